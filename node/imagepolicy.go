package node

import (
	"context"
	"crypto"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// signedBy are the keys of which one must have signed an image, by the policy
// of the pod's namespace as this node knows it; none where it demands none. A
// static pod is of whoever owns the node, so no namespace has a say in it.
func (w *worker) signedBy(s *podState, image string) ([]crypto.PublicKey, error) {
	var ns corev1.Namespace
	if s.rec.Static || !w.a.object("Namespace", "", s.pod.Namespace, &ns) {
		return nil, nil
	}
	text, ok := ns.Annotations[manifests.ImagePolicyAnnotation]
	if !ok {
		return nil, nil
	}
	refused := func(why, hint string) error {
		return &workload.StartError{Reason: images.ReasonSignature, Hint: hint,
			Message: fmt.Sprintf("image %s is refused by the image policy of namespace %s: %s", image, s.pod.Namespace, why)}
	}
	policy, err := manifests.ParseImagePolicy(text)
	if err != nil {
		return nil, refused("it cannot be read: "+err.Error(), "correct the annotation "+manifests.ImagePolicyAnnotation)
	}
	rule := policy.Rule(images.Names(image)...)
	switch {
	case rule == nil:
		return nil, refused("it has no rule for it", "add one to the annotation "+manifests.ImagePolicyAnnotation)
	case !rule.Allow && !w.needsRegistry(image):
		return nil, refused("a module without a registry has no signature", "push it to a registry and sign it there, or allow it by a rule")
	}
	return rule.SignedBy(), nil
}

// stillSigned looks again, offline, before what was prepared is started: the
// policy may have changed since, and a node that was off for long starts what
// it has.
func (w *worker) stillSigned(ctx context.Context, s *podState, c *ctrState, digest string) error {
	keys, err := w.signedBy(s, c.spec.Image)
	if err != nil || len(keys) == 0 {
		return err
	}
	st, err := w.rt.Prepare(ctx, workload.ImageRequest{Image: c.spec.Image, Policy: string(corev1.PullNever), PodNamespace: s.pod.Namespace, SignedBy: keys}, nil)
	if err == nil && st.Digest != digest {
		err = &workload.StartError{Reason: images.ReasonPull, Message: fmt.Sprintf("image %s means something else now (%.19s) than what was prepared (%.19s)", c.spec.Image, st.Digest, digest)}
	}
	return err
}
