// Package plugins holds the admission plugins that every write passes, with
// the effects and messages of the kube-apiserver's plugins of the same name.
//
// Owner and goroutines: none. Plugins read other objects through
// admission.Attributes.Read, from the same snapshots that serve reads; only
// ResourceQuota keeps state (reservations of writes on their way, bounded and
// short-lived).
package plugins

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// Config of the default chain. The zero value is usable.
type Config struct {
	// NotReadySeconds and UnreachableSeconds are the default tolerations of
	// the node's NoExecute taints, seconds. Nil is 300 and 0: a node that is
	// unreachable loses its pods at once, unlike upstream, which waits 300 s.
	NotReadySeconds, UnreachableSeconds *int64
	// WasmArtifact says whether the cluster knows an image, by its digest, as
	// a Wasm artifact; nil knows none beyond what the name tells.
	WasmArtifact func(image string) bool
	// Clock dates deletions for quota; nil is the machine's.
	Clock clock.Clock
}

// Default is the chain of a server, in order.
func Default(cfg Config) admission.Chain {
	if cfg.Clock == nil {
		cfg.Clock = clock.System
	}
	return admission.Chain{
		NamespaceLifecycle{},
		LimitRanger{},
		ServiceAccount{},
		Priority{},
		RuntimeClass{WasmArtifact: cfg.WasmArtifact},
		DefaultIngressClass{},
		NewDefaultTolerationSeconds(cfg.NotReadySeconds, cfg.UnreachableSeconds),
		DefaultStorageClass{},
		StorageObjectInUseProtection{},
		PersistentVolumeClaimResize{},
		NewResourceQuota(cfg.Clock),
	}
}

// newPod returns the pod of a request that creates one.
func newPod(a *admission.Attributes) (*corev1.Pod, bool) {
	if a.Operation != admission.Create || a.Subresource != "" {
		return nil, false
	}
	pod, ok := a.Object.(*corev1.Pod)
	return pod, ok
}

// isMirror says whether a pod mirrors a static pod of a node: its spec is the
// node's, and admission does not touch it.
func isMirror(pod *corev1.Pod) bool {
	_, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return ok
}

// forbidden refuses a request with a 403 that names its object.
func forbidden(a *admission.Attributes, format string, args ...any) *apierrors.StatusError {
	gr := schema.GroupResource{}
	if a.Kind != nil {
		gr = a.Kind.GVR().GroupResource()
	}
	err := fmt.Errorf(format, args...)
	return apierrors.NewForbidden(gr, a.Name, err)
}

// lister returns the reader's ability to list, which the registry has.
func lister(a *admission.Attributes) (admission.Lister, error) {
	l, ok := a.Read.(admission.Lister)
	if !ok {
		return nil, apierrors.NewInternalError(errors.New("admission: the reader cannot list"))
	}
	return l, nil
}
