// Package manifests knows the kinds Dunlin serves: their names and
// abilities, the scheme and codecs, strict decoding, defaults, validation,
// and which fields are not implemented.
package manifests

import (
	"sync"

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
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Kind describes one served kind, as discovery, the registry and the CLI
// need it. Every kind has one version, which is also the stored one.
type Kind struct {
	GVK        schema.GroupVersionKind
	Resource   string // plural, lower case
	Singular   string
	ShortNames []string
	Categories []string
	Namespaced bool
	// Soft kinds live in the leader's memory (events; node leases are soft by
	// their namespace, see IsSoft).
	Soft bool
	// Generation: the kind has metadata.generation, raised by spec changes.
	Generation bool
	Status     bool // has the status sub-resource
	Scale      bool // has the scale sub-resource
	// ReturnDeleted: DELETE answers with the object instead of a Status.
	ReturnDeleted bool
	// AliasOf: served as another projection of this kind's storage
	// (events.k8s.io Event on core Event).
	AliasOf schema.GroupKind
	New     func() runtime.Object
	NewList func() runtime.Object
}

// GroupKind is the kind's name in storage.
func (k *Kind) GroupKind() schema.GroupKind { return k.GVK.GroupKind() }

// GVR is where the kind is served.
func (k *Kind) GVR() schema.GroupVersionResource {
	return k.GVK.GroupVersion().WithResource(k.Resource)
}

// StorageKind is state.Key.Kind of the kind's records.
func (k *Kind) StorageKind() string {
	if k.AliasOf != (schema.GroupKind{}) {
		return k.AliasOf.String()
	}
	return k.GroupKind().String()
}

func kind[T, L any, PT interface {
	*T
	runtime.Object
}, PL interface {
	*L
	runtime.Object
}](gv schema.GroupVersion, name, resource, singular string, set ...func(*Kind)) *Kind {
	k := &Kind{
		GVK: gv.WithKind(name), Resource: resource, Singular: singular, Namespaced: true,
		New:     func() runtime.Object { return PT(new(T)) },
		NewList: func() runtime.Object { return PL(new(L)) },
	}
	for _, f := range set {
		f(k)
	}
	return k
}

func short(s ...string) func(*Kind) { return func(k *Kind) { k.ShortNames = s } }
func all(k *Kind)                   { k.Categories = []string{"all"} }
func cluster(k *Kind)               { k.Namespaced = false }
func spec(k *Kind)                  { k.Generation = true }
func status(k *Kind)                { k.Status = true }
func scale(k *Kind)                 { k.Scale = true }
func returned(k *Kind)              { k.ReturnDeleted = true }
func soft(k *Kind)                  { k.Soft = true }

var table = sync.OnceValue(func() []*Kind {
	core, apps, storage := corev1.SchemeGroupVersion, appsv1.SchemeGroupVersion, storagev1.SchemeGroupVersion
	return []*Kind{
		kind[corev1.Namespace, corev1.NamespaceList](core, "Namespace", "namespaces", "namespace", short("ns"), cluster, status),
		kind[corev1.Node, corev1.NodeList](core, "Node", "nodes", "node", short("no"), cluster, status),
		kind[corev1.Pod, corev1.PodList](core, "Pod", "pods", "pod", short("po"), all, spec, status, returned),
		kind[corev1.Service, corev1.ServiceList](core, "Service", "services", "service", short("svc"), all, status, returned),
		kind[corev1.Endpoints, corev1.EndpointsList](core, "Endpoints", "endpoints", "endpoints", short("ep")),
		kind[corev1.ConfigMap, corev1.ConfigMapList](core, "ConfigMap", "configmaps", "configmap", short("cm")),
		kind[corev1.Secret, corev1.SecretList](core, "Secret", "secrets", "secret"),
		kind[corev1.ServiceAccount, corev1.ServiceAccountList](core, "ServiceAccount", "serviceaccounts", "serviceaccount", short("sa"), returned),
		kind[corev1.Event, corev1.EventList](core, "Event", "events", "event", short("ev"), soft),
		kind[corev1.PodTemplate, corev1.PodTemplateList](core, "PodTemplate", "podtemplates", "podtemplate", returned),
		kind[corev1.ReplicationController, corev1.ReplicationControllerList](core, "ReplicationController", "replicationcontrollers", "replicationcontroller", short("rc"), all, spec, status, scale),
		kind[corev1.ResourceQuota, corev1.ResourceQuotaList](core, "ResourceQuota", "resourcequotas", "resourcequota", short("quota"), status, returned),
		kind[corev1.LimitRange, corev1.LimitRangeList](core, "LimitRange", "limitranges", "limitrange", short("limits")),
		kind[corev1.PersistentVolume, corev1.PersistentVolumeList](core, "PersistentVolume", "persistentvolumes", "persistentvolume", short("pv"), cluster, status, returned),
		kind[corev1.PersistentVolumeClaim, corev1.PersistentVolumeClaimList](core, "PersistentVolumeClaim", "persistentvolumeclaims", "persistentvolumeclaim", short("pvc"), status, returned),
		kind[appsv1.ReplicaSet, appsv1.ReplicaSetList](apps, "ReplicaSet", "replicasets", "replicaset", short("rs"), all, spec, status, scale),
		kind[appsv1.Deployment, appsv1.DeploymentList](apps, "Deployment", "deployments", "deployment", short("deploy"), all, spec, status, scale),
		kind[appsv1.ControllerRevision, appsv1.ControllerRevisionList](apps, "ControllerRevision", "controllerrevisions", "controllerrevision"),
		kind[appsv1.DaemonSet, appsv1.DaemonSetList](apps, "DaemonSet", "daemonsets", "daemonset", short("ds"), all, spec, status),
		kind[appsv1.StatefulSet, appsv1.StatefulSetList](apps, "StatefulSet", "statefulsets", "statefulset", short("sts"), all, spec, status, scale),
		kind[batchv1.Job, batchv1.JobList](batchv1.SchemeGroupVersion, "Job", "jobs", "job", all, spec, status),
		kind[batchv1.CronJob, batchv1.CronJobList](batchv1.SchemeGroupVersion, "CronJob", "cronjobs", "cronjob", short("cj"), all, spec, status),
		kind[policyv1.PodDisruptionBudget, policyv1.PodDisruptionBudgetList](policyv1.SchemeGroupVersion, "PodDisruptionBudget", "poddisruptionbudgets", "poddisruptionbudget", short("pdb"), spec, status),
		kind[discoveryv1.EndpointSlice, discoveryv1.EndpointSliceList](discoveryv1.SchemeGroupVersion, "EndpointSlice", "endpointslices", "endpointslice", spec),
		kind[networkingv1.Ingress, networkingv1.IngressList](networkingv1.SchemeGroupVersion, "Ingress", "ingresses", "ingress", short("ing"), spec, status),
		kind[networkingv1.IngressClass, networkingv1.IngressClassList](networkingv1.SchemeGroupVersion, "IngressClass", "ingressclasses", "ingressclass", cluster, spec),
		kind[coordinationv1.Lease, coordinationv1.LeaseList](coordinationv1.SchemeGroupVersion, "Lease", "leases", "lease"),
		kind[nodev1.RuntimeClass, nodev1.RuntimeClassList](nodev1.SchemeGroupVersion, "RuntimeClass", "runtimeclasses", "runtimeclass", cluster),
		kind[schedulingv1.PriorityClass, schedulingv1.PriorityClassList](schedulingv1.SchemeGroupVersion, "PriorityClass", "priorityclasses", "priorityclass", short("pc"), cluster, spec),
		kind[storagev1.StorageClass, storagev1.StorageClassList](storage, "StorageClass", "storageclasses", "storageclass", short("sc"), cluster, returned),
		kind[storagev1.CSIDriver, storagev1.CSIDriverList](storage, "CSIDriver", "csidrivers", "csidriver", cluster, returned),
		kind[storagev1.CSINode, storagev1.CSINodeList](storage, "CSINode", "csinodes", "csinode", cluster, status, returned),
		kind[storagev1.CSIStorageCapacity, storagev1.CSIStorageCapacityList](storage, "CSIStorageCapacity", "csistoragecapacities", "csistoragecapacity"),
		kind[storagev1.VolumeAttachment, storagev1.VolumeAttachmentList](storage, "VolumeAttachment", "volumeattachments", "volumeattachment", cluster, status, returned),
		kind[storagev1.VolumeAttributesClass, storagev1.VolumeAttributesClassList](storage, "VolumeAttributesClass", "volumeattributesclasses", "volumeattributesclass", short("vac"), cluster, returned),
		kind[eventsv1.Event, eventsv1.EventList](eventsv1.SchemeGroupVersion, "Event", "events", "event", short("ev"), soft,
			func(k *Kind) { k.AliasOf = schema.GroupKind{Kind: "Event"} }),
	}
})

// Kinds lists every served kind, in discovery order.
func Kinds() []*Kind { return table() }

// ByGVK finds a kind; nil if it is not served.
func ByGVK(gvk schema.GroupVersionKind) *Kind {
	for _, k := range table() {
		if k.GVK == gvk {
			return k
		}
	}
	return nil
}

// ByGroupKind finds a kind whatever its version; nil if it is not served.
func ByGroupKind(gk schema.GroupKind) *Kind {
	for _, k := range table() {
		if k.GroupKind() == gk {
			return k
		}
	}
	return nil
}

// ByResource finds a kind by where it is served; nil if it is not.
func ByResource(gvr schema.GroupVersionResource) *Kind {
	for _, k := range table() {
		if k.GVR() == gvr {
			return k
		}
	}
	return nil
}

// NodeLeaseNamespace holds the node Leases, which are served from the
// leader's memory.
const NodeLeaseNamespace = "kube-node-lease"

// IsSoft says whether objects of the kind in the namespace live in the
// leader's memory and never reach the disk.
func IsSoft(k *Kind, namespace string) bool {
	return k.Soft || (k.GVK.Kind == "Lease" && namespace == NodeLeaseNamespace)
}
