package cli

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// The timestamp of a deletion is when its grace ends, and numbers are read as
// encoding/json reads them.
func TestDeletedFor(t *testing.T) {
	end := time.Date(2026, 3, 1, 12, 0, 30, 0, time.UTC)
	for _, c := range []struct {
		grace string
		now   time.Duration // after the end
		want  string
	}{
		{`"deletionGracePeriodSeconds": 30,`, -17 * time.Second, "for 13s, ends within 17s"},
		{`"deletionGracePeriodSeconds": 30,`, -31 * time.Second, "for 0s, ends within 31s"}, // our clock is behind
		{`"deletionGracePeriodSeconds": 30,`, 10 * time.Second, "for 40s (it had 30s to stop)"},
		{"", -17 * time.Second, "ends within 17s"},
		{"", 5 * time.Second, "for 5s"},
		{`"deletionGracePeriodSeconds": 0,`, 5 * time.Second, "for 5s"},
	} {
		u := &unstructured.Unstructured{}
		if err := json.Unmarshal([]byte(`{"metadata": {`+c.grace+`"deletionTimestamp": "`+end.Format(time.RFC3339)+`"}}`), &u.Object); err != nil {
			t.Fatal(err)
		}
		if got := deletedFor(u, end.Add(c.now)); got != c.want {
			t.Errorf("%s %s: %q, want %q", c.grace, c.now, got, c.want)
		}
	}
}

// A namespace that stays says what is left in it.
func TestDeleteNamespaceNamesWhatRemains(t *testing.T) {
	w, ctx, gk := newWorld(t), context.Background(), schema.GroupKind{Kind: "Namespace"}
	if _, err := w.reg.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "gx"}}, registry.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, gone, err := w.reg.Delete(ctx, gk, "", "gx", registry.DeleteOptions{}); err != nil || gone {
		t.Fatal(gone, err)
	}
	if _, _, errs := run("delete", "ns", "gx", "--timeout", "3s"); !strings.Contains(errs, "it waits for its contents\n") {
		t.Errorf("before anything is known: %s", errs)
	}
	_, err := w.reg.Update(ctx, gk, "", "gx", registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		n := cur.(*corev1.Namespace)
		n.Status.Conditions = []corev1.NamespaceCondition{
			{Type: corev1.NamespaceDeletionContentFailure, Status: corev1.ConditionFalse, Message: "All content successfully deleted"},
			{Type: corev1.NamespaceContentRemaining, Status: corev1.ConditionTrue, Message: "Some resources are remaining: configmaps. has 1 resource instances"},
			{Type: corev1.NamespaceFinalizersRemaining, Status: corev1.ConditionTrue, Message: "Some content in the namespace has finalizers remaining: test/hold in 1 resource instances"}}
		return n, nil
	}, registry.WriteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	code, _, errs := run("delete", "ns", "gx", "--timeout", "3s")
	if code != 1 || !strings.Contains(errs, "it waits for its contents: Some resources are remaining: configmaps. has 1 resource instances; Some content in the namespace has finalizers remaining: test/hold in 1") {
		t.Errorf("exit %d: %s", code, errs)
	}
}
