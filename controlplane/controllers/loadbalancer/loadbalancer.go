// Package loadbalancer gives Services of type LoadBalancer the addresses of
// nodes, which serve the Service's own ports there.
//
// Chosen are the Ready nodes with the label dunlin.dev/loadbalancer=true, or
// all Ready nodes where none has it. Two Services cannot have the same port:
// the older one keeps it.
//
// It also says where nothing can answer: spec.externalIPs that no node has.
//
// Owned fields: status.loadBalancer of Services without a loadBalancerClass.
package loadbalancer

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// NodeLabel chooses the nodes.
const NodeLabel = "dunlin.dev/loadbalancer"

// gather is how long changes are gathered: nodes come and go in groups.
const gather = 100 * time.Millisecond

var (
	serviceGK = schema.GroupKind{Kind: "Service"}
	nodeKind  = "Node"
	sliceKind = "EndpointSlice." + discoveryv1.GroupName
)

type controller struct {
	env loop.Env

	mu sync.Mutex
	// told is what was said of a Service's external addresses: once a term.
	told map[state.Key]string
}

// New makes the controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env, told: map[state.Key]string{}}
	return &loop.Controller{
		Name: "loadbalancer", Delay: gather,
		Sources: []loop.Source{
			// One Service that goes, or changes, frees a port for another.
			{Kind: serviceGK.String(), Keys: func(ev state.Event, add func(state.Key)) {
				add(ev.Record.Header.Key)
				if ev.Type == state.Deleted || ev.Prev != nil && ev.Prev.Spec != ev.Record.Spec {
					c.all(add)
				}
			}},
			{Kind: nodeKind, Keys: func(_ state.Event, add func(state.Key)) { c.all(add) }},
			{Kind: sliceKind, Keys: func(ev state.Event, add func(state.Key)) {
				h := &ev.Record.Header
				if name := h.Labels[discoveryv1.LabelServiceName]; name != "" {
					add(state.Key{Kind: serviceGK.String(), Namespace: h.Key.Namespace, Name: name})
				}
			}},
		},
		Reconcile: c.reconcile,
	}
}

// all adds every Service that nodes' addresses matter to.
func (c *controller) all(add func(state.Key)) {
	for _, s := range c.services(func(s *corev1.Service) bool { return ours(s) || len(s.Spec.ExternalIPs) > 0 }) {
		add(state.Key{Kind: serviceGK.String(), Namespace: s.Namespace, Name: s.Name})
	}
}

func (c *controller) services(which func(*corev1.Service) bool) (out []*corev1.Service) {
	c.env.Reader.Snapshot().Range(serviceGK.String(), "", state.Key{}, func(r *state.Record) bool {
		if obj, err := c.env.Store.Decode(r); err == nil {
			if s, ok := obj.(*corev1.Service); ok && which(s) {
				out = append(out, s)
			}
		}
		return true
	})
	return out
}

func ours(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer && s.Spec.LoadBalancerClass == nil && s.DeletionTimestamp == nil
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(serviceGK, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		c.mu.Lock()
		delete(c.told, key)
		c.mu.Unlock()
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	svc, ok := obj.(*corev1.Service)
	if ok {
		c.tellExternal(key, svc)
	}
	if !ok || svc.Spec.Type != corev1.ServiceTypeLoadBalancer && len(svc.Status.LoadBalancer.Ingress) == 0 || svc.Spec.LoadBalancerClass != nil {
		return 0, nil
	}
	want := corev1.LoadBalancerStatus{}
	if ours(svc) {
		if holder, port := conflict(svc, c.services(ours)); holder != "" {
			c.env.Events.Event(about(svc), corev1.EventTypeWarning, "PortConflict",
				fmt.Sprintf("port %s is that of the LoadBalancer Service %s on every node, so this one gets no address: give one of the two another port", port, holder))
		} else {
			want.Ingress = addresses(c.nodes(), svc, c.local(svc))
		}
	}
	if apiequality.Semantic.DeepEqual(want, svc.Status.LoadBalancer) {
		return 0, nil
	}
	_, err = c.env.Store.Update(ctx, serviceGK, svc.Namespace, svc.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		if s, ok := cur.(*corev1.Service); ok {
			s.Status.LoadBalancer = want
		}
		return cur, nil
	}, c.env.Write())
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	return 0, err
}

func about(svc *corev1.Service) corev1.ObjectReference {
	return corev1.ObjectReference{Kind: "Service", APIVersion: "v1", Namespace: svc.Namespace, Name: svc.Name, UID: svc.UID}
}

func (c *controller) nodes() (out []*corev1.Node) {
	c.env.Reader.Snapshot().Range(nodeKind, "", state.Key{}, func(r *state.Record) bool {
		if obj, err := c.env.Store.Decode(r); err == nil {
			if n, ok := obj.(*corev1.Node); ok {
				out = append(out, n)
			}
		}
		return true
	})
	return out
}

// local are the nodes with ready endpoints, where only they may be used; nil
// is all.
func (c *controller) local(svc *corev1.Service) map[string]bool {
	if svc.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return nil
	}
	out := map[string]bool{}
	c.env.Reader.Snapshot().Range(sliceKind, svc.Namespace, state.Key{}, func(r *state.Record) bool {
		if r.Header.Labels[discoveryv1.LabelServiceName] != svc.Name {
			return true
		}
		obj, err := c.env.Store.Decode(r)
		if sl, ok := obj.(*discoveryv1.EndpointSlice); err == nil && ok {
			for i := range sl.Endpoints {
				if e := &sl.Endpoints[i]; e.NodeName != nil && e.Conditions.Ready != nil && *e.Conditions.Ready {
					out[*e.NodeName] = true
				}
			}
		}
		return true
	})
	return out
}

// addresses are those of the chosen nodes. Pure.
func addresses(nodes []*corev1.Node, svc *corev1.Service, local map[string]bool) (out []corev1.LoadBalancerIngress) {
	chosen := slices.ContainsFunc(nodes, func(n *corev1.Node) bool { return n.Labels[NodeLabel] == "true" })
	mode := corev1.LoadBalancerIPModeProxy // what comes there passes a proxy
	var ips []string
	for _, n := range nodes {
		if (chosen && n.Labels[NodeLabel] != "true") || (local != nil && !local[n.Name]) || !ready(n) {
			continue
		}
		for _, a := range n.Status.Addresses {
			if a.Type == corev1.NodeInternalIP && wanted(svc, a.Address) && !slices.Contains(ips, a.Address) {
				ips = append(ips, a.Address)
			}
		}
	}
	slices.Sort(ips)
	for _, ip := range ips {
		out = append(out, corev1.LoadBalancerIngress{IP: ip, IPMode: &mode})
	}
	return out
}

func ready(n *corev1.Node) bool {
	for i := range n.Status.Conditions {
		if c := &n.Status.Conditions[i]; c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// wanted says whether the address is of one of the Service's families.
func wanted(svc *corev1.Service, ip string) bool {
	family := corev1.IPv4Protocol
	if strings.Contains(ip, ":") {
		family = corev1.IPv6Protocol
	}
	return slices.Contains(svc.Spec.IPFamilies, family)
}

// conflict names an older Service that has one of the ports. Pure.
func conflict(svc *corev1.Service, all []*corev1.Service) (holder, port string) {
	for _, o := range all {
		if o.UID == svc.UID || !older(o, svc) {
			continue
		}
		for _, p := range svc.Spec.Ports {
			for _, q := range o.Spec.Ports {
				if p.Port == q.Port && p.Protocol == q.Protocol {
					return o.Namespace + "/" + o.Name, fmt.Sprintf("%d/%s", p.Port, p.Protocol)
				}
			}
		}
	}
	return "", ""
}

// older says whether a comes before b: by age, then by name.
func older(a, b *corev1.Service) bool {
	if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return a.CreationTimestamp.Before(&b.CreationTimestamp)
	}
	return a.Namespace+"/"+a.Name < b.Namespace+"/"+b.Name
}
