package plugins

import (
	"context"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
)

// DefaultIngressClass gives a new Ingress without a class the one that is
// marked as the default, the newest of several.
type DefaultIngressClass struct{}

var ingressClassKind = schema.GroupKind{Group: networkingv1.GroupName, Kind: "IngressClass"}

// annotationIngressClass is what spec.ingressClassName replaced.
const annotationIngressClass = "kubernetes.io/ingress.class"

// Name implements admission.Plugin.
func (DefaultIngressClass) Name() string { return "DefaultIngressClass" }

// Admit implements admission.Plugin.
func (DefaultIngressClass) Admit(_ context.Context, a *admission.Attributes) error {
	ing, ok := a.Object.(*networkingv1.Ingress)
	if !ok || a.Operation != admission.Create || a.Subresource != "" || ing.Spec.IngressClassName != nil {
		return nil
	}
	if _, ok := ing.Annotations[annotationIngressClass]; ok {
		return nil
	}
	l, err := lister(a)
	if err != nil {
		return err
	}
	list, err := l.List(ingressClassKind, "", labels.Everything(), fields.Everything())
	if err != nil {
		return err
	}
	var found *networkingv1.IngressClass
	for _, obj := range list {
		c, ok := obj.(*networkingv1.IngressClass)
		if ok && c.Annotations[networkingv1.AnnotationIsDefaultIngressClass] == "true" && (found == nil || newer(c, found)) {
			found = c
		}
	}
	if found != nil {
		name := found.Name
		ing.Spec.IngressClassName = &name
	}
	return nil
}

// newer says whether a comes before b: by age, then by name.
func newer(a, b *networkingv1.IngressClass) bool {
	if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return b.CreationTimestamp.Before(&a.CreationTimestamp)
	}
	return a.Name < b.Name
}

// Validate implements admission.Plugin.
func (DefaultIngressClass) Validate(context.Context, *admission.Attributes) error { return nil }
