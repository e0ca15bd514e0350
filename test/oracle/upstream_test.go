package oracle

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	policyv1 "k8s.io/api/policy/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	podutil "k8s.io/kubernetes/pkg/api/pod"
	"k8s.io/kubernetes/pkg/apis/apps"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	appsvalidation "k8s.io/kubernetes/pkg/apis/apps/validation"
	"k8s.io/kubernetes/pkg/apis/coordination"
	_ "k8s.io/kubernetes/pkg/apis/coordination/install"
	coordinationvalidation "k8s.io/kubernetes/pkg/apis/coordination/validation"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	corevalidation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/apis/discovery"
	_ "k8s.io/kubernetes/pkg/apis/discovery/install"
	discoveryvalidation "k8s.io/kubernetes/pkg/apis/discovery/validation"
	_ "k8s.io/kubernetes/pkg/apis/events/install"
	"k8s.io/kubernetes/pkg/apis/networking"
	_ "k8s.io/kubernetes/pkg/apis/networking/install"
	networkingvalidation "k8s.io/kubernetes/pkg/apis/networking/validation"
	"k8s.io/kubernetes/pkg/apis/node"
	_ "k8s.io/kubernetes/pkg/apis/node/install"
	nodevalidation "k8s.io/kubernetes/pkg/apis/node/validation"
	"k8s.io/kubernetes/pkg/apis/scheduling"
	_ "k8s.io/kubernetes/pkg/apis/scheduling/install"
	schedulingvalidation "k8s.io/kubernetes/pkg/apis/scheduling/validation"
	"k8s.io/kubernetes/pkg/apis/storage"
	_ "k8s.io/kubernetes/pkg/apis/storage/install"
	storagevalidation "k8s.io/kubernetes/pkg/apis/storage/validation"
	"k8s.io/kubernetes/pkg/capabilities"
)

func TestMain(m *testing.M) {
	capabilities.Initialize(capabilities.Capabilities{AllowPrivileged: true})
	m.Run()
}

// upstreamDefault defaults a copy and passes it through the internal type
// and back, as the server does before it stores an object.
func upstreamDefault(obj runtime.Object) (stored, internal runtime.Object, err error) {
	c := obj.DeepCopyObject()
	legacyscheme.Scheme.Default(c)
	internal, err = legacyscheme.Scheme.UnsafeConvertToVersion(c, runtime.InternalGroupVersioner)
	if err != nil {
		return nil, nil, err
	}
	gvks, _, err := legacyscheme.Scheme.ObjectKinds(obj)
	if err != nil {
		return nil, nil, err
	}
	stored, err = legacyscheme.Scheme.ConvertToVersion(internal.DeepCopyObject(), gvks[0].GroupVersion())
	return stored, internal, err
}

// upstreamValidate validates an internal object for create, or for update if
// old is not nil. versioned only tells the type apart.
func upstreamValidate(versioned, obj, old runtime.Object) field.ErrorList {
	switch versioned.(type) {
	case *corev1.Pod:
		return validatePod(obj.(*core.Pod), old)
	case *corev1.PodTemplate:
		o := obj.(*core.PodTemplate)
		if old == nil {
			return corevalidation.ValidatePodTemplate(o, podutil.GetValidationOptionsFromPodTemplate(&o.Template, nil))
		}
		b := old.(*core.PodTemplate)
		return corevalidation.ValidatePodTemplateUpdate(o, b, podutil.GetValidationOptionsFromPodTemplate(&o.Template, &b.Template))
	case *corev1.ReplicationController:
		o := obj.(*core.ReplicationController)
		if old == nil {
			return corevalidation.ValidateReplicationController(o, podutil.GetValidationOptionsFromPodTemplate(o.Spec.Template, nil))
		}
		b := old.(*core.ReplicationController)
		return corevalidation.ValidateReplicationControllerUpdate(o, b, podutil.GetValidationOptionsFromPodTemplate(o.Spec.Template, b.Spec.Template))
	case *appsv1.ReplicaSet:
		o := obj.(*apps.ReplicaSet)
		if old == nil {
			return appsvalidation.ValidateReplicaSet(o, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.Template, nil))
		}
		b := old.(*apps.ReplicaSet)
		return appsvalidation.ValidateReplicaSetUpdate(o, b, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.Template, &b.Spec.Template))
	case *appsv1.Deployment:
		o := obj.(*apps.Deployment)
		if old == nil {
			return appsvalidation.ValidateDeployment(o, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.Template, nil))
		}
		b := old.(*apps.Deployment)
		return appsvalidation.ValidateDeploymentUpdate(o, b, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.Template, &b.Spec.Template))
	case *appsv1.ControllerRevision:
		if old == nil {
			return appsvalidation.ValidateControllerRevisionCreate(obj.(*apps.ControllerRevision))
		}
		return appsvalidation.ValidateControllerRevisionUpdate(obj.(*apps.ControllerRevision), old.(*apps.ControllerRevision))
	case *appsv1.DaemonSet, *appsv1.StatefulSet, *batchv1.Job, *batchv1.CronJob, *policyv1.PodDisruptionBudget:
		return validateWorkload(obj, old)
	case *corev1.PersistentVolume, *corev1.PersistentVolumeClaim, *storagev1.StorageClass, *storagev1.CSIDriver, *storagev1.CSINode,
		*storagev1.CSIStorageCapacity, *storagev1.VolumeAttachment, *storagev1.VolumeAttributesClass:
		return validateStorage(versioned, obj, old)
	default:
		return validateOther(versioned, obj, old)
	}
}

func validateStorage(versioned, obj, old runtime.Object) field.ErrorList {
	var r rule
	switch versioned.(type) {
	case *corev1.PersistentVolume:
		opts := func(o, b *core.PersistentVolume) corevalidation.PersistentVolumeSpecValidationOptions {
			return corevalidation.ValidationOptionsForPersistentVolume(o, b)
		}
		r = pairOf(func(o *core.PersistentVolume) field.ErrorList {
			return corevalidation.ValidatePersistentVolume(o, opts(o, nil))
		},
			func(o, b *core.PersistentVolume) field.ErrorList {
				return append(corevalidation.ValidateObjectMetaUpdate(&o.ObjectMeta, &b.ObjectMeta, field.NewPath("metadata")),
					corevalidation.ValidatePersistentVolumeUpdate(o, b, opts(o, b))...)
			})
	case *corev1.PersistentVolumeClaim:
		opts := corevalidation.PersistentVolumeClaimSpecValidationOptions{EnableRecoverFromExpansionFailure: true, EnableVolumeAttributesClass: true}
		r = pairOf(func(o *core.PersistentVolumeClaim) field.ErrorList {
			return corevalidation.ValidatePersistentVolumeClaim(o, opts)
		},
			func(o, b *core.PersistentVolumeClaim) field.ErrorList {
				return corevalidation.ValidatePersistentVolumeClaimUpdate(o, b, opts)
			})
	case *storagev1.StorageClass:
		r = pairOf(storagevalidation.ValidateStorageClass, storagevalidation.ValidateStorageClassUpdate)
	case *storagev1.CSIDriver:
		r = pairOf(storagevalidation.ValidateCSIDriver, storagevalidation.ValidateCSIDriverUpdate)
	case *storagev1.CSINode:
		r = pairOf(storagevalidation.ValidateCSINode, func(o, b *storage.CSINode) field.ErrorList {
			return append(corevalidation.ValidateObjectMetaUpdate(&o.ObjectMeta, &b.ObjectMeta, field.NewPath("metadata")), storagevalidation.ValidateCSINodeUpdate(o, b)...)
		})
	case *storagev1.CSIStorageCapacity:
		r = pairOf(func(o *storage.CSIStorageCapacity) field.ErrorList {
			return storagevalidation.ValidateCSIStorageCapacity(o, storagevalidation.CSIStorageCapacityValidateOptions{})
		}, storagevalidation.ValidateCSIStorageCapacityUpdate)
	case *storagev1.VolumeAttachment:
		r = pairOf(storagevalidation.ValidateVolumeAttachment, func(o, b *storage.VolumeAttachment) field.ErrorList {
			return append(corevalidation.ValidateObjectMetaUpdate(&o.ObjectMeta, &b.ObjectMeta, field.NewPath("metadata")), storagevalidation.ValidateVolumeAttachmentUpdate(o, b)...)
		})
	case *storagev1.VolumeAttributesClass:
		r = pairOf(storagevalidation.ValidateVolumeAttributesClass, storagevalidation.ValidateVolumeAttributesClassUpdate)
	}
	if old == nil {
		return r.create(obj)
	}
	return r.update(obj, old)
}

func validatePod(o *core.Pod, old runtime.Object) field.ErrorList {
	if old == nil {
		opts := podutil.GetValidationOptionsFromPodSpecAndMeta(&o.Spec, nil, &o.ObjectMeta, nil)
		opts.ResourceIsPod = true
		return corevalidation.ValidatePodCreate(o, opts)
	}
	b := old.(*core.Pod)
	opts := podutil.GetValidationOptionsFromPodSpecAndMeta(&o.Spec, &b.Spec, &o.ObjectMeta, &b.ObjectMeta)
	opts.ResourceIsPod = true
	return corevalidation.ValidatePodUpdate(o, b, opts)
}

// rule pairs upstream's checks for create and update.
type rule struct {
	create func(obj runtime.Object) field.ErrorList
	update func(obj, old runtime.Object) field.ErrorList
}

func pairOf[T runtime.Object](create func(T) field.ErrorList, update func(obj, old T) field.ErrorList) rule {
	return rule{
		func(o runtime.Object) field.ErrorList { return create(o.(T)) },
		func(o, b runtime.Object) field.ErrorList { return update(o.(T), b.(T)) },
	}
}

func validateOther(versioned, obj, old runtime.Object) field.ErrorList {
	var r rule
	switch versioned.(type) {
	case *corev1.Service:
		r = pairOf(corevalidation.ValidateServiceCreate, corevalidation.ValidateServiceUpdate)
	case *corev1.Endpoints:
		r = pairOf(corevalidation.ValidateEndpointsCreate, corevalidation.ValidateEndpointsUpdate)
	case *corev1.ConfigMap:
		r = pairOf(corevalidation.ValidateConfigMap, corevalidation.ValidateConfigMapUpdate)
	case *corev1.Secret:
		r = pairOf(corevalidation.ValidateSecret, corevalidation.ValidateSecretUpdate)
	case *corev1.ServiceAccount:
		r = pairOf(corevalidation.ValidateServiceAccount, corevalidation.ValidateServiceAccountUpdate)
	case *corev1.Namespace:
		r = pairOf(corevalidation.ValidateNamespace, corevalidation.ValidateNamespaceFinalizeUpdate)
	case *corev1.Node:
		r = pairOf(corevalidation.ValidateNode, corevalidation.ValidateNodeUpdate)
	case *corev1.LimitRange:
		r = pairOf(corevalidation.ValidateLimitRange, func(o, _ *core.LimitRange) field.ErrorList { return corevalidation.ValidateLimitRange(o) })
	case *corev1.ResourceQuota:
		r = pairOf(corevalidation.ValidateResourceQuota, corevalidation.ValidateResourceQuotaUpdate)
	case *discoveryv1.EndpointSlice:
		r = pairOf(discoveryvalidation.ValidateEndpointSliceCreate, func(o, b *discovery.EndpointSlice) field.ErrorList {
			return append(corevalidation.ValidateObjectMetaUpdate(&o.ObjectMeta, &b.ObjectMeta, field.NewPath("metadata")),
				discoveryvalidation.ValidateEndpointSliceUpdate(o, b)...)
		})
	case *networkingv1.Ingress:
		r = pairOf(networkingvalidation.ValidateIngressCreate, func(o, b *networking.Ingress) field.ErrorList {
			return networkingvalidation.ValidateIngressUpdate(o, b)
		})
	case *networkingv1.IngressClass:
		r = pairOf(networkingvalidation.ValidateIngressClass, func(o, b *networking.IngressClass) field.ErrorList {
			return networkingvalidation.ValidateIngressClassUpdate(o, b)
		})
	case *coordinationv1.Lease:
		r = pairOf(coordinationvalidation.ValidateLease, func(o, b *coordination.Lease) field.ErrorList {
			return coordinationvalidation.ValidateLeaseUpdate(o, b)
		})
	case *nodev1.RuntimeClass:
		r = pairOf(nodevalidation.ValidateRuntimeClass, func(o, b *node.RuntimeClass) field.ErrorList { return nodevalidation.ValidateRuntimeClassUpdate(o, b) })
	case *schedulingv1.PriorityClass:
		r = pairOf(schedulingvalidation.ValidatePriorityClass, func(o, b *scheduling.PriorityClass) field.ErrorList {
			return schedulingvalidation.ValidatePriorityClassUpdate(o, b)
		})
	case *corev1.Event:
		gv := corev1.SchemeGroupVersion
		r = pairOf(func(o *core.Event) field.ErrorList { return corevalidation.ValidateEventCreate(o, gv) },
			func(o, b *core.Event) field.ErrorList { return corevalidation.ValidateEventUpdate(o, b, gv) })
	case *eventsv1.Event:
		gv := eventsv1.SchemeGroupVersion
		r = pairOf(func(o *core.Event) field.ErrorList { return corevalidation.ValidateEventCreate(o, gv) },
			func(o, b *core.Event) field.ErrorList { return corevalidation.ValidateEventUpdate(o, b, gv) })
	}
	if old == nil {
		return r.create(obj)
	}
	return r.update(obj, old)
}
