package registry

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// ForeignOwner says whether what a reference of an object in a namespace means
// exists, and in another one, where it can own nothing here. Pure.
func ForeignOwner(snap state.Snapshot, namespace string, kind schema.GroupKind, uid string) bool {
	k := manifests.ByGroupKind(kind)
	if k == nil || !k.Namespaced || namespace == "" {
		return false
	}
	owner, ok := snap.ByUID(uid)
	return ok && owner.Header.Key.Kind == k.StorageKind() && owner.Header.Key.Namespace != namespace
}

// IgnoredOwners are the uids of owners that the object was noted to refer to
// in another namespace.
func IgnoredOwners(m metav1.Object) []string {
	if v := m.GetAnnotations()[manifests.AnnotationIgnoredOwners]; v != "" {
		return strings.Split(v, ",")
	}
	return nil
}

// SetIgnoredOwners notes them. The object's annotations may be shared, and are
// replaced when anything changes.
func SetIgnoredOwners(m metav1.Object, uids []string) {
	value := strings.Join(uids, ",")
	have := m.GetAnnotations()
	if old, ok := have[manifests.AnnotationIgnoredOwners]; old == value && ok == (value != "") {
		return
	}
	next := map[string]string{}
	for k, v := range have {
		next[k] = v
	}
	if next[manifests.AnnotationIgnoredOwners] = value; value == "" {
		delete(next, manifests.AnnotationIgnoredOwners)
	}
	if len(next) == 0 {
		next = nil // as an object that never had any
	}
	m.SetAnnotations(next)
}

// noteIgnored brings the note of an object in step with its references. Once
// such an owner is gone, nothing but the note tells its reference from one to
// an owner that the object has lost. So it is made in the write that makes the
// reference, and while that is there no write takes it away.
func (r *Registry) noteIgnored(obj, cur runtime.Object) error {
	m, err := meta.Accessor(obj)
	if err != nil {
		return err
	}
	known := IgnoredOwners(m)
	if len(known) == 0 && len(m.GetOwnerReferences()) == 0 {
		return nil
	}
	if cur != nil {
		om, err := meta.Accessor(cur)
		if err != nil {
			return err
		}
		known = slices.Concat(known, IgnoredOwners(om))
	}
	snap := r.cfg.Durable.Snapshot()
	var uids []string
	for _, o := range m.GetOwnerReferences() {
		uid := string(o.UID)
		_, lives := snap.ByUID(uid)
		ignored := !lives && slices.Contains(known, uid)
		if lives {
			ignored = ForeignOwner(snap, m.GetNamespace(), schema.FromAPIVersionAndKind(o.APIVersion, o.Kind).GroupKind(), uid)
		}
		if ignored && !slices.Contains(uids, uid) {
			uids = append(uids, uid)
		}
	}
	SetIgnoredOwners(m, uids)
	return nil
}
