package plugins

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/manifests"
)

// countName is the object count quota of a kind: "count/deployments.apps".
func countName(k *manifests.Kind) corev1.ResourceName {
	return corev1.ResourceName("count/" + k.GVR().GroupResource().String())
}

// legacyCounts are the kinds that also have a count under their plain name.
var legacyCounts = map[string]bool{
	"services": true, "replicationcontrollers": true, "resourcequotas": true, "secrets": true,
	"configmaps": true, "persistentvolumeclaims": true,
}

func one() resource.Quantity { return *resource.NewQuantity(1, resource.DecimalSI) }

// usageOf is what one object takes of quotas.
func usageOf(k *manifests.Kind, obj runtime.Object, now time.Time) corev1.ResourceList {
	use := corev1.ResourceList{countName(k): one()}
	if k.GVK.Group == "" && legacyCounts[k.Resource] {
		use[corev1.ResourceName(k.Resource)] = one()
	}
	switch o := obj.(type) {
	case *corev1.Pod:
		podUsage(use, o, now)
	case *corev1.PersistentVolumeClaim:
		size := o.Spec.Resources.Requests[corev1.ResourceStorage]
		use[corev1.ResourceRequestsStorage] = size
		if class := manifests.ClaimClass(o); class != "" {
			use[corev1.ResourceName(class+".storageclass.storage.k8s.io/requests.storage")] = size
			use[corev1.ResourceName(class+".storageclass.storage.k8s.io/persistentvolumeclaims")] = one()
		}
	case *corev1.Service:
		ports := int64(0)
		if o.Spec.Type == corev1.ServiceTypeNodePort || o.Spec.Type == corev1.ServiceTypeLoadBalancer {
			ports = int64(len(o.Spec.Ports))
		}
		if o.Spec.Type == corev1.ServiceTypeLoadBalancer {
			use[corev1.ResourceServicesLoadBalancers] = one()
			if o.Spec.AllocateLoadBalancerNodePorts != nil && !*o.Spec.AllocateLoadBalancerNodePorts {
				ports = 0
				for i := range o.Spec.Ports {
					if o.Spec.Ports[i].NodePort != 0 {
						ports++
					}
				}
			}
		}
		if ports > 0 {
			use[corev1.ResourceServicesNodePorts] = *resource.NewQuantity(ports, resource.DecimalSI)
		}
	}
	return use
}

// podUsage adds what a pod takes while it lives: one that is finished, or
// whose time to stop is over, takes nothing but its count.
func podUsage(use corev1.ResourceList, pod *corev1.Pod, now time.Time) {
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return
	}
	if d := pod.DeletionTimestamp; d != nil && pod.DeletionGracePeriodSeconds != nil {
		if now.After(d.Add(time.Duration(*pod.DeletionGracePeriodSeconds) * time.Second)) {
			return
		}
	}
	use[corev1.ResourcePods] = one()
	for name, q := range manifests.PodRequests(pod) {
		switch {
		case name == corev1.ResourceCPU || name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage ||
			strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix):
			use[name] = q
			use[requestName(name)] = q
		case isExtended(name):
			use[requestName(name)] = q
		}
	}
	limits := podTotal(pod, limitsOf)
	for name, q := range limits {
		if over, ok := pod.Spec.Overhead[name]; ok {
			q = q.DeepCopy()
			q.Add(over)
		}
		if name == corev1.ResourceCPU || name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage {
			use["limits."+name] = q
		}
	}
}

func requestName(name corev1.ResourceName) corev1.ResourceName {
	return corev1.DefaultResourceRequestsPrefix + name
}

// matches says whether a quota is about the object: one with scopes only
// tracks the pods that all of them hold for.
func matches(q *corev1.ResourceQuota, obj runtime.Object) bool {
	var list []corev1.ScopedResourceSelectorRequirement
	for _, s := range q.Spec.Scopes {
		list = append(list, corev1.ScopedResourceSelectorRequirement{ScopeName: s, Operator: corev1.ScopeSelectorOpExists})
	}
	if q.Spec.ScopeSelector != nil {
		list = append(list, q.Spec.ScopeSelector.MatchExpressions...)
	}
	if len(list) == 0 {
		return true
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return false
	}
	for i := range list {
		if !inScope(pod, &list[i]) {
			return false
		}
	}
	return true
}

func inScope(pod *corev1.Pod, s *corev1.ScopedResourceSelectorRequirement) bool {
	terminating := pod.Spec.ActiveDeadlineSeconds != nil && *pod.Spec.ActiveDeadlineSeconds >= 0
	bestEffort := manifests.QOSClass(pod) == corev1.PodQOSBestEffort
	switch s.ScopeName {
	case corev1.ResourceQuotaScopeTerminating:
		return terminating
	case corev1.ResourceQuotaScopeNotTerminating:
		return !terminating
	case corev1.ResourceQuotaScopeBestEffort:
		return bestEffort
	case corev1.ResourceQuotaScopeNotBestEffort:
		return !bestEffort
	case corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
		return crossesNamespaces(pod.Spec.Affinity)
	case corev1.ResourceQuotaScopePriorityClass:
		class := pod.Spec.PriorityClassName
		switch s.Operator {
		case corev1.ScopeSelectorOpExists:
			return class != ""
		case corev1.ScopeSelectorOpDoesNotExist:
			return class == ""
		case corev1.ScopeSelectorOpIn:
			return class != "" && slices.Contains(s.Values, class)
		case corev1.ScopeSelectorOpNotIn:
			return !slices.Contains(s.Values, class)
		}
	}
	return false
}

func crossesNamespaces(a *corev1.Affinity) bool {
	if a == nil {
		return false
	}
	var terms []corev1.PodAffinityTerm
	weighted := func(list []corev1.WeightedPodAffinityTerm) {
		for i := range list {
			terms = append(terms, list[i].PodAffinityTerm)
		}
	}
	if a.PodAffinity != nil {
		terms = append(terms, a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution...)
		weighted(a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	if a.PodAntiAffinity != nil {
		terms = append(terms, a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution...)
		weighted(a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	return slices.ContainsFunc(terms, func(t corev1.PodAffinityTerm) bool {
		return len(t.Namespaces) > 0 || t.NamespaceSelector != nil
	})
}

// QuotaUsed adds up what the live objects of the quota's namespace take of
// it: a value for every resource of spec.hard. It is what status.used shall
// say.
func QuotaUsed(q *corev1.ResourceQuota, l admission.Lister, now time.Time) (corev1.ResourceList, error) {
	used := corev1.ResourceList{}
	for name := range q.Spec.Hard {
		used[name] = *resource.NewQuantity(0, resource.DecimalSI)
	}
	for _, k := range manifests.Kinds() {
		if !k.Namespaced || k.AliasOf.Kind != "" || !tracks(q, k) {
			continue
		}
		if err := addUsed(used, q, k, l, now, nil); err != nil {
			return nil, err
		}
	}
	return used, nil
}

// tracks says whether objects of the kind can count towards the quota.
func tracks(q *corev1.ResourceQuota, k *manifests.Kind) bool {
	for name := range q.Spec.Hard {
		if kindOfResource(name) == k.GVR().GroupResource() {
			return true
		}
	}
	return false
}

// kindOfResource is the resource whose objects a quota's entry counts.
func kindOfResource(name corev1.ResourceName) schema.GroupResource {
	if counted, ok := strings.CutPrefix(string(name), "count/"); ok {
		return schema.ParseGroupResource(counted)
	}
	switch {
	case legacyCounts[string(name)]:
		return schema.GroupResource{Resource: string(name)}
	case name == corev1.ResourceServicesNodePorts || name == corev1.ResourceServicesLoadBalancers:
		return schema.GroupResource{Resource: "services"}
	case name == corev1.ResourceRequestsStorage || strings.Contains(string(name), ".storageclass.storage.k8s.io/"):
		return schema.GroupResource{Resource: "persistentvolumeclaims"}
	}
	return schema.GroupResource{Resource: "pods"} // cpu, memory, pods, limits.cpu, requests.example.com/x, ...
}

// addUsed adds what the live objects of one kind take, restricted to the
// resources that used has already; skip leaves single objects out.
func addUsed(used corev1.ResourceList, q *corev1.ResourceQuota, k *manifests.Kind, l admission.Lister, now time.Time, skip func(name string) bool) error {
	list, err := l.List(k.GroupKind(), q.Namespace, labels.Everything(), fields.Everything())
	if err != nil {
		return err
	}
	for _, obj := range list {
		if skip != nil {
			if m, err := meta.Accessor(obj); err == nil && skip(m.GetName()) {
				continue
			}
		}
		if matches(q, obj) {
			addTo(used, usageOf(k, obj, now))
		}
	}
	return nil
}

// addTo adds the amounts of resources that sum has.
func addTo(sum, more corev1.ResourceList) {
	for name, q := range more {
		if have, ok := sum[name]; ok {
			have = have.DeepCopy()
			have.Add(q)
			sum[name] = have
		}
	}
}

// quantities writes a list as upstream's messages do: "cpu=1,pods=2".
func quantities(list corev1.ResourceList) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(list)) {
		q := list[name]
		out = append(out, string(name)+"="+q.String())
	}
	return strings.Join(out, ",")
}
