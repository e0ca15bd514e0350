package statefulset

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

var claimGK = schema.GroupKind{Kind: "PersistentVolumeClaim"}

var errClaimLeaves = errors.New("is being deleted")

// claimSource wakes the sets of a claim that is gone: their next pod needs a
// new one.
func (c *controller) claimSource() loop.Source {
	return loop.Source{Kind: claimGK.String(), Keys: func(ev state.Event, add func(state.Key)) {
		if ev.Type != state.Deleted {
			return
		}
		k := ev.Record.Header.Key
		c.env.Reader.Snapshot().Range(gk.String(), k.Namespace, state.Key{}, func(r *state.Record) bool {
			if strings.Contains(k.Name, "-"+r.Header.Key.Name+"-") {
				add(r.Header.Key)
			}
			return true
		})
	}}
}

func claimName(t *corev1.PersistentVolumeClaim, pod string) string { return t.Name + "-" + pod }

// addClaims puts the set's claims into a pod, in place of volumes of the same
// name.
func addClaims(set *appsv1.StatefulSet, pod *corev1.Pod) {
	var out []corev1.Volume
	for i := range set.Spec.VolumeClaimTemplates {
		t := &set.Spec.VolumeClaimTemplates[i]
		out = append(out, corev1.Volume{Name: t.Name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claimName(t, pod.Name)}}})
	}
	for _, v := range pod.Spec.Volumes {
		if !slices.ContainsFunc(out, func(o corev1.Volume) bool { return o.Name == v.Name }) {
			out = append(out, v)
		}
	}
	pod.Spec.Volumes = out
}

// makeClaims makes the claims of an ordinal that do not exist. One that is
// being deleted belongs to the pod before: it is waited for, or the new pod
// would lose its data.
func (r *round) makeClaims(ctx context.Context, pod string) error {
	for i := range r.set.Spec.VolumeClaimTemplates {
		t := &r.set.Spec.VolumeClaimTemplates[i]
		name := claimName(t, pod)
		obj, err := r.c.env.Store.Get(claimGK, r.set.Namespace, name)
		switch {
		case err == nil:
			old, ok := obj.(*corev1.PersistentVolumeClaim)
			if !ok || old.DeletionTimestamp != nil || r.stale(old, pod) {
				return fmt.Errorf("claim %s %w: the pod waits until it is gone", name, errClaimLeaves)
			}
			continue
		case !apierrors.IsNotFound(err):
			return fmt.Errorf("claim %s: %w", name, err)
		}
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{
			Namespace: r.set.Namespace, Name: name, Labels: maps.Clone(t.Labels), Annotations: t.Annotations,
			OwnerReferences: ownersOf(r.set, nil, nil, false),
		}, Spec: *t.Spec.DeepCopy()}
		if s := r.set.Spec.Selector; s != nil && len(s.MatchLabels) > 0 {
			if claim.Labels == nil {
				claim.Labels = map[string]string{}
			}
			maps.Copy(claim.Labels, s.MatchLabels)
		}
		if _, err := r.c.env.Store.Create(ctx, claim, r.c.env.Write()); err != nil && !apierrors.IsAlreadyExists(err) {
			r.note(events.Warning, "FailedCreate", "create Claim %s Pod %s in StatefulSet %s failed error: %v", name, pod, r.set.Name, err)
			return fmt.Errorf("make claim %s: %w", name, err)
		}
		r.note(events.Normal, "SuccessfulCreate", "create Claim %s Pod %s in StatefulSet %s success", name, pod, r.set.Name)
	}
	return nil
}

// renewClaims makes the claims that pods which have not started yet lack: a
// user may have deleted one whose volume is out of reach, or too large for any
// node, and the pod would wait for it for ever. It is asked of all of them,
// also in an ordered set: the pods are there, and no order is broken.
func (r *round) renewClaims(ctx context.Context) (failed error) {
	if len(r.set.Spec.VolumeClaimTemplates) == 0 {
		return nil
	}
	for i := range r.replicas {
		x := &r.replicas[i]
		if !x.pending || x.leaving {
			continue
		}
		err := r.makeClaims(ctx, x.name)
		if errors.Is(err, errClaimLeaves) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			continue // its end wakes the set; nothing is left to do
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

// stale says whether a claim is owned by an earlier pod of the ordinal, with
// which it goes.
func (r *round) stale(c *corev1.PersistentVolumeClaim, pod string) bool {
	return slices.ContainsFunc(c.OwnerReferences, func(o metav1.OwnerReference) bool {
		if o.Kind != "Pod" || o.Name != pod {
			return false
		}
		rec := r.recs[pod]
		return rec == nil || rec.Header.UID != string(o.UID)
	})
}

// ownersOf is whose end a claim shares, by the set's retention policy: the
// set's, or its pod's once that is to go by a smaller size. have are the
// owners that it has; what others put there stays. Pure.
func ownersOf(set *appsv1.StatefulSet, pod *metav1.ObjectMeta, have []metav1.OwnerReference, condemned bool) []metav1.OwnerReference {
	var out []metav1.OwnerReference
	foreign := false
	for _, o := range have {
		ours := o.UID == set.UID || pod != nil && o.UID == pod.UID
		if !ours {
			out = append(out, o)
			foreign = foreign || o.Controller != nil && *o.Controller
		}
	}
	p := set.Spec.PersistentVolumeClaimRetentionPolicy
	if p == nil || foreign {
		return out
	}
	const remove = appsv1.DeletePersistentVolumeClaimRetentionPolicyType
	switch {
	case condemned && p.WhenScaled == remove && pod != nil:
		return append(out, *metav1.NewControllerRef(pod, corev1.SchemeGroupVersion.WithKind("Pod")))
	case p.WhenDeleted == remove && (!condemned || p.WhenScaled != remove):
		return append(out, *metav1.NewControllerRef(set, gvk))
	}
	return out
}

// retain brings the owners of the claims of all pods up to date. Those of a
// pod that is to go must be before it goes: failed names the pods for which
// they are not.
func (r *round) retain(ctx context.Context) (failed map[string]bool, err error) {
	if len(r.set.Spec.VolumeClaimTemplates) == 0 {
		return nil, nil
	}
	failed = map[string]bool{}
	one := func(x *replica, condemned bool) {
		rec := r.recs[x.name]
		if rec == nil {
			return
		}
		pod := &metav1.ObjectMeta{Name: x.name, UID: types.UID(rec.Header.UID)}
		for i := range r.set.Spec.VolumeClaimTemplates {
			if e := r.own(ctx, claimName(&r.set.Spec.VolumeClaimTemplates[i], x.name), pod, condemned); e != nil {
				failed[x.name], err = true, errors.Join(err, e)
			}
		}
	}
	for i := range r.replicas {
		one(&r.replicas[i], false)
	}
	for i := range r.condemned {
		one(&r.condemned[i], true)
	}
	return failed, err
}

func (r *round) own(ctx context.Context, name string, pod *metav1.ObjectMeta, condemned bool) error {
	obj, err := r.c.env.Store.Get(claimGK, r.set.Namespace, name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	claim, ok := obj.(*corev1.PersistentVolumeClaim)
	if err != nil || !ok {
		return fmt.Errorf("claim %s: %w", name, err)
	}
	if sameOwners(ownersOf(r.set, pod, claim.OwnerReferences, condemned), claim.OwnerReferences) {
		return nil
	}
	_, err = r.c.env.Store.Update(ctx, claimGK, claim.Namespace, name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		now, ok := cur.(*corev1.PersistentVolumeClaim)
		if !ok || now.UID != claim.UID {
			return nil, loop.ErrMoved
		}
		now.OwnerReferences = ownersOf(r.set, pod, now.OwnerReferences, condemned)
		return now, nil
	}, r.c.env.Write())
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("owners of claim %s: %w", name, err)
	}
	return nil
}

func sameOwners(a, b []metav1.OwnerReference) bool {
	return slices.EqualFunc(a, b, func(x, y metav1.OwnerReference) bool { return x.UID == y.UID })
}
