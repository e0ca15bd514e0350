package api

import (
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/dunlin-project/dunlin/manifests"
)

// managers holds one field manager a kind and sub-resource. The type
// converter, which costs some megabytes and a tenth of a second, is built
// for the first write that needs it.
type managers struct {
	schemas func() map[string]*spec.Schema

	mu        sync.Mutex
	converter managedfields.TypeConverter
	err       error
	byKey     map[managerKey]*managedfields.FieldManager
}

type managerKey struct {
	gvk schema.GroupVersionKind
	sub string
}

func newManagers(schemas func() map[string]*spec.Schema) *managers {
	return &managers{schemas: schemas, byKey: map[managerKey]*managedfields.FieldManager{}}
}

// get returns the field manager, or nil if this server tracks no fields.
func (m *managers) get(gvk schema.GroupVersionKind, sub string) (*managedfields.FieldManager, error) {
	if m.schemas == nil {
		return nil, nil //nolint:nilnil // no manager is a configuration, not an error
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.converter == nil && m.err == nil {
		m.converter, m.err = managedfields.NewTypeConverter(m.schemas(), false)
	}
	if m.err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("server-side apply is not available: %w", m.err))
	}
	k := managerKey{gvk, sub}
	if fm, ok := m.byKey[k]; ok {
		return fm, nil
	}
	s := manifests.Scheme()
	fm, err := managedfields.NewDefaultFieldManager(m.converter, runtime.UnsafeObjectConvertor(s), defaulter{}, s, gvk, gvk.GroupVersion(), sub, resetFields(gvk, sub))
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
