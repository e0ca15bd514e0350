package cli

import (
	"context"
	"regexp"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// What a deletion waits for stands in describe, with its age: the condition of
// the garbage collector beside what the object itself says.
func TestDescribeSaysWhatBlocksADeletion(t *testing.T) {
	w, ctx, gk := newWorld(t), context.Background(), schema.GroupKind{Kind: "Service"}
	_, err := w.reg.Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "held", Finalizers: []string{"example.com/hold"}},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, registry.WriteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, gone, err := w.reg.Delete(ctx, gk, "default", "held", registry.DeleteOptions{}); err != nil || gone {
		t.Fatal(gone, err)
	}
	_, err = w.reg.Update(ctx, gk, "default", "held", registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		s := cur.(*corev1.Service)
		s.Status.Conditions = []metav1.Condition{{Type: manifests.ConditionDeletionBlocked, Status: metav1.ConditionTrue, Reason: "FinalizersRemain",
			Message: "waits for finalizer example.com/hold", LastTransitionTime: metav1.NewTime(time.Now().Add(-5 * time.Hour))}}
		return s, nil
	}, registry.WriteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := w.ok("describe", "service", "held")
	for _, want := range []string{
		`Terminating: +for \d+s, waits for finalizers example.com/hold`,
		`dunlin.dev/DeletionBlocked +True +5h +FinalizersRemain +waits for finalizer example.com/hold`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
}
