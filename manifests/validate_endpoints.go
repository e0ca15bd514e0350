package manifests

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Upstream's bounds of one EndpointSlice.
const (
	maxEndpoints = 1000
	maxAddresses = 100
	maxPorts     = 20000
	maxTopology  = 16
	maxHints     = 8
)

func (p *problems) endpoints(e, old *corev1.Endpoints) {
	p.weights(e.Annotations) // the slices that mirror them have them too
	if old != nil && equality.Semantic.DeepEqual(e.Subsets, old.Subsets) {
		return
	}
	for i := range e.Subsets {
		s, at := &e.Subsets[i], field.NewPath("subsets").Index(i)
		if len(s.Addresses) == 0 && len(s.NotReadyAddresses) == 0 {
			p.required(at, "must specify `addresses` or `notReadyAddresses`")
		}
		for j := range s.Addresses {
			p.endpointAddress(at.Child("addresses").Index(j), &s.Addresses[j])
		}
		for j := range s.NotReadyAddresses {
			p.endpointAddress(at.Child("notReadyAddresses").Index(j), &s.NotReadyAddresses[j])
		}
		for j := range s.Ports {
			port, one := &s.Ports[j], at.Child("ports").Index(j)
			if port.Name != "" {
				p.dnsLabel(one.Child("name"), port.Name)
			} else if len(s.Ports) > 1 {
				p.required(one.Child("name"), "")
			}
			p.portNumber(one.Child("port"), port.Port)
			oneOf(p, one.Child("protocol"), port.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)
			if port.AppProtocol != nil {
				p.qualifiedName(one.Child("appProtocol"), *port.AppProtocol)
			}
		}
	}
}

func (p *problems) endpointAddress(at *field.Path, a *corev1.EndpointAddress) {
	p.ip(at.Child("ip"), a.IP, nil)
	if a.Hostname != "" {
		p.dnsLabel(at.Child("hostname"), a.Hostname)
	}
	if a.NodeName != nil {
		p.invalid(at.Child("nodeName"), *a.NodeName, apivalidation.NameIsDNSSubdomain(*a.NodeName, false)...)
	}
	p.endpointIP(at.Child("ip"), a.IP)
}

func (p *problems) endpointSlice(s, old *discoveryv1.EndpointSlice) {
	oneOf(p, field.NewPath("addressType"), s.AddressType, discoveryv1.AddressTypeFQDN, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6)
	p.slicePorts(field.NewPath("ports"), s.Ports)
	p.weights(s.Annotations)
	at := field.NewPath("endpoints")
	if old != nil && equality.Semantic.DeepEqual(s.Endpoints, old.Endpoints) {
		return
	}
	if n := len(s.Endpoints); n > maxEndpoints {
		p.add(field.TooMany(at, n, maxEndpoints))
		return
	}
	for i := range s.Endpoints {
		p.endpoint(at.Index(i), &s.Endpoints[i], s.AddressType)
	}
}

func (p *problems) slicePorts(at *field.Path, ports []discoveryv1.EndpointPort) {
	if n := len(ports); n > maxPorts {
		p.add(field.TooMany(at, n, maxPorts))
		return
	}
	used := names{}
	for i := range ports {
		port, one := &ports[i], at.Index(i)
		if port.Name != nil {
			if *port.Name != "" {
				p.dnsLabel(one.Child("name"), *port.Name)
			}
			if used.seen(*port.Name) {
				p.duplicate(one.Child("name"), port.Name)
			}
		}
		if port.Protocol == nil {
			p.required(one.Child("protocol"), "")
		} else {
			supported(p, one.Child("protocol"), *port.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)
		}
		if port.AppProtocol != nil {
			p.qualifiedName(one.Child("appProtocol"), *port.AppProtocol)
		}
	}
}

func (p *problems) endpoint(at *field.Path, e *discoveryv1.Endpoint, kind discoveryv1.AddressType) {
	addresses := at.Child("addresses")
	if n := len(e.Addresses); n == 0 {
		p.required(addresses, "must contain at least 1 address")
	} else if n > maxAddresses {
		p.add(field.TooMany(addresses, n, maxAddresses))
	}
	for i, a := range e.Addresses {
		p.sliceAddress(addresses, i, a, kind)
	}
	if e.NodeName != nil {
		p.invalid(at.Child("nodeName"), *e.NodeName, apivalidation.NameIsDNSSubdomain(*e.NodeName, false)...)
	}
	topology := at.Child("deprecatedTopology")
	if n := len(e.DeprecatedTopology); n > maxTopology {
		p.add(field.TooMany(topology, n, maxTopology))
	}
	p.labels(topology, e.DeprecatedTopology)
	if e.Hostname != nil {
		p.dnsLabel(at.Child("hostname"), *e.Hostname)
	}
	if h := e.Hints; h != nil {
		var zones, nodes []string
		for _, z := range h.ForZones {
			zones = append(zones, z.Name)
		}
		for _, n := range h.ForNodes {
			nodes = append(nodes, n.Name)
		}
		p.hints(at.Child("hints", "forZones"), zones, validation.IsValidLabelValue)
		if len(zones) <= maxHints {
			p.hints(at.Child("hints", "forNodes"), nodes, func(v string) []string { return apivalidation.NameIsDNSSubdomain(v, false) })
		}
	}
}

func (p *problems) hints(at *field.Path, values []string, check func(string) []string) {
	if n := len(values); n > maxHints {
		p.add(field.TooMany(at, n, maxHints))
		return
	}
	used := names{}
	for i, v := range values {
		in := at.Index(i).Child("name")
		if used.seen(v) {
			p.duplicate(in, v)
		}
		p.invalid(in, v, check(v)...)
	}
}

func (p *problems) sliceAddress(at *field.Path, i int, a string, kind discoveryv1.AddressType) {
	before := len(p.list)
	switch kind {
	case discoveryv1.AddressTypeFQDN:
		p.add(validation.IsFullyQualifiedDomainName(at.Index(i), a)...)
		return
	case discoveryv1.AddressTypeIPv4:
		p.ip(at.Index(i), a, nil)
	case discoveryv1.AddressTypeIPv6:
		p.add(validation.IsValidIP(at.Index(i), a)...)
	default:
		return
	}
	if len(p.list) > before {
		return
	}
	if isIPv6(a) != (kind == discoveryv1.AddressTypeIPv6) {
		p.invalid(at, a, "must be an "+string(kind)+" address")
	}
	p.endpointIP(at.Index(i), a)
}

// weights checks AnnotationWeights.
func (p *problems) weights(annotations map[string]string) {
	v := annotations[AnnotationWeights]
	if _, err := ParseWeights(v); err != nil {
		p.invalid(metadataPath.Child("annotations").Key(AnnotationWeights), v, err.Error())
	}
}
