// Package namespace empties namespaces that are being deleted, and then lets
// them go.
//
// Owned fields: spec.finalizers "kubernetes" and the deletion conditions of
// Namespaces.
package namespace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// recheck is how soon a namespace with content is looked at again even if no
// event comes.
const recheck = 15 * time.Second

var (
	namespaceGK = schema.GroupKind{Kind: "Namespace"}
	podGK       = schema.GroupKind{Kind: "Pod"}
)

type controller struct {
	env   loop.Env
	kinds []*manifests.Kind // namespaced ones, pods first
}

// New makes the namespace controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env}
	sources := []loop.Source{{Kind: namespaceGK.String(), Keys: func(ev state.Event, add func(state.Key)) {
		if ev.Record.Header.Deleted != 0 && ev.Type != state.Deleted {
			add(ev.Record.Header.Key)
		}
	}}}
	for _, k := range manifests.Kinds() {
		if !k.Namespaced || k.AliasOf != (schema.GroupKind{}) {
			continue
		}
		c.kinds = append(c.kinds, k)
		sources = append(sources, loop.Source{Kind: k.StorageKind(), Keys: c.contentWent})
	}
	slices.SortStableFunc(c.kinds, func(a, b *manifests.Kind) int {
		switch {
		case a.GroupKind() == podGK:
			return -1
		case b.GroupKind() == podGK:
			return 1
		}
		return 0
	})
	return &loop.Controller{Name: "namespace", Workers: 2, Sources: sources, Reconcile: c.reconcile, Delay: 20 * time.Millisecond}
}

// contentWent wakes a terminating namespace when something in it is gone.
func (c *controller) contentWent(ev state.Event, add func(state.Key)) {
	if ev.Type != state.Deleted {
		return
	}
	key := state.Key{Kind: namespaceGK.String(), Name: ev.Record.Header.Key.Namespace}
	if ns, ok := c.env.Reader.Snapshot().Get(key); ok && ns.Header.Deleted != 0 {
		add(key)
	}
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(namespaceGK, "", key.Name)
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	ns, ok := obj.(*corev1.Namespace)
	if !ok || ns.DeletionTimestamp == nil || !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
		return 0, nil
	}
	failed := c.empty(ctx, ns.Name)
	left := c.remaining(ns.Name)
	if failed == nil && left.total == 0 {
		return 0, c.finalize(ctx, ns)
	}
	if err := c.writeConditions(ctx, ns, left, failed); err != nil {
		return 0, errors.Join(failed, err)
	}
	return recheck, failed
}

// empty asks for the deletion of everything in the namespace. Pods go first,
// and nothing else is touched while there are any: they may need their
// ConfigMaps and Secrets until they have ended (KEP-5080).
func (c *controller) empty(ctx context.Context, ns string) error {
	for _, k := range c.kinds {
		gk := k.GroupKind()
		var records []*state.Record
		for _, reader := range c.readers(k) {
			reader.Snapshot().Range(k.StorageKind(), ns, state.Key{}, func(r *state.Record) bool {
				records = append(records, r)
				return true
			})
		}
		err := loop.Parallel(ctx, len(records), func(ctx context.Context, i int) error {
			h := &records[i].Header
			if h.Deleted != 0 {
				return nil
			}
			uid := types.UID(h.UID)
			_, _, err := c.env.Store.Delete(ctx, gk, ns, h.Key.Name, registry.DeleteOptions{
				UID: &uid, Propagation: metav1.DeletePropagationBackground, Term: c.env.Term})
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
				return fmt.Errorf("delete %s %s: %w", k.Resource, h.Key.Name, err)
			}
			return nil
		})
		if err != nil {
			return err
		}
		if gk == podGK && c.env.Reader.Snapshot().Len(gk.String(), ns) > 0 {
			return nil
		}
	}
	return nil
}

// readers are the stores that may hold the kind: Leases live in both.
func (c *controller) readers(k *manifests.Kind) []state.Reader {
	if k.Soft {
		return []state.Reader{c.env.Store.Reader(k.GroupKind())}
	}
	return []state.Reader{c.env.Reader}
}

// content is what is left in a namespace.
type content struct {
	total      int
	kinds      []string // "pods. has 2 resource instances"
	finalizers []string // "x in 1 resource instances (longest: pods/a, since ...)"
}

// waiting is what a finalizer holds up.
type waiting struct {
	n       int
	longest string // resource/name
	since   int64  // state.Header.Deleted of that; 0 while none is being deleted
}

func (c *controller) remaining(ns string) content {
	var left content
	finalizers := map[string]waiting{}
	for _, k := range c.kinds {
		n := 0
		for _, reader := range c.readers(k) {
			reader.Snapshot().Range(k.StorageKind(), ns, state.Key{}, func(r *state.Record) bool {
				n++
				for _, f := range r.Header.Finalizers {
					w := finalizers[f]
					w.n++
					if d := r.Header.Deleted; d != 0 && (w.since == 0 || d < w.since) {
						w.since, w.longest = d, k.Resource+"/"+r.Header.Key.Name
					}
					finalizers[f] = w
				}
				return true
			})
		}
		if n > 0 {
			left.total += n
			left.kinds = append(left.kinds, fmt.Sprintf("%s.%s has %d resource instances", k.Resource, k.GVK.Group, n))
		}
	}
	for f, w := range finalizers {
		text := fmt.Sprintf("%s in %d resource instances", f, w.n)
		if w.since != 0 {
			// The time and not the age, which would be written again and again.
			text += fmt.Sprintf(" (longest: %s, since %s)", w.longest, time.Unix(w.since, 0).UTC().Format(time.RFC3339))
		}
		left.finalizers = append(left.finalizers, text)
	}
	slices.Sort(left.kinds)
	slices.Sort(left.finalizers)
	return left
}

// conditions says what the deletion waits for, in upstream's words.
func conditions(old []corev1.NamespaceCondition, left content, failed error, now time.Time) []corev1.NamespaceCondition {
	out := slices.Clone(old)
	set := func(t corev1.NamespaceConditionType, yes bool, reason, message string) {
		c := corev1.NamespaceCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, Message: message,
			LastTransitionTime: metav1.NewTime(now).Rfc3339Copy()}
		if yes {
			c.Status = corev1.ConditionTrue
		}
		for i := range out {
			if out[i].Type == t {
				if out[i].Status == c.Status {
					c.LastTransitionTime = out[i].LastTransitionTime
				}
				out[i] = c
				return
			}
		}
		out = append(out, c)
	}
	set(corev1.NamespaceDeletionDiscoveryFailure, false, "ResourcesDiscovered", "All resources successfully discovered")
	set(corev1.NamespaceDeletionGVParsingFailure, false, "ParsedGroupVersions", "All legacy kube types successfully parsed")
	if failed != nil {
		set(corev1.NamespaceDeletionContentFailure, true, "ContentDeletionFailed", "Failed to delete all resource types, 1 remaining: "+failed.Error())
	} else {
		set(corev1.NamespaceDeletionContentFailure, false, "ContentDeleted", "All content successfully deleted, may be waiting on finalization")
	}
	if len(left.kinds) > 0 {
		set(corev1.NamespaceContentRemaining, true, "SomeResourcesRemain", "Some resources are remaining: "+strings.Join(left.kinds, ", "))
	} else {
		set(corev1.NamespaceContentRemaining, false, "ContentRemoved", "All content successfully removed")
	}
	if len(left.finalizers) > 0 {
		set(corev1.NamespaceFinalizersRemaining, true, "SomeFinalizersRemain", "Some content in the namespace has finalizers remaining: "+strings.Join(left.finalizers, ", "))
	} else {
		set(corev1.NamespaceFinalizersRemaining, false, "ContentHasNoFinalizers", "All content-preserving finalizers finished")
	}
	return out
}

func (c *controller) writeConditions(ctx context.Context, ns *corev1.Namespace, left content, failed error) error {
	want := conditions(ns.Status.Conditions, left, failed, c.env.Clock.Now())
	if apiequality.Semantic.DeepEqual(want, ns.Status.Conditions) {
		return nil
	}
	return c.update(ctx, ns, registry.Status, func(cur *corev1.Namespace) {
		cur.Status.Phase = corev1.NamespaceTerminating
		cur.Status.Conditions = want
	})
}

func (c *controller) finalize(ctx context.Context, ns *corev1.Namespace) error {
	return c.update(ctx, ns, registry.Finalize, func(cur *corev1.Namespace) {
		cur.Spec.Finalizers = slices.DeleteFunc(cur.Spec.Finalizers, func(f corev1.FinalizerName) bool { return f == corev1.FinalizerKubernetes })
	})
}

var errMoved = errors.New("another namespace has the name by now")

func (c *controller) update(ctx context.Context, ns *corev1.Namespace, sub registry.Subresource, change func(*corev1.Namespace)) error {
	_, err := c.env.Store.Update(ctx, namespaceGK, "", ns.Name, sub, func(cur runtime.Object) (runtime.Object, error) {
		n, ok := cur.(*corev1.Namespace)
		if !ok || n.UID != ns.UID {
			return nil, errMoved
		}
		change(n)
		return n, nil
	}, c.env.Write())
	if apierrors.IsNotFound(err) || errors.Is(err, errMoved) {
		return nil
	}
	return err
}
