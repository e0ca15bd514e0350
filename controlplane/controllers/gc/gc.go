// Package gc removes what nobody owns any more, and finishes deletions that
// wait for their dependents: background, foreground and orphan.
//
// Owned fields: the finalizers foregroundDeletion and orphan, owner references
// to owners that are gone, the condition dunlin.dev/DeletionBlocked, and with
// the registry the annotation dunlin.dev/ignored-owners.
//
// The owner graph is the store's own index (Snapshot.ByOwner, ByUID), so
// there is nothing to build, and an owner that is not in it does not exist:
// the leader's snapshot holds all that was committed. A reference to one in
// another namespace counts neither for nor against the object, also when that
// owner is gone: the annotation says which they are.
package gc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

type controller struct {
	env  loop.Env
	said said
	// noted are the references of which an event was made, as noteKey;
	// forgotten with the object.
	noted sync.Map
}

// noteKey is one owner reference, by uids.
type noteKey struct{ dependent, owner string }

// New makes the garbage collector.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env}
	var sources []loop.Source
	seen := map[string]bool{}
	for _, k := range manifests.Kinds() {
		if kind := k.StorageKind(); !k.Soft && !seen[kind] {
			seen[kind] = true
			sources = append(sources, loop.Source{Kind: kind, Keys: c.keys})
		}
	}
	return &loop.Controller{Name: "gc", Workers: 4, Sources: sources, Reconcile: c.reconcile}
}

// keys wakes an object whose owner is gone or going or in another namespace,
// one that waits with a finalizer, the dependents of what was deleted, and
// owners that wait for it.
func (c *controller) keys(ev state.Event, add func(state.Key)) {
	snap := c.env.Reader.Snapshot()
	h := &ev.Record.Header
	if ev.Type == state.Deleted {
		snap.ByOwner(h.UID, func(r *state.Record) bool {
			if h.Key.Namespace == "" || r.Header.Key.Namespace == h.Key.Namespace {
				add(r.Header.Key)
			}
			return true
		})
		for _, o := range h.Owners {
			c.noted.Delete(noteKey{h.UID, o.UID})
		}
	} else if (h.Deleted != 0 && len(h.Finalizers) > 0) || needsCare(snap, ev.Record) {
		add(h.Key)
	}
	for _, r := range []*state.Record{ev.Record, ev.Prev} {
		if r == nil || (ev.Type != state.Deleted && ev.Prev == nil) {
			continue
		}
		for _, o := range r.Header.Owners {
			if owner, ok := snap.ByUID(o.UID); ok && waitsForDependents(owner) {
				add(owner.Header.Key)
			}
		}
	}
}

func needsCare(snap state.Snapshot, r *state.Record) bool {
	for _, o := range r.Header.Owners {
		if fateOf(snap, r, o) != solid {
			return true
		}
	}
	return false
}

func waitsForDependents(r *state.Record) bool {
	return r.Header.Deleted != 0 && slices.Contains(r.Header.Finalizers, metav1.FinalizerDeleteDependents)
}

// fate is what an owner reference leads to.
type fate uint8

const (
	solid   fate = iota // the owner lives, or it cannot be told
	absent              // it does not exist, or no more
	leaving             // it is being deleted in the foreground
	invalid             // it cannot be an owner of this object
)

// fateOf judges one owner reference of a record. Pure.
func fateOf(snap state.Snapshot, r *state.Record, o state.Owner) fate {
	k := manifests.ByGroupKind(schema.ParseGroupKind(o.Kind))
	if k == nil {
		return solid // a kind that this cluster does not serve
	}
	if k.Namespaced && r.Header.Key.Namespace == "" {
		return invalid
	}
	owner, ok := snap.ByUID(o.UID)
	switch {
	case !ok && k.Soft:
		return solid
	case !ok:
		return absent
	case registry.ForeignOwner(snap, r.Header.Key.Namespace, k.GroupKind(), o.UID):
		return invalid
	case owner.Header.Key.Kind != k.StorageKind() || owner.Header.Key.Name != o.Name:
		return absent // nothing of that kind and name has this uid
	case waitsForDependents(owner):
		return leaving
	}
	return solid
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	snap := c.env.Reader.Snapshot()
	r, ok := snap.Get(key)
	if !ok {
		return 0, nil
	}
	if r.Header.Deleted != 0 {
		return c.finish(ctx, snap, r)
	}
	return 0, c.judge(ctx, snap, r)
}

// judge deletes an object that has no owner left, and strips references to
// owners that are gone from one that has.
func (c *controller) judge(ctx context.Context, snap state.Snapshot, r *state.Record) error {
	fates, err := c.fates(ctx, snap, r)
	if err != nil {
		return err
	}
	var gone []string
	count := map[fate]int{}
	for i, o := range r.Header.Owners {
		count[fates[i]]++
		switch fates[i] {
		case absent, leaving:
			gone = append(gone, o.UID)
		case invalid:
			if _, again := c.noted.LoadOrStore(noteKey{r.Header.UID, o.UID}, true); !again {
				c.note(r, "OwnerRefInvalidNamespace", fmt.Sprintf("ownerRef [%s %s, uid: %s] does not exist in namespace %q and is ignored", o.Kind, o.Name, o.UID, r.Header.Key.Namespace))
			}
		}
	}
	switch {
	case len(gone) == 0:
		return nil
	case count[solid] > 0:
		return c.strip(ctx, r, gone)
	}
	policy := metav1.DeletePropagationBackground
	switch {
	case slices.Contains(r.Header.Finalizers, metav1.FinalizerOrphanDependents):
		policy = metav1.DeletePropagationOrphan
	case slices.Contains(r.Header.Finalizers, metav1.FinalizerDeleteDependents):
		policy = metav1.DeletePropagationForeground
	case count[leaving] > 0 && hasDependents(snap, r):
		policy = metav1.DeletePropagationForeground // its owner waits for all of them
	}
	return c.remove(ctx, r, policy)
}

// fates judges the owner references of an object, by what is there and, of
// owners that are not, by what was noted while they were. What is not noted
// yet, by an older version or on a server that lagged behind, is noted before
// anything else is done.
func (c *controller) fates(ctx context.Context, snap state.Snapshot, r *state.Record) ([]fate, error) {
	out := make([]fate, len(r.Header.Owners))
	for i, o := range r.Header.Owners {
		out[i] = fateOf(snap, r, o)
	}
	if r.Header.Key.Namespace == "" || (!slices.Contains(out, absent) && !slices.Contains(out, invalid)) {
		return out, nil
	}
	obj, err := c.env.Store.Decode(r)
	if err != nil {
		return nil, fmt.Errorf("owners of %s: %w", loop.KeyString(r.Header.Key), err)
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("owners of %s: %w", loop.KeyString(r.Header.Key), err)
	}
	known := registry.IgnoredOwners(m)
	all := known
	for i, o := range r.Header.Owners {
		switch noted := slices.Contains(known, o.UID); {
		case out[i] == absent && noted:
			out[i] = invalid
		case out[i] == invalid && !noted:
			all = append(slices.Clip(all), o.UID)
		}
	}
	if len(all) == len(known) {
		return out, nil
	}
	return out, c.update(ctx, r, func(m metav1.Object) { registry.SetIgnoredOwners(m, all) })
}

func hasDependents(snap state.Snapshot, r *state.Record) (any bool) {
	snap.ByOwner(r.Header.UID, func(*state.Record) bool {
		any = true
		return false
	})
	return any
}

// remove deletes exactly the version that was judged.
func (c *controller) remove(ctx context.Context, r *state.Record, policy metav1.DeletionPropagation) error {
	uid, rv := types.UID(r.Header.UID), fmt.Sprint(r.Header.ResourceVersion)
	_, _, err := c.env.Store.Delete(ctx, gk(r), r.Header.Key.Namespace, r.Header.Key.Name,
		registry.DeleteOptions{UID: &uid, ResourceVersion: &rv, Propagation: policy, Term: c.env.Term})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("collect %s: %w", loop.KeyString(r.Header.Key), err)
	}
	return nil
}

func gk(r *state.Record) schema.GroupKind { return schema.ParseGroupKind(r.Header.Key.Kind) }

// finish goes on with a deletion that has begun.
func (c *controller) finish(ctx context.Context, snap state.Snapshot, r *state.Record) (time.Duration, error) {
	switch {
	case slices.Contains(r.Header.Finalizers, metav1.FinalizerOrphanDependents):
		return 0, c.orphan(ctx, snap, r)
	case slices.Contains(r.Header.Finalizers, metav1.FinalizerDeleteDependents):
		return c.foreground(ctx, snap, r)
	}
	if len(r.Header.Finalizers) == 0 {
		return 0, nil
	}
	return c.complain(ctx, r, byFinalizers(r.Header.Finalizers))
}

// orphan lets the dependents live without the owner, then lets it go.
func (c *controller) orphan(ctx context.Context, snap state.Snapshot, r *state.Record) error {
	var deps []*state.Record
	snap.ByOwner(r.Header.UID, func(d *state.Record) bool {
		if !foreign(snap, d, r) {
			deps = append(deps, d)
		}
		return true
	})
	err := loop.Parallel(ctx, len(deps), func(ctx context.Context, i int) error {
		return c.strip(ctx, deps[i], []string{r.Header.UID})
	})
	if err != nil {
		return err
	}
	return c.dropFinalizer(ctx, r, metav1.FinalizerOrphanDependents)
}

// foreground deletes the dependents, and lets the owner go when none that
// blocks it is left.
func (c *controller) foreground(ctx context.Context, snap state.Snapshot, r *state.Record) (time.Duration, error) {
	var pending, blocking []*state.Record
	snap.ByOwner(r.Header.UID, func(d *state.Record) bool {
		if foreign(snap, d, r) {
			return true
		}
		i := slices.IndexFunc(d.Header.Owners, func(o state.Owner) bool { return o.UID == r.Header.UID })
		if d.Header.Owners[i].Block && (!waitsForDependents(d) || !owns(snap, d, r)) {
			blocking = append(blocking, d)
		}
		if d.Header.Deleted == 0 {
			pending = append(pending, d)
		}
		return true
	})
	err := loop.Parallel(ctx, len(pending), func(ctx context.Context, i int) error { return c.judge(ctx, snap, pending[i]) })
	if err != nil {
		return 0, err
	}
	if len(blocking) == 0 {
		return 0, c.dropFinalizer(ctx, r, metav1.FinalizerDeleteDependents)
	}
	if len(pending) > 0 {
		return time.Second, nil // look again at what that left
	}
	return c.complain(ctx, r, byDependents(blocking))
}

// foreign says whether a dependent refers to the owner from where it cannot
// be owned. One that kept it waiting would do so for ever.
func foreign(snap state.Snapshot, dependent, owner *state.Record) bool {
	return slices.ContainsFunc(dependent.Header.Owners, func(o state.Owner) bool {
		return o.UID == owner.Header.UID && fateOf(snap, dependent, o) == invalid
	})
}

// owns says whether above is an owner of below, over any number of steps. An
// owner and a dependent that wait for each other would wait for ever.
func owns(snap state.Snapshot, above, below *state.Record) bool {
	seen := map[string]bool{}
	pending := []*state.Record{below}
	for len(pending) > 0 {
		r := pending[0]
		pending = pending[1:]
		for _, o := range r.Header.Owners {
			if o.UID == above.Header.UID {
				return true
			}
			if owner, ok := snap.ByUID(o.UID); ok && !seen[o.UID] {
				seen[o.UID] = true
				pending = append(pending, owner)
			}
		}
	}
	return false
}

func (c *controller) note(r *state.Record, reason, message string) {
	h := &r.Header
	c.env.Events.Event(corev1.ObjectReference{APIVersion: h.APIVersion, Kind: gk(r).Kind, Namespace: h.Key.Namespace, Name: h.Key.Name, UID: types.UID(h.UID)},
		events.Warning, reason, message)
}

var errMoved = errors.New("another object has the name by now")

// strip removes owner references by uid.
func (c *controller) strip(ctx context.Context, r *state.Record, uids []string) error {
	return c.update(ctx, r, func(m metav1.Object) {
		m.SetOwnerReferences(slices.DeleteFunc(slices.Clone(m.GetOwnerReferences()), func(o metav1.OwnerReference) bool {
			return slices.Contains(uids, string(o.UID))
		}))
	})
}

func (c *controller) dropFinalizer(ctx context.Context, r *state.Record, name string) error {
	return c.update(ctx, r, func(m metav1.Object) {
		m.SetFinalizers(slices.DeleteFunc(slices.Clone(m.GetFinalizers()), func(f string) bool { return f == name }))
	})
}

func (c *controller) update(ctx context.Context, r *state.Record, change func(metav1.Object)) error {
	_, err := c.env.Store.Update(ctx, gk(r), r.Header.Key.Namespace, r.Header.Key.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		m, err := meta.Accessor(cur)
		if err != nil {
			return nil, err
		}
		if string(m.GetUID()) != r.Header.UID {
			return nil, errMoved
		}
		change(m)
		return cur, nil
	}, c.env.Write())
	if apierrors.IsNotFound(err) || errors.Is(err, errMoved) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("update %s: %w", loop.KeyString(r.Header.Key), err)
	}
	return nil
}
