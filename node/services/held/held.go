// Package held is what a node knows better of its Services than its servers
// do: they lead to the pods that it holds after a restore, and while no server
// can be reached its own pods are as ready as it sees them. It is apart from package services, which the proxy is made of: that
// knows no Kubernetes types, and is small for it.
package held

import (
	"bytes"
	"maps"
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
	e.State = state(pod, svc.NotReady)
	if pod.Spec.Subdomain == name {
		e.Hostname = pod.Spec.Hostname
	}
	return e, ports, true
}

// state is that of a pod's endpoint, of a Service that wants those not ready
// too or not.
func state(pod *corev1.Pod, notReady bool) (s uint8) {
	serving := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	terminating := pod.DeletionTimestamp != nil
	if notReady || serving && !terminating {
		s |= wire.EndpointReady
	}
	if serving {
		s |= wire.EndpointServing
	}
	if terminating {
		s |= wire.EndpointTerminating
	}
	return s
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

// Lead makes this node's Services lead to the pods that it holds, and, while it
// is cut off, to its own as they are now: own has them by namespace/name, nil
// for one that was not looked at yet; it is nil while the node is not cut off.
func Lead(t *services.Table, node, zone string, held []Pod, own map[string]*corev1.Pod) error {
	if len(held) == 0 && own == nil {
		t.SetLocal(nil)
		return nil
	}
	list := map[string]*wire.Service{}
	t.Served(wire.ItemService, func(key string, data []byte) {
		svc := &wire.Service{}
		if wire.DecodeItem(data, svc) == nil {
			list[key[len(wire.ItemService):]] = svc
		}
	})
	found := Endpoints(list, node, zone, held)
	if own != nil {
		maps.Copy(found, ownSlices(t, list, node, own))
	}
	items := map[string][]byte{}
	for key, s := range found {
		data, err := wire.EncodeItem(s)
		if err != nil {
			return err
		}
		items[key] = data
	}
	t.SetLocal(items)
	return nil
}

// ownSlices are those slices of the table that say otherwise of this node's
// pods than the node does.
func ownSlices(t *services.Table, list map[string]*wire.Service, node string, own map[string]*corev1.Pod) map[string]*wire.Slice {
	out := map[string]*wire.Slice{}
	t.Served(wire.ItemSlice, func(key string, data []byte) {
		s := &wire.Slice{}
		if !bytes.Contains(data, []byte(node)) || wire.DecodeItem(data, s) != nil {
			return
		}
		namespace, _, _ := strings.Cut(key[len(wire.ItemSlice):], "/")
		svc := list[namespace+"/"+s.Service]
		if seen(s, namespace, node, svc != nil && svc.NotReady, own) {
			out[key] = s
		}
	})
	return out
}

// seen makes a slice's endpoints on this node what the node sees of their pods;
// one that it has no more serves nobody. It says whether any was another. Pure.
func seen(s *wire.Slice, namespace, node string, notReady bool, pods map[string]*corev1.Pod) (changed bool) {
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if e.Node != node || e.Pod == "" {
			continue
		}
		p, here := pods[namespace+"/"+e.Pod]
		if here && p == nil {
			continue
		}
		now := uint8(0)
		if here && p.Status.Phase != corev1.PodFailed && p.Status.Phase != corev1.PodSucceeded {
			now = state(p, notReady) | e.State&wire.EndpointTerminating
			if now&wire.EndpointTerminating != 0 && !notReady {
				now &^= wire.EndpointReady
			}
		}
		changed = changed || now != e.State
		e.State = now
	}
	return changed
}
