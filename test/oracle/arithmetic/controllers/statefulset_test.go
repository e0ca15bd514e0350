package controllers

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
	"k8s.io/kubernetes/pkg/controller/history"
	upstreamset "k8s.io/kubernetes/pkg/controller/statefulset"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/statefulset"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

var (
	setKind      = schema.GroupKind{Group: appsv1.GroupName, Kind: "StatefulSet"}
	revisionKind = schema.GroupKind{Group: appsv1.GroupName, Kind: "ControllerRevision"}
)

// outcome is what a controller made of a StatefulSet's pods once it wants
// nothing more, though no pod moved.
type outcome struct {
	Doomed []string // gone, or being deleted
	Made   []string // name of the pod, and of its revision
	Status appsv1.StatefulSetStatus
}

// setCase is a StatefulSet in the midst of an update, with pods in any state.
type setCase struct {
	w         *fixture.World
	set       *appsv1.StatefulSet
	pods      []*corev1.Pod
	revisions []*appsv1.ControllerRevision
}

func newSetCase(t *testing.T, seed uint64) *setCase {
	d := roll(seed)
	c := &setCase{w: fixture.New(t)}
	c.w.AddNode("n")
	none := int32(0)
	s := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"}, Spec: appsv1.StatefulSetSpec{
		Replicas: &none, ServiceName: "s", Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "s"}}, Template: fixture.Template("s"),
		PodManagementPolicy: oneOf(d, appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement), MinReadySeconds: int32(oneOf(d, 0, 0, 30)),
	}}
	image(&s.Spec.Template, 0)
	if d.odds(2) {
		s.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: int32(d.r.IntN(4))}
	}
	if s.Spec.UpdateStrategy.Type = oneOf(d, appsv1.RollingUpdateStatefulSetStrategyType, appsv1.RollingUpdateStatefulSetStrategyType, appsv1.OnDeleteStatefulSetStrategyType); s.Spec.UpdateStrategy.Type == appsv1.RollingUpdateStatefulSetStrategyType {
		r := &appsv1.RollingUpdateStatefulSetStrategy{}
		if d.odds(2) {
			r.Partition = new(int32)
			*r.Partition = int32(d.r.IntN(6))
		}
		if d.odds(2) {
			if r.MaxUnavailable = d.share(4); zero(r.MaxUnavailable) {
				r.MaxUnavailable = nil
			}
		}
		s.Spec.UpdateStrategy.RollingUpdate = r
	}
	c.w.Create(s)
	settled := func() { c.w.Settle(statefulset.New(c.w.Env())) } // without pods: it records the revision
	settled()
	old := fixture.List[*appsv1.ControllerRevision](c.w, revisionKind, "default")[0].Name
	if d.odds(5) { // nothing to update
		c.read()
	} else {
		fixture.Change(c.w, setKind, "default", "s", registry.Main, func(s *appsv1.StatefulSet) { image(&s.Spec.Template, 1) })
		settled()
		fixture.Change(c.w, setKind, "default", "s", registry.Status, func(s *appsv1.StatefulSet) { s.Status.CurrentRevision = old })
	}
	fixture.Change(c.w, setKind, "default", "s", registry.Main, func(s *appsv1.StatefulSet) { *s.Spec.Replicas = int32(d.r.IntN(6)) })
	c.read()
	for n := range 9 {
		if !d.odds(4) {
			c.pod(d, n)
		}
	}
	c.read()
	return c
}

func (c *setCase) read() {
	c.set = fixture.Get[*appsv1.StatefulSet](c.w, setKind, "default", "s").DeepCopy()
	c.pods = nil
	for _, p := range fixture.List[*corev1.Pod](c.w, fixture.Pod, "default") {
		c.pods = append(c.pods, p.DeepCopy())
	}
	c.revisions = fixture.List[*appsv1.ControllerRevision](c.w, revisionKind, "default")
}

// pod makes the pod of an ordinal, of any revision and in any state. All are
// on a node: what is not is gone as soon as it is deleted.
func (c *setCase) pod(d dice, n int) {
	rev := oneOf(d, c.revisions...)
	t := fixture.Template("s")
	image(&t, slices.Index(c.revisions, rev))
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("s-%d", n), Labels: t.Labels,
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(c.set, appsv1.SchemeGroupVersion.WithKind("StatefulSet"))}}, Spec: t.Spec}
	p.Labels[appsv1.ControllerRevisionHashLabelKey] = rev.Name
	p.Labels[appsv1.StatefulSetPodNameLabel], p.Labels[appsv1.PodIndexLabel] = p.Name, strconv.Itoa(n)
	p.Spec.Hostname, p.Spec.Subdomain = p.Name, "s"
	c.w.Create(p)
	p = fixture.Get[*corev1.Pod](c.w, fixture.Pod, "default", p.Name)
	c.w.Bind(p, "n")
	phase := oneOf(d, corev1.PodPending, corev1.PodRunning, corev1.PodRunning, corev1.PodRunning, corev1.PodRunning, corev1.PodRunning, corev1.PodFailed, corev1.PodSucceeded)
	if phase != corev1.PodPending {
		ready := phase == corev1.PodRunning && !d.odds(4)
		since := c.w.Now().Add(-time.Hour)
		if d.odds(4) {
			since = c.w.Now()
		}
		fixture.Change(c.w, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) {
			p.Status.Phase = phase
			status := corev1.ConditionFalse
			if ready {
				status = corev1.ConditionTrue
			}
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: status, LastTransitionTime: metav1.NewTime(since)})
		})
	}
	if d.odds(6) {
		c.w.Delete(fixture.Pod, "default", p.Name, metav1.DeletePropagationBackground)
	}
}

func (c *setCase) ours() outcome {
	c.w.Settle(statefulset.New(c.w.Env()))
	var o outcome
	left := map[types.UID]*corev1.Pod{}
	before := map[types.UID]bool{}
	for _, p := range fixture.List[*corev1.Pod](c.w, fixture.Pod, "default") {
		left[p.UID] = p
	}
	for _, p := range c.pods {
		before[p.UID] = true
		if q := left[p.UID]; q == nil || q.DeletionTimestamp != nil {
			o.Doomed = append(o.Doomed, p.Name)
		}
	}
	for uid, p := range left {
		if !before[uid] {
			o.Made = append(o.Made, p.Name+" "+p.Labels[appsv1.ControllerRevisionHashLabelKey])
		}
	}
	o.Status = fixture.Get[*appsv1.StatefulSet](c.w, setKind, "default", "s").Status
	return o
}

// objects is the world of upstream's StatefulSet controller.
type objects struct {
	mu   sync.Mutex // parallel sets work in parallel
	c    *setCase
	pods []*corev1.Pod
	out  outcome
	busy bool
}

func (o *objects) CreatePod(_ context.Context, p *corev1.Pod, _ *appsv1.StatefulSet) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.busy = true
	o.out.Made = append(o.out.Made, p.Name+" "+p.Labels[appsv1.ControllerRevisionHashLabelKey])
	q := p.DeepCopy()
	q.Status.Phase = corev1.PodPending
	o.pods = append(o.pods, q)
	return nil
}

func (o *objects) GetPod(string, string) (*corev1.Pod, error) { panic("not asked") }

func (o *objects) UpdatePod(p *corev1.Pod, _ *appsv1.StatefulSet) error {
	return fmt.Errorf("pod %s is not as it shall be", p.Name)
}

func (o *objects) DeletePod(p *corev1.Pod) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.busy = true
	i := slices.IndexFunc(o.pods, func(q *corev1.Pod) bool { return q.Name == p.Name })
	if i < 0 {
		return nil // the second time in one look
	}
	if p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded { // nothing to wait for
		o.pods = slices.Delete(slices.Clone(o.pods), i, i+1) // who called has them, too
		return nil
	}
	at := metav1.NewTime(o.c.w.Now())
	o.pods[i] = o.pods[i].DeepCopy()
	o.pods[i].DeletionTimestamp = &at
	return nil
}

func (o *objects) CreateClaim(*corev1.PersistentVolumeClaim, *appsv1.StatefulSet) error {
	panic("no claims")
}

func (o *objects) GetClaim(string, string) (*corev1.PersistentVolumeClaim, error) {
	panic("no claims")
}

func (o *objects) UpdateClaim(*corev1.PersistentVolumeClaim, *appsv1.StatefulSet) error {
	panic("no claims")
}

func (o *objects) UpdateStatefulSetStatus(_ context.Context, _ *appsv1.StatefulSet, st *appsv1.StatefulSetStatus) error {
	o.out.Status = *st
	return nil
}

func (c *setCase) theirs(t *testing.T) outcome {
	o := &objects{c: c, pods: slices.Clone(c.pods), out: outcome{Status: c.set.Status}}
	factory := informers.NewSharedInformerFactory(fake.NewClientset(), 0)
	revs := factory.Apps().V1().ControllerRevisions()
	for _, r := range c.revisions {
		if err := revs.Informer().GetIndexer().Add(r); err != nil {
			t.Fatal(err)
		}
	}
	control := upstreamset.NewDefaultStatefulSetControl(upstreamset.NewStatefulPodControlFromManager(o, record.NewFakeRecorder(1000)), o, history.NewFakeHistory(revs))
	for range 60 {
		o.busy = false
		set := c.set.DeepCopy()
		set.Status = o.out.Status
		if _, err := control.UpdateStatefulSet(context.Background(), set, o.pods, c.w.Now()); err != nil {
			t.Fatal(err)
		}
		if !o.busy {
			break
		}
	}
	left := map[types.UID]*corev1.Pod{}
	for _, p := range o.pods {
		left[p.UID] = p
	}
	for _, p := range c.pods {
		if q := left[p.UID]; q == nil || q.DeletionTimestamp != nil {
			o.out.Doomed = append(o.out.Doomed, p.Name)
		}
	}
	return o.out
}

// broken: an ordered set has a pod that is not ready and of a revision that
// it shall not be. Upstream waits for it for ever, Dunlin replaces it.
func (c *setCase) broken() bool {
	s := &c.set.Spec
	if s.PodManagementPolicy != appsv1.OrderedReadyPodManagement || s.UpdateStrategy.RollingUpdate == nil {
		return false
	}
	start := 0
	if s.Ordinals != nil {
		start = int(s.Ordinals.Start)
	}
	return slices.ContainsFunc(c.pods, func(p *corev1.Pod) bool {
		n, err := strconv.Atoi(p.Labels[appsv1.PodIndexLabel])
		ready := slices.ContainsFunc(p.Status.Conditions, func(x corev1.PodCondition) bool { return x.Type == corev1.PodReady && x.Status == corev1.ConditionTrue })
		return err == nil && !ready && n >= start+int(*s.UpdateStrategy.RollingUpdate.Partition) && n < start+int(*s.Replicas) &&
			p.Labels[appsv1.ControllerRevisionHashLabelKey] != c.set.Status.UpdateRevision
	})
}

// The same pods are made, in the same revision, and the same ones deleted,
// until each waits for its pods; the status counts the same.
func TestStatefulSets(t *testing.T) {
	made, doomed, left := 0, 0, 0
	for seed := range uint64(cases) {
		c := newSetCase(t, seed)
		if c.broken() {
			left++
			continue
		}
		want, got := c.theirs(t), c.ours()
		for _, o := range []*outcome{&want, &got} {
			slices.Sort(o.Made)
			slices.Sort(o.Doomed)
		}
		if a, b := fmt.Sprint(got.Doomed, got.Made), fmt.Sprint(want.Doomed, want.Made); a != b {
			t.Errorf("seed %d: %s\n dunlin   deletes and makes %s\n upstream deletes and makes %s", seed, c, a, b)
		} else if a, b := counts(&got.Status), counts(&want.Status); a != b {
			t.Errorf("seed %d: %s\n dunlin   counts %s\n upstream counts %s", seed, c, a, b)
		}
		made, doomed = made+len(want.Made), doomed+len(want.Doomed)
		if t.Failed() && seed > 200 {
			t.Fatal("enough")
		}
	}
	t.Logf("%d pods made, %d deleted; %d sets left out", made, doomed, left)
}

func counts(s *appsv1.StatefulSetStatus) string {
	return fmt.Sprintf("replicas %d ready %d available %d current %d of %s, updated %d of %s", s.Replicas, s.ReadyReplicas, s.AvailableReplicas, s.CurrentReplicas, s.CurrentRevision, s.UpdatedReplicas, s.UpdateRevision)
}

// String tells the case, for whoever reads a failure.
func (c *setCase) String() string {
	s := &c.set.Spec
	text := fmt.Sprintf("%s %s replicas %d, minReady %d", s.PodManagementPolicy, s.UpdateStrategy.Type, *s.Replicas, s.MinReadySeconds)
	if s.Ordinals != nil {
		text += fmt.Sprintf(", from %d", s.Ordinals.Start)
	}
	if u := s.UpdateStrategy.RollingUpdate; u != nil {
		text += fmt.Sprintf(", partition %d, maxUnavailable %s", *u.Partition, u.MaxUnavailable)
	}
	text += fmt.Sprintf("; %s -> %s:", c.set.Status.CurrentRevision, c.set.Status.UpdateRevision)
	for _, p := range c.pods {
		text += fmt.Sprintf("\n   %s %s %s", p.Name, p.Labels[appsv1.ControllerRevisionHashLabelKey], p.Status.Phase)
		for _, x := range p.Status.Conditions {
			if x.Type == corev1.PodReady {
				text += fmt.Sprintf(" ready %s since %s", x.Status, c.w.Now().Sub(x.LastTransitionTime.Time))
			}
		}
		if p.DeletionTimestamp != nil {
			text += " leaving"
		}
	}
	return text
}
