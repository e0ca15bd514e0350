// Package ingress says where Ingresses are served, and what is wrong with
// them: in their status the addresses of the nodes that serve them, in events
// what keeps a request from its backend.
//
// Owned fields: status.loadBalancer of Ingresses whose class is ours.
package ingress

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/ingress"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

const (
	// gather is how long changes are gathered: nodes and certificates come in
	// groups.
	gather = 100 * time.Millisecond
	// look is how often dates of certificates are looked at.
	look = 6 * time.Hour
)

var (
	serviceGK = schema.GroupKind{Kind: "Service"}
	secretGK  = schema.GroupKind{Kind: "Secret"}
	nodeKind  = "Node"
)

type controller struct {
	env loop.Env

	mu   sync.Mutex
	told map[state.Key]string // problems that an event told of in this term
	// good is, of an Ingress, until when the last readable certificate of each
	// Secret is valid, as seen in this term.
	good map[state.Key]map[string]time.Time
}

// New makes the controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env, told: map[state.Key]string{}, good: map[state.Key]map[string]time.Time{}}
	return &loop.Controller{
		Name: "ingress", Delay: gather,
		Sources: []loop.Source{
			// One that comes or goes takes a path from another, or frees it.
			{Kind: ingress.Kind, Keys: func(ev state.Event, add func(state.Key)) {
				add(ev.Record.Header.Key)
				if ev.Type != state.Modified || ev.Prev == nil || ev.Prev.Header.Generation != ev.Record.Header.Generation {
					c.all(add, nil)
				}
			}},
			{Kind: ingress.ClassKind, Keys: func(_ state.Event, add func(state.Key)) { c.all(add, nil) }},
			{Kind: nodeKind, Keys: func(ev state.Event, add func(state.Key)) {
				if ingress.MayChange(&ev) || slices.Contains(ingress.Chosen(c.env.Reader.Snapshot()), ev.Record.Header.Key.Name) {
					c.all(add, nil)
				}
			}},
			{Kind: serviceGK.Kind, Keys: func(ev state.Event, add func(state.Key)) {
				k := ev.Record.Header.Key
				c.all(add, func(i *networkingv1.Ingress) bool { return i.Namespace == k.Namespace && names(i, k.Name) })
			}},
			{Kind: secretGK.Kind, Keys: func(ev state.Event, add func(state.Key)) {
				k := ev.Record.Header.Key
				c.all(add, func(i *networkingv1.Ingress) bool {
					return i.Namespace == k.Namespace && slices.Contains(ingress.Secrets(i), k.Name)
				})
			}},
		},
		Reconcile: c.reconcile,
	}
}

// names says whether the Ingress leads to a Service.
func names(i *networkingv1.Ingress, service string) bool {
	return slices.ContainsFunc(backends(i), func(b place) bool { return b.backend.Service != nil && b.backend.Service.Name == service })
}

func (c *controller) all(add func(state.Key), only func(*networkingv1.Ingress) bool) {
	for _, i := range c.list() {
		if only == nil || only(i) {
			add(state.Key{Kind: ingress.Kind, Namespace: i.Namespace, Name: i.Name})
		}
	}
}

// list are all Ingresses, whosoever's.
func (c *controller) list() (out []*networkingv1.Ingress) {
	c.env.Reader.Snapshot().Range(ingress.Kind, "", state.Key{}, func(r *state.Record) bool {
		if obj, err := c.env.Store.Decode(r); err == nil {
			if i, ok := obj.(*networkingv1.Ingress); ok {
				out = append(out, i)
			}
		}
		return true
	})
	return out
}

func (c *controller) class(name string) *networkingv1.IngressClass {
	return get[*networkingv1.IngressClass](c, ingress.ClassGK, "", name)
}

// get returns an object, nil if there is none.
func get[T runtime.Object](c *controller, gk schema.GroupKind, namespace, name string) (none T) {
	obj, err := c.env.Store.Get(gk, namespace, name)
	if err != nil {
		return none
	}
	o, _ := obj.(T)
	return o
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(ingress.GK, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		c.mu.Lock()
		delete(c.told, key)
		delete(c.good, key)
		c.mu.Unlock()
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	ing, ok := obj.(*networkingv1.Ingress)
	if !ok || ing.DeletionTimestamp != nil {
		return 0, nil
	}
	name := ingress.ClassOf(ing)
	class := c.class(name)
	if !ingress.Ours(ing, c.class) {
		if class == nil {
			c.tell(key, ing, noClass(name))
		}
		// What another controller wrote is its own; ours goes with the class.
		return 0, nil
	}
	nodes := c.nodes()
	found := faults(ing, c)
	if len(nodes) == 0 {
		found = append(found, fault{"NoNode", "no node serves Ingresses: give one the label dunlin.dev/ingress=true"})
	}
	c.tell(key, ing, found)
	want := networkingv1.IngressLoadBalancerStatus{Ingress: addresses(nodes)}
	if !apiequality.Semantic.DeepEqual(want, ing.Status.LoadBalancer) {
		_, err = c.env.Store.Update(ctx, ingress.GK, key.Namespace, key.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
			if i, ok := cur.(*networkingv1.Ingress); ok {
				i.Status.LoadBalancer = want
			}
			return cur, nil
		}, c.env.Write())
		if err != nil && !apierrors.IsNotFound(err) {
			return 0, err
		}
	}
	if len(ing.Spec.TLS) > 0 {
		return look, nil
	}
	return 0, nil
}

// tell makes an event of each fault, once while it is so.
func (c *controller) tell(key state.Key, ing *networkingv1.Ingress, found []fault) {
	var text strings.Builder
	for _, f := range found {
		text.WriteString(f.reason + f.message + "\n")
	}
	c.mu.Lock()
	known := c.told[key]
	c.told[key] = text.String()
	c.mu.Unlock()
	if known == text.String() {
		return
	}
	about := corev1.ObjectReference{Kind: "Ingress", APIVersion: networkingv1.SchemeGroupVersion.String(), Namespace: ing.Namespace, Name: ing.Name, UID: ing.UID}
	for _, f := range found {
		if !strings.Contains(known, f.reason+f.message+"\n") {
			c.env.Events.Event(about, corev1.EventTypeWarning, f.reason, f.message)
		}
	}
}

// nodes are the chosen ones.
func (c *controller) nodes() (out []*corev1.Node) {
	snap := c.env.Reader.Snapshot()
	for _, name := range ingress.Chosen(snap) {
		if rec, ok := snap.Get(state.Key{Kind: nodeKind, Name: name}); ok {
			if obj, err := c.env.Store.Decode(rec); err == nil {
				if n, ok := obj.(*corev1.Node); ok {
					out = append(out, n)
				}
			}
		}
	}
	return out
}

// addresses are those of the nodes that are Ready. Pure.
func addresses(nodes []*corev1.Node) (out []networkingv1.IngressLoadBalancerIngress) {
	var ips []string
	for _, n := range nodes {
		ready := slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		})
		for _, a := range n.Status.Addresses {
			if ready && a.Type == corev1.NodeInternalIP && !slices.Contains(ips, a.Address) {
				ips = append(ips, a.Address)
			}
		}
	}
	slices.Sort(ips)
	for _, ip := range ips {
		out = append(out, networkingv1.IngressLoadBalancerIngress{IP: ip})
	}
	return out
}
