// Package printers turns objects into the tables that kubectl get prints
// (metav1.Table, KEP-491). Columns and cells are those of the kube-apiserver
// of the served version, so that what people and their scripts read does not
// depend on the server.
//
// Everything is a pure function of the objects and a time.
package printers

import (
	"fmt"
	"reflect"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/dunlin-project/dunlin/manifests"
)

// Options of one table.
type Options struct {
	// Now is what ages are counted to.
	Now time.Time
	// IncludeObject says what rows carry besides cells: None, Metadata (also
	// for "") or Object. It is the includeObject parameter of the request.
	IncludeObject metav1.IncludeObjectPolicy
	// NoHeaders leaves the column definitions out: every event of a watch but
	// the first.
	NoHeaders bool
	// GroupVersion is the table's own; zero is meta.k8s.io/v1.
	GroupVersion schema.GroupVersion
}

// printer makes the table of one kind.
type printer struct {
	columns []metav1.TableColumnDefinition
	row     func(obj runtime.Object, now time.Time) (cells []any, conditions []metav1.TableRowCondition)
}

// add registers the printer of *T.
func add[T any, P interface {
	*T
	runtime.Object
}](m map[reflect.Type]*printer, columns []metav1.TableColumnDefinition, row func(obj P, now time.Time) []any) {
	m[reflect.TypeFor[T]()] = &printer{columns: columns, row: func(obj runtime.Object, now time.Time) ([]any, []metav1.TableRowCondition) {
		return row(obj.(P), now), nil
	}}
}

// table holds the printer of every kind that has one of its own.
var table = sync.OnceValue(func() map[reflect.Type]*printer {
	m := map[reflect.Type]*printer{}
	addCore(m)
	addWorkloads(m)
	addBatch(m)
	addCluster(m)
	addStorage(m)
	return m
})

// Table makes the table of an object or of a list. Objects are only read. A
// row's object, if it has one, shares memory with the object.
func Table(obj runtime.Object, o Options) (*metav1.Table, error) {
	if !meta.IsListType(obj) {
		m, err := meta.Accessor(obj)
		rv := ""
		if err == nil {
			rv = m.GetResourceVersion()
		} else if _, ok := obj.(*metav1.Status); !ok {
			return nil, fmt.Errorf("printers: %T has no metadata: %w", obj, err)
		}
		return TableOf(obj, []runtime.Object{obj}, metav1.ListMeta{ResourceVersion: rv}, o)
	}
	list, err := meta.ListAccessor(obj)
	if err != nil {
		return nil, fmt.Errorf("printers: %T has no list metadata: %w", obj, err)
	}
	items, err := meta.ExtractList(obj)
	if err != nil {
		return nil, fmt.Errorf("printers: items of %T: %w", obj, err)
	}
	return TableOf(elementOf(obj), items, metav1.ListMeta{
		ResourceVersion: list.GetResourceVersion(), Continue: list.GetContinue(), RemainingItemCount: list.GetRemainingItemCount(),
	}, o)
}

// elementOf returns a zero element of a typed list, so that an empty list
// has its kind's columns; nil if there is none.
func elementOf(list runtime.Object) runtime.Object {
	v := reflect.Indirect(reflect.ValueOf(list))
	if v.Kind() != reflect.Struct {
		return nil
	}
	items := v.FieldByName("Items")
	if !items.IsValid() || items.Kind() != reflect.Slice || items.Type().Elem().Kind() != reflect.Struct {
		return nil
	}
	obj, _ := reflect.New(items.Type().Elem()).Interface().(runtime.Object)
	return obj
}

// TableOf makes a table of items, all of the kind of example (which may be
// nil: then the columns are the generic ones).
func TableOf(example runtime.Object, items []runtime.Object, list metav1.ListMeta, o Options) (*metav1.Table, error) {
	p := printerOf(example)
	gv := o.GroupVersion
	if gv.Empty() {
		gv = metav1.SchemeGroupVersion
	}
	t := &metav1.Table{
		TypeMeta: metav1.TypeMeta{Kind: "Table", APIVersion: gv.String()},
		ListMeta: list,
		Rows:     make([]metav1.TableRow, 0, len(items)),
	}
	if !o.NoHeaders {
		t.ColumnDefinitions = p.columns
	}
	var err error
	for _, obj := range items {
		q := p
		if reflect.TypeOf(obj) != reflect.TypeOf(example) {
			q = generic()
			if len(p.columns) != len(q.columns) {
				return nil, fmt.Errorf("printers: a %T in a list of %T", obj, example)
			}
		}
		cells, conditions := q.row(obj, o.Now)
		row := metav1.TableRow{Cells: cells, Conditions: conditions}
		switch o.IncludeObject {
		case metav1.IncludeNone:
		case metav1.IncludeObject:
			if row.Object.Object, err = described(obj); err != nil {
				return nil, err
			}
		case metav1.IncludeMetadata, "":
			if m, err := meta.Accessor(obj); err == nil {
				partial := meta.AsPartialObjectMetadata(m)
				partial.TypeMeta = metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: gv.String()}
				row.Object.Object = partial
			}
		default:
			return nil, fmt.Errorf("printers: unknown includeObject %q", o.IncludeObject)
		}
		t.Rows = append(t.Rows, row)
	}
	return t, nil
}

// described is an object that says its kind and apiVersion. Items of lists do
// not, yet a row's object is read without its list: without a kind no client
// can decode it.
func described(obj runtime.Object) (runtime.Object, error) {
	if !obj.GetObjectKind().GroupVersionKind().Empty() {
		return obj, nil
	}
	gvks, _, err := manifests.Scheme().ObjectKinds(obj)
	if err != nil {
		return nil, fmt.Errorf("printers: kind of %T: %w", obj, err)
	}
	v := reflect.ValueOf(obj).Elem()
	cp := reflect.New(v.Type())
	cp.Elem().Set(v)
	out, ok := cp.Interface().(runtime.Object)
	if !ok {
		return nil, fmt.Errorf("printers: %T is no object", obj)
	}
	out.GetObjectKind().SetGroupVersionKind(gvks[0])
	return out, nil
}

func printerOf(obj runtime.Object) *printer {
	if obj != nil {
		if p, ok := table()[reflect.TypeOf(obj).Elem()]; ok {
			return p
		}
	}
	return generic()
}

// generic prints what every object has.
var generic = sync.OnceValue(func() *printer {
	return &printer{
		columns: []metav1.TableColumnDefinition{nameColumn(), ageColumn()},
		row: func(obj runtime.Object, now time.Time) ([]any, []metav1.TableRowCondition) {
			m, err := meta.Accessor(obj)
			if err != nil {
				return []any{unknown, unknown}, nil
			}
			return []any{m.GetName(), age(m.GetCreationTimestamp(), now)}, nil
		},
	}
})

// What stands in a cell without a value.
const (
	none    = "<none>"
	unknown = "<unknown>"
)

// column makes a string column; wide ones are shown with -o wide only.
func column(name, description string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "string", Description: description}
}

func wide(c metav1.TableColumnDefinition) metav1.TableColumnDefinition {
	c.Priority = 1
	return c
}

func typed(kind string, c metav1.TableColumnDefinition) metav1.TableColumnDefinition {
	c.Type = kind
	return c
}

func nameColumn() metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: "Name", Type: "string", Format: "name", Description: metav1.ObjectMeta{}.SwaggerDoc()["name"]}
}

func ageColumn() metav1.TableColumnDefinition {
	return column("Age", metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"])
}

// age is how long ago a time was, as people say it ("5m", "3d2h").
func age(t metav1.Time, now time.Time) string { return since(t.Time, now) }

func since(t, now time.Time) string {
	if t.IsZero() {
		return unknown
	}
	return duration.HumanDuration(now.Sub(t))
}

func orNone(s string) string {
	if s == "" {
		return none
	}
	return s
}

func orUnknown(s string) string {
	if s == "" {
		return unknown
	}
	return s
}
