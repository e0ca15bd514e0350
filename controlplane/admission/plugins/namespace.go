package plugins

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
)

// NamespaceLifecycle refuses writes into a namespace that does not exist
// (404) or is being deleted (403), and the deletion of the namespaces that
// the cluster needs.
type NamespaceLifecycle struct{}

// Name implements admission.Plugin.
func (NamespaceLifecycle) Name() string { return "NamespaceLifecycle" }

var immortal = map[string]bool{"default": true, "kube-system": true, "kube-public": true}

// Admit implements admission.Plugin.
func (NamespaceLifecycle) Admit(_ context.Context, a *admission.Attributes) error {
	if a.Kind == nil {
		return nil
	}
	if a.Kind.GroupKind() == (schema.GroupKind{Kind: "Namespace"}) {
		if a.Operation == admission.Delete && a.Subresource == "" && immortal[a.Name] {
			return forbidden(a, "this namespace may not be deleted")
		}
		return nil
	}
	if !a.Kind.Namespaced || a.Namespace == "" || a.Operation == admission.Delete {
		return nil
	}
	obj, err := a.Read.Get(schema.GroupKind{Kind: "Namespace"}, "", a.Namespace)
	if err != nil {
		return err // 404 names the namespace
	}
	ns, ok := obj.(*corev1.Namespace)
	if !ok || a.Operation != admission.Create || (ns.Status.Phase != corev1.NamespaceTerminating && ns.DeletionTimestamp == nil) {
		return nil
	}
	refusal := forbidden(a, "unable to create new content in namespace %s because it is being terminated", a.Namespace)
	if refusal.ErrStatus.Details != nil {
		refusal.ErrStatus.Details.Causes = append(refusal.ErrStatus.Details.Causes, metav1.StatusCause{
			Type: corev1.NamespaceTerminatingCause, Message: "namespace " + a.Namespace + " is being terminated", Field: "metadata.namespace",
		})
	}
	return refusal
}

// Validate implements admission.Plugin.
func (NamespaceLifecycle) Validate(context.Context, *admission.Attributes) error { return nil }
