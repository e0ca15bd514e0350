package endpoints

import (
	"fmt"
	"hash/fnv"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/dunlin-project/dunlin/manifests"
)

// maxPerSlice is upstream's default number of endpoints in a slice.
const maxPerSlice = 100

// changes are what has to be written to the slices of a Service.
type changes struct {
	create []*discoveryv1.EndpointSlice
	update []*discoveryv1.EndpointSlice
	remove []*discoveryv1.EndpointSlice
}

// plan compares the slices that exist with the endpoints that should be.
// Endpoints stay in the slice in which they are, so that one pod's change
// rewrites one slice. inUse says of a name that a slice has it, be it that of
// an earlier Service or somebody else's. Pure.
func plan(svc *corev1.Service, have []*discoveryv1.EndpointSlice, want map[discoveryv1.AddressType][]candidate, inUse func(name string) bool) changes {
	var out changes
	type group struct {
		family discoveryv1.AddressType
		ports  string
	}
	byGroup := map[group][]*discoveryv1.EndpointSlice{}
	made := map[string]bool{}
	taken := func(name string) bool { // notes the name
		if made[name] || inUse(name) {
			return true
		}
		made[name] = true
		return false
	}
	for _, s := range have {
		made[s.Name] = true
		g := group{s.AddressType, portsID(s.Ports)}
		byGroup[g] = append(byGroup[g], s)
	}
	for _, family := range families(svc) {
		byPorts := map[string][]candidate{}
		for _, c := range want[family] {
			byPorts[c.ports.id] = append(byPorts[c.ports.id], c)
		}
		if len(byPorts) == 0 {
			// A Service without endpoints has one empty slice, as upstream's.
			byPorts[""] = nil
		}
		for _, id := range slices.Sorted(maps.Keys(byPorts)) {
			g := group{family, id}
			fill(svc, family, byGroup[g], byPorts[id], taken, &out)
			delete(byGroup, g)
		}
	}
	for _, s := range have {
		if rest, ok := byGroup[group{s.AddressType, portsID(s.Ports)}]; ok && slices.Contains(rest, s) {
			out.remove = append(out.remove, s)
		}
	}
	return out
}

// fill spreads the endpoints of one family and port set over its slices.
func fill(svc *corev1.Service, family discoveryv1.AddressType, have []*discoveryv1.EndpointSlice, want []candidate, taken func(name string) bool, out *changes) {
	pending := make(map[types.UID]candidate, len(want))
	for _, c := range want {
		pending[c.endpoint.TargetRef.UID] = c
	}
	lists := make([][]discoveryv1.Endpoint, len(have))
	for i, s := range have {
		for j := range s.Endpoints {
			ref := s.Endpoints[j].TargetRef
			if ref == nil {
				continue
			}
			if c, ok := pending[ref.UID]; ok {
				lists[i] = append(lists[i], c.endpoint)
				delete(pending, ref.UID)
			}
		}
	}
	var ports []discoveryv1.EndpointPort
	if len(want) > 0 {
		ports = want[0].ports.ports
	}
	for _, c := range want { // in the caller's order, for a stable outcome
		if _, new := pending[c.endpoint.TargetRef.UID]; !new {
			continue
		}
		i := slices.IndexFunc(lists, func(l []discoveryv1.Endpoint) bool { return len(l) < maxPerSlice })
		if i < 0 {
			lists = append(lists, nil)
			i = len(lists) - 1
		}
		lists[i] = append(lists[i], c.endpoint)
	}
	if len(lists) == 0 {
		lists = make([][]discoveryv1.Endpoint, 1) // the empty slice
	}
	weights := weightsOf(want)
	for i, list := range lists {
		switch {
		case i >= len(have):
			s := newSlice(svc, family, ports, list, taken)
			weigh(s, weights)
			out.create = append(out.create, s)
		case len(list) == 0 && (len(want) > 0 || i > 0):
			out.remove = append(out.remove, have[i])
		default:
			next := have[i].DeepCopy()
			next.Endpoints, next.Ports = list, ports
			decorate(svc, next)
			weigh(next, weights)
			if !apiequality.Semantic.DeepEqual(next, have[i]) {
				out.update = append(out.update, next)
			}
		}
	}
}

// weightsOf are the weights that pods say, by address.
func weightsOf(list []candidate) map[string]uint16 {
	out := map[string]uint16{}
	for i := range list {
		if w := list[i].weight; w > 0 {
			out[list[i].endpoint.Addresses[0]] = w
		}
	}
	return out
}

// weigh notes the weights of a slice's endpoints on it: EndpointSlices have no
// field for them.
func weigh(s *discoveryv1.EndpointSlice, weights map[string]uint16) {
	own := map[string]uint16{}
	for i := range s.Endpoints {
		if w := weights[s.Endpoints[i].Addresses[0]]; w > 0 {
			own[s.Endpoints[i].Addresses[0]] = w
		}
	}
	text := manifests.FormatWeights(own)
	if text == "" {
		delete(s.Annotations, manifests.AnnotationWeights)
		return
	}
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[manifests.AnnotationWeights] = text
}

// newSlice names the slice after what it holds, so that a second try after a
// crash meets the first one's.
func newSlice(svc *corev1.Service, family discoveryv1.AddressType, ports []discoveryv1.EndpointPort, list []discoveryv1.Endpoint, taken func(name string) bool) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: svc.Namespace, GenerateName: svc.Name + "-",
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(svc, corev1.SchemeGroupVersion.WithKind("Service"))}},
		AddressType: family, Ports: ports, Endpoints: list,
	}
	for i := 0; ; i++ {
		h := fnv.New32a()
		fmt.Fprintf(h, "%s %s %d", family, portsID(ports), i)
		s.Name = svc.Name + "-" + rand.SafeEncodeString(fmt.Sprint(h.Sum32()))
		if !taken(s.Name) {
			decorate(svc, s)
			return s
		}
	}
}

// decorate sets the labels: the Service's own, and upstream's.
func decorate(svc *corev1.Service, s *discoveryv1.EndpointSlice) {
	l := map[string]string{}
	for k, v := range svc.Labels {
		if k != corev1.IsHeadlessService && k != discoveryv1.LabelServiceName && k != discoveryv1.LabelManagedBy {
			l[k] = v
		}
	}
	if svc.Spec.ClusterIP == corev1.ClusterIPNone {
		l[corev1.IsHeadlessService] = ""
	}
	l[discoveryv1.LabelServiceName] = svc.Name
	l[discoveryv1.LabelManagedBy] = managedBy
	s.Labels = l
}

const managedBy = "endpointslice-controller.k8s.io"
