package node

import (
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// preparing takes what a runtime tells of an image on its way: to the log, and
// what people wait for to the pod's events.
func (w *worker) preparing(s *podState, c *ctrState, m string) {
	w.log.Info("preparing image", "image", c.spec.Image, "progress", m)
	if m == workload.Compiling {
		w.eventOf(s.pod, c.note(false, "Compiling", fmt.Sprintf("Compiling module %q, the first time on this node only; a large one takes minutes on a small machine", c.spec.Image)))
	} else if far, ok := strings.CutPrefix(m, workload.Pulling); ok {
		w.eventOf(s.pod, c.note(false, "Pulling", fmt.Sprintf("Pulling image %q: %s", c.spec.Image, far)))
	} else if why, ok := strings.CutPrefix(m, workload.Kept); ok {
		w.eventOf(s.pod, c.note(true, "RegistryUnreachable", why))
	}
}

// needsRegistry says whether an image that is not here may have to be pulled.
func (w *worker) needsRegistry(image string) bool {
	return !strings.HasPrefix(image, "file://") && (w.rt.Name() != wasmHandler || images.NamesRegistry(image))
}

// pullCredentials reads the pod's imagePullSecrets. As upstream, one that is
// missing or damaged is told and does not keep the pod from trying.
func (w *worker) pullCredentials(pod *corev1.Pod, c *ctrState) (out []workload.RegistryCredential) {
	for _, ref := range pod.Spec.ImagePullSecrets {
		if ref.Name == "" {
			continue
		}
		creds, err := w.a.pullSecret(pod.Namespace, ref.Name)
		if err != nil {
			w.eventOf(pod, c.note(true, "FailedToRetrieveImagePullSecret",
				fmt.Sprintf("The pull secret %q cannot be used: %v; pulling without it", ref.Name, err)))
		}
		out = append(out, creds...)
	}
	return out
}

func (a *Agent) pullSecret(namespace, name string) ([]workload.RegistryCredential, error) {
	s, ok := a.Secret(namespace, name)
	if !ok {
		return nil, fmt.Errorf("there is no secret %q in namespace %q", name, namespace)
	}
	for _, key := range []string{corev1.DockerConfigJsonKey, corev1.DockerConfigKey} {
		if b, ok := s.Data[key]; ok {
			creds, err := registry.ParseDockerConfig(b)
			if err != nil {
				return nil, fmt.Errorf("key %s: %w", key, err)
			}
			return creds, nil
		}
	}
	return nil, fmt.Errorf("it has neither the key %s nor %s", corev1.DockerConfigJsonKey, corev1.DockerConfigKey)
}

// retryAfter is how long whoever refused asked to wait.
func retryAfter(err error) time.Duration {
	var se *workload.StartError
	if errors.As(err, &se) {
		return se.RetryAfter
	}
	return 0
}
