package manifests

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func headless(s *corev1.ServiceSpec) bool {
	return len(s.ClusterIPs) == 1 && s.ClusterIPs[0] == corev1.ClusterIPNone
}

// service checks a Service; addresses that it had before stay valid.
func (p *problems) service(svc, old *corev1.Service) {
	s := &svc.Spec
	if mode, ok := svc.Annotations[corev1.AnnotationTopologyMode]; ok {
		if hints, ok := svc.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]; ok && mode != hints {
			p.invalid(metadataPath.Child("annotations").Key(corev1.AnnotationTopologyMode), mode,
				fmt.Sprintf("must match annotations[%s] when both are specified", corev1.DeprecatedAnnotationTopologyAwareHints))
		}
	}
	if len(s.Ports) == 0 && !headless(s) && s.Type != corev1.ServiceTypeExternalName {
		p.required(specPath.Child("ports"), "")
	}
	oneOf(p, specPath.Child("type"), s.Type, corev1.ServiceTypeClusterIP, corev1.ServiceTypeExternalName,
		corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort)
	switch s.Type {
	case corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort:
		if headless(s) {
			p.invalid(specPath.Child("clusterIPs").Index(0), s.ClusterIPs[0], fmt.Sprintf("may not be set to 'None' for %s services", s.Type))
		}
	case corev1.ServiceTypeExternalName:
		p.externalName(s)
	}
	p.servicePorts(specPath.Child("ports"), s)
	if s.Selector != nil {
		p.labels(specPath.Child("selector"), s.Selector)
	}
	p.sessionAffinity(s)
	var oldIPs, oldExternal, oldRanges []string
	if old != nil {
		oldIPs, oldExternal, oldRanges = old.Spec.ClusterIPs, old.Spec.ExternalIPs, old.Spec.LoadBalancerSourceRanges
	}
	if s.Type != corev1.ServiceTypeExternalName {
		p.clusterIPs(s, oldIPs)
	}
	for i, ip := range s.ExternalIPs {
		before := len(p.list)
		p.ip(specPath.Child("externalIPs").Index(i), ip, oldExternal)
		if len(p.list) == before {
			p.endpointIP(specPath.Child("externalIPs").Index(i), ip)
		}
	}
	p.loadBalancer(s, oldRanges)
	p.trafficPolicies(s)
}

func (p *problems) externalName(s *corev1.ServiceSpec) {
	const why = "may not be set for ExternalName services"
	if len(s.ClusterIPs) > 0 {
		p.forbidden(specPath.Child("clusterIPs"), why)
	}
	if len(s.IPFamilies) > 0 {
		p.forbidden(specPath.Child("ipFamilies"), why)
	}
	if s.IPFamilyPolicy != nil {
		p.forbidden(specPath.Child("ipFamilyPolicy"), why)
	}
	if name := strings.TrimSuffix(s.ExternalName, "."); name != "" {
		p.dnsSubdomain(specPath.Child("externalName"), name)
	} else {
		p.required(specPath.Child("externalName"), "")
	}
}

func (p *problems) servicePorts(at *field.Path, s *corev1.ServiceSpec) {
	used, numbers, nodePorts := names{}, names{}, names{}
	for i := range s.Ports {
		port, one := &s.Ports[i], at.Index(i)
		if port.Name == "" {
			if len(s.Ports) > 1 {
				p.required(one.Child("name"), "")
			}
		} else {
			p.dnsLabel(one.Child("name"), port.Name)
			if used.seen(port.Name) {
				p.duplicate(one.Child("name"), port.Name)
			}
		}
		p.portNumber(one.Child("port"), port.Port)
		oneOf(p, one.Child("protocol"), port.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)
		p.portNumberOrName(one.Child("targetPort"), port.TargetPort)
		if port.AppProtocol != nil {
			p.qualifiedName(one.Child("appProtocol"), *port.AppProtocol)
		}
		if numbers.seen(string(port.Protocol) + "/" + itoa(port.Port)) {
			p.duplicate(one, corev1.ServicePort{Protocol: port.Protocol, Port: port.Port})
		}
		if port.NodePort == 0 {
			continue
		}
		if s.Type == corev1.ServiceTypeClusterIP {
			p.forbidden(one.Child("nodePort"), "may not be used when `type` is 'ClusterIP'")
		}
		if nodePorts.seen(string(port.Protocol) + "/" + itoa(port.NodePort)) {
			p.duplicate(one.Child("nodePort"), port.NodePort)
		}
	}
}

func (p *problems) sessionAffinity(s *corev1.ServiceSpec) {
	at := specPath.Child("sessionAffinityConfig")
	oneOf(p, specPath.Child("sessionAffinity"), s.SessionAffinity, corev1.ServiceAffinityClientIP, corev1.ServiceAffinityNone)
	switch s.SessionAffinity {
	case corev1.ServiceAffinityNone:
		if s.SessionAffinityConfig != nil {
			p.forbidden(at, "must not be set when session affinity is None")
		}
	case corev1.ServiceAffinityClientIP:
		const when = "when session affinity type is ClientIP"
		c := s.SessionAffinityConfig
		switch {
		case c == nil:
			p.required(at, when)
		case c.ClientIP == nil:
			p.required(at.Child("clientIP"), when)
		case c.ClientIP.TimeoutSeconds == nil:
			p.required(at.Child("clientIP", "timeoutSeconds"), when)
		default:
			if t := c.ClientIP.TimeoutSeconds; *t <= 0 || *t > 86400 {
				p.invalid(at.Child("clientIP", "timeoutSeconds"), t, "must be greater than 0 and less than 86400")
			}
		}
	}
}

// clusterIPs checks the addresses and families for themselves and against
// each other.
func (p *problems) clusterIPs(s *corev1.ServiceSpec, old []string) {
	at, families := specPath.Child("clusterIPs"), specPath.Child("ipFamilies")
	switch {
	case s.ClusterIP == "" && len(s.ClusterIPs) > 0:
		p.invalid(at, s.ClusterIPs, "must be empty when `clusterIP` is not specified")
	case s.ClusterIP != "" && len(s.ClusterIPs) == 0:
		p.required(at, "")
	case s.ClusterIP != "" && s.ClusterIPs[0] != s.ClusterIP:
		p.invalid(at, s.ClusterIPs, "first value must match `clusterIP`")
	}
	used := names{}
	for i, f := range s.IPFamilies {
		supported(p, families.Index(i), f, corev1.IPv4Protocol, corev1.IPv6Protocol)
		if used.seen(string(f)) {
			p.duplicate(families.Index(i), f)
		}
	}
	supportedIfSet(p, specPath.Child("ipFamilyPolicy"), s.IPFamilyPolicy,
		corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack, corev1.IPFamilyPolicySingleStack)
	bad := false
	for i, ip := range s.ClusterIPs {
		if i == 0 && ip == corev1.ClusterIPNone {
			if len(s.ClusterIPs) > 1 {
				bad = true
				p.invalid(at, s.ClusterIPs, "'None' must be the first and only value")
			}
			continue
		}
		before := len(p.list)
		p.ip(at.Index(i), ip, old)
		bad = bad || len(p.list) > before
	}
	if len(s.ClusterIPs) > 2 {
		p.invalid(at, s.ClusterIPs, "may only hold up to 2 values")
	}
	if bad {
		return
	}
	if len(s.ClusterIPs) > 1 && !dualStack(s.ClusterIPs) {
		p.invalid(at, s.ClusterIPs, "may specify no more than one IP for each IP family")
	}
	if headless(s) {
		return
	}
	for i, ip := range s.ClusterIPs {
		if i >= len(s.IPFamilies) {
			break
		}
		if want := s.IPFamilies[i]; want == corev1.IPv4Protocol && isIPv6(ip) || want == corev1.IPv6Protocol && !isIPv6(ip) {
			p.invalid(at.Index(i), ip, fmt.Sprintf("expected an %s value as indicated by `ipFamilies[%v]`", want, i))
		}
	}
}

func isIPv6(s string) bool {
	a, err := netip.ParseAddr(s)
	return err == nil && a.Is6() && !a.Is4In6()
}

// dualStack: both families occur.
func dualStack(ips []string) bool {
	var four, six bool
	for _, ip := range ips {
		six = six || isIPv6(ip)
		four = four || !isIPv6(ip)
	}
	return four && six
}

func (p *problems) loadBalancer(s *corev1.ServiceSpec, oldRanges []string) {
	const only = "may only be used when `type` is 'LoadBalancer'"
	is := s.Type == corev1.ServiceTypeLoadBalancer
	if len(s.LoadBalancerSourceRanges) > 0 {
		at := specPath.Child("LoadBalancerSourceRanges")
		if !is {
			p.forbidden(at, only)
		}
		for i, r := range s.LoadBalancerSourceRanges {
			p.cidr(at.Index(i), strings.TrimSpace(r), oldRanges)
		}
	}
	switch a := s.AllocateLoadBalancerNodePorts; {
	case a != nil && !is:
		p.forbidden(specPath.Child("allocateLoadBalancerNodePorts"), only)
	case a == nil && is:
		p.required(field.NewPath("allocateLoadBalancerNodePorts"), "")
	}
	if c := s.LoadBalancerClass; c != nil {
		if is {
			p.qualifiedName(specPath.Child("loadBalancerClass"), *c)
		} else {
			p.forbidden(specPath.Child("loadBalancerClass"), only)
		}
	}
}

// needsHealthCheck: a health check port exists only for local load balancers.
func needsHealthCheck(s *corev1.ServiceSpec) bool {
	return s.Type == corev1.ServiceTypeLoadBalancer && s.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

func (p *problems) trafficPolicies(s *corev1.ServiceSpec) {
	external := specPath.Child("externalTrafficPolicy")
	if externallyAccessible(s) {
		oneOf(p, external, s.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	} else if s.ExternalTrafficPolicy != "" {
		p.invalid(external, s.ExternalTrafficPolicy, "may only be set for externally-accessible services")
	}
	health := specPath.Child("healthCheckNodePort")
	switch port := s.HealthCheckNodePort; {
	case !needsHealthCheck(s) && port != 0:
		p.invalid(health, port, "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'")
	case needsHealthCheck(s) && port == 0:
		p.required(health, "")
	case needsHealthCheck(s):
		p.portNumber(health, port)
	}
	internal := specPath.Child("internalTrafficPolicy")
	switch {
	case s.InternalTrafficPolicy != nil:
		supported(p, internal, *s.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)
	case s.Type == corev1.ServiceTypeClusterIP, s.Type == corev1.ServiceTypeNodePort, s.Type == corev1.ServiceTypeLoadBalancer:
		p.required(internal, "")
	}
	supportedIfSet(p, specPath.Child("trafficDistribution"), s.TrafficDistribution, corev1.ServiceTrafficDistributionPreferClose,
		corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferSameNode)
}

// serviceUpdate: cluster addresses and families may be added to and taken
// from, but the first never changes, except from, to and on ExternalName.
func (p *problems) serviceUpdate(svc, oldSvc *corev1.Service) {
	s, old := &svc.Spec, &oldSvc.Spec
	if s.Type == corev1.ServiceTypeLoadBalancer && old.Type == corev1.ServiceTypeLoadBalancer {
		now, before := s.LoadBalancerClass, old.LoadBalancerClass
		if (now == nil) != (before == nil) || now != nil && *now != *before {
			p.invalid(specPath.Child("loadBalancerClass"), now, "may not change once set")
		}
	}
	if needsHealthCheck(s) && needsHealthCheck(old) && s.HealthCheckNodePort != old.HealthCheckNodePort {
		p.forbidden(specPath.Child("healthCheckNodePort"), "field is immutable")
	}
	if s.Type == corev1.ServiceTypeExternalName || old.Type == corev1.ServiceTypeExternalName {
		return
	}
	single := s.IPFamilyPolicy != nil && *s.IPFamilyPolicy == corev1.IPFamilyPolicySingleStack
	if ips := specPath.Child("clusterIPs"); !headless(s) || !headless(old) {
		firstStays(p, ips, s.ClusterIPs, s.ClusterIPs, old.ClusterIPs, true)
		if len(old.ClusterIPs) > len(s.ClusterIPs) {
			if len(s.ClusterIPs) == 0 {
				p.invalid(ips.Index(0), s.ClusterIPs, "primary clusterIP can not be unset")
			}
			if len(s.ClusterIPs) == 1 && !single {
				p.invalid(specPath.Child("ipFamilyPolicy"), s.IPFamilyPolicy, "must be set to 'SingleStack' when releasing the secondary clusterIP")
			}
		}
	}
	if headless(s) || headless(old) {
		return
	}
	fam := specPath.Child("ipFamilies")
	var shown any = s.ClusterIPs // upstream shows the addresses when the number of families changed
	if len(s.IPFamilies) == len(old.IPFamilies) {
		shown = s.IPFamilies
	}
	firstStays(p, fam, shown, s.IPFamilies, old.IPFamilies, false)
	if len(old.IPFamilies) > len(s.IPFamilies) {
		if len(s.ClusterIPs) == 0 {
			p.invalid(fam.Index(0), s.IPFamilies, "primary ipFamily can not be unset")
		}
		if len(s.IPFamilies) == 1 && !single {
			p.invalid(specPath.Child("ipFamilyPolicy"), s.IPFamilyPolicy, "must be set to 'SingleStack' when releasing the secondary ipFamily")
		}
	}
}

// firstStays: lists of equal length are equal, others begin alike. indexed
// reports the position of a change, else always the first.
func firstStays[T ~string](p *problems, at *field.Path, shown any, now, before []T, indexed bool) {
	n := 1
	if len(now) == len(before) {
		n = len(now)
	}
	for i := 0; i < n && i < len(now) && i < len(before); i++ {
		if now[i] == before[i] {
			continue
		}
		if indexed {
			p.invalid(at.Index(i), shown, "may not change once set")
		} else {
			p.invalid(at.Index(0), shown, "may not change once set")
		}
	}
}

// endpointIP refuses addresses that make no sense as a destination.
func (p *problems) endpointIP(at *field.Path, v string) {
	ip, err := netip.ParseAddr(v)
	if err != nil {
		if len(validation.IsValidIPForLegacyField(at, v, false, nil)) > 0 {
			p.invalid(at, v, "must be a valid IP address")
		}
		return
	}
	ip = ip.Unmap()
	switch {
	case ip.IsUnspecified():
		p.invalid(at, v, fmt.Sprintf("may not be unspecified (%v)", v))
	case ip.IsLoopback():
		p.invalid(at, v, "may not be in the loopback range (127.0.0.0/8, ::1/128)")
	case ip.IsLinkLocalUnicast():
		p.invalid(at, v, "may not be in the link-local range (169.254.0.0/16, fe80::/10)")
	case ip.IsLinkLocalMulticast():
		p.invalid(at, v, "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)")
	}
}
