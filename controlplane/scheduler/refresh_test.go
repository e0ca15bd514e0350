package scheduler

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
)

func smallNode(w *fixture.World) {
	w.AddNode("a1", func(n *corev1.Node) {
		n.Labels["zone"] = "a1"
		n.Status.Allocatable["memory"] = resource.MustParse("200Mi")
	})
}

// What makes a pod's chances worse wakes nobody, and yet what is said of them
// is true soon; an event does not repeat it, and nothing is written at rest.
func TestFiguresOfAParkedPodAreKeptTrue(t *testing.T) {
	run(t, smallNode, func(t *testing.T, r *running) {
		r.Create(pod("big", requests("1m", "300Mi"), func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"zone": "a1"} }))
		r.after(time.Second)
		if m, want := scheduled(r.World, "big").Message, "0/1 nodes are available: 1 Insufficient memory (needs 300Mi, most free 200Mi)."; m != want {
			t.Fatalf("says %q, want %q", m, want)
		}
		for i := range 4 {
			r.Create(pod(fmt.Sprintf("small-%d", i), requests("1m", "45Mi")))
		}
		r.after(figuresEvery + flushEvery)
		if m, want := scheduled(r.World, "big").Message, "0/1 nodes are available: 1 Insufficient memory (needs 300Mi, most free 20Mi)."; m != want {
			t.Fatalf("says %q, want %q", m, want)
		}
		if n := r.attempts("big"); n != 1 {
			t.Errorf("it was tried %d times", n)
		}
		before := r.Machine.Snapshot().ResourceVersion()
		r.after(4 * time.Minute)
		if now := r.Machine.Snapshot().ResourceVersion(); now != before {
			t.Errorf("%d writes at rest", now-before)
		}
	})
}

// A sweep is bounded, and reaches all in the end.
func TestFiguresOfManyParkedPods(t *testing.T) {
	const pods = 2*sweepWrites + 10
	run(t, smallNode, func(t *testing.T, r *running) {
		for i := range pods {
			r.Create(pod(fmt.Sprintf("big-%d", i), requests("1m", "300Mi")))
		}
		r.after(time.Second)
		r.Create(pod("small", requests("1m", "150Mi")))
		r.after(time.Second)
		told := func() (n int) {
			for i := range pods {
				if scheduled(r.World, fmt.Sprintf("big-%d", i)).Message == "0/1 nodes are available: 1 Insufficient memory (needs 300Mi, most free 50Mi)." {
					n++
				}
			}
			return n
		}
		last := 0
		for sweep := range 8 {
			r.after(flushEvery)
			now := told()
			if now-last > sweepWrites {
				t.Fatalf("sweep %d wrote %d", sweep, now-last)
			}
			last = now
		}
		if last != pods {
			t.Fatalf("%d of %d are told", last, pods)
		}
	})
}
