// Package held makes a node's Services lead to the pods that it holds after a
// restore. It is apart from package services, which the proxy is made of: that
// knows no Kubernetes types, and is small for it.
package held

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/wire"
)

// Pod is a pod that this node holds after a restore of the cluster to an
// older state: no server knows it, so no EndpointSlice names it.
type Pod struct {
	Pod *corev1.Pod
	// Moved are its ports' places on a node without a pod network.
	Moved map[int32]int32
}

// Endpoints are the slices, for this node's own table, by which Services
// lead to held pods. Pure.
func Endpoints(list map[string]*wire.Service, node, zone string, pods []Pod) map[string]*wire.Slice {
	out := map[string]*wire.Slice{}
	for name, svc := range list {
		namespace, short, _ := strings.Cut(name, "/")
		var found []*wire.Slice
		for i := range pods {
			if e, ports, ok := endpoint(svc, namespace, short, &pods[i]); ok {
				e.Node, e.Zone = node, zone
				found = join(found, short, ports, e)
			}
		}
		for i, s := range found {
			slices.SortFunc(s.Endpoints, func(a, b wire.Endpoint) int { return strings.Compare(string(a.Address), string(b.Address)) })
			out[wire.ItemSlice+name+"~held."+strconv.Itoa(i)] = s // no object's name has a tilde
		}
	}
	return out
}

// join adds an endpoint to the slice with its ports.
func join(list []*wire.Slice, service string, ports []wire.SlicePort, e wire.Endpoint) []*wire.Slice {
	for _, s := range list {
		if slices.Equal(s.Ports, ports) {
			s.Endpoints = append(s.Endpoints, e)
			return list
		}
	}
	return append(list, &wire.Slice{Service: service, Ports: ports, Endpoints: []wire.Endpoint{e}})
}

// endpoint is what the cluster's controller would make of the pod.
func endpoint(svc *wire.Service, namespace, name string, h *Pod) (e wire.Endpoint, ports []wire.SlicePort, ok bool) {
	pod := h.Pod
	ip, err := netip.ParseAddr(pod.Status.PodIP)
	over := pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded
	if err != nil || over || pod.Namespace != namespace || !selects(svc.Selector, pod.Labels) {
		return e, nil, false
	}
	if ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsUnspecified() {
		return e, nil, false
	}
	for _, p := range svc.Ports {
		n, found := target(&p, pod)
		if !found {
			continue
		}
		if to := h.Moved[n]; to != 0 {
			n = to
		}
		ports = append(ports, wire.SlicePort{Name: p.Name, Protocol: p.Protocol, Port: uint16(n)})
	}
	if len(ports) == 0 && len(svc.Ports) > 0 {
		return e, nil, false
	}
	slices.SortFunc(ports, func(a, b wire.SlicePort) int { return strings.Compare(a.Name, b.Name) })
	e = wire.Endpoint{Address: ip.Unmap().AsSlice(), Pod: pod.Name}
	serving := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	terminating := pod.DeletionTimestamp != nil
	if svc.NotReady || serving && !terminating {
		e.State |= wire.EndpointReady
	}
	if serving {
		e.State |= wire.EndpointServing
	}
	if terminating {
		e.State |= wire.EndpointTerminating
	}
	if pod.Spec.Subdomain == name {
		e.Hostname = pod.Spec.Hostname
	}
	return e, ports, true
}

func selects(selector, labels map[string]string) bool {
	for k, v := range selector {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return len(selector) > 0
}

// target is the port of the pod that a Service's port leads to.
func target(p *wire.ServicePort, pod *corev1.Pod) (int32, bool) {
	if p.Target == "" {
		return int32(p.Port), true
	}
	if n, err := strconv.ParseUint(p.Target, 10, 16); err == nil {
		return int32(n), true
	}
	containers := slices.Clone(pod.Spec.Containers)
	for _, c := range pod.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			containers = append(containers, c)
		}
	}
	for _, c := range containers {
		for _, cp := range c.Ports {
			protocol := cp.Protocol
			if protocol == "" {
				protocol = corev1.ProtocolTCP
			}
			if cp.Name == p.Target && string(protocol) == p.Protocol {
				return cp.ContainerPort, true
			}
		}
	}
	return 0, false
}

// Lead makes this node's Services lead to the pods that it holds.
func Lead(t *services.Table, node, zone string, pods []Pod) error {
	if len(pods) == 0 {
		t.SetLocal(nil)
		return nil
	}
	list := map[string]*wire.Service{}
	t.Range(wire.ItemService, func(key string, data []byte) {
		svc := &wire.Service{}
		if wire.DecodeItem(data, svc) == nil && len(svc.Selector) > 0 {
			list[key[len(wire.ItemService):]] = svc
		}
	})
	items := map[string][]byte{}
	for key, s := range Endpoints(list, node, zone, pods) {
		data, err := wire.EncodeItem(s)
		if err != nil {
			return err
		}
		items[key] = data
	}
	t.SetLocal(items)
	return nil
}
