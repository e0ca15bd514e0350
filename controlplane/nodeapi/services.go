package nodeapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/dunlin-project/dunlin/controlplane/ingress"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

const (
	serviceKind = "Service"
	sliceKind   = "EndpointSlice." + discoveryv1.GroupName
	nodeKind    = "Node"
)

// servicesGather is how long changes of the service table are gathered
// before nodes are told: a rollout is a few pulls and not one for each pod.
// The more nodes are told, the longer (servicesEach), so that a change costs no
// more than some thousand pulls a second: at 5,000 nodes 1 s.
const (
	servicesGather = 50 * time.Millisecond
	servicesEach   = 200 * time.Microsecond
)

// appProtocolH2C is HTTP/2 without TLS (KEP-3726).
const appProtocolH2C = "kubernetes.io/h2c"

// ClusterDomain ends the names of Services.
const ClusterDomain = "cluster.local"

// DNSAddress is the address that DNS has in a range of service addresses: the
// tenth, as everywhere; invalid where the range has none.
func DNSAddress(services netip.Prefix) netip.Addr {
	a := services.Masked().Addr()
	for range 10 {
		a = a.Next()
	}
	if !services.Contains(a) {
		return netip.Addr{}
	}
	return a
}

// services follows the store and keeps the service table, until ctx ends.
// Every server does, so that a new leader knows what changed when.
func (s *Server) serviceLoop(ctx context.Context) {
	reader := s.cfg.Store.Reader(nodeGK)
	for ctx.Err() == nil {
		snap := reader.Snapshot()
		w, err := reader.Watch("", "", snap.ResourceVersion())
		if err == nil {
			s.fillTable(snap)
			err = s.followServices(ctx, w)
		}
		if err != nil && ctx.Err() == nil && !errors.Is(err, state.ErrTooOld) {
			s.log.Warn("watch for the service table ended", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// found is an item and the version of the store at which it became so.
type found struct {
	key     string
	data    []byte
	version uint64
}

// ingressNodes is the item that says who serves Ingresses.
func ingressNodes(snap state.Snapshot) found {
	data, err := wire.EncodeItem(&wire.IngressNodes{Nodes: ingress.Chosen(snap)})
	if err != nil {
		data = nil // cannot be: a list of strings
	}
	return found{key: wire.ItemIngressNodes, data: data}
}

// fillTable brings the table up to a snapshot, whatever was missed.
func (s *Server) fillTable(snap state.Snapshot) {
	version := snap.ResourceVersion()
	t := s.services
	first := t.generation() == 0
	var all []found
	if data, err := wire.EncodeItem(s.clusterNetwork()); err == nil {
		all = append(all, found{key: wire.ItemNetwork, data: data})
	}
	all = append(all, ingressNodes(snap))
	for _, kind := range []string{serviceKind, sliceKind, nodeKind, ingress.Kind} {
		snap.Range(kind, "", state.Key{}, func(rec *state.Record) bool {
			if key, data := s.item(rec); data != nil {
				all = append(all, found{key, data, rec.Header.ResourceVersion})
			}
			return true
		})
	}
	// Each at its own version, so that pages can end between any two.
	slices.SortFunc(all, func(a, b found) int { return cmp.Compare(a.version, b.version) })
	seen := make(map[string]bool, len(all))
	for _, f := range all {
		seen[f.key] = true
		t.put(f.key, f.data, max(f.version, 1))
	}
	for _, k := range t.keys() {
		if !seen[k] {
			t.put(k, nil, version)
		}
	}
	if first {
		t.begin(version)
	}
	s.tellServices()
}

func (s *Server) clusterNetwork() *wire.ClusterNetwork {
	n := &wire.ClusterNetwork{Domain: ClusterDomain}
	for _, p := range s.cfg.ServiceCIDRs {
		n.ServiceCIDRs = append(n.ServiceCIDRs, p.String())
	}
	if len(s.cfg.ServiceCIDRs) > 0 {
		if a := DNSAddress(s.cfg.ServiceCIDRs[0]); a.IsValid() {
			n.DNS = []string{a.String()}
		}
	}
	return n
}

func (s *Server) followServices(ctx context.Context, w state.Watcher) error {
	for {
		batch, _, err := w.Next(ctx)
		if err != nil {
			return err
		}
		changed := false
		for i := range batch {
			e := &batch[i]
			switch e.Record.Header.Key.Kind {
			case serviceKind, sliceKind, ingress.Kind:
			case nodeKind:
				if ingress.MayChange(e) {
					it := ingressNodes(s.cfg.Store.Reader(nodeGK).Snapshot())
					changed = s.services.put(it.key, it.data, e.ResourceVersion) || changed
				}
			case ingress.ClassKind:
				changed = s.reclass(e.ResourceVersion) || changed
				continue
			default:
				continue
			}
			key, data := s.item(e.Record)
			if e.Type == state.Deleted {
				data = nil
			}
			changed = s.services.put(key, data, e.ResourceVersion) || changed
		}
		if !changed {
			continue
		}
		told := s.tellServices()
		select { // the next changes are gathered
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(servicesGather, time.Duration(told)*servicesEach)):
		}
	}
}

// reclass looks at all Ingresses again: whose they are depends on their class.
func (s *Server) reclass(version uint64) (changed bool) {
	s.cfg.Store.Reader(nodeGK).Snapshot().Range(ingress.Kind, "", state.Key{}, func(rec *state.Record) bool {
		key, data := s.item(rec)
		changed = s.services.put(key, data, version) || changed
		return true
	})
	return changed
}

// ingressClass finds one; nil if there is none.
func (s *Server) ingressClass(name string) *networkingv1.IngressClass {
	obj, err := s.cfg.Store.Get(ingress.ClassGK, "", name)
	if err != nil {
		return nil
	}
	c, _ := obj.(*networkingv1.IngressClass)
	return c
}

// tellServices nudges all nodes that are connected, and says how many.
func (s *Server) tellServices() int {
	gen := s.services.generation()
	s.mu.Lock()
	list := make([]*session, 0, len(s.sessions))
	for _, sess := range s.sessions {
		list = append(list, sess)
	}
	s.mu.Unlock()
	for _, sess := range list {
		s.assign.nudge(sess, wire.Nudge{Services: gen})
	}
	return len(list)
}

// item is what the table says of an object; no data if nothing.
func (s *Server) item(rec *state.Record) (key string, data []byte) {
	k := rec.Header.Key
	obj, err := s.cfg.Store.Decode(rec)
	if err != nil {
		s.warn(k.Kind, k.Namespace+"/"+k.Name, "object is left out of the service table", err)
	}
	var v any
	switch k.Kind {
	case serviceKind:
		key = wire.ItemService + k.Namespace + "/" + k.Name
		if svc, ok := obj.(*corev1.Service); ok {
			v = serviceItem(svc)
		}
	case sliceKind:
		key = wire.ItemSlice + k.Namespace + "/" + k.Name
		if sl, ok := obj.(*discoveryv1.EndpointSlice); ok {
			if it := sliceItem(sl); it != nil {
				v = it
			}
		}
	case ingress.Kind:
		key = wire.ItemIngress + k.Namespace + "/" + k.Name
		if i, ok := obj.(*networkingv1.Ingress); ok && ingress.Ours(i, s.ingressClass) {
			v = ingress.Item(i)
		}
	case nodeKind:
		key = wire.ItemNodeInfo + k.Name
		if n, ok := obj.(*corev1.Node); ok {
			v = nodeItem(n, rec)
		}
	}
	if v == nil {
		return key, nil
	}
	if data, err = wire.EncodeItem(v); err != nil {
		s.warn(k.Kind, k.Namespace+"/"+k.Name, "object is left out of the service table", err)
		return key, nil
	}
	return key, data
}

// serviceItem is a Service as nodes need it. Pure.
func serviceItem(svc *corev1.Service) *wire.Service {
	spec := &svc.Spec
	if spec.Type == corev1.ServiceTypeExternalName {
		return &wire.Service{ExternalName: spec.ExternalName}
	}
	out := &wire.Service{
		InternalLocal: spec.InternalTrafficPolicy != nil && *spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal,
		ExternalLocal: spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
		ExternalIPs:   slices.Clone(spec.ExternalIPs),
		HealthPort:    uint16(spec.HealthCheckNodePort),
		NotReady:      spec.PublishNotReadyAddresses,
		Selector:      spec.Selector,
	}
	if spec.ClusterIP != corev1.ClusterIPNone {
		out.ClusterIPs = spec.ClusterIPs
	}
	for _, i := range svc.Status.LoadBalancer.Ingress {
		if i.IP != "" && !slices.Contains(out.ExternalIPs, i.IP) {
			out.ExternalIPs = append(out.ExternalIPs, i.IP)
		}
	}
	for _, r := range spec.LoadBalancerSourceRanges {
		out.Sources = append(out.Sources, strings.TrimSpace(r))
	}
	if spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		out.AffinitySeconds = corev1.DefaultClientIPServiceAffinitySeconds
		if c := spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			out.AffinitySeconds = *c.ClientIP.TimeoutSeconds
		}
	}
	if d := spec.TrafficDistribution; d != nil {
		switch *d {
		case corev1.ServiceTrafficDistributionPreferSameNode:
			out.Traffic = wire.TrafficSameNode
		case corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferClose:
			out.Traffic = wire.TrafficSameZone
		}
	}
	for _, p := range spec.Ports {
		sp := wire.ServicePort{Name: p.Name, Protocol: string(p.Protocol), Port: uint16(p.Port), NodePort: uint16(p.NodePort),
			H2C: p.AppProtocol != nil && *p.AppProtocol == appProtocolH2C}
		if t := p.TargetPort.String(); t != "0" && t != strconv.Itoa(int(p.Port)) {
			sp.Target = t
		}
		out.Ports = append(out.Ports, sp)
	}
	return out
}

// sliceItem is an EndpointSlice as nodes need it; nil if it is no Service's.
// Pure.
func sliceItem(sl *discoveryv1.EndpointSlice) *wire.Slice {
	name := sl.Labels[discoveryv1.LabelServiceName]
	if name == "" || sl.DeletionTimestamp != nil {
		return nil
	}
	out := &wire.Slice{Service: name}
	for _, p := range sl.Ports {
		if p.Port == nil {
			continue // every port: a form that no controller of Services writes
		}
		sp := wire.SlicePort{Protocol: string(corev1.ProtocolTCP), Port: uint16(*p.Port)}
		if p.Name != nil {
			sp.Name = *p.Name
		}
		if p.Protocol != nil {
			sp.Protocol = string(*p.Protocol)
		}
		out.Ports = append(out.Ports, sp)
	}
	weights, err := manifests.ParseWeights(sl.Annotations[manifests.AnnotationWeights])
	if err != nil {
		weights = nil // admission refuses them
	}
	for i := range sl.Endpoints {
		if e, ok := endpointItem(&sl.Endpoints[i]); ok {
			e.Weight = weights[sl.Endpoints[i].Addresses[0]]
			out.Endpoints = append(out.Endpoints, e)
		}
	}
	slices.SortFunc(out.Endpoints, func(a, b wire.Endpoint) int { return strings.Compare(string(a.Address), string(b.Address)) })
	return out
}

func endpointItem(e *discoveryv1.Endpoint) (wire.Endpoint, bool) {
	if len(e.Addresses) == 0 {
		return wire.Endpoint{}, false
	}
	ip, err := netip.ParseAddr(e.Addresses[0])
	if err != nil {
		return wire.Endpoint{}, false // a name: no slice of type FQDN is routed
	}
	out := wire.Endpoint{Address: ip.Unmap().AsSlice()}
	is := func(b *bool, absent bool) bool { return (b == nil && absent) || (b != nil && *b) }
	c := &e.Conditions
	ready, terminating := is(c.Ready, true), is(c.Terminating, false)
	if ready {
		out.State |= wire.EndpointReady
	}
	if is(c.Serving, ready) {
		out.State |= wire.EndpointServing
	}
	if terminating {
		out.State |= wire.EndpointTerminating
	}
	for _, f := range []struct {
		from *string
		to   *string
	}{{e.NodeName, &out.Node}, {e.Zone, &out.Zone}, {e.Hostname, &out.Hostname}} {
		if f.from != nil {
			*f.to = *f.from
		}
	}
	if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
		out.Pod = e.TargetRef.Name
	}
	return out, true
}

func nodeItem(n *corev1.Node, rec *state.Record) *wire.NodeInfo {
	out := &wire.NodeInfo{PodCIDRs: cidrsOf(rec), Zone: cmp.Or(n.Labels[corev1.LabelTopologyZone], DefaultZone)}
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			out.Addresses = append(out.Addresses, a.Address)
		}
	}
	for i := range n.Status.Conditions {
		// Node lifecycle makes it Unknown while the lease is expired, also where
		// the zone is frozen and the pods stay as they were.
		if c := &n.Status.Conditions[i]; c.Type == corev1.NodeReady {
			out.Silent = c.Status == corev1.ConditionUnknown
		}
	}
	return out
}

// pullServices answers a node's ServicesRequest.
func (s *Server) pullServices(r *wire.ServicesRequest) (wire.Message, error) {
	if s.services.generation() == 0 {
		return nil, &wire.Fault{Code: wire.FaultNotLeader, Message: fmt.Sprintf("the service table is not built yet (%d held)", r.Generation)}
	}
	return s.services.page(r), nil
}
