package volume

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// doClaim does the one write of a claim's step. Each checks again, on the
// object that it changes, what the decision was made by.
func (c *controller) doClaim(ctx context.Context, f *facts, s step) error {
	switch s.verb {
	case reserve:
		return c.reserve(ctx, f.claim, s.volume)
	case bind:
		return c.bind(ctx, f, s.volume)
	case provision:
		return c.provision(ctx, f, s.node)
	case drop:
		return c.drop(ctx, s.volume)
	case enlarge:
		return c.enlarge(ctx, f.claim, s.volume)
	case unreserve:
		return c.unreserve(ctx, s.volume)
	case claimStatus:
		return c.changeClaim(ctx, f.claim, registry.Status, func(now *corev1.PersistentVolumeClaim) error {
			st := &now.Status
			st.Phase, st.AccessModes, st.Capacity = s.claim.Phase, s.claim.AccessModes, s.claim.Capacity
			return nil
		})
	}
	return c.changeClaim(ctx, f.claim, registry.Main, func(now *corev1.PersistentVolumeClaim) error {
		switch s.verb {
		case giveClass:
			if manifests.ClaimHasClass(now) {
				return loop.ErrMoved
			}
			now.Spec.StorageClassName = &s.class
		case outsource:
			annotate(&now.ObjectMeta, manifests.AnnotationProvisioner, s.class)
		case protect:
			if now.DeletionTimestamp != nil {
				return loop.ErrMoved
			}
			now.Finalizers = append(now.Finalizers, manifests.FinalizerClaim)
		case unprotect:
			now.Finalizers = without(now.Finalizers, manifests.FinalizerClaim)
		}
		return nil
	})
}

// doVolume does the one write of a volume's step.
func (c *controller) doVolume(ctx context.Context, v *corev1.PersistentVolume, s step) error {
	switch s.verb {
	case reclaim:
		uid := v.UID
		_, _, err := c.env.Store.Delete(ctx, volumeGK, "", v.Name, registry.DeleteOptions{UID: &uid, ResourceVersion: &v.ResourceVersion, Term: c.env.Term})
		return err
	case unreserve:
		return c.unreserve(ctx, v)
	case volumePhase:
		return c.changeVolume(ctx, v, registry.Status, func(now *corev1.PersistentVolume) error {
			if now.Status.Phase != s.phase {
				at := metav1.NewTime(c.env.Clock.Now()).Rfc3339Copy()
				now.Status.LastPhaseTransitionTime = &at
			}
			now.Status.Phase, now.Status.Message = s.phase, s.message
			return nil
		})
	}
	return c.changeVolume(ctx, v, registry.Main, func(now *corev1.PersistentVolume) error {
		switch s.verb {
		case protect:
			if now.DeletionTimestamp != nil {
				return loop.ErrMoved
			}
			now.Finalizers = append(now.Finalizers, manifests.FinalizerVolume)
		case unprotect:
			now.Finalizers = without(now.Finalizers, manifests.FinalizerVolume)
		case releaseData:
			now.Finalizers = without(now.Finalizers, manifests.FinalizerData)
		}
		return nil
	})
}

func annotate(m *metav1.ObjectMeta, key, value string) {
	if m.Annotations == nil {
		m.Annotations = map[string]string{}
	}
	m.Annotations[key] = value
}

func without(list []string, s string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(x string) bool { return x == s })
}

// changeClaim writes to the very version that was decided on.
func (c *controller) changeClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim, sub registry.Subresource, f func(*corev1.PersistentVolumeClaim) error) error {
	_, err := c.env.Store.Update(ctx, claimGK, claim.Namespace, claim.Name, sub, func(cur runtime.Object) (runtime.Object, error) {
		now, ok := cur.(*corev1.PersistentVolumeClaim)
		if !ok || now.UID != claim.UID || now.ResourceVersion != claim.ResourceVersion {
			return nil, loop.ErrMoved
		}
		return now, f(now)
	}, c.env.Write())
	if err != nil {
		return fmt.Errorf("write claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return nil
}

func (c *controller) changeVolume(ctx context.Context, v *corev1.PersistentVolume, sub registry.Subresource, f func(*corev1.PersistentVolume) error) error {
	_, err := c.env.Store.Update(ctx, volumeGK, "", v.Name, sub, func(cur runtime.Object) (runtime.Object, error) {
		now, ok := cur.(*corev1.PersistentVolume)
		if !ok || now.UID != v.UID || now.ResourceVersion != v.ResourceVersion {
			return nil, loop.ErrMoved
		}
		return now, f(now)
	}, c.env.Write())
	if err != nil {
		return fmt.Errorf("write volume %s: %w", v.Name, err)
	}
	return nil
}

// reserve makes a volume the claim's and nobody else's.
func (c *controller) reserve(ctx context.Context, claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) error {
	return c.changeVolume(ctx, v, registry.Main, func(now *corev1.PersistentVolume) error {
		if now.Spec.ClaimRef == nil {
			annotate(&now.ObjectMeta, manifests.AnnotationBoundByController, "yes")
		}
		now.Spec.ClaimRef = claimRef(claim)
		return nil
	})
}

// bind is the write that counts: from then on the claim has its volume. The
// claim is the version that the volume's node was compared with.
func (c *controller) bind(ctx context.Context, f *facts, v *corev1.PersistentVolume) error {
	return c.changeClaim(ctx, f.claim, registry.Main, func(now *corev1.PersistentVolumeClaim) error {
		if now.Spec.VolumeName == "" {
			annotate(&now.ObjectMeta, manifests.AnnotationBoundByController, "yes")
		}
		now.Spec.VolumeName = v.Name
		annotate(&now.ObjectMeta, manifests.AnnotationBindCompleted, "yes")
		return nil
	})
}

func (c *controller) provision(ctx context.Context, f *facts, node *corev1.Node) error {
	v := newVolume(f.claim, f.class, node)
	_, err := c.env.Store.Create(ctx, v, c.env.Write())
	switch {
	case apierrors.IsAlreadyExists(err):
		if old, ok, gerr := get[*corev1.PersistentVolume](c, volumeGK, "", v.Name); gerr != nil || ok && !reservedFor(f.claim, old) {
			return fmt.Errorf("volume %s of claim %s/%s exists and is not the claim's: %w", v.Name, f.claim.Namespace, f.claim.Name, err)
		}
		return loop.ErrMoved
	case err != nil:
		return fmt.Errorf("make volume %s: %w", v.Name, err)
	}
	note := fmt.Sprintf("made volume %s on node %s: pods of the claim run there", v.Name, node.Name)
	if !manifests.WaitsForConsumer(f.class) {
		note = fmt.Sprintf("class %s binds at once: made volume %s on node %s, which has the most room; pods of the claim can run there only", f.class.Name, v.Name, node.Name)
	}
	c.env.Events.Event(events.Ref(claimGK, f.claim), events.Normal, "ProvisioningSucceeded", note)
	return nil
}

// drop takes back a volume that no claim was ever bound to: nothing is on its
// node.
func (c *controller) drop(ctx context.Context, v *corev1.PersistentVolume) error {
	if slices.Contains(v.Finalizers, manifests.FinalizerData) {
		return c.changeVolume(ctx, v, registry.Main, func(now *corev1.PersistentVolume) error {
			now.Finalizers = without(now.Finalizers, manifests.FinalizerData)
			return nil
		})
	}
	return c.doVolume(ctx, v, step{verb: reclaim})
}

func (c *controller) enlarge(ctx context.Context, claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) error {
	size := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	return c.changeVolume(ctx, v, registry.Main, func(now *corev1.PersistentVolume) error {
		now.Spec.Capacity[corev1.ResourceStorage] = size.DeepCopy()
		return nil
	})
}

// unreserve gives a volume back that we reserved.
func (c *controller) unreserve(ctx context.Context, v *corev1.PersistentVolume) error {
	return c.changeVolume(ctx, v, registry.Main, func(now *corev1.PersistentVolume) error {
		now.Spec.ClaimRef = nil
		delete(now.Annotations, manifests.AnnotationBoundByController)
		return nil
	})
}
