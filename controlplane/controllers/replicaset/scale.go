package replicaset

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/claim"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// scale creates or deletes pods until as many are counted as the set wants.
func (c *controller) scale(ctx context.Context, s set, counted []one) (reason string, err error) {
	diff := s.replicas - len(counted)
	switch {
	case diff > 0:
		return "FailedCreate", c.create(ctx, s, min(diff, burst))
	case diff < 0:
		return "FailedDelete", c.remove(ctx, s, counted, min(-diff, burst))
	}
	return "", nil
}

// create makes n pods in batches of 1, 2, 4, ...: when they are refused (by
// a quota, say), few attempts are wasted.
func (c *controller) create(ctx context.Context, s set, n int) error {
	template := newPod(s, c.ref(s))
	var first error
	for batch := 1; n > 0 && first == nil; batch *= 2 {
		batch = min(batch, n)
		n -= batch
		first = loop.Parallel(ctx, batch, func(ctx context.Context, _ int) error {
			obj, err := c.env.Store.Create(ctx, template.DeepCopy(), c.env.Write())
			switch {
			case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
				return nil // the pods of a dying namespace are nobody's loss
			case err != nil:
				if ctx.Err() == nil {
					c.note(s, events.Warning, "FailedCreate", "Error creating: %v", err)
				}
				return fmt.Errorf("create pod: %w", err)
			}
			if m, ok := obj.(metav1.Object); ok {
				c.note(s, events.Normal, "SuccessfulCreate", "Created pod: %s", m.GetName())
			}
			return nil
		})
	}
	return first
}

// newPod is the pod that the set's template describes.
func newPod(s set, ref metav1.OwnerReference) *corev1.Pod {
	t := s.template.DeepCopy()
	prefix := s.meta.GetName() + "-"
	if len(prefix) > 58 {
		prefix = s.meta.GetName() // as upstream: the name must stay valid
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: prefix, Namespace: s.meta.GetNamespace(),
			Labels: t.Labels, Annotations: t.Annotations, Finalizers: t.Finalizers,
			OwnerReferences: []metav1.OwnerReference{ref},
		},
		Spec: t.Spec,
	}
}

func (c *controller) remove(ctx context.Context, s set, counted []one, n int) error {
	pods := make([]*corev1.Pod, 0, len(counted))
	for _, o := range counted {
		if o.pod == nil {
			var err error
			if o.pod, err = c.decode(o.rec); err != nil {
				return err
			}
		}
		pods = append(pods, o.pod)
	}
	victims := chooseVictims(pods, c.crowd(s), n)
	return loop.Parallel(ctx, len(victims), func(ctx context.Context, i int) error {
		pod := victims[i]
		uid := pod.UID
		_, _, err := c.env.Store.Delete(ctx, podGK, pod.Namespace, pod.Name, registry.DeleteOptions{UID: &uid, Term: c.env.Term})
		switch {
		case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
			return nil // gone or replaced already
		case err != nil:
			c.note(s, events.Warning, "FailedDelete", "Error deleting: %v", err)
			return fmt.Errorf("delete pod %s: %w", pod.Name, err)
		}
		c.note(s, events.Normal, "SuccessfulDelete", "Deleted pod: %s", pod.Name)
		return nil
	})
}

// crowd counts, by node, the active pods of all sets that share this one's
// controller (a Deployment's old and new ReplicaSets).
func (c *controller) crowd(s set) map[string]int {
	snap := c.env.Reader.Snapshot()
	count := map[string]int{}
	add := func(uid string) {
		snap.ByOwner(uid, func(r *state.Record) bool {
			if r.Header.Key.Kind == podGK.String() && claim.Active(r) && r.Header.NodeName != "" {
				count[r.Header.NodeName]++
			}
			return true
		})
	}
	owner := metav1.GetControllerOf(s.meta)
	if owner == nil {
		add(string(s.meta.GetUID()))
		return count
	}
	snap.ByOwner(string(owner.UID), func(r *state.Record) bool {
		if o, ok := loop.ControllerOf(r); ok && o.UID == string(owner.UID) && r.Header.Key.Kind == c.flavor.gk.String() {
			add(r.Header.UID)
		}
		return true
	})
	return count
}
