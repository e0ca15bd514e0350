package manifests

import (
	"strings"

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
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Validate checks a defaulted object that shall be created, as upstream
// does, with upstream's wording. What kinds of volumes, profiles and the
// like we do not implement is Unsupported's business; they are only checked
// here as far as ignoring a fault could hurt. Types that are not served
// pass.
//
// Stricter than upstream in one thing: small amounts of memory or storage
// that are a fraction of a byte ("400m") are refused.
func Validate(obj runtime.Object) field.ErrorList {
	p := &problems{}
	if m, ok := obj.(metav1.ObjectMetaAccessor); ok {
		if name, namespaced, ok := metaRules(obj); ok {
			p.meta(m.GetObjectMeta().(*metav1.ObjectMeta), namespaced, name)
		}
	}
	p.object(obj, nil)
	return p.list
}

// ValidateUpdate checks a defaulted object that shall replace old: Validate's
// rules where they apply to updates, and what may not change. An empty
// resourceVersion stands for old's.
func ValidateUpdate(obj, old runtime.Object) field.ErrorList {
	p := &problems{}
	if m, ok := obj.(metav1.ObjectMetaAccessor); ok {
		if _, _, ok := metaRules(obj); ok {
			now := *m.GetObjectMeta().(*metav1.ObjectMeta)
			before := old.(metav1.ObjectMetaAccessor).GetObjectMeta().(*metav1.ObjectMeta)
			if now.ResourceVersion == "" {
				now.ResourceVersion = before.ResourceVersion
			}
			p.metaUpdate(&now, before)
		}
	}
	p.object(obj, old)
	p.update(obj, old)
	return p.list
}

var metadataPath = field.NewPath("metadata")
var specPath = field.NewPath("spec")
var statusPath = field.NewPath("status")

// metaRules gives a served type's rule for names and whether it is
// namespaced. ok is false for types whose metadata is not checked.
func metaRules(obj runtime.Object) (name apivalidation.ValidateNameFunc, namespaced, ok bool) {
	switch obj.(type) {
	case *corev1.Namespace:
		return apivalidation.ValidateNamespaceName, false, true
	case *corev1.Node, *nodev1.RuntimeClass, *schedulingv1.PriorityClass, *corev1.PersistentVolume, *storagev1.StorageClass, *storagev1.CSIDriver,
		*storagev1.CSINode, *storagev1.VolumeAttachment, *storagev1.VolumeAttributesClass, *networkingv1.IngressClass:
		return apivalidation.NameIsDNSSubdomain, false, true
	case *corev1.Service, *appsv1.StatefulSet:
		return apivalidation.NameIsDNSLabel, true, true
	case *corev1.ServiceAccount:
		return apivalidation.ValidateServiceAccountName, true, true
	case *corev1.Pod, *corev1.PodTemplate, *corev1.ReplicationController, *corev1.ConfigMap, *corev1.Secret,
		*corev1.ResourceQuota, *corev1.LimitRange, *corev1.Endpoints, *corev1.PersistentVolumeClaim, *storagev1.CSIStorageCapacity,
		*appsv1.Deployment, *appsv1.ReplicaSet, *appsv1.DaemonSet, *appsv1.ControllerRevision,
		*batchv1.Job, *batchv1.CronJob, *policyv1.PodDisruptionBudget,
		*discoveryv1.EndpointSlice, *coordinationv1.Lease, *eventsv1.Event, *networkingv1.Ingress:
		return apivalidation.NameIsDNSSubdomain, true, true
	}
	return nil, false, false // core Events among them: upstream never checked theirs
}

func (p *problems) meta(m *metav1.ObjectMeta, namespaced bool, name apivalidation.ValidateNameFunc) {
	p.add(apivalidation.ValidateObjectMeta(m, namespaced, name, metadataPath)...)
	p.finalizers(m)
}

func (p *problems) metaUpdate(now, before *metav1.ObjectMeta) {
	p.add(apivalidation.ValidateObjectMetaUpdate(now, before, metadataPath)...)
	p.add(apivalidation.ValidateFinalizers(now.Finalizers, metadataPath.Child("finalizers"))...)
	p.finalizers(now)
}

func (p *problems) finalizers(m *metav1.ObjectMeta) {
	for i, f := range m.Finalizers {
		p.finalizer(metadataPath.Child("finalizers").Index(i), f)
	}
}

// finalizer refuses names without a domain, except the historical ones.
func (p *problems) finalizer(at *field.Path, f string) {
	switch f {
	case string(corev1.FinalizerKubernetes), metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents:
	default:
		if !strings.Contains(f, "/") {
			p.invalid(at, f, "name is neither a standard finalizer name nor is it fully qualified")
		}
	}
}

// object checks everything but metadata; old is nil on create.
func (p *problems) object(obj, old runtime.Object) {
	switch o := obj.(type) {
	case *corev1.Pod:
		p.pod(o, old == nil)
	case *corev1.PodTemplate:
		p.podTemplate(field.NewPath("template"), &o.Template)
	case *corev1.ReplicationController:
		p.replicationController(o)
	case *appsv1.ReplicaSet:
		p.replicaSet(o)
	case *appsv1.Deployment:
		p.deployment(o)
	case *appsv1.ControllerRevision:
		p.controllerRevision(o, old == nil)
	case *appsv1.DaemonSet:
		p.daemonSet(o)
	case *appsv1.StatefulSet:
		p.statefulSet(o, old == nil)
	case *batchv1.Job:
		p.job(o, old == nil)
	case *batchv1.CronJob:
		before, _ := old.(*batchv1.CronJob)
		p.cronJob(o, before)
	case *policyv1.PodDisruptionBudget:
		p.disruptionBudget(o)
	case *corev1.Service:
		before, _ := old.(*corev1.Service)
		p.service(o, before)
	case *corev1.Endpoints:
		before, _ := old.(*corev1.Endpoints)
		p.endpoints(o, before)
	case *discoveryv1.EndpointSlice:
		before, _ := old.(*discoveryv1.EndpointSlice)
		p.endpointSlice(o, before)
	case *networkingv1.Ingress:
		before, _ := old.(*networkingv1.Ingress)
		p.ingress(o, before)
	case *networkingv1.IngressClass:
		p.ingressClass(o)
	case *corev1.ConfigMap:
		p.configMap(o)
	case *corev1.Secret:
		p.secret(o)
	case *corev1.Namespace:
		if old == nil {
			p.namespace(o)
		}
		p.imagePolicy(o)
	case *corev1.Node:
		p.node(o, old == nil)
	case *corev1.LimitRange:
		p.limitRange(o)
	case *corev1.ResourceQuota:
		p.resourceQuota(o, old == nil)
	case *coordinationv1.Lease:
		p.lease(o)
	case *nodev1.RuntimeClass:
		if old == nil {
			p.runtimeClass(o)
		}
	case *schedulingv1.PriorityClass:
		if old == nil {
			p.priorityClass(o)
		}
	case *corev1.PersistentVolume:
		p.volumeSpec(specPath, &o.Spec)
	case *corev1.PersistentVolumeClaim:
		p.claimSpec(specPath, &o.Spec)
	case *storagev1.StorageClass, *storagev1.CSIDriver, *storagev1.CSINode, *storagev1.CSIStorageCapacity, *storagev1.VolumeAttachment,
		*storagev1.VolumeAttributesClass:
		p.storage(o, old == nil)
	case *corev1.Event:
		p.coreEvent(o)
	case *eventsv1.Event:
		p.event(o, old == nil)
	}
}

// update checks what may not change.
func (p *problems) update(obj, old runtime.Object) {
	switch o := obj.(type) {
	case *corev1.Pod:
		p.podUpdate(o, old.(*corev1.Pod))
	case *appsv1.ReplicaSet:
		before := old.(*appsv1.ReplicaSet)
		p.immutable(specPath.Child("selector"), o.Spec.Selector, before.Spec.Selector)
		p.replicaSetStatus(o, before)
	case *appsv1.Deployment:
		before := old.(*appsv1.Deployment)
		p.immutable(specPath.Child("selector"), o.Spec.Selector, before.Spec.Selector)
		p.deploymentStatus(o, before)
	case *corev1.ReplicationController:
		p.replicationControllerStatus(o, old.(*corev1.ReplicationController))
	case *appsv1.DaemonSet:
		p.daemonSetUpdate(o, old.(*appsv1.DaemonSet))
	case *appsv1.StatefulSet:
		p.statefulSetUpdate(o, old.(*appsv1.StatefulSet))
	case *batchv1.Job:
		p.jobUpdate(o, old.(*batchv1.Job))
	case *policyv1.PodDisruptionBudget:
		p.disruptionBudgetUpdate(o, old.(*policyv1.PodDisruptionBudget))
	case *appsv1.ControllerRevision:
		p.immutable(field.NewPath("data"), o.Data, old.(*appsv1.ControllerRevision).Data)
	case *corev1.Service:
		p.serviceUpdate(o, old.(*corev1.Service))
	case *discoveryv1.EndpointSlice:
		p.immutable(field.NewPath("addressType"), o.AddressType, old.(*discoveryv1.EndpointSlice).AddressType)
	case *networkingv1.IngressClass:
		p.immutable(specPath.Child("controller"), o.Spec.Controller, old.(*networkingv1.IngressClass).Spec.Controller)
	case *corev1.ConfigMap:
		p.configMapUpdate(o, old.(*corev1.ConfigMap))
	case *corev1.Secret:
		p.secretUpdate(o, old.(*corev1.Secret))
	case *corev1.Namespace:
		p.namespaceUpdate(o, old.(*corev1.Namespace))
	case *corev1.Node:
		p.nodeUpdate(o, old.(*corev1.Node))
	case *corev1.ResourceQuota:
		p.quotaUpdate(o, old.(*corev1.ResourceQuota))
	case *nodev1.RuntimeClass:
		p.immutable(field.NewPath("handler"), o.Handler, old.(*nodev1.RuntimeClass).Handler)
	case *schedulingv1.PriorityClass:
		before := old.(*schedulingv1.PriorityClass)
		if o.Value != before.Value {
			p.forbidden(field.NewPath("value"), "may not be changed in an update.")
		}
		p.immutable(field.NewPath("preemptionPolicy"), o.PreemptionPolicy, before.PreemptionPolicy)
	case *corev1.PersistentVolume:
		p.volumeUpdate(o, old.(*corev1.PersistentVolume))
	case *corev1.PersistentVolumeClaim:
		p.claimUpdate(o, old.(*corev1.PersistentVolumeClaim))
	case *storagev1.StorageClass, *storagev1.CSIDriver, *storagev1.CSINode, *storagev1.CSIStorageCapacity, *storagev1.VolumeAttachment,
		*storagev1.VolumeAttributesClass:
		p.storageUpdate(o, old)
	case *eventsv1.Event:
		p.eventUpdate(o, old.(*eventsv1.Event))
	}
}
