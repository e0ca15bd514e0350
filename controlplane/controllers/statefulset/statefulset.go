// Package statefulset keeps pods with names that last: one for each ordinal,
// in order or all at once.
//
// Owned fields: the existence of the set's pods, their controller reference
// and identity labels, that of their claims and their owners, its
// ControllerRevisions, and its status.
//
// At most one pod of a name runs: a name is free only once the pod's node
// has said that nothing of it runs any more (its object is gone), however
// long the node is silent, unless a user deletes the pod by force, declares
// the node dead, or the pod itself carries a deadline after which it stops
// (dunlin.dev/stop-deadline).
package statefulset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane/controllers/claim"
	"github.com/dunlin-project/dunlin/controlplane/controllers/history"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/controllers/readiness"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

var (
	gk  = schema.GroupKind{Group: appsv1.GroupName, Kind: "StatefulSet"}
	gvk = appsv1.SchemeGroupVersion.WithKind("StatefulSet")

	kind = claim.Kind[*appsv1.StatefulSet]{GK: gk, Selector: func(s *appsv1.StatefulSet) *metav1.LabelSelector { return s.Spec.Selector }}
)

// burst bounds the pods made or deleted in one round of a parallel set.
const burst = 500

type controller struct {
	env     loop.Env
	orphans *claim.Orphans
	seen    *readiness.Tracker
}

// New makes the StatefulSet controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env, orphans: claim.NewOrphans(), seen: readiness.New()}
	return &loop.Controller{
		Name: "statefulset", Workers: 2,
		Sources: []loop.Source{
			loop.Self(gk.String()),
			loop.Controlled(claim.PodGK.String(), gk.String()),
			loop.Controlled(history.GK.String(), gk.String()),
			c.orphans.Source(env, gk.String(), kind.SelectorOf(env)),
			c.claimSource(),
			c.nameSource(),
		},
		Reconcile: c.reconcile,
	}
}

// awayPod is a pod on a node that is silent.
type awayPod struct {
	name, node string
	earlier    bool // not this set's: it has the name of one that is to be made
}

// round is one reconcile.
type round struct {
	c   *controller
	set *appsv1.StatefulSet
	key state.Key
	now time.Time
	h   history.History
	// before is the revision that the partition keeps; the update's own once
	// the update is complete.
	before    *appsv1.ControllerRevision
	recs      map[string]*state.Record
	replicas  []replica // shall be, rising
	condemned []replica // shall go, falling
	away      []awayPod // pods on silent nodes
	held      []string  // names that others have, with what they wait for
	foreign   bool      // one of them is no pod of an earlier set
	wait      time.Duration
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	owner, err := kind.Find(c.env, key)
	if owner.Gone {
		c.seen.Forget(key)
	}
	if err != nil || !owner.Live {
		return 0, err
	}
	set, sel := owner.Object, owner.Selector
	r := &round{c: c, set: set, key: key, now: c.env.Clock.Now()}
	if r.h, err = history.Sync(ctx, c.env, history.Owner{Object: set, GVK: gvk, Selector: sel, Template: &set.Spec.Template}); err != nil {
		return 0, err
	}
	r.before = r.h.Current
	for _, rev := range r.h.Old {
		if rev.Name == set.Status.CurrentRevision {
			r.before = rev
		}
	}
	if err := r.look(ctx, sel); err != nil {
		return 0, err
	}
	failed := r.act(ctx)
	if err := r.look(ctx, sel); err != nil {
		return 0, errors.Join(failed, err)
	}
	used := map[string]bool{r.before.Name: true}
	for _, rec := range r.recs {
		used[rec.Header.Labels[appsv1.ControllerRevisionHashLabelKey]] = true
	}
	err = errors.Join(failed, r.writeStatus(ctx),
		history.Truncate(ctx, c.env, r.h, set.Spec.RevisionHistoryLimit, func(rev *appsv1.ControllerRevision) bool { return used[rev.Name] }))
	return r.wait, err
}

// ordinal of a pod's name; -1 if it is not one of the set's.
func ordinal(set, pod string) int {
	rest, ok := strings.CutPrefix(pod, set+"-")
	n, err := strconv.Atoi(rest)
	if !ok || err != nil || n < 0 || strconv.Itoa(n) != rest {
		return -1
	}
	return n
}

func (r *round) podName(n int) string { return r.set.Name + "-" + strconv.Itoa(n) }

// look reads the set's pods.
func (r *round) look(ctx context.Context, sel labels.Selector) error {
	recs, err := r.c.orphans.Pods(ctx, r.c.env, claim.Owner{Object: r.set, GVK: gvk, Selector: sel,
		Adopts: func(rec *state.Record) bool { return ordinal(r.set.Name, rec.Header.Key.Name) >= 0 }})
	if err != nil {
		return err
	}
	r.replicas, r.condemned, r.away, r.wait, r.recs = nil, nil, nil, 0, map[string]*state.Record{}
	r.held, r.foreign = nil, false
	start := 0
	if r.set.Spec.Ordinals != nil {
		start = int(r.set.Spec.Ordinals.Start)
	}
	for i := range int(*r.set.Spec.Replicas) {
		r.replicas = append(r.replicas, replica{ordinal: start + i, name: r.podName(start + i)})
	}
	var living []types.UID
	for _, rec := range recs {
		n := ordinal(r.set.Name, rec.Header.Key.Name)
		if n < 0 {
			continue
		}
		x, err := r.read(rec, n)
		if err != nil {
			return err
		}
		r.recs[x.name] = rec
		living = append(living, types.UID(rec.Header.UID))
		if i := n - start; i >= 0 && i < len(r.replicas) {
			r.replicas[i] = x
		} else {
			r.condemned = append(r.condemned, x)
		}
	}
	if err := r.taken(); err != nil {
		return err
	}
	slices.SortFunc(r.condemned, func(a, b replica) int { return cmp.Compare(b.ordinal, a.ordinal) })
	if r.set.Spec.MinReadySeconds > 0 {
		r.c.seen.Keep(r.key, len(living), slices.Values(living))
	}
	return nil
}

func (r *round) read(rec *state.Record, n int) (replica, error) {
	h := &rec.Header
	x := replica{ordinal: n, name: h.Key.Name, exists: true, leaving: h.Deleted != 0, over: claim.Over(rec),
		pending: h.Phase == string(corev1.PodPending),
		current: h.Labels[appsv1.ControllerRevisionHashLabelKey] == r.h.Current.Name,
		ready:   h.Ready && h.Phase == string(corev1.PodRunning)}
	var p *corev1.Pod
	minReady := time.Duration(r.set.Spec.MinReadySeconds) * time.Second
	if minReady > 0 || (!x.ready && h.NodeName != "") {
		var err error
		if p, err = claim.Decode(r.c.env, rec); err != nil {
			return x, err
		}
		for i := range p.Status.Conditions {
			if c := &p.Status.Conditions[i]; c.Type == corev1.PodReady && !x.over {
				x.silent = c.Reason == lost.Reason
			}
		}
		if x.silent {
			r.away = append(r.away, awayPod{name: x.name, node: h.NodeName})
		}
	}
	x.available = x.ready
	if minReady > 0 {
		left := minReady - r.c.seen.For(r.key, types.UID(h.UID), x.ready, p, r.now)
		if x.ready && left > 0 {
			x.available = false
			r.later(left)
		}
	}
	return x, nil
}

// later asks for another look after d at the latest.
func (r *round) later(d time.Duration) {
	if r.wait == 0 || d < r.wait {
		r.wait = max(d, time.Millisecond)
	}
}

// strategy turns the set's words into numbers.
func (r *round) strategy() (strategy, error) {
	s := strategy{ordered: r.set.Spec.PodManagementPolicy != appsv1.ParallelPodManagement, maxUnavailable: 1}
	u := &r.set.Spec.UpdateStrategy
	if s.onDelete = u.Type == appsv1.OnDeleteStatefulSetStrategyType; s.onDelete || u.RollingUpdate == nil {
		return s, nil
	}
	if p := u.RollingUpdate.Partition; p != nil {
		s.partition = int(*p)
		if o := r.set.Spec.Ordinals; o != nil {
			s.partition += int(o.Start) // it counts pods, from the first
		}
	}
	if m := u.RollingUpdate.MaxUnavailable; m != nil {
		n, err := intstr.GetScaledValueFromIntOrPercent(m, int(*r.set.Spec.Replicas), false)
		if err != nil {
			return s, err
		}
		s.maxUnavailable = max(n, 1)
	}
	return s, nil
}

func (r *round) act(ctx context.Context) error {
	s, err := r.strategy()
	if err != nil {
		return loop.Terminal(fmt.Errorf("update strategy of %s: %w", r.set.Name, err))
	}
	a := decide(r.replicas, r.condemned, s)
	unowned, failed := r.retain(ctx)
	a.remove = slices.DeleteFunc(a.remove, func(pod string) bool { return unowned[pod] })
	remove, create := a.remove[:min(len(a.remove), burst)], a.create[:min(len(a.create), burst)]
	gone := loop.Parallel(ctx, len(remove), func(ctx context.Context, i int) error {
		if err := claim.Delete(ctx, r.c.env, r.recs[remove[i]]); err != nil {
			r.note(events.Warning, "FailedDelete", "delete Pod %s in StatefulSet %s failed error: %v", remove[i], r.set.Name, err)
			return err
		}
		r.note(events.Normal, "SuccessfulDelete", "delete Pod %s in StatefulSet %s successful", remove[i], r.set.Name)
		return nil
	})
	made := loop.Parallel(ctx, len(create), func(ctx context.Context, i int) error { return r.create(ctx, create[i], s) })
	return errors.Join(failed, gone, made, r.renewClaims(ctx), r.identify(ctx))
}

// create makes the pod of an ordinal, in the revision that is due to it.
func (r *round) create(ctx context.Context, n int, s strategy) error {
	rev, t := r.h.Current, &r.set.Spec.Template
	if !s.onDelete && n < s.partition && r.before != r.h.Current {
		old, err := history.Template(r.before)
		if err != nil {
			return err
		}
		rev, t = r.before, old
	}
	name := r.podName(n)
	err := r.makeClaims(ctx, name)
	if err == nil {
		_, err = r.c.env.Store.Create(ctx, newPod(r.set, t, rev.Name, n), r.c.env.Write())
	}
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause), apierrors.IsAlreadyExists(err):
		return nil // of the latter the next look says whose it is
	case err != nil:
		if ctx.Err() == nil {
			r.note(events.Warning, "FailedCreate", "create Pod %s in StatefulSet %s failed error: %v", name, r.set.Name, err)
		}
		return fmt.Errorf("create pod %s: %w", name, err)
	}
	r.note(events.Normal, "SuccessfulCreate", "create Pod %s in StatefulSet %s successful", name, r.set.Name)
	return nil
}

// newPod is the set's pod of one ordinal.
func newPod(set *appsv1.StatefulSet, template *corev1.PodTemplateSpec, revision string, n int) *corev1.Pod {
	t := template.DeepCopy()
	name := set.Name + "-" + strconv.Itoa(n)
	if t.Labels == nil {
		t.Labels = map[string]string{}
	}
	t.Labels[appsv1.ControllerRevisionHashLabelKey] = revision
	t.Labels[appsv1.StatefulSetPodNameLabel] = name
	t.Labels[appsv1.PodIndexLabel] = strconv.Itoa(n)
	t.Spec.Hostname, t.Spec.Subdomain = name, set.Spec.ServiceName
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: set.Namespace, Labels: t.Labels, Annotations: t.Annotations, Finalizers: t.Finalizers,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(set, gvk)},
		},
		Spec: t.Spec,
	}
	addClaims(set, pod)
	return pod
}

// identify gives adopted or edited pods their identity labels.
func (r *round) identify(ctx context.Context) error {
	for i := range r.replicas {
		x := &r.replicas[i]
		rec := r.recs[x.name]
		if rec == nil || x.leaving || x.over {
			continue
		}
		index := strconv.Itoa(x.ordinal)
		if rec.Header.Labels[appsv1.StatefulSetPodNameLabel] == x.name && rec.Header.Labels[appsv1.PodIndexLabel] == index {
			continue
		}
		_, err := r.c.env.Store.Update(ctx, claim.PodGK, r.set.Namespace, x.name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
			p, ok := cur.(*corev1.Pod)
			if !ok || string(p.UID) != rec.Header.UID {
				return nil, loop.ErrMoved
			}
			if p.Labels == nil {
				p.Labels = map[string]string{}
			}
			p.Labels[appsv1.StatefulSetPodNameLabel], p.Labels[appsv1.PodIndexLabel] = x.name, index
			return p, nil
		}, r.c.env.Write())
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("label pod %s: %w", x.name, err)
		}
	}
	return nil
}

func (r *round) note(eventType, reason, format string, args ...any) {
	r.c.env.Events.Event(events.Ref(gk, r.set), eventType, reason, fmt.Sprintf(format, args...))
}
