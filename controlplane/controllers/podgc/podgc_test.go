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
