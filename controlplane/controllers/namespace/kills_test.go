package namespace

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// Whatever is in it, and wherever the leader dies: a namespace goes once
// nothing is in it, never before; what its pods may need stays as long as one
// of them runs; other namespaces are not touched.
func TestGoesThroughKills(t *testing.T) {
	configMap := schema.GroupKind{Kind: "ConfigMap"}
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		w.AddNode("n")
		tpl := fixture.Template("a")
		for _, ns := range []string{"app", "stays"} {
			w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
		}
		add := func(ns string, i int, held, pod bool) {
			m := metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprintf("o%d", i), Labels: tpl.Labels}
			if held {
				m.Finalizers = []string{"test/hold"}
			}
			if pod {
				w.Create(&corev1.Pod{ObjectMeta: m, Spec: tpl.Spec})
			} else {
				w.Create(&corev1.ConfigMap{ObjectMeta: m})
			}
		}
		for i := range rapid.IntRange(0, 6).Draw(rt, "objects") {
			add("app", i, rapid.Bool().Draw(rt, "held"), rapid.Bool().Draw(rt, "pod"))
			add("stays", i, false, rapid.Bool().Draw(rt, "other pod"))
		}
		count := func(ns string) (pods, maps int) {
			return len(fixture.List[*corev1.Pod](w, fixture.Pod, ns)), len(fixture.List[*corev1.ConfigMap](w, configMap, ns))
		}
		pods, maps := count("stays")
		_, all := count("app")
		var broken error
		check := func() {
			p, m := count("app")
			if _, err := w.Store.Get(fixture.Namespace, "", "app"); apierrors.IsNotFound(err) && p+m > 0 {
				broken = fmt.Errorf("the namespace went before %d pods and %d ConfigMaps", p, m)
			}
			if p > 0 && m < all {
				broken = fmt.Errorf("%d of %d ConfigMaps while %d pods end", m, all, p)
			}
			all = m
		}
		if rapid.Bool().Draw(rt, "bound") {
			w.BindAll("n")
		}
		w.Delete(fixture.Namespace, "", "app", "")
		for range rapid.IntRange(0, 12).Draw(rt, "steps") {
			switch rapid.IntRange(0, 2).Draw(rt, "step") {
			case 0:
				env := w.Killed(rapid.IntRange(0, 4).Draw(rt, "writes"), check)
				w.Try(env, New(env))
			case 1:
				w.Report(nil)
			case 2:
				release(w, configMap)
				_, all = count("app") // those were only held
			}
			if broken != nil {
				rt.Fatal(broken)
			}
		}
		for range 4 {
			w.Settle(New(w.Env()))
			w.Report(nil)
			release(w, configMap)
		}
		w.Settle(New(w.Env()))
		if _, err := w.Store.Get(fixture.Namespace, "", "app"); !apierrors.IsNotFound(err) {
			p, m := count("app")
			rt.Fatalf("still there with %d pods and %d ConfigMaps: %v", p, m, err)
		}
		if p, m := count("stays"); p != pods || m != maps {
			rt.Fatalf("another namespace has %d pods and %d ConfigMaps, had %d and %d", p, m, pods, maps)
		}
	})
}

// release takes the finalizers off what waits for them.
func release(w *fixture.World, configMap schema.GroupKind) {
	for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "app") {
		if p.DeletionTimestamp != nil && len(p.Finalizers) > 0 {
			fixture.Change(w, fixture.Pod, "app", p.Name, registry.Main, func(p *corev1.Pod) { p.Finalizers = nil })
		}
	}
	for _, m := range fixture.List[*corev1.ConfigMap](w, configMap, "app") {
		if m.DeletionTimestamp != nil {
			fixture.Change(w, configMap, "app", m.Name, registry.Main, func(m *corev1.ConfigMap) { m.Finalizers = nil })
		}
	}
}
