// Package sweep removes what is left of objects that are gone in the leader's
// memory, which the garbage collector does not look at: events about them, and
// the node Leases of nodes.
//
// Owned fields: the existence of such events and Leases.
package sweep

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

const (
	// every is how often it looks, and most how much it removes in one run;
	// what is left then is for the next one, after pause.
	every = 10 * time.Minute
	most  = 500
	pause = time.Second
	// keepEvents is how long an event outlives what it is about: somebody may
	// want to know why it went.
	keepEvents = time.Hour
)

var (
	eventGK = schema.GroupKind{Kind: "Event"}
	nodeGK  = schema.GroupKind{Kind: "Node"}
	leaseGK = schema.GroupKind{Group: coordinationv1.GroupName, Kind: "Lease"}
)

type controller struct{ env loop.Env }

// New makes the controller; its one key is the whole cluster.
func New(env loop.Env) *loop.Controller {
	c := &controller{env}
	all := state.Key{Name: "leftovers"}
	return &loop.Controller{
		Name: "sweep",
		Sources: []loop.Source{{Kind: nodeGK.String(), Keys: func(ev state.Event, add func(state.Key)) {
			if ev.Type == state.Deleted {
				add(all)
			}
		}}},
		Background: func(ctx context.Context, add func(state.Key)) error {
			t := time.NewTicker(every)
			defer t.Stop()
			for {
				select {
				case <-ctx.Done():
					return nil
				case <-t.C:
					add(all)
				}
			}
		},
		Reconcile: c.reconcile,
	}
}

// leftover is one object to remove.
type leftover struct {
	gk              schema.GroupKind
	namespace, name string
	uid             types.UID
}

func (c *controller) reconcile(ctx context.Context, _ state.Key) (time.Duration, error) {
	list, err := c.leases(nil)
	if err != nil {
		return 0, err
	}
	// An age is not told by a clock that nobody trusts.
	if len(list) < most && (c.env.Trust == nil || c.env.Trust() == nil) {
		list = c.events(list)
	}
	err = loop.Parallel(ctx, len(list), func(ctx context.Context, i int) error {
		x := list[i]
		_, _, err := c.env.Store.Delete(ctx, x.gk, x.namespace, x.name, registry.DeleteOptions{UID: &x.uid, Term: c.env.Term})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("sweep %s %s/%s: %w", x.gk.Kind, x.namespace, x.name, err)
		}
		return nil
	})
	if err == nil && len(list) == most {
		return pause, nil
	}
	return 0, err
}

// leases adds the node Leases whose node is gone.
func (c *controller) leases(list []leftover) ([]leftover, error) {
	all, err := c.env.Store.List(leaseGK, manifests.NodeLeaseNamespace, labels.Everything(), nil)
	if err != nil {
		return nil, fmt.Errorf("list node leases: %w", err)
	}
	snap := c.env.Reader.Snapshot()
	for _, o := range all {
		l, ok := o.(*coordinationv1.Lease)
		if !ok {
			continue
		}
		if _, lives := snap.Get(state.Key{Kind: nodeGK.String(), Name: l.Name}); !lives && len(list) < most {
			list = append(list, leftover{leaseGK, l.Namespace, l.Name, l.UID})
		}
	}
	return list, nil
}

// events adds the old events about objects that are gone, up to the bound.
func (c *controller) events(list []leftover) []leftover {
	snap, before := c.env.Reader.Snapshot(), c.env.Clock.Now().Add(-keepEvents)
	c.env.Store.Reader(eventGK).Snapshot().Range(eventGK.String(), "", state.Key{}, func(r *state.Record) bool {
		if time.Unix(r.Header.Created, 0).After(before) {
			return true
		}
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			return true // it ages out
		}
		if ev, ok := obj.(*corev1.Event); ok && lastSeen(ev).Before(before) && gone(snap, &ev.InvolvedObject) {
			list = append(list, leftover{eventGK, ev.Namespace, ev.Name, ev.UID})
		}
		return len(list) < most
	})
	return list
}

func lastSeen(ev *corev1.Event) time.Time {
	t := ev.CreationTimestamp.Time
	for _, at := range []time.Time{ev.LastTimestamp.Time, ev.EventTime.Time, series(ev.Series)} {
		if at.After(t) {
			t = at
		}
	}
	return t
}

func series(s *corev1.EventSeries) time.Time {
	if s == nil {
		return time.Time{}
	}
	return s.LastObservedTime.Time
}

// gone says that nothing is left of what a reference means. A kind that is
// not served, or whose objects are not durable, cannot be told. Pure.
func gone(snap state.Snapshot, ref *corev1.ObjectReference) bool {
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return false
	}
	k := manifests.ByGroupKind(schema.GroupKind{Group: gv.Group, Kind: ref.Kind})
	if k == nil || manifests.IsSoft(k, ref.Namespace) || ref.Name == "" {
		return false
	}
	if ref.UID != "" && string(ref.UID) != ref.Name { // a kubelet names its node so
		if _, lives := snap.ByUID(string(ref.UID)); lives {
			return false
		}
	}
	ns := ref.Namespace
	if !k.Namespaced {
		ns = metav1.NamespaceNone
	}
	_, lives := snap.Get(state.Key{Kind: k.StorageKind(), Namespace: ns, Name: ref.Name})
	return !lives
}
