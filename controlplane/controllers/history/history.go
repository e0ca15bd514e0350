// Package history keeps the revisions of a pod template as
// ControllerRevisions, for DaemonSets and StatefulSets.
//
// A revision is found by comparing templates, never by its name or by bytes:
// a newer version of this program that adds defaults, or that hashes in
// another way, must not roll out anything.
package history

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// GK is the kind that is kept.
var GK = schema.GroupKind{Group: appsv1.GroupName, Kind: "ControllerRevision"}

// maxCollisions of names in a row mean that something is wrong.
const maxCollisions = 32

// HashTemplate names a pod template. It only has to be stable and to differ:
// an existing revision or set is found by comparing templates, never by this
// name, so a newer binary may well come to another name for the same template.
func HashTemplate(t *corev1.PodTemplateSpec, collisions *int32) (string, error) {
	b, err := json.Marshal(t)
	if err != nil {
		return "", fmt.Errorf("hash pod template: %w", err)
	}
	h := fnv.New32a()
	_, _ = h.Write(b) // never fails
	if collisions != nil {
		_, _ = h.Write(binary.LittleEndian.AppendUint32(nil, uint32(*collisions)))
	}
	return rand.SafeEncodeString(strconv.FormatUint(uint64(h.Sum32()), 10)), nil
}

// Owner is whose history it is.
type Owner struct {
	Object   metav1.Object
	GVK      schema.GroupVersionKind
	Selector labels.Selector
	Template *corev1.PodTemplateSpec
}

// History of one owner, oldest first.
type History struct {
	// Current has the owner's template.
	Current *appsv1.ControllerRevision
	Old     []*appsv1.ControllerRevision
}

// Hash is what the pods of a revision carry as controller-revision-hash in a
// DaemonSet. A StatefulSet's carry the revision's name.
func Hash(r *appsv1.ControllerRevision) string {
	return r.Labels[appsv1.ControllerRevisionHashLabelKey]
}

// patch is the data of a revision: a strategic merge patch, as upstream's
// clients apply it to undo.
type patch struct {
	Spec struct {
		Template json.RawMessage `json:"template"`
	} `json:"spec"`
}

func data(t *corev1.PodTemplateSpec) ([]byte, error) {
	b, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(b, &fields); err != nil {
		return nil, err
	}
	fields["$patch"] = json.RawMessage(`"replace"`)
	return json.Marshal(map[string]any{"spec": map[string]any{"template": fields}})
}

// Template reads a revision's template, defaulted.
func Template(r *appsv1.ControllerRevision) (*corev1.PodTemplateSpec, error) {
	var p patch
	if err := json.Unmarshal(r.Data.Raw, &p); err != nil {
		return nil, fmt.Errorf("read revision %s: %w", r.Name, err)
	}
	ds := &appsv1.DaemonSet{}
	if err := json.Unmarshal(p.Spec.Template, &ds.Spec.Template); err != nil {
		return nil, fmt.Errorf("read revision %s: %w", r.Name, err)
	}
	manifests.Default(ds)
	return &ds.Spec.Template, nil
}

// Sync returns the owner's history, after adopting what matches, recording
// the current template and giving it the highest number.
func Sync(ctx context.Context, env loop.Env, o Owner) (History, error) {
	all, err := list(ctx, env, o)
	if err != nil {
		return History{}, err
	}
	var h History
	top := int64(0)
	for _, r := range all {
		t, err := Template(r)
		if err == nil && apiequality.Semantic.DeepEqual(t, o.Template) {
			if h.Current != nil { // the same twice: the newer one counts
				h.Old = append(h.Old, h.Current)
			}
			h.Current = r
			continue
		}
		h.Old = append(h.Old, r)
	}
	for _, r := range h.Old {
		top = max(top, r.Revision)
	}
	switch {
	case o.Object.GetDeletionTimestamp() != nil:
	case h.Current == nil:
		h.Current, err = create(ctx, env, o, top+1)
	case h.Current.Revision <= top:
		h.Current, err = renumber(ctx, env, h.Current, top+1)
	}
	if err != nil {
		return History{}, err
	}
	slices.SortStableFunc(h.Old, byRevision)
	return h, nil
}

func byRevision(a, b *appsv1.ControllerRevision) int {
	switch {
	case a.Revision < b.Revision:
		return -1
	case a.Revision > b.Revision:
		return 1
	}
	return 0
}

func list(ctx context.Context, env loop.Env, o Owner) ([]*appsv1.ControllerRevision, error) {
	var out []*appsv1.ControllerRevision
	var failed error
	var orphans []*appsv1.ControllerRevision
	env.Reader.Snapshot().Range(GK.String(), o.Object.GetNamespace(), state.Key{}, func(r *state.Record) bool {
		c, owned := loop.ControllerOf(r)
		mine := owned && c.UID == string(o.Object.GetUID())
		if !mine && (owned || r.Header.Deleted != 0 || !o.Selector.Matches(labels.Set(r.Header.Labels))) {
			return true
		}
		obj, err := env.Store.Decode(r)
		if err != nil {
			failed = fmt.Errorf("decode revision %s: %w", r.Header.Key.Name, err)
			return false
		}
		if rev, ok := obj.(*appsv1.ControllerRevision); ok && mine {
			out = append(out, rev)
		} else if ok {
			orphans = append(orphans, rev)
		}
		return true
	})
	if failed != nil {
		return nil, failed
	}
	if o.Object.GetDeletionTimestamp() == nil {
		for _, rev := range orphans {
			got, err := update(ctx, env, rev, func(r *appsv1.ControllerRevision) {
				r.OwnerReferences = append(r.OwnerReferences, *metav1.NewControllerRef(o.Object, o.GVK))
			})
			if err != nil {
				return nil, fmt.Errorf("adopt revision %s: %w", rev.Name, err)
			}
			out = append(out, got)
		}
	}
	slices.SortStableFunc(out, byRevision)
	return out, nil
}

func update(ctx context.Context, env loop.Env, rev *appsv1.ControllerRevision, change func(*appsv1.ControllerRevision)) (*appsv1.ControllerRevision, error) {
	obj, err := env.Store.Update(ctx, GK, rev.Namespace, rev.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		r, ok := cur.(*appsv1.ControllerRevision)
		if !ok || r.UID != rev.UID || r.DeletionTimestamp != nil {
			return nil, loop.ErrMoved
		}
		change(r)
		return r, nil
	}, env.Write())
	if err != nil {
		return nil, err
	}
	out, ok := obj.(*appsv1.ControllerRevision)
	if !ok {
		return nil, fmt.Errorf("revision %s is a %T", rev.Name, obj)
	}
	return out, nil
}

func renumber(ctx context.Context, env loop.Env, rev *appsv1.ControllerRevision, n int64) (*appsv1.ControllerRevision, error) {
	out, err := update(ctx, env, rev, func(r *appsv1.ControllerRevision) { r.Revision = n })
	if err != nil {
		return nil, fmt.Errorf("number revision %s: %w", rev.Name, err)
	}
	return out, nil
}

func create(ctx context.Context, env loop.Env, o Owner, n int64) (*appsv1.ControllerRevision, error) {
	raw, err := data(o.Template)
	if err != nil {
		return nil, fmt.Errorf("record revision: %w", err)
	}
	var last error
	for i := range int32(maxCollisions) {
		collisions := &i
		if i == 0 {
			collisions = nil
		}
		hash, err := HashTemplate(o.Template, collisions)
		if err != nil {
			return nil, err
		}
		l := maps.Clone(o.Template.Labels)
		if l == nil {
			l = map[string]string{}
		}
		l[appsv1.ControllerRevisionHashLabelKey] = hash
		obj, err := env.Store.Create(ctx, &appsv1.ControllerRevision{
			ObjectMeta: metav1.ObjectMeta{
				Name: o.Object.GetName() + "-" + hash, Namespace: o.Object.GetNamespace(), Labels: l, Annotations: annotations(o.Object),
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(o.Object, o.GVK)},
			},
			Data: runtime.RawExtension{Raw: raw}, Revision: n,
		}, env.Write())
		if err == nil {
			if rev, ok := obj.(*appsv1.ControllerRevision); ok {
				return rev, nil
			}
			return nil, fmt.Errorf("revision is a %T", obj)
		}
		if last = err; !apierrors.IsAlreadyExists(err) {
			break
		}
	}
	return nil, fmt.Errorf("record revision %d: %w", n, last)
}

// annotations that go along: the cause of the change is shown in the history.
func annotations(o metav1.Object) map[string]string {
	out := maps.Clone(o.GetAnnotations())
	delete(out, corev1.LastAppliedConfigAnnotation)
	return out
}

// Truncate deletes the oldest revisions beyond the limit that no pod uses.
func Truncate(ctx context.Context, env loop.Env, h History, limit *int32, used func(*appsv1.ControllerRevision) bool) error {
	if limit == nil || *limit < 0 {
		return nil
	}
	var spare []*appsv1.ControllerRevision
	for _, r := range h.Old {
		if !used(r) {
			spare = append(spare, r)
		}
	}
	for i := 0; i < len(spare)-int(*limit); i++ {
		uid := spare[i].UID
		_, _, err := env.Store.Delete(ctx, GK, spare[i].Namespace, spare[i].Name, registry.DeleteOptions{UID: &uid, Term: env.Term})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete revision %s: %w", spare[i].Name, err)
		}
	}
	return nil
}
