package node

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// admission is the node's own last word on a pod that is new here.
type admission struct {
	nodeName    string
	labels      map[string]string
	allocatable corev1.ResourceList
	handler     string
	supported   bool
	runtimes    string        // for the message
	others      []*corev1.Pod // admitted and not ended
}

// admit decides on a new pod; nil is yes. Main loop only.
func (a *Agent) admit(pod *corev1.Pod) *store.Verdict {
	ad := admission{
		nodeName: a.c.NodeName, labels: a.labels(), handler: a.handler(pod),
		supported: a.runtimeOf(pod) != nil, runtimes: strings.Join(a.handlers(), ", "),
	}
	a.mu.RLock()
	if v := underPressure(a.pressed, pod); v != nil {
		a.mu.RUnlock()
		return v
	}
	ad.allocatable = a.alloc
	for uid, i := range a.known {
		if uid == string(pod.UID) || i.worker == nil || i.inactive || i.status != nil && ended(i.status.Phase) {
			continue
		}
		ad.others = append(ad.others, i.assigned)
	}
	a.mu.RUnlock()
	return ad.decide(pod)
}

func (ad *admission) decide(pod *corev1.Pod) *store.Verdict {
	no := func(reason, format string, args ...any) *store.Verdict {
		return &store.Verdict{Reason: reason, Message: "Pod was rejected: " + fmt.Sprintf(format, args...), Rejected: true}
	}
	if !ad.supported {
		return no("RuntimeClassNotSupported", "no runtime for handler %q on node %s (it has: %s)", ad.handler, ad.nodeName, ad.runtimes)
	}
	if !isStatic(pod) && !matchesNode(&pod.Spec, ad.labels, ad.nodeName) {
		return no("NodeAffinity", "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector")
	}
	if p := portConflict(pod, ad.others); p != "" {
		return no("NodePorts", "host port %s is taken by another pod of this node", p)
	}
	used := corev1.ResourceList{}
	for _, o := range ad.others {
		add(used, manifests.PodRequests(o))
	}
	if max, ok := ad.allocatable[corev1.ResourcePods]; ok && int64(len(ad.others)+1) > max.Value() {
		return no("OutOfpods", "Node didn't have enough resource: pods, requested: 1, used: %d, capacity: %d", len(ad.others), max.Value())
	}
	for name, want := range manifests.PodRequests(pod) {
		have, ok := ad.allocatable[name]
		// Resources that others advertise on the Node through the API
		// (example.com/dongle) are the scheduler's to count.
		if want.IsZero() || !ok && (name == corev1.ResourceEphemeralStorage || strings.HasPrefix(string(name), "hugepages-") || strings.Contains(string(name), "/")) {
			continue
		}
		sum := used[name].DeepCopy()
		sum.Add(want)
		if sum.Cmp(have) <= 0 {
			continue
		}
		u := used[name]
		value := func(q interface {
			MilliValue() int64
			Value() int64
		}) int64 {
			if name == corev1.ResourceCPU {
				return q.MilliValue()
			}
			return q.Value()
		}
		return no("OutOf"+string(name), "Node didn't have enough resource: %s, requested: %d, used: %d, capacity: %d",
			name, value(&want), value(&u), value(&have))
	}
	return nil
}

func add(to, from corev1.ResourceList) {
	for name, q := range from {
		have := to[name].DeepCopy()
		have.Add(q)
		to[name] = have
	}
}

// portConflict names a host port that another pod has.
func portConflict(pod *corev1.Pod, others []*corev1.Pod) string {
	type key struct {
		port  int32
		proto corev1.Protocol
	}
	taken := map[key][]string{} // with their addresses, "" is all
	ip := ""
	each := func(p *corev1.Pod, f func(key) (stop bool)) {
		for i := range p.Spec.Containers {
			for _, cp := range p.Spec.Containers[i].Ports {
				k := key{cp.HostPort, cp.Protocol}
				if ip = cp.HostIP; ip == "0.0.0.0" || ip == "::" {
					ip = ""
				}
				if p.Spec.HostNetwork && k.port == 0 {
					k.port = cp.ContainerPort
				}
				if k.proto == "" {
					k.proto = corev1.ProtocolTCP
				}
				if k.port != 0 && f(k) {
					return
				}
			}
		}
	}
	for _, o := range others {
		each(o, func(k key) bool { taken[k] = append(taken[k], ip); return false })
	}
	clashes := func(k key) bool {
		return slices.ContainsFunc(taken[k], func(other string) bool { return other == ip || other == "" || ip == "" })
	}
	conflict := ""
	each(pod, func(k key) bool {
		if clashes(k) {
			conflict = fmt.Sprintf("%d/%s", k.port, k.proto)
		}
		return clashes(k)
	})
	return conflict
}

// matchesNode evaluates nodeSelector and required node affinity.
func matchesNode(spec *corev1.PodSpec, node map[string]string, name string) bool {
	if !labels.SelectorFromSet(spec.NodeSelector).Matches(labels.Set(node)) {
		return false
	}
	if spec.Affinity == nil || spec.Affinity.NodeAffinity == nil ||
		spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	for _, term := range spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		if len(term.MatchExpressions)+len(term.MatchFields) == 0 {
			continue // an empty term matches nothing
		}
		if matchesAll(term.MatchExpressions, labels.Set(node)) &&
			matchesAll(term.MatchFields, labels.Set{metav1.ObjectNameField: name}) {
			return true
		}
	}
	return false
}

var nodeOperators = map[corev1.NodeSelectorOperator]selection.Operator{
	corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpNotIn: selection.NotIn,
	corev1.NodeSelectorOpExists: selection.Exists, corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist,
	corev1.NodeSelectorOpGt: selection.GreaterThan, corev1.NodeSelectorOpLt: selection.LessThan,
}

func matchesAll(reqs []corev1.NodeSelectorRequirement, set labels.Labels) bool {
	for _, r := range reqs {
		req, err := labels.NewRequirement(r.Key, nodeOperators[r.Operator], r.Values)
		if err != nil || !req.Matches(set) {
			return false
		}
	}
	return true
}

func (a *Agent) runtimeOf(pod *corev1.Pod) workload.Runtime { return a.c.Runtimes[a.handler(pod)] }
