// Package endpoints keeps the EndpointSlices (and, for old clients, the
// Endpoints) of Services with a selector.
//
// Owned fields: EndpointSlices labelled
// endpointslice.kubernetes.io/managed-by=endpointslice-controller.k8s.io, and
// Endpoints labelled endpoints.kubernetes.io/managed-by=endpoint-controller.
package endpoints

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// gather is how long changes are gathered, so that a rollout writes slices
// a few times and not once a pod.
const gather = 30 * time.Millisecond

const (
	mirrorLabel  = "endpoints.kubernetes.io/managed-by"
	mirrorValue  = "endpoint-controller"
	overCapacity = "endpoints.kubernetes.io/over-capacity"
)

var (
	serviceGK   = schema.GroupKind{Kind: "Service"}
	podGK       = schema.GroupKind{Kind: "Pod"}
	endpointsGK = schema.GroupKind{Kind: "Endpoints"}
	sliceGK     = schema.GroupKind{Group: discoveryv1.GroupName, Kind: "EndpointSlice"}
)

type controller struct {
	env loop.Env
	// selectors of the Services, by namespace and name; owned by the Feed.
	selectors map[string]map[string]labels.Selector

	mu         sync.Mutex
	complained map[string]struct{} // Service's uid and node
}

// maxComplained bounds what is remembered; beyond it is said again.
const maxComplained = 1000

// New makes the controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env, selectors: map[string]map[string]labels.Selector{}, complained: map[string]struct{}{}}
	return &loop.Controller{
		Name: "endpoints", Workers: 4, Delay: gather,
		Sources: []loop.Source{
			{Kind: serviceGK.String(), Reset: func() { clear(c.selectors) }, Keys: c.serviceChanged},
			{Kind: podGK.String(), Keys: c.podChanged},
			{Kind: sliceGK.String(), Keys: c.outputChanged},
			{Kind: endpointsGK.String(), Keys: c.mirrorChanged},
		},
		Reconcile: c.reconcile,
	}
}

func serviceKey(ns, name string) state.Key {
	return state.Key{Kind: serviceGK.String(), Namespace: ns, Name: name}
}

func (c *controller) serviceChanged(ev state.Event, add func(state.Key)) {
	key := ev.Record.Header.Key
	add(key)
	delete(c.selectors[key.Namespace], key.Name)
	if ev.Type == state.Deleted {
		return
	}
	obj, err := c.env.Store.Decode(ev.Record)
	if err != nil {
		return // reconcile reports it
	}
	if svc, ok := obj.(*corev1.Service); ok && selects(svc) {
		if c.selectors[key.Namespace] == nil {
			c.selectors[key.Namespace] = map[string]labels.Selector{}
		}
		c.selectors[key.Namespace][key.Name] = labels.SelectorFromSet(svc.Spec.Selector)
	}
}

func selects(svc *corev1.Service) bool {
	return len(svc.Spec.Selector) > 0 && svc.Spec.Type != corev1.ServiceTypeExternalName
}

// podChanged wakes the Services that select the pod, before or after.
func (c *controller) podChanged(ev state.Event, add func(state.Key)) {
	if ev.Type == state.Modified && ev.Prev != nil && alike(ev.Prev, ev.Record) {
		return
	}
	ns := ev.Record.Header.Key.Namespace
	for name, sel := range c.selectors[ns] {
		if sel.Matches(labels.Set(ev.Record.Header.Labels)) || (ev.Prev != nil && sel.Matches(labels.Set(ev.Prev.Header.Labels))) {
			add(serviceKey(ns, name))
		}
	}
}

// alike says that nothing changed that an endpoint shows.
func alike(a, b *state.Record) bool {
	return a.Status == b.Status && a.Meta == b.Meta && a.Header.NodeName == b.Header.NodeName &&
		a.Header.Deleted == b.Header.Deleted && maps.Equal(a.Header.Labels, b.Header.Labels)
}

func (c *controller) outputChanged(ev state.Event, add func(state.Key)) {
	h := &ev.Record.Header
	if name := h.Labels[discoveryv1.LabelServiceName]; ev.Type != state.Added && name != "" && h.Labels[discoveryv1.LabelManagedBy] == managedBy {
		add(serviceKey(h.Key.Namespace, name))
	}
}

// mirrorChanged also finds, when everything is listed anew, those whose Service
// went while nobody led.
func (c *controller) mirrorChanged(ev state.Event, add func(state.Key)) {
	h := &ev.Record.Header
	if h.Labels[mirrorLabel] != mirrorValue {
		return
	}
	key := serviceKey(h.Key.Namespace, h.Key.Name)
	if ev.Type == state.Added {
		if _, ok := c.env.Reader.Snapshot().Get(key); ok {
			return
		}
	}
	add(key)
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(serviceGK, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		return 0, c.removeMirror(ctx, key) // the slices are garbage-collected
	}
	if err != nil {
		return 0, err
	}
	svc, ok := obj.(*corev1.Service)
	if !ok || !selects(svc) || svc.DeletionTimestamp != nil {
		return 0, nil // someone else's endpoints
	}
	want, err := c.candidates(svc)
	if err != nil {
		return 0, err
	}
	have, err := c.slices(svc)
	if err != nil {
		return 0, err
	}
	snap := c.env.Reader.Snapshot()
	inUse := func(name string) bool {
		_, ok := snap.Get(state.Key{Kind: sliceGK.String(), Namespace: svc.Namespace, Name: name})
		return ok
	}
	err = errors.Join(c.write(ctx, plan(svc, have, want, inUse)), c.mirror(ctx, svc, want[families(svc)[0]]))
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return 0, nil
	}
	return 0, err
}

// candidates are the endpoints that should be, in the order of pod names.
func (c *controller) candidates(svc *corev1.Service) (map[discoveryv1.AddressType][]candidate, error) {
	snap := c.env.Reader.Snapshot()
	sel := labels.SelectorFromSet(svc.Spec.Selector)
	out := map[discoveryv1.AddressType][]candidate{}
	var failed error
	snap.Range(podGK.String(), svc.Namespace, state.Key{}, func(r *state.Record) bool {
		if !sel.Matches(labels.Set(r.Header.Labels)) || r.Header.NodeName == "" {
			return true
		}
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			failed = fmt.Errorf("decode pod %s: %w", r.Header.Key.Name, err)
			return false
		}
		pod, ok := obj.(*corev1.Pod)
		if !ok {
			return true
		}
		if ip := onlyLocal(pod); ip != "" {
			c.complain(svc, pod, ip)
		}
		zone := ""
		if node, ok := snap.Get(state.Key{Kind: "Node", Name: r.Header.NodeName}); ok {
			zone = node.Header.Labels[corev1.LabelTopologyZone]
		}
		for _, f := range families(svc) {
			if e, ok := podEndpoint(svc, pod, f, zone); ok {
				out[f] = append(out[f], e)
			}
		}
		return true
	})
	return out, failed
}

// complain says of a Service, once a node, that pods are left out of it.
func (c *controller) complain(svc *corev1.Service, pod *corev1.Pod, ip string) {
	key := string(svc.UID) + "/" + pod.Spec.NodeName
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, said := c.complained[key]; said {
		return
	}
	if len(c.complained) >= maxComplained {
		clear(c.complained)
	}
	c.complained[key] = struct{}{}
	c.env.Events.Event(corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: svc.Namespace, Name: svc.Name, UID: svc.UID},
		events.Warning, "LocalAddress", fmt.Sprintf("pod %s is left out: its address %s means another machine everywhere else. Start the agent of node %s with --node-address, or as root",
			pod.Name, ip, pod.Spec.NodeName))
}

func (c *controller) slices(svc *corev1.Service) ([]*discoveryv1.EndpointSlice, error) {
	var out []*discoveryv1.EndpointSlice
	var failed error
	c.env.Reader.Snapshot().ByOwner(string(svc.UID), func(r *state.Record) bool {
		if r.Header.Key.Kind != sliceGK.String() || r.Header.Deleted != 0 || r.Header.Labels[discoveryv1.LabelManagedBy] != managedBy {
			return true
		}
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			failed = fmt.Errorf("decode slice %s: %w", r.Header.Key.Name, err)
			return false
		}
		if s, ok := obj.(*discoveryv1.EndpointSlice); ok {
			out = append(out, s)
		}
		return true
	})
	slices.SortFunc(out, func(a, b *discoveryv1.EndpointSlice) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return out, failed
}

// write adds before it removes, so that a pod that moves between slices is
// never missing.
func (c *controller) write(ctx context.Context, ch changes) error {
	for _, s := range ch.create {
		if _, err := c.env.Store.Create(ctx, s, c.env.Write()); err != nil {
			return fmt.Errorf("create slice: %w", err)
		}
	}
	for _, s := range ch.update {
		// The resourceVersion in s makes it conditional on what was compared.
		_, err := c.env.Store.Update(ctx, sliceGK, s.Namespace, s.Name, registry.Main, func(runtime.Object) (runtime.Object, error) {
			return s.DeepCopy(), nil
		}, c.env.Write())
		if err != nil {
			return fmt.Errorf("update slice %s: %w", s.Name, err)
		}
	}
	for _, s := range ch.remove {
		uid := s.UID
		_, _, err := c.env.Store.Delete(ctx, sliceGK, s.Namespace, s.Name, registry.DeleteOptions{UID: &uid, Term: c.env.Term})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("remove slice %s: %w", s.Name, err)
		}
	}
	return nil
}

// mirror writes the core/v1 Endpoints of the primary family.
func (c *controller) mirror(ctx context.Context, svc *corev1.Service, list []candidate) error {
	want := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: svc.Namespace, Name: svc.Name}}
	shape := func(e *corev1.Endpoints) {
		var cut bool
		e.Subsets, cut = subsets(list)
		e.Labels = maps.Clone(svc.Labels)
		if e.Labels == nil {
			e.Labels = map[string]string{}
		}
		e.Labels[mirrorLabel] = mirrorValue
		delete(e.Labels, corev1.IsHeadlessService)
		if svc.Spec.ClusterIP == corev1.ClusterIPNone {
			e.Labels[corev1.IsHeadlessService] = ""
		}
		if cut {
			if e.Annotations == nil {
				e.Annotations = map[string]string{}
			}
			e.Annotations[overCapacity] = "truncated"
		} else {
			delete(e.Annotations, overCapacity)
		}
	}
	obj, err := c.env.Store.Get(endpointsGK, svc.Namespace, svc.Name)
	if apierrors.IsNotFound(err) {
		shape(want)
		if _, err := c.env.Store.Create(ctx, want, c.env.Write()); err != nil {
			return fmt.Errorf("create endpoints: %w", err)
		}
		return nil
	}
	if err != nil {
		return err
	}
	cur, ok := obj.(*corev1.Endpoints)
	if !ok {
		return fmt.Errorf("endpoints %s is a %T", svc.Name, obj)
	}
	probe := cur.DeepCopy()
	if shape(probe); apiequality.Semantic.DeepEqual(probe, cur) {
		return nil
	}
	_, err = c.env.Store.Update(ctx, endpointsGK, svc.Namespace, svc.Name, registry.Main, func(obj runtime.Object) (runtime.Object, error) {
		if e, ok := obj.(*corev1.Endpoints); ok {
			shape(e)
		}
		return obj, nil
	}, c.env.Write())
	if err != nil {
		return fmt.Errorf("update endpoints: %w", err)
	}
	return nil
}

// removeMirror deletes the Endpoints of a Service that is gone.
func (c *controller) removeMirror(ctx context.Context, key state.Key) error {
	r, ok := c.env.Reader.Snapshot().Get(state.Key{Kind: endpointsGK.String(), Namespace: key.Namespace, Name: key.Name})
	if !ok || r.Header.Labels[mirrorLabel] != mirrorValue {
		return nil
	}
	uid := types.UID(r.Header.UID)
	_, _, err := c.env.Store.Delete(ctx, endpointsGK, key.Namespace, key.Name, registry.DeleteOptions{UID: &uid, Term: c.env.Term})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
