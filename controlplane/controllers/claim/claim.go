// Package claim finds the pods of an owner: those that it controls and that
// match its selector, after releasing those that match no longer and adopting
// those that match and have no controller.
package claim

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// PodGK is the kind that is claimed.
var PodGK = schema.GroupKind{Kind: "Pod"}

// Owner is who claims.
type Owner struct {
	Object   metav1.Object
	GVK      schema.GroupVersionKind
	Selector labels.Selector
	// Adopts says more about which orphans it takes; nil takes all that match.
	Adopts func(*state.Record) bool
}

// Orphans is the index of pods without a controller. Safe for concurrent use.
type Orphans struct {
	mu    sync.Mutex
	names map[string]map[string]struct{} // namespace -> names
}

// NewOrphans returns an empty index.
func NewOrphans() *Orphans { return &Orphans{names: map[string]map[string]struct{}{}} }

// Source keeps the index and wakes the owners of a kind whose selector
// matches a pod without a controller. selector decodes an owner's record; it
// returns nil for one that adopts nothing.
func (x *Orphans) Source(env loop.Env, ownerKind string, selector func(*state.Record) labels.Selector) loop.Source {
	return loop.Source{Kind: PodGK.String(), Reset: x.reset, Keys: func(ev state.Event, add func(state.Key)) {
		if !x.note(ev) {
			return
		}
		set := labels.Set(ev.Record.Header.Labels)
		env.Reader.Snapshot().Range(ownerKind, ev.Record.Header.Key.Namespace, state.Key{}, func(r *state.Record) bool {
			if s := selector(r); s != nil && !s.Empty() && s.Matches(set) {
				add(r.Header.Key)
			}
			return true
		})
	}}
}

func (x *Orphans) reset() {
	x.mu.Lock()
	defer x.mu.Unlock()
	clear(x.names)
}

// note says whether the pod is an orphan now.
func (x *Orphans) note(ev state.Event) bool {
	key := ev.Record.Header.Key
	_, owned := loop.ControllerOf(ev.Record)
	x.mu.Lock()
	defer x.mu.Unlock()
	names := x.names[key.Namespace]
	if owned || ev.Type == state.Deleted {
		delete(names, key.Name)
		if len(names) == 0 {
			delete(x.names, key.Namespace)
		}
		return false
	}
	if names == nil {
		names = map[string]struct{}{}
		x.names[key.Namespace] = names
	}
	names[key.Name] = struct{}{}
	return true
}

func (x *Orphans) in(namespace string) []string {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := make([]string, 0, len(x.names[namespace]))
	for n := range x.names[namespace] {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

// Active says whether the pod is neither over nor being deleted.
func Active(r *state.Record) bool { return r.Header.Deleted == 0 && !Over(r) }

// Over says whether the pod has ended for good.
func Over(r *state.Record) bool {
	return r.Header.Phase == string(corev1.PodSucceeded) || r.Header.Phase == string(corev1.PodFailed)
}

// Pods returns the owner's pods, in the order of their names, those that are
// over or being deleted among them: what it controls and matches, after
// adopting and releasing. An owner that is being deleted changes nothing.
func (x *Orphans) Pods(ctx context.Context, env loop.Env, o Owner) ([]*state.Record, error) {
	snap := env.Reader.Snapshot()
	uid := string(o.Object.GetUID())
	dying := o.Object.GetDeletionTimestamp() != nil
	var mine, release []*state.Record
	snap.ByOwner(uid, func(r *state.Record) bool {
		c, ok := loop.ControllerOf(r)
		if !ok || c.UID != uid || r.Header.Key.Kind != PodGK.String() {
			return true
		}
		if o.Selector.Matches(labels.Set(r.Header.Labels)) || !Active(r) || dying {
			mine = append(mine, r)
		} else {
			release = append(release, r)
		}
		return true
	})
	if !dying {
		for _, r := range release {
			if _, err := setController(ctx, env, o, r, false); err != nil {
				return nil, fmt.Errorf("release pod %s: %w", r.Header.Key.Name, err)
			}
		}
		adopted, err := x.adopt(ctx, env, snap, o)
		if err != nil {
			return nil, err
		}
		mine = append(mine, adopted...)
	}
	slices.SortFunc(mine, func(a, b *state.Record) int { return cmp.Compare(a.Header.Key.Name, b.Header.Key.Name) })
	return mine, nil
}

func (x *Orphans) adopt(ctx context.Context, env loop.Env, snap state.Snapshot, o Owner) (out []*state.Record, err error) {
	ns := o.Object.GetNamespace()
	for _, name := range x.in(ns) {
		r, ok := snap.Get(state.Key{Kind: PodGK.String(), Namespace: ns, Name: name})
		if !ok || !Active(r) || !o.Selector.Matches(labels.Set(r.Header.Labels)) || (o.Adopts != nil && !o.Adopts(r)) {
			continue
		}
		if _, owned := loop.ControllerOf(r); owned {
			continue
		}
		taken, err := setController(ctx, env, o, r, true)
		if err != nil {
			return nil, fmt.Errorf("adopt pod %s: %w", name, err)
		}
		if taken {
			out = append(out, r)
		}
	}
	return out, nil
}

func setController(ctx context.Context, env loop.Env, o Owner, r *state.Record, adopt bool) (done bool, err error) {
	uid := o.Object.GetUID()
	_, err = env.Store.Update(ctx, PodGK, r.Header.Key.Namespace, r.Header.Key.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		pod, ok := cur.(*corev1.Pod)
		if !ok || string(pod.UID) != r.Header.UID || pod.DeletionTimestamp != nil {
			return nil, loop.ErrMoved
		}
		if adopt && (metav1.GetControllerOf(pod) != nil || !o.Selector.Matches(labels.Set(pod.Labels))) {
			return nil, loop.ErrMoved
		}
		refs := pod.OwnerReferences[:0:0]
		for _, ref := range pod.OwnerReferences {
			if ref.UID != uid {
				refs = append(refs, ref)
			}
		}
		if adopt {
			refs = append(refs, *metav1.NewControllerRef(o.Object, o.GVK))
		}
		pod.OwnerReferences = refs
		return pod, nil
	}, env.Write())
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// Decode returns the pod of a record; shared, read only.
func Decode(env loop.Env, r *state.Record) (*corev1.Pod, error) {
	obj, err := env.Store.Decode(r)
	if err != nil {
		return nil, fmt.Errorf("decode pod %s: %w", r.Header.Key.Name, err)
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("pod %s is a %T", r.Header.Key.Name, obj)
	}
	return pod, nil
}

// Delete removes a pod, if it is still that one; grace is the pod's own.
func Delete(ctx context.Context, env loop.Env, r *state.Record) error {
	uid, name := types.UID(r.Header.UID), r.Header.Key.Name
	_, _, err := env.Store.Delete(ctx, PodGK, r.Header.Key.Namespace, name, registry.DeleteOptions{UID: &uid, Term: env.Term})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone or replaced already
	}
	if err != nil {
		return fmt.Errorf("delete pod %s: %w", name, err)
	}
	return nil
}
