package podgc

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

func addPod(w *fixture.World, name string, set ...func(*corev1.Pod)) {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: fixture.Template("a").Spec}
	for _, f := range set {
		f(p)
	}
	w.Create(p)
}

func TestVanishedNodesAndTerminatedPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := fixture.New(t)
		w.AddNode("stays")
		w.AddNode("goes")
		addPod(w, "alive", func(p *corev1.Pod) { p.Spec.NodeName = "stays" })
		addPod(w, "stranded", func(p *corev1.Pod) { p.Spec.NodeName = "goes" })
		addPod(w, "waits")
		for i := range 4 {
			name := fmt.Sprintf("done-%d", i)
			addPod(w, name, func(p *corev1.Pod) { p.Spec.NodeName = "stays" })
			fixture.Change(w, fixture.Pod, "default", name, registry.Status, func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })
			w.Advance(time.Second)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- loop.Run(ctx, w.Env(), nil, New(w.Env(), Config{KeepTerminated: 2})) }()
		left := func() (out []string) {
			for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "default") {
				out = append(out, p.Name)
			}
			return out
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := fmt.Sprint(left()); got != "[alive done-2 done-3 stranded waits]" {
			t.Fatal(got)
		}
		w.Delete(fixture.Node, "", "goes", "")
		time.Sleep(30 * time.Second)
		if got := fmt.Sprint(left()); got != "[alive done-2 done-3 stranded waits]" {
			t.Fatalf("removed within the quarantine: %s", got)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := fmt.Sprint(left()); got != "[alive done-2 done-3 waits]" {
			t.Fatal(got)
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

// A StatefulSet's pod keeps its name when its Node object goes, until it has
// stopped by itself; a node that is declared dead gives its pods up.
func TestNamesAreNotGivenAwayEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := fixture.New(t)
		w.AddNode("goes")
		w.AddNode("dead")
		yes := true
		owned := func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "db", UID: "db", Controller: &yes}}
		}
		addPod(w, "for-ever", owned, func(p *corev1.Pod) { p.Spec.NodeName = "goes" })
		addPod(w, "an-hour", owned, func(p *corev1.Pod) {
			p.Spec.NodeName = "goes"
			p.Annotations = map[string]string{manifests.AnnotationStopDeadline: "1h"}
		})
		addPod(w, "on-the-dead", owned, func(p *corev1.Pod) { p.Spec.NodeName = "dead" })
		left := func() (out []string) {
			for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "default") {
				out = append(out, p.Name)
			}
			return out
		}
		c := New(w.Env(), Config{})
		round := func() {
			if _, err := c.Reconcile(context.Background(), state.Key{Name: "pods"}); err != nil {
				t.Fatal(err)
			}
		}
		w.Delete(fixture.Node, "", "goes", "")
		w.Delete(fixture.Pod, "default", "on-the-dead", "")
		round()
		time.Sleep(time.Hour)
		round()
		if got := fmt.Sprint(left()); got != "[an-hour for-ever on-the-dead]" {
			t.Fatal(got)
		}
		time.Sleep(time.Minute + 12*time.Second) // 1 %, the grace of 30 s, 5 s
		round()
		if got := fmt.Sprint(left()); got != "[for-ever on-the-dead]" {
			t.Fatal(got)
		}
		fixture.Change(w, fixture.Node, "", "dead", registry.Main, func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute}}
		})
		round()
		if got := fmt.Sprint(left()); got != "[for-ever on-the-dead]" {
			t.Fatalf("a node that answers was believed dead: %s", got)
		}
		fixture.Change(w, fixture.Node, "", "dead", registry.Main, func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute})
		})
		round()
		if got := fmt.Sprint(left()); got != "[for-ever]" {
			t.Fatal(got)
		}
		// Of a node that was declared dead here, nobody needs to delete the pods.
		w.AddNode("gone")
		addPod(w, "only-one", owned, func(p *corev1.Pod) { p.Spec.NodeName = "gone" })
		fixture.Change(w, fixture.Node, "", "gone", registry.Main, func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute}, {Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute}}
		})
		round()
		if got := fmt.Sprint(left()); got != "[for-ever only-one]" {
			t.Fatalf("out of service, and nobody deleted the pod: %s", got)
		}
		fixture.Change(w, fixture.Node, "", "gone", registry.Main, func(n *corev1.Node) {
			n.Labels = map[string]string{manifests.LabelDead: "true"}
		})
		round()
		if got := fmt.Sprint(left()); got != "[for-ever]" {
			t.Fatal(got)
		}
	})
}
