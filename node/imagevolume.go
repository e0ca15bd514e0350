package node

import (
	"cmp"
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// volumeSource is what a pod's volumes are made of.
type volumeSource struct {
	*Agent
	w *worker
	s *podState
}

// MountImage implements volumes.ImageSource. Pull secrets and the namespace's
// image policy are those of the pod's containers.
func (v volumeSource) MountImage(ctx context.Context, vol *corev1.ImageVolumeSource, target string) error {
	if v.c.ImageVolumes == nil {
		return errors.New("this node has no images")
	}
	pod := v.s.pod
	req := workload.ImageRequest{Image: vol.Reference, Policy: string(cmp.Or(vol.PullPolicy, corev1.PullIfNotPresent)), PodNamespace: pod.Namespace}
	var err error
	if req.SignedBy, err = v.w.signedBy(v.s, vol.Reference); err != nil {
		return err
	}
	for _, ref := range pod.Spec.ImagePullSecrets {
		creds, err := v.pullSecret(pod.Namespace, ref.Name)
		if err != nil {
			v.log.Warn("a pull secret cannot be used for an image volume", "pod", pod.Namespace+"/"+pod.Name, "secret", ref.Name, "err", err)
		}
		req.Credentials = append(req.Credentials, creds...)
	}
	_, err = v.c.ImageVolumes.Mount(ctx, req, target, func(m string) {
		v.log.Info("preparing image volume", "pod", pod.Namespace+"/"+pod.Name, "image", vol.Reference, "progress", m)
	})
	return err
}
