package plugins

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/manifests"
)

var storageClassKind = schema.GroupKind{Group: storagev1.GroupName, Kind: "StorageClass"}

// DefaultStorageClass gives claims that name no class the default one.
type DefaultStorageClass struct{}

// Name implements admission.Plugin.
func (DefaultStorageClass) Name() string { return "DefaultStorageClass" }

// Admit implements admission.Plugin.
func (DefaultStorageClass) Admit(_ context.Context, a *admission.Attributes) error {
	claim, ok := a.Object.(*corev1.PersistentVolumeClaim)
	if !ok || a.Operation != admission.Create || manifests.ClaimHasClass(claim) {
		return nil
	}
	l, err := lister(a)
	if err != nil {
		return err
	}
	list, err := l.List(storageClassKind, "", labels.Everything(), fields.Everything())
	if err != nil {
		return err
	}
	var classes []*storagev1.StorageClass
	for _, obj := range list {
		if c, ok := obj.(*storagev1.StorageClass); ok {
			classes = append(classes, c)
		}
	}
	if c := manifests.DefaultClass(classes); c != nil {
		claim.Spec.StorageClassName = &c.Name
	}
	return nil
}

// Validate implements admission.Plugin.
func (DefaultStorageClass) Validate(context.Context, *admission.Attributes) error { return nil }

// StorageObjectInUseProtection gives claims and volumes the finalizers that
// keep them while they are in use.
type StorageObjectInUseProtection struct{}

// Name implements admission.Plugin.
func (StorageObjectInUseProtection) Name() string { return "StorageObjectInUseProtection" }

// Admit implements admission.Plugin.
func (StorageObjectInUseProtection) Admit(_ context.Context, a *admission.Attributes) error {
	if a.Operation != admission.Create {
		return nil
	}
	switch o := a.Object.(type) {
	case *corev1.PersistentVolumeClaim:
		if !slices.Contains(o.Finalizers, manifests.FinalizerClaim) {
			o.Finalizers = append(o.Finalizers, manifests.FinalizerClaim)
		}
	case *corev1.PersistentVolume:
		if !slices.Contains(o.Finalizers, manifests.FinalizerVolume) {
			o.Finalizers = append(o.Finalizers, manifests.FinalizerVolume)
		}
	}
	return nil
}

// Validate implements admission.Plugin.
func (StorageObjectInUseProtection) Validate(context.Context, *admission.Attributes) error {
	return nil
}

// PersistentVolumeClaimResize refuses to make a claim larger than its class
// allows.
type PersistentVolumeClaimResize struct{}

// Name implements admission.Plugin.
func (PersistentVolumeClaimResize) Name() string { return "PersistentVolumeClaimResize" }

// Admit implements admission.Plugin.
func (PersistentVolumeClaimResize) Admit(context.Context, *admission.Attributes) error { return nil }

// Validate implements admission.Plugin.
func (PersistentVolumeClaimResize) Validate(_ context.Context, a *admission.Attributes) error {
	if a.Operation != admission.Update || a.Subresource != "" {
		return nil
	}
	claim, ok := a.Object.(*corev1.PersistentVolumeClaim)
	old, was := a.Old.(*corev1.PersistentVolumeClaim)
	if !ok || !was {
		return nil
	}
	now, before := claim.Spec.Resources.Requests[corev1.ResourceStorage], old.Spec.Resources.Requests[corev1.ResourceStorage]
	if now.Cmp(before) <= 0 {
		return nil
	}
	if old.Status.Phase != corev1.ClaimBound {
		return forbidden(a, "Only bound persistent volume claims can be expanded")
	}
	obj, err := a.Read.Get(storageClassKind, "", manifests.ClaimClass(old))
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	class, ok := obj.(*storagev1.StorageClass)
	if err != nil || !ok || class.AllowVolumeExpansion == nil || !*class.AllowVolumeExpansion {
		return forbidden(a, "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize")
	}
	return nil
}
