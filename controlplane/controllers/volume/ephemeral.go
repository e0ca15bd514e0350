package volume

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// NewEphemeral makes the controller of ephemeral volumes: a claim for each,
// which the pod owns, so that it goes with the pod.
//
// Owned: the existence of these claims.
func NewEphemeral(env loop.Env) *loop.Controller {
	c := &controller{env: env}
	return &loop.Controller{
		Name: "ephemeral-volume", Workers: 2,
		Sources: []loop.Source{
			{Kind: podGK.String(), Keys: func(ev state.Event, add func(state.Key)) {
				if ev.Type != state.Deleted && ev.Record.Header.Deleted == 0 && mountsClaims(ev.Record) && ev.Record.Header.NodeName == "" {
					add(ev.Record.Header.Key)
				}
			}},
			{Kind: claimGK.String(), Keys: func(ev state.Event, add func(state.Key)) {
				if o, ok := loop.ControllerOf(ev.Record); ok && o.Kind == podGK.String() && ev.Type == state.Deleted {
					add(state.Key{Kind: podGK.String(), Namespace: ev.Record.Header.Key.Namespace, Name: o.Name})
				}
			}},
		},
		Reconcile: c.ephemeral,
	}
}

func (c *controller) ephemeral(ctx context.Context, key state.Key) (time.Duration, error) {
	pod, ok, err := get[*corev1.Pod](c, podGK, key.Namespace, key.Name)
	if err != nil || !ok || pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return 0, err
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Ephemeral == nil || v.Ephemeral.VolumeClaimTemplate == nil {
			continue
		}
		if err := c.ephemeralClaim(ctx, pod, v); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

func (c *controller) ephemeralClaim(ctx context.Context, pod *corev1.Pod, v *corev1.Volume) error {
	name := manifests.EphemeralClaimName(pod, v.Name)
	old, ok, err := get[*corev1.PersistentVolumeClaim](c, claimGK, pod.Namespace, name)
	if err != nil {
		return err
	}
	if ok {
		if !metav1.IsControlledBy(old, pod) {
			c.env.Events.Event(events.Ref(podGK, pod), events.Warning, "FailedBinding",
				fmt.Sprintf("PVC %q was not created for pod %q (pod is not owner)", name, pod.Namespace+"/"+pod.Name))
		}
		return nil
	}
	t := v.Ephemeral.VolumeClaimTemplate
	yes := true
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: name, Labels: t.Labels, Annotations: t.Annotations,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: &yes, BlockOwnerDeletion: &yes}},
		},
		Spec: t.Spec,
	}
	_, err = c.env.Store.Create(ctx, claim, c.env.Write())
	switch {
	case err == nil, apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	case apierrors.IsAlreadyExists(err):
		return loop.ErrMoved
	}
	c.env.Events.Event(events.Ref(podGK, pod), events.Warning, "FailedBinding", fmt.Sprintf("ephemeral volume %s: %v", v.Name, err))
	return fmt.Errorf("make claim %s/%s: %w", pod.Namespace, name, err)
}
