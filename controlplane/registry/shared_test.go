package registry

import (
	"fmt"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// TestReadObjectsAreNeverWritten: others read a stored object while it is
// updated. The race detector sees a write to it.
func TestReadObjectsAreNeverWritten(t *testing.T) {
	w := newWorld(t)
	gk := schema.GroupKind{Kind: "Node"}
	w.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	set := func(sub Subresource, f func(*corev1.Node)) {
		t.Helper()
		if _, err := w.Update(t.Context(), gk, "", "n", sub, func(obj runtime.Object) (runtime.Object, error) {
			f(obj.(*corev1.Node))
			return obj, nil
		}, WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	set(Status, func(n *corev1.Node) {
		n.Status.Capacity = corev1.ResourceList{"cpu": resource.MustParse("4")}
		n.Status.Allocatable = n.Status.Capacity
	})
	for i := range 20 {
		obj, err := w.Get(gk, "", "n")
		read := as[*corev1.Node](t, obj, err)
		var wg sync.WaitGroup
		wg.Go(func() { _ = read.DeepCopy() })
		set(Main, func(n *corev1.Node) { n.Labels = map[string]string{"round": fmt.Sprint(i)} })
		wg.Wait()
	}
}
