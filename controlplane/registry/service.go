package registry

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

func needsClusterIP(s *corev1.Service) bool {
	return s.Spec.Type != corev1.ServiceTypeExternalName
}

func needsNodePort(s *corev1.Service) bool {
	switch s.Spec.Type {
	case corev1.ServiceTypeNodePort:
		return true
	case corev1.ServiceTypeLoadBalancer:
		return s.Spec.AllocateLoadBalancerNodePorts == nil || *s.Spec.AllocateLoadBalancerNodePorts
	}
	return false
}

func needsHealthPort(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer && s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// keepAllocated carries over what the server allocated before and the client
// left out, and drops what the new type has no use for.
func keepAllocated(s, old *corev1.Service) {
	switch {
	case needsClusterIP(old) && needsClusterIP(s):
		if s.Spec.ClusterIP == "" {
			s.Spec.ClusterIP = old.Spec.ClusterIP
		}
		if len(s.Spec.ClusterIPs) == 0 && s.Spec.ClusterIP == old.Spec.ClusterIP {
			s.Spec.ClusterIPs = slices.Clone(old.Spec.ClusterIPs)
		}
		if len(s.Spec.IPFamilies) == 0 {
			s.Spec.IPFamilies = slices.Clone(old.Spec.IPFamilies)
		}
		if s.Spec.IPFamilyPolicy == nil {
			s.Spec.IPFamilyPolicy = old.Spec.IPFamilyPolicy
		}
	case needsClusterIP(old) && s.Spec.ClusterIP == old.Spec.ClusterIP:
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies, s.Spec.IPFamilyPolicy = "", nil, nil, nil
	}
	switch {
	case needsNodePort(old) && needsNodePort(s):
		keepNodePorts(s, old)
	case needsNodePort(old) && sameNodePorts(s, old):
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].NodePort = 0
		}
	}
	switch {
	case needsHealthPort(old) && needsHealthPort(s) && s.Spec.HealthCheckNodePort == 0:
		s.Spec.HealthCheckNodePort = old.Spec.HealthCheckNodePort
	case needsHealthPort(old) && !needsHealthPort(s) && s.Spec.HealthCheckNodePort == old.Spec.HealthCheckNodePort:
		s.Spec.HealthCheckNodePort = 0
	}
	dropForType(s, old)
}

// dropForType takes away what the old type needed, the new one may not have,
// and the client left as it was: a change of type need name the type only.
func dropForType(s, old *corev1.Service) {
	if externallyAccessible(old) && !externallyAccessible(s) && s.Spec.ExternalTrafficPolicy == old.Spec.ExternalTrafficPolicy {
		s.Spec.ExternalTrafficPolicy = ""
	}
	if old.Spec.Type != corev1.ServiceTypeLoadBalancer || s.Spec.Type == corev1.ServiceTypeLoadBalancer {
		return
	}
	if a, b := s.Spec.AllocateLoadBalancerNodePorts, old.Spec.AllocateLoadBalancerNodePorts; a != nil && b != nil && *a == *b {
		s.Spec.AllocateLoadBalancerNodePorts = nil
	}
	if a, b := s.Spec.LoadBalancerClass, old.Spec.LoadBalancerClass; a != nil && b != nil && *a == *b {
		s.Spec.LoadBalancerClass = nil
	}
}

// externallyAccessible: it has an external traffic policy.
func externallyAccessible(s *corev1.Service) bool {
	t := s.Spec.Type
	return t == corev1.ServiceTypeLoadBalancer || t == corev1.ServiceTypeNodePort || (t == corev1.ServiceTypeClusterIP && len(s.Spec.ExternalIPs) > 0)
}

func keepNodePorts(s, old *corev1.Service) {
	used := map[int32]bool{}
	for _, p := range s.Spec.Ports {
		used[p.NodePort] = true
	}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if p.NodePort != 0 {
			continue
		}
		for _, q := range old.Spec.Ports {
			if q.Port == p.Port && q.Protocol == p.Protocol && q.NodePort != 0 && !used[q.NodePort] {
				p.NodePort = q.NodePort
				used[q.NodePort] = true
			}
		}
	}
}

func sameNodePorts(s, old *corev1.Service) bool {
	set := func(s *corev1.Service) []int32 {
		var out []int32
		for _, p := range s.Spec.Ports {
			if p.NodePort != 0 {
				out = append(out, p.NodePort)
			}
		}
		slices.Sort(out)
		return slices.Compact(out)
	}
	a, b := set(s), set(old)
	return len(a) == 0 || slices.Equal(a, b)
}

// allocate gives a Service the cluster addresses and node ports that it asks
// for but does not name, and says which claims it chose. What is free is
// read from the headers of the current snapshot; the state machine has the
// last word, and a lost race is tried again.
func (r *Registry) allocate(s, old *corev1.Service) (chosen []string, err error) {
	var taken map[string]bool // built when first needed
	free := func(claim string) bool {
		if taken == nil {
			taken = map[string]bool{}
			r.cfg.Durable.Snapshot().Range("Service", "", state.Key{}, func(rec *state.Record) bool {
				for _, c := range rec.Header.Claims {
					taken[c] = true
				}
				return true
			})
		}
		return !taken[claim]
	}
	if old != nil && len(s.Spec.ClusterIPs) > 0 && s.Spec.ClusterIP != "" && s.Spec.ClusterIP != old.Spec.ClusterIP && slices.Equal(s.Spec.ClusterIPs, old.Spec.ClusterIPs) {
		// Who knows only the one field means both (upstream's NormalizeClusterIPs).
		s.Spec.ClusterIPs = append([]string{s.Spec.ClusterIP}, s.Spec.ClusterIPs[1:]...)
	}
	if needsClusterIP(s) {
		ips, err := r.allocateIPs(s, free)
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, ips...)
	}
	ports, err := r.allocatePorts(s, old, free)
	if err != nil {
		return nil, err
	}
	return append(chosen, ports...), nil
}

func (r *Registry) allocateIPs(s *corev1.Service, free func(string) bool) (chosen []string, err error) {
	spec := &s.Spec
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	if spec.ClusterIP == "" && len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
	if len(spec.IPFamilies) == 2 && spec.IPFamilies[0] == spec.IPFamilies[1] {
		return nil, nil // validation says so, and of what would follow from it nothing is said
	}
	if err := r.families(s); err != nil {
		return nil, err
	}
	if spec.ClusterIP == corev1.ClusterIPNone {
		spec.ClusterIPs = []string{corev1.ClusterIPNone}
		return nil, nil
	}
	if len(spec.ClusterIPs) > len(spec.IPFamilies) {
		spec.ClusterIPs = spec.ClusterIPs[:len(spec.IPFamilies)]
	}
	for i, family := range spec.IPFamilies {
		cidr, ok := r.cidrOf(family)
		if !ok {
			return nil, invalidService(s, field.Invalid(field.NewPath("spec", "ipFamilies").Index(i), family, "not configured on this cluster"))
		}
		if i < len(spec.ClusterIPs) {
			ip, err := netip.ParseAddr(spec.ClusterIPs[i])
			if err == nil && !cidr.Contains(ip) {
				return nil, invalidService(s, field.Invalid(field.NewPath("spec", "clusterIPs").Index(i), spec.ClusterIPs[i],
					fmt.Sprintf("failed to allocate IP %s: the provided IP is not in the valid range. The range of valid IPs is %s", ip, cidr)))
			}
			continue
		}
		ip, err := r.freeIP(cidr, free)
		if err != nil {
			return nil, err
		}
		spec.ClusterIPs = append(spec.ClusterIPs, ip)
		chosen = append(chosen, "clusterip/"+ip)
	}
	spec.ClusterIP = spec.ClusterIPs[0]
	return chosen, nil
}

// families defaults spec.ipFamilyPolicy and spec.ipFamilies.
func (r *Registry) families(s *corev1.Service) error {
	spec := &s.Spec
	policy := corev1.IPFamilyPolicySingleStack
	switch {
	case spec.IPFamilyPolicy != nil:
		policy = *spec.IPFamilyPolicy
	case len(spec.ClusterIPs) == 2 || len(spec.IPFamilies) == 2:
		policy = corev1.IPFamilyPolicyRequireDualStack
	case spec.ClusterIP == corev1.ClusterIPNone && len(spec.Selector) == 0:
		// Endpoints that the user makes may be of any family.
		policy = corev1.IPFamilyPolicyRequireDualStack
		if len(spec.IPFamilies) == 0 {
			spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
		}
	}
	spec.IPFamilyPolicy = &policy
	headless := spec.ClusterIP == corev1.ClusterIPNone
	if !headless && policy == corev1.IPFamilyPolicyRequireDualStack && len(r.cfg.ServiceCIDRs) < 2 {
		return invalidService(s, field.Invalid(field.NewPath("spec", "ipFamilyPolicy"), policy, "this cluster is not configured for dual-stack services"))
	}
	if len(spec.IPFamilies) == 0 {
		for _, ip := range spec.ClusterIPs {
			if a, err := netip.ParseAddr(ip); err == nil {
				spec.IPFamilies = append(spec.IPFamilies, familyOf(a))
			}
		}
	}
	if len(spec.IPFamilies) == 0 {
		spec.IPFamilies = []corev1.IPFamily{familyOf(r.cfg.ServiceCIDRs[0].Addr())}
	}
	switch {
	case policy == corev1.IPFamilyPolicySingleStack:
		spec.IPFamilies = spec.IPFamilies[:1]
	case len(spec.IPFamilies) == 1 && (len(r.cfg.ServiceCIDRs) == 2 || (headless && policy == corev1.IPFamilyPolicyRequireDualStack)):
		other := corev1.IPv6Protocol
		if spec.IPFamilies[0] == corev1.IPv6Protocol {
			other = corev1.IPv4Protocol
		}
		spec.IPFamilies = append(spec.IPFamilies, other)
	}
	return nil
}

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Is4() || a.Is4In6() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

func (r *Registry) cidrOf(f corev1.IPFamily) (netip.Prefix, bool) {
	for _, c := range r.cfg.ServiceCIDRs {
		if familyOf(c.Addr()) == f {
			return c, true
		}
	}
	return netip.Prefix{}, false
}

// freeIP picks from the upper part of the range, and from the lower part,
// which people use for fixed addresses, only when that is full (KEP-3070).
func (r *Registry) freeIP(cidr netip.Prefix, free func(string) bool) (string, error) {
	bits := cidr.Addr().BitLen() - cidr.Bits()
	size := 1 << min(bits, 16) // 65,536 addresses are enough
	low := min(max(16, size/16), 256)
	if low >= size {
		low = 0
	}
	last := size - 1
	if cidr.Addr().Is4() {
		last-- // broadcast
	}
	for _, band := range [][2]int{{low + 1, last}, {1, low}} {
		n := band[1] - band[0] + 1
		if n <= 0 {
			continue
		}
		start, err := r.below(n)
		if err != nil {
			return "", apierrors.NewInternalError(err)
		}
		for i := range n {
			ip := offset(cidr.Masked().Addr(), band[0]+(start+i)%n)
			if free("clusterip/" + ip.String()) {
				return ip.String(), nil
			}
		}
	}
	return "", apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: range %s is full", cidr))
}

// offset adds n (below 2^16) to a network's first address.
func offset(base netip.Addr, n int) netip.Addr {
	b := base.AsSlice()
	tail := b[len(b)-4:]
	binary.BigEndian.PutUint32(tail, binary.BigEndian.Uint32(tail)+uint32(n))
	ip, _ := netip.AddrFromSlice(b)
	return ip
}

func (r *Registry) allocatePorts(s, old *corev1.Service, free func(string) bool) (chosen []string, err error) {
	held := map[string]bool{} // this Service's own, old and new
	if old != nil {
		for _, c := range serviceClaims(old) {
			held[c] = true
		}
	}
	for _, c := range serviceClaims(s) {
		held[c] = true
	}
	pick := func() (int32, error) {
		p, err := r.freePort(func(c string) bool { return !held[c] && free(c) })
		if err == nil {
			c := fmt.Sprintf("nodeport/%d", p)
			held[c] = true
			chosen = append(chosen, c)
		}
		return p, err
	}
	if needsNodePort(s) {
		for i := range s.Spec.Ports {
			p := &s.Spec.Ports[i]
			if p.NodePort == 0 {
				// One number serves all protocols of a port.
				for _, q := range s.Spec.Ports[:i] {
					if q.Port == p.Port && q.Protocol != p.Protocol {
						p.NodePort = q.NodePort
					}
				}
			}
			if p.NodePort == 0 {
				if p.NodePort, err = pick(); err != nil {
					return nil, err
				}
			}
			if p.NodePort < r.cfg.NodePortMin || p.NodePort > r.cfg.NodePortMax {
				return nil, invalidService(s, field.Invalid(field.NewPath("spec", "ports").Index(i).Child("nodePort"), p.NodePort,
					fmt.Sprintf("provided port is not in the valid range. The range of valid ports is %d-%d", r.cfg.NodePortMin, r.cfg.NodePortMax)))
			}
		}
	}
	if needsHealthPort(s) && s.Spec.HealthCheckNodePort == 0 {
		if s.Spec.HealthCheckNodePort, err = pick(); err != nil {
			return nil, err
		}
	}
	return chosen, nil
}

// freePort leaves the lower part of the range to fixed ports (KEP-3668).
func (r *Registry) freePort(free func(string) bool) (int32, error) {
	size := int(r.cfg.NodePortMax-r.cfg.NodePortMin) + 1
	low := min(max(16, size/32), 128)
	if low >= size {
		low = 0
	}
	for _, band := range [][2]int{{low, size}, {0, low}} {
		n := band[1] - band[0]
		if n <= 0 {
			continue
		}
		start, err := r.below(n)
		if err != nil {
			return 0, apierrors.NewInternalError(err)
		}
		for i := range n {
			p := r.cfg.NodePortMin + int32(band[0]+(start+i)%n)
			if free(fmt.Sprintf("nodeport/%d", p)) {
				return p, nil
			}
		}
	}
	return 0, apierrors.NewInternalError(fmt.Errorf("failed to allocate a nodePort: range is full"))
}

func invalidService(s *corev1.Service, e *field.Error) error {
	return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Service").GroupKind(), s.Name, field.ErrorList{e})
}
