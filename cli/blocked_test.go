package cli

import (
	"context"
	"regexp"
	"strings"
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

// A pod of a StatefulSet whose Node object was deleted keeps its name: what is
// said of it names the way out that there is.
func TestDescribeOfAPodOnADeletedNode(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	owner := *metav1.NewControllerRef(&metav1.ObjectMeta{Name: "db", UID: "u"}, schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: "StatefulSet"})
	_, err := w.reg.Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "db-0", OwnerReferences: []metav1.OwnerReference{owner}},
		Spec: corev1.PodSpec{NodeName: "away", Containers: []corev1.Container{{Name: "c", Image: "file:///a.wasm"}}}}, registry.WriteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.reg.Update(ctx, podKind, "default", "db-0", registry.Status, running, registry.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, gone, err := w.reg.Delete(ctx, podKind, "default", "db-0", registry.DeleteOptions{}); err != nil || gone {
		t.Fatal(gone, err)
	}
	const want = "node away was deleted, and not declared dead: the pod may run there still, and keeps its name until the node is back; if that machine is off for good, 'dunlin delete pod -n default db-0 --force' frees it"
	if out := w.ok("describe", "pod", "db-0"); !strings.Contains(out, want) {
		t.Errorf("no %q in:\n%s", want, out)
	}
}
