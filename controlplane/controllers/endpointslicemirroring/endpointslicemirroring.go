// Package endpointslicemirroring mirrors hand-made Endpoints, those of
// Services without a selector, to EndpointSlices (KEP-752), so that whatever
// follows Services reads slices only.
//
// Owned fields: EndpointSlices labelled
// endpointslice.kubernetes.io/managed-by=endpointslicemirroring-controller.k8s.io.
package endpointslicemirroring

import (
	"context"
	"fmt"
	"slices"
	"strings"
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

// managedBy is upstream's name of this controller.
const managedBy = "endpointslicemirroring-controller.k8s.io"

// leaderElection marks Endpoints that are somebody's lock
// (client-go's resourcelock).
const leaderElection = "control-plane.alpha.kubernetes.io/leader"

// gather is how long changes are gathered before slices are written.
const gather = 30 * time.Millisecond

var (
	serviceGK   = schema.GroupKind{Kind: "Service"}
	endpointsGK = schema.GroupKind{Kind: "Endpoints"}
	sliceGK     = schema.GroupKind{Group: discoveryv1.GroupName, Kind: "EndpointSlice"}
)

type controller struct{ env loop.Env }

// New makes the controller. Its keys are Endpoints.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env}
	return &loop.Controller{
		Name: "endpointslicemirroring", Workers: 2, Delay: gather,
		Sources: []loop.Source{
			loop.Self(endpointsGK.String()),
			{Kind: serviceGK.String(), Keys: c.serviceChanged},
			{Kind: sliceGK.String(), Keys: sliceChanged},
		},
		Reconcile: c.reconcile,
	}
}

func endpointsKey(ns, name string) state.Key {
	return state.Key{Kind: endpointsGK.String(), Namespace: ns, Name: name}
}

// serviceChanged leaves alone what has a selector and had one: most.
func (c *controller) serviceChanged(ev state.Event, add func(state.Key)) {
	for _, r := range []*state.Record{ev.Record, ev.Prev} {
		if r == nil {
			continue
		}
		obj, err := c.env.Store.Decode(r)
		if svc, ok := obj.(*corev1.Service); err != nil || (ok && len(svc.Spec.Selector) == 0) {
			add(endpointsKey(r.Header.Key.Namespace, r.Header.Key.Name))
			return
		}
	}
}

// sliceChanged wakes for slices of ours, also for those that were and now
// bear another label.
func sliceChanged(ev state.Event, add func(state.Key)) {
	for _, r := range []*state.Record{ev.Record, ev.Prev} {
		if r != nil && r.Header.Labels[discoveryv1.LabelManagedBy] == managedBy {
			if name := r.Header.Labels[discoveryv1.LabelServiceName]; name != "" {
				add(endpointsKey(r.Header.Key.Namespace, name))
			}
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	have, err := c.slices(key)
	if err != nil {
		return 0, err
	}
	e, err := c.mirrored(key)
	if err != nil {
		return 0, err
	}
	if e == nil {
		return 0, c.remove(ctx, have)
	}
	if e.DeletionTimestamp != nil {
		return 0, nil // its end is an event of its own
	}
	want, skipped := desired(e)
	if skipped > 0 {
		c.env.Events.Event(corev1.ObjectReference{APIVersion: "v1", Kind: "Endpoints", Namespace: e.Namespace, Name: e.Name, UID: e.UID},
			corev1.EventTypeWarning, "TooManyAddressesToMirror",
			fmt.Sprintf("A max of %d addresses can be mirrored to EndpointSlices per Endpoints subset. %d addresses were skipped", maxPerSubset, skipped))
	}
	err = c.write(ctx, have, want)
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return 0, nil
	}
	return 0, err
}

// mirrored returns the Endpoints if they are to be mirrored, nil if not.
func (c *controller) mirrored(key state.Key) (*corev1.Endpoints, error) {
	obj, err := c.env.Store.Get(endpointsGK, key.Namespace, key.Name)
	if err != nil {
		return nil, ignoreNotFound(err)
	}
	e, ok := obj.(*corev1.Endpoints)
	if !ok {
		return nil, loop.Terminal(fmt.Errorf("endpoints %s is a %T", key.Name, obj))
	}
	if _, lock := e.Annotations[leaderElection]; lock || e.Labels[discoveryv1.LabelSkipMirror] == "true" {
		return nil, nil //nolint:nilnil // nothing to mirror is no error
	}
	obj, err = c.env.Store.Get(serviceGK, key.Namespace, key.Name)
	if err != nil {
		return nil, ignoreNotFound(err)
	}
	if svc, ok := obj.(*corev1.Service); !ok || len(svc.Spec.Selector) > 0 {
		return nil, nil //nolint:nilnil // the endpoints controller's
	}
	return e, nil
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// slices are those that mirror the Endpoints, in the order of their names.
func (c *controller) slices(key state.Key) ([]*discoveryv1.EndpointSlice, error) {
	var out []*discoveryv1.EndpointSlice
	var failed error
	c.env.Reader.Snapshot().Range(sliceGK.String(), key.Namespace, state.Key{}, func(r *state.Record) bool {
		l := r.Header.Labels
		if l[discoveryv1.LabelManagedBy] != managedBy || l[discoveryv1.LabelServiceName] != key.Name || r.Header.Deleted != 0 {
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
	slices.SortFunc(out, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	return out, failed
}

// write makes have into want: one slice for each address family and set of
// ports. It adds before it removes.
func (c *controller) write(ctx context.Context, have, want []*discoveryv1.EndpointSlice) error {
	snap := c.env.Reader.Snapshot()
	taken := func(ns, name string) bool {
		_, ok := snap.Get(state.Key{Kind: sliceGK.String(), Namespace: ns, Name: name})
		return ok
	}
	left := slices.Clone(have)
	for _, s := range want {
		i := slices.IndexFunc(left, func(h *discoveryv1.EndpointSlice) bool { return sameSet(h, s) })
		if i < 0 {
			s.Name = freeName(s, taken)
			if _, err := c.env.Store.Create(ctx, s, c.env.Write()); err != nil {
				return fmt.Errorf("create slice: %w", err)
			}
			continue
		}
		cur := left[i]
		left = slices.Delete(left, i, i+1)
		next := cur.DeepCopy()
		next.Labels, next.Annotations, next.OwnerReferences = s.Labels, s.Annotations, s.OwnerReferences
		next.Ports, next.Endpoints = s.Ports, s.Endpoints
		if apiequality.Semantic.DeepEqual(next, cur) {
			continue
		}
		// The resourceVersion in next makes it conditional on what was compared.
		_, err := c.env.Store.Update(ctx, sliceGK, next.Namespace, next.Name, registry.Main, func(runtime.Object) (runtime.Object, error) {
			return next.DeepCopy(), nil
		}, c.env.Write())
		if err != nil {
			return fmt.Errorf("update slice %s: %w", next.Name, err)
		}
	}
	return c.remove(ctx, left)
}

func (c *controller) remove(ctx context.Context, list []*discoveryv1.EndpointSlice) error {
	for _, s := range list {
		uid := s.UID
		_, _, err := c.env.Store.Delete(ctx, sliceGK, s.Namespace, s.Name, registry.DeleteOptions{UID: &uid, Term: c.env.Term})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("remove slice %s: %w", s.Name, err)
		}
	}
	return nil
}
