// Package replicaset keeps the number of pods that a ReplicaSet or a
// ReplicationController asks for.
//
// Owned fields: the existence of the set's pods, their controller reference,
// and the set's status. Pods that are lost (package lost), terminal or being
// deleted are not counted.
package replicaset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/claim"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/controllers/readiness"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// burst bounds the creates and deletes of one reconcile.
const burst = 500

var podGK = schema.GroupKind{Kind: "Pod"}

// New makes the ReplicaSet controller.
func New(env loop.Env) *loop.Controller { return newController(env, replicaSet) }

// NewReplicationController makes the ReplicationController controller: the
// same logic under another kind.
func NewReplicationController(env loop.Env) *loop.Controller {
	return newController(env, replicationController)
}

type controller struct {
	env     loop.Env
	flavor  flavor
	seen    *readiness.Tracker
	orphans *claim.Orphans
}

func newController(env loop.Env, f flavor) *loop.Controller {
	c := &controller{env: env, flavor: f, seen: readiness.New(), orphans: claim.NewOrphans()}
	kind := f.gk.String()
	return &loop.Controller{
		Name:    f.name,
		Workers: 4,
		Sources: []loop.Source{
			loop.Self(kind),
			loop.Controlled(podGK.String(), kind),
			c.orphans.Source(env, kind, c.selector),
		},
		Reconcile: c.reconcile,
	}
}

func (c *controller) selector(r *state.Record) labels.Selector {
	obj, err := c.env.Store.Decode(r)
	if err != nil {
		return nil
	}
	s, err := c.flavor.read(obj)
	if err != nil {
		return nil
	}
	return s.selector
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(c.flavor.gk, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		c.seen.Forget(key)
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	s, err := c.flavor.read(obj)
	if err != nil {
		return 0, loop.Terminal(err)
	}
	pods, err := c.claim(ctx, s)
	if err != nil {
		return 0, err
	}
	counted, err := c.counted(pods)
	if err != nil {
		return 0, err
	}
	var failReason string
	var failure error
	if s.meta.GetDeletionTimestamp() == nil {
		failReason, failure = c.scale(ctx, s, counted)
		// What was just made or removed shows in the status at once.
		if pods, err = c.claim(ctx, s); err == nil {
			counted, err = c.counted(pods)
		}
		if err != nil {
			return 0, errors.Join(failure, err)
		}
	}
	wait, err := c.writeStatus(ctx, key, s, counted, failReason, failure)
	return wait, errors.Join(failure, err)
}

// claim returns the active pods of the set, after adopting and releasing.
func (c *controller) claim(ctx context.Context, s set) ([]*state.Record, error) {
	all, err := c.orphans.Pods(ctx, c.env, claim.Owner{Object: s.meta, GVK: c.flavor.gv.WithKind(c.flavor.gk.Kind), Selector: s.selector})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(r *state.Record) bool { return !claim.Active(r) }), nil
}

// errMoved says that the pod is no longer what the decision was about.
var errMoved = loop.ErrMoved

func (c *controller) ref(s set) metav1.OwnerReference {
	return *metav1.NewControllerRef(s.meta, c.flavor.gv.WithKind(c.flavor.gk.Kind))
}

// one is a counted pod; pod is nil where the header says enough.
type one struct {
	rec *state.Record
	pod *corev1.Pod
}

// counted leaves out the lost pods. Only those that could be are decoded: a
// ready pod or one without a node is not lost.
func (c *controller) counted(recs []*state.Record) ([]one, error) {
	out := make([]one, 0, len(recs))
	for _, r := range recs {
		o := one{rec: r}
		if !r.Header.Ready && r.Header.NodeName != "" {
			pod, err := c.decode(r)
			if err != nil {
				return nil, err
			}
			if lost.Is(pod) {
				continue
			}
			o.pod = pod
		}
		out = append(out, o)
	}
	return out, nil
}

func (c *controller) decode(r *state.Record) (*corev1.Pod, error) {
	obj, err := c.env.Store.Decode(r)
	if err != nil {
		return nil, fmt.Errorf("decode pod %s: %w", r.Header.Key.Name, err)
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("pod %s is a %T", r.Header.Key.Name, obj)
	}
	return pod, nil
}

func (c *controller) writeStatus(ctx context.Context, key state.Key, s set, counted []one, failReason string, failure error) (time.Duration, error) {
	now := c.env.Clock.Now()
	members := make([]member, len(counted))
	for i, o := range counted {
		members[i] = member{labels: o.rec.Header.Labels, ready: o.rec.Header.Ready}
		if s.minReady > 0 {
			pod := o.pod
			if pod == nil && o.rec.Header.Ready {
				var err error
				if pod, err = c.decode(o.rec); err != nil {
					return 0, err
				}
			}
			members[i].readyFor = c.seen.For(key, types.UID(o.rec.Header.UID), o.rec.Header.Ready, pod, now)
		}
	}
	if s.minReady > 0 {
		c.seen.Keep(key, len(counted), func(yield func(types.UID) bool) {
			for _, o := range counted {
				if !yield(types.UID(o.rec.Header.UID)) {
					return
				}
			}
		})
	}
	st, wait := computeStatus(s, members, failReason, failure, now)
	if sameStatus(st, s.status) {
		return wait, nil
	}
	_, err := c.env.Store.Update(ctx, c.flavor.gk, key.Namespace, key.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		if fresh, err := c.flavor.read(cur); err != nil || fresh.meta.GetUID() != s.meta.GetUID() {
			return nil, errMoved
		}
		c.flavor.setStatus(cur, st)
		return cur, nil
	}, c.env.Write())
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("status: %w", err)
	}
	return wait, nil
}

func (c *controller) note(s set, eventType, reason, format string, args ...any) {
	c.env.Events.Event(events.Ref(c.flavor.gk, s.object), eventType, reason, fmt.Sprintf(format, args...))
}
