package endpointslicemirroring

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
)

// maxPerSubset is how many addresses of a subset are mirrored: upstream's
// default, and what one slice holds.
const maxPerSubset = 1000

// desired are the slices that mirror the Endpoints, without names, and how
// many addresses found no place. Subsets with the same ports are one. Pure.
func desired(e *corev1.Endpoints) (out []*discoveryv1.EndpointSlice, skipped int) {
	type subset struct {
		ports []discoveryv1.EndpointPort
		ready map[string]bool
		first map[string]corev1.EndpointAddress // by address
	}
	byPorts := map[string]*subset{}
	for i := range e.Subsets {
		ports := portsOf(&e.Subsets[i])
		id := portsID(ports)
		s := byPorts[id]
		if s == nil {
			s = &subset{ports, map[string]bool{}, map[string]corev1.EndpointAddress{}}
			byPorts[id] = s
		}
		for j, list := range [][]corev1.EndpointAddress{e.Subsets[i].Addresses, e.Subsets[i].NotReadyAddresses} {
			for _, a := range list {
				if _, have := s.first[a.IP]; !have {
					s.first[a.IP] = a
				}
				s.ready[a.IP] = s.ready[a.IP] || j == 0
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(byPorts)) {
		s := byPorts[id]
		ips := slices.SortedFunc(maps.Keys(s.first), func(a, b string) int {
			if s.ready[a] != s.ready[b] { // what is ready has a place first
				if s.ready[a] {
					return -1
				}
				return 1
			}
			return strings.Compare(a, b)
		})
		if len(ips) > maxPerSubset {
			skipped += len(ips) - maxPerSubset
			ips = ips[:maxPerSubset]
		}
		byFamily := map[discoveryv1.AddressType][]discoveryv1.Endpoint{}
		for _, ip := range ips {
			if addr, err := netip.ParseAddr(ip); err == nil {
				family := discoveryv1.AddressTypeIPv4
				if addr.Is6() {
					family = discoveryv1.AddressTypeIPv6
				}
				byFamily[family] = append(byFamily[family], endpoint(s.first[ip], s.ready[ip]))
			}
		}
		for _, family := range slices.Sorted(maps.Keys(byFamily)) {
			out = append(out, slice(e, family, s.ports, byFamily[family]))
		}
	}
	return out, skipped
}

func endpoint(a corev1.EndpointAddress, ready bool) discoveryv1.Endpoint {
	out := discoveryv1.Endpoint{
		Addresses: []string{a.IP}, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
		NodeName: a.NodeName, TargetRef: a.TargetRef,
	}
	if a.Hostname != "" {
		out.Hostname = &a.Hostname
	}
	return out
}

func portsOf(s *corev1.EndpointSubset) []discoveryv1.EndpointPort {
	out := make([]discoveryv1.EndpointPort, 0, len(s.Ports))
	for i := range s.Ports {
		p := s.Ports[i]
		if p.Protocol == "" {
			p.Protocol = corev1.ProtocolTCP
		}
		out = append(out, discoveryv1.EndpointPort{Name: &p.Name, Port: &p.Port, Protocol: &p.Protocol, AppProtocol: p.AppProtocol})
	}
	slices.SortFunc(out, func(a, b discoveryv1.EndpointPort) int { return cmp.Compare(*a.Name, *b.Name) })
	return out
}

// portsID is a set of ports as text.
func portsID(ports []discoveryv1.EndpointPort) string {
	var b strings.Builder
	for _, p := range ports {
		fmt.Fprintf(&b, "%q/%q/%d/%q ", value(p.Name), value(p.Protocol), value(p.Port), value(p.AppProtocol))
	}
	return b.String()
}

func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func sameSet(a, b *discoveryv1.EndpointSlice) bool {
	return a.AddressType == b.AddressType && portsID(a.Ports) == portsID(b.Ports)
}

// slice has the labels and annotations of the Endpoints, as upstream's, so
// that what selects the one selects the other.
func slice(e *corev1.Endpoints, family discoveryv1.AddressType, ports []discoveryv1.EndpointPort, list []discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	labels := maps.Clone(e.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[discoveryv1.LabelServiceName], labels[discoveryv1.LabelManagedBy] = e.Name, managedBy
	annotations := maps.Clone(e.Annotations)
	delete(annotations, corev1.EndpointsLastChangeTriggerTime)
	delete(annotations, corev1.LastAppliedConfigAnnotation)
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: e.Namespace, GenerateName: e.Name + "-", Labels: labels, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(e, corev1.SchemeGroupVersion.WithKind("Endpoints"))}},
		AddressType: family, Ports: ports, Endpoints: list,
	}
}

// freeName names a slice after what it holds, so that a second try after a
// crash meets the first one's; a name that somebody else has is passed over.
func freeName(s *discoveryv1.EndpointSlice, taken func(ns, name string) bool) string {
	for i := 0; ; i++ {
		h := fnv.New32a()
		fmt.Fprintf(h, "mirror %s %s %d", s.AddressType, portsID(s.Ports), i)
		if name := s.GenerateName + rand.SafeEncodeString(fmt.Sprint(h.Sum32())); !taken(s.Namespace, name) {
			return name
		}
	}
}
