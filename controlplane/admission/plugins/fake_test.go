package plugins

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/manifests"
)

// objects is a reader over a plain list, with the registry's errors.
type objects struct{ list []runtime.Object }

func kindOf(obj runtime.Object) schema.GroupKind {
	gvks, _, err := manifests.Scheme().ObjectKinds(obj)
	if err != nil {
		panic(err)
	}
	return gvks[0].GroupKind()
}

func metaOf(obj runtime.Object) metav1.Object {
	m, err := meta.Accessor(obj)
	if err != nil {
		panic(err)
	}
	return m
}

func (o *objects) Get(gk schema.GroupKind, namespace, name string) (runtime.Object, error) {
	for _, obj := range o.list {
		if m := metaOf(obj); kindOf(obj) == gk && m.GetNamespace() == namespace && m.GetName() == name {
			return obj, nil
		}
	}
	k := manifests.ByGroupKind(gk)
	return nil, apierrors.NewNotFound(k.GVR().GroupResource(), name)
}

func (o *objects) List(gk schema.GroupKind, namespace string, _ labels.Selector, _ fields.Selector) ([]runtime.Object, error) {
	var out []runtime.Object
	for _, obj := range o.list {
		if m := metaOf(obj); kindOf(obj) == gk && (namespace == "" || m.GetNamespace() == namespace) {
			out = append(out, obj)
		}
	}
	return out, nil
}

func (o *objects) add(list ...runtime.Object) *objects {
	o.list = append(o.list, list...)
	return o
}

func (o *objects) remove(obj runtime.Object) {
	o.list = slices.DeleteFunc(o.list, func(e runtime.Object) bool { return e == obj })
}

var now = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

var fixed = clock.Func(func() time.Time { return now })

// request makes the attributes of a write into namespace "d".
func request(op admission.Operation, obj, old runtime.Object, read *objects) *admission.Attributes {
	of := obj
	if of == nil {
		of = old
	}
	m := metaOf(of)
	return &admission.Attributes{
		Operation: op, Kind: manifests.ByGroupKind(kindOf(of)), Namespace: m.GetNamespace(), Name: m.GetName(),
		Object: obj, Old: old, User: "tester", Warn: func(string) {}, Read: read,
	}
}

func create(obj runtime.Object, read *objects) *admission.Attributes {
	return request(admission.Create, obj, nil, read)
}

// run passes a request through one plugin as the chain does.
func run(t *testing.T, p admission.Plugin, a *admission.Attributes) error {
	t.Helper()
	c := admission.Chain{p}
	if err := c.Admit(t.Context(), a); err != nil {
		return err
	}
	return c.Validate(t.Context(), a)
}

// refused checks code and text of a refusal; an empty text demands success.
func refused(t *testing.T, err error, reason metav1.StatusReason, text string) {
	t.Helper()
	if text == "" {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	if apierrors.ReasonForError(err) != reason || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v (%s), want %s with %q", err, apierrors.ReasonForError(err), reason, text)
	}
}

func inD(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "d", Name: name} }

func newTestPod(name string, images ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: inD(name)}
	for i, image := range images {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "c" + string(rune('0'+i)), Image: image})
	}
	return p
}

func account(name string) *corev1.ServiceAccount {
	return &corev1.ServiceAccount{ObjectMeta: inD(name)}
}

func amounts(pairs ...string) corev1.ResourceList {
	l := corev1.ResourceList{}
	for i := 0; i+1 < len(pairs); i += 2 {
		l[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return l
}

func ptr[T any](v T) *T { return &v }
