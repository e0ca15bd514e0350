package api

import (
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/dunlin-project/dunlin/manifests"
)

// managers holds one field manager a kind and sub-resource. The type
// converter, which costs some megabytes and a tenth of a second, is asked for
// by the first write that needs it, and is one for the whole process.
type managers struct {
	types func() (managedfields.TypeConverter, error)

	mu    sync.Mutex
	byKey map[managerKey]*managedfields.FieldManager
}

type managerKey struct {
	gvk schema.GroupVersionKind
	sub string
}

func newManagers(types func() (managedfields.TypeConverter, error)) *managers {
	return &managers{types: types, byKey: map[managerKey]*managedfields.FieldManager{}}
}

// get returns the field manager, or nil if this server tracks no fields.
func (m *managers) get(gvk schema.GroupVersionKind, sub string) (*managedfields.FieldManager, error) {
	if m.types == nil {
		return nil, nil //nolint:nilnil // no manager is a configuration, not an error
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	k := managerKey{gvk, sub}
	if fm, ok := m.byKey[k]; ok {
		return fm, nil
	}
	converter, err := m.types()
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("server-side apply is not available: %w", err))
	}
	s := manifests.Scheme()
	fm, err := managedfields.NewDefaultFieldManager(converter, runtime.UnsafeObjectConvertor(s), defaulter{}, s, gvk, gvk.GroupVersion(), sub, resetFields(gvk, sub))
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	m.byKey[k] = fm
	return fm, nil
}

// resetFields are the fields that a write to the sub-resource cannot change,
// and so cannot own.
func resetFields(gvk schema.GroupVersionKind, sub string) map[fieldpath.APIVersion]fieldpath.Filter {
	set := fieldpath.NewSet(fieldpath.MakePathOrDie("status"))
	switch sub {
	case "status":
		set = fieldpath.NewSet(fieldpath.MakePathOrDie("spec"), fieldpath.MakePathOrDie("metadata", "labels"),
			fieldpath.MakePathOrDie("metadata", "ownerReferences"), fieldpath.MakePathOrDie("metadata", "finalizers"))
	case "scale":
		return nil
	}
	return map[fieldpath.APIVersion]fieldpath.Filter{
		fieldpath.APIVersion(gvk.GroupVersion().String()): fieldpath.NewExcludeSetFilter(set),
	}
}

// defaulter adapts our defaults.
type defaulter struct{}

func (defaulter) Default(obj runtime.Object) { manifests.Default(obj) }
