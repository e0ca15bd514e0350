package endpoints

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/manifests"
)

// PortsAnnotation is how a pod without an address of its own (the rootless
// form) says where its ports really are: a JSON object from containerPort to
// the port on the node, such as {"8080":30123}. Its endpoints stand in a
// slice of their own, since a slice has one set of ports.
const PortsAnnotation = "dunlin.dev/ports"

// portSet is a set of ports that endpoints share.
type portSet struct {
	id    string // canonical text
	ports []discoveryv1.EndpointPort
}

// candidate is a pod's endpoint in one address family.
type candidate struct {
	ports    portSet
	endpoint discoveryv1.Endpoint
	// inEndpoints: it belongs into the core/v1 Endpoints, which know no
	// terminating addresses.
	inEndpoints bool
	weight      uint16 // 0: nobody said one
}

// podEndpoint decides whether and how a pod serves a Service in an address
// family. Pure.
func podEndpoint(svc *corev1.Service, pod *corev1.Pod, family discoveryv1.AddressType, zone string) (candidate, bool) {
	if pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		return candidate{}, false
	}
	ip := podIP(pod, family)
	if ip == "" {
		return candidate{}, false
	}
	ports, ok := portsOf(svc, pod)
	if !ok {
		return candidate{}, false
	}
	serving := podReady(pod)
	terminating := pod.DeletionTimestamp != nil
	ready := svc.Spec.PublishNotReadyAddresses || (serving && !terminating)
	e := discoveryv1.Endpoint{
		Addresses:  []string{ip},
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
		TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
	}
	if n := pod.Spec.NodeName; n != "" {
		e.NodeName = &n
	}
	if zone != "" {
		e.Zone = &zone
	}
	if h := pod.Spec.Hostname; h != "" && pod.Spec.Subdomain == svc.Name {
		e.Hostname = &h
	}
	weight, err := manifests.ParseWeight(pod.Annotations[manifests.AnnotationWeight])
	if err != nil {
		weight = 0 // absent, or of a static pod, which nobody checked
	}
	return candidate{ports, e, !terminating || svc.Spec.PublishNotReadyAddresses, weight}, true
}

func podReady(pod *corev1.Pod) bool {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func podIP(pod *corev1.Pod, family discoveryv1.AddressType) string {
	ips := pod.Status.PodIPs
	if len(ips) == 0 && pod.Status.PodIP != "" {
		ips = []corev1.PodIP{{IP: pod.Status.PodIP}}
	}
	for _, p := range ips {
		if addr, err := netip.ParseAddr(p.IP); err == nil && addr.Is6() == (family == discoveryv1.AddressTypeIPv6) && !local(addr) {
			return p.IP
		}
	}
	return ""
}

// local says that an address means another machine on every machine, which is
// none for an endpoint (upstream's validation).
func local(a netip.Addr) bool { return a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() }

// onlyLocal is the address of a pod that has no other; "" if it has.
func onlyLocal(pod *corev1.Pod) string {
	a, err := netip.ParseAddr(pod.Status.PodIP)
	if err != nil || !local(a) || podIP(pod, discoveryv1.AddressTypeIPv4) != "" || podIP(pod, discoveryv1.AddressTypeIPv6) != "" {
		return ""
	}
	return pod.Status.PodIP
}

// portsOf resolves the Service's ports on a pod; ports that the pod does not
// have are left out. ok is false when that leaves none of some.
func portsOf(svc *corev1.Service, pod *corev1.Pod) (portSet, bool) {
	moved := movedPorts(pod)
	var out []discoveryv1.EndpointPort
	for i := range svc.Spec.Ports {
		p := &svc.Spec.Ports[i]
		n, ok := targetPort(p, pod)
		if !ok {
			continue
		}
		if to, ok := moved[n]; ok {
			n = to
		}
		name, protocol := p.Name, p.Protocol
		if protocol == "" {
			protocol = corev1.ProtocolTCP
		}
		out = append(out, discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &n, AppProtocol: p.AppProtocol})
	}
	if len(out) == 0 && len(svc.Spec.Ports) > 0 {
		return portSet{}, false
	}
	slices.SortFunc(out, func(a, b discoveryv1.EndpointPort) int { return cmp.Compare(*a.Name, *b.Name) })
	return portSet{portsID(out), out}, true
}

func portsID(ports []discoveryv1.EndpointPort) string {
	var b strings.Builder
	for _, p := range ports {
		app, name, protocol, port := "", "", "", int32(0)
		if p.AppProtocol != nil {
			app = *p.AppProtocol
		}
		if p.Name != nil {
			name = *p.Name
		}
		if p.Protocol != nil {
			protocol = string(*p.Protocol)
		}
		if p.Port != nil {
			port = *p.Port
		}
		fmt.Fprintf(&b, "%s/%s/%d/%s ", name, protocol, port, app)
	}
	return b.String()
}

// movedPorts reads PortsAnnotation; what cannot be read is ignored.
func movedPorts(pod *corev1.Pod) map[int32]int32 {
	text := pod.Annotations[PortsAnnotation]
	if text == "" {
		return nil
	}
	raw := map[string]int32{}
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		return nil
	}
	out := make(map[int32]int32, len(raw))
	for k, v := range raw {
		k, _, _ = strings.Cut(k, "/") // "8080/TCP"
		if n, err := strconv.ParseInt(k, 10, 32); err == nil && v > 0 && v < 65536 {
			out[int32(n)] = v
		}
	}
	return out
}

func targetPort(p *corev1.ServicePort, pod *corev1.Pod) (int32, bool) {
	if p.TargetPort.Type == intstr.Int {
		if p.TargetPort.IntVal == 0 {
			return p.Port, true
		}
		return p.TargetPort.IntVal, true
	}
	protocol := p.Protocol
	if protocol == "" {
		protocol = corev1.ProtocolTCP
	}
	find := func(c *corev1.Container) (int32, bool) {
		for _, cp := range c.Ports {
			if cp.Name == p.TargetPort.StrVal && (cp.Protocol == protocol || (cp.Protocol == "" && protocol == corev1.ProtocolTCP)) {
				return cp.ContainerPort, true
			}
		}
		return 0, false
	}
	for i := range pod.Spec.Containers {
		if n, ok := find(&pod.Spec.Containers[i]); ok {
			return n, true
		}
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			if n, ok := find(c); ok {
				return n, true
			}
		}
	}
	return 0, false
}

// families are the address types of a Service.
func families(svc *corev1.Service) []discoveryv1.AddressType {
	var out []discoveryv1.AddressType
	for _, f := range svc.Spec.IPFamilies {
		if f == corev1.IPv6Protocol {
			out = append(out, discoveryv1.AddressTypeIPv6)
		} else {
			out = append(out, discoveryv1.AddressTypeIPv4)
		}
	}
	if len(out) == 0 {
		out = []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4}
	}
	return out
}

// subsets are the core/v1 form of endpoints, cut to a thousand addresses as
// upstream's.
func subsets(list []candidate) (out []corev1.EndpointSubset, cut bool) {
	byPorts := map[string]*corev1.EndpointSubset{}
	var order []string
	left := maxAddresses
	for _, ready := range []bool{true, false} {
		for _, c := range list {
			if !c.inEndpoints || *c.endpoint.Conditions.Ready != ready {
				continue
			}
			if left == 0 {
				return collect(byPorts, order), true
			}
			left--
			s := byPorts[c.ports.id]
			if s == nil {
				s = &corev1.EndpointSubset{}
				for _, p := range c.ports.ports {
					s.Ports = append(s.Ports, corev1.EndpointPort{Name: *p.Name, Port: *p.Port, Protocol: *p.Protocol, AppProtocol: p.AppProtocol})
				}
				byPorts[c.ports.id] = s
				order = append(order, c.ports.id)
			}
			a := corev1.EndpointAddress{IP: c.endpoint.Addresses[0], NodeName: c.endpoint.NodeName, TargetRef: c.endpoint.TargetRef}
			if c.endpoint.Hostname != nil {
				a.Hostname = *c.endpoint.Hostname
			}
			if ready {
				s.Addresses = append(s.Addresses, a)
			} else {
				s.NotReadyAddresses = append(s.NotReadyAddresses, a)
			}
		}
	}
	return collect(byPorts, order), false
}

const maxAddresses = 1000

func collect(m map[string]*corev1.EndpointSubset, order []string) []corev1.EndpointSubset {
	slices.Sort(order)
	out := make([]corev1.EndpointSubset, 0, len(order))
	for _, id := range order {
		out = append(out, *m[id])
	}
	return out
}
