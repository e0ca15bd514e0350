package registry

import (
	"fmt"
	"slices"
	"sort"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// header computes the facts that the state machine reads.
func header(k *manifests.Kind, obj runtime.Object, m metav1.Object) state.Header {
	h := state.Header{
		Version:    state.HeaderVersion,
		Key:        state.Key{Kind: k.StorageKind(), Namespace: m.GetNamespace(), Name: m.GetName()},
		APIVersion: k.GVK.GroupVersion().String(),
		UID:        string(m.GetUID()),
		Generation: m.GetGeneration(),
		Finalizers: slices.Clone(m.GetFinalizers()),
	}
	if t := m.GetCreationTimestamp(); !t.IsZero() {
		h.Created = t.Unix()
	}
	if t := m.GetDeletionTimestamp(); t != nil {
		h.Deleted = t.Unix()
	}
	if g := m.GetDeletionGracePeriodSeconds(); g != nil {
		v := *g
		h.DeletionGrace = &v
	}
	if l := m.GetLabels(); len(l) > 0 {
		h.Labels = make(map[string]string, len(l))
		for key, v := range l {
			h.Labels[key] = v
		}
	}
	if len(h.Finalizers) == 0 {
		h.Finalizers = nil
	}
	for _, o := range m.GetOwnerReferences() {
		gv, err := schema.ParseGroupVersion(o.APIVersion)
		if err != nil { // validated before; keep what can be kept
			gv = schema.GroupVersion{}
		}
		h.Owners = append(h.Owners, state.Owner{
			UID: string(o.UID), Name: o.Name,
			Kind:       schema.GroupKind{Group: gv.Group, Kind: o.Kind}.String(),
			Controller: o.Controller != nil && *o.Controller,
			Block:      o.BlockOwnerDeletion != nil && *o.BlockOwnerDeletion,
		})
	}
	switch o := obj.(type) {
	case *corev1.Pod:
		podHeader(&h, o)
	case *corev1.Node:
		list := o.Status.Allocatable
		if list == nil {
			list = o.Status.Capacity
		}
		h.Allocatable = vector(list)
		h.Claims = cidrClaims(o)
	case *corev1.Namespace:
		h.Phase = string(o.Status.Phase)
	case *corev1.PersistentVolume:
		h.Phase = string(o.Status.Phase)
	case *corev1.PersistentVolumeClaim:
		h.Phase = string(o.Status.Phase)
	case *corev1.Service:
		h.Claims = serviceClaims(o)
	}
	return h
}

func podHeader(h *state.Header, p *corev1.Pod) {
	h.NodeName = p.Spec.NodeName
	h.Phase = string(p.Status.Phase)
	h.Gated = len(p.Spec.SchedulingGates) > 0
	req := manifests.PodRequests(p)
	if req == nil {
		req = corev1.ResourceList{}
	}
	h.Requests = vector(req)
	if !slices.ContainsFunc(h.Requests, func(q state.Quantity) bool { return q.Name == string(corev1.ResourcePods) }) {
		h.Requests = append(h.Requests, state.Quantity{Name: string(corev1.ResourcePods), Value: 1})
		sortVector(h.Requests)
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			h.Ready = c.Status == corev1.ConditionTrue
		}
	}
	h.HostPorts = hostPorts(p)
}

// hostPorts are the ports a pod takes on its node, in a stable order. A
// restartable init container holds its ports for the pod's life; ordinary
// init containers release them.
func hostPorts(p *corev1.Pod) []state.HostPort {
	var out []state.HostPort
	add := func(c *corev1.Container) {
		for _, port := range c.Ports {
			if port.HostPort <= 0 {
				continue
			}
			proto := string(port.Protocol)
			if proto == "" {
				proto = string(corev1.ProtocolTCP)
			}
			hp := state.HostPort{IP: port.HostIP, Protocol: proto, Port: port.HostPort}
			if hp.IP == "0.0.0.0" || hp.IP == "::" {
				hp.IP = ""
			}
			if !slices.Contains(out, hp) {
				out = append(out, hp)
			}
		}
	}
	for i := range p.Spec.InitContainers {
		c := &p.Spec.InitContainers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			add(c)
		}
	}
	for i := range p.Spec.Containers {
		add(&p.Spec.Containers[i])
	}
	sort.Slice(out, func(i, j int) bool {
		a, b := out[i], out[j]
		if a.Port != b.Port {
			return a.Port < b.Port
		}
		if a.Protocol != b.Protocol {
			return a.Protocol < b.Protocol
		}
		return a.IP < b.IP
	})
	return out
}

// vector turns a resource list into integers: millicores for cpu, whole
// units rounded up for the rest; sorted by name, zeros left out.
func vector(l corev1.ResourceList) []state.Quantity {
	out := make([]state.Quantity, 0, len(l))
	for name, q := range l {
		v := q.Value()
		if name == corev1.ResourceCPU {
			v = q.MilliValue()
		}
		// A larger request fits no node either, and sums must not overflow.
		v = min(v, state.MaxQuantity)
		if v != 0 {
			out = append(out, state.Quantity{Name: string(name), Value: v})
		}
	}
	if len(out) == 0 {
		return nil
	}
	sortVector(out)
	return out
}

func sortVector(v []state.Quantity) {
	sort.Slice(v, func(i, j int) bool { return v[i].Name < v[j].Name })
}

func cidrClaims(n *corev1.Node) []string {
	cidrs := n.Spec.PodCIDRs
	if len(cidrs) == 0 && n.Spec.PodCIDR != "" {
		cidrs = []string{n.Spec.PodCIDR}
	}
	var out []string
	for _, c := range cidrs {
		out = append(out, "podcidr/"+c)
	}
	sort.Strings(out)
	return slices.Compact(out)
}

// serviceClaims are the addresses and node ports that only this Service may
// hold.
func serviceClaims(s *corev1.Service) []string {
	var out []string
	if s.Spec.Type != corev1.ServiceTypeExternalName {
		for _, ip := range append([]string{s.Spec.ClusterIP}, s.Spec.ClusterIPs...) {
			if ip != "" && !strings.EqualFold(ip, corev1.ClusterIPNone) {
				out = append(out, "clusterip/"+ip)
			}
		}
	}
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 {
			out = append(out, fmt.Sprintf("nodeport/%d", p.NodePort))
		}
	}
	if s.Spec.HealthCheckNodePort != 0 {
		out = append(out, fmt.Sprintf("nodeport/%d", s.Spec.HealthCheckNodePort))
	}
	sort.Strings(out)
	return slices.Compact(out)
}
