package scheduler

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
)

// running is a scheduler in a bubble.
type running struct {
	*fixture.World
	s *Scheduler
}

func run(t *testing.T, prepare func(w *fixture.World), test func(t *testing.T, r *running)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := fixture.New(t)
		prepare(w)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		s := newScheduler(w)
		go func() { done <- s.Run(ctx) }()
		defer func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		w.T = t
		test(t, &running{w, s})
	})
}

// after lets virtual time pass. Only then is the scheduler's state looked at.
func (r *running) after(d time.Duration) *running {
	time.Sleep(d)
	synctest.Wait()
	return r
}

// order tells the race detector that what the test did with the scheduler's
// state comes before what the scheduler does next: by the event of a pod that
// is none of its business, where nothing but time follows.
func (r *running) order() {
	r.Create(pod("", func(p *corev1.Pod) { p.GenerateName, p.Spec.SchedulerName = "other-", "another" }))
}

func (r *running) attempts(name string) int {
	p := r.s.queue.pods[string(get(r.World, name).UID)]
	if p == nil {
		return -1
	}
	return p.attempts
}

func (r *running) gone(name string) {
	r.T.Helper()
	zero := int64(0)
	if _, _, err := r.Store.Delete(context.Background(), fixture.Pod, "default", name, registry.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		r.T.Fatal(err)
	}
}

func (r *running) node(name string, f func(*corev1.Node)) {
	fixture.Change(r.World, fixture.Node, "", name, registry.Main, f)
}

func (r *running) size(name, cpu string) {
	fixture.Change(r.World, fixture.Node, "", name, registry.Status, func(n *corev1.Node) { n.Status.Allocatable["cpu"] = resource.MustParse(cpu) })
}

// Every kind of change wakes exactly the pods that it could help.
func TestRelevantChangesWake(t *testing.T) {
	full := func(w *fixture.World) {
		w.AddNode("full", inZone("z0"))
		w.AddNode("tainted", inZone("z1"), func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "k", Effect: corev1.TaintEffectNoSchedule}} })
		w.Create(pod("big", on("full"), requests("3500m", "1Mi"), labelled("big")))
		w.Create(pod("on-tainted", on("tainted"), requests("3500m", "1Mi")))
	}
	gpuOf := func(n string) func(*corev1.Pod) { return func(p *corev1.Pod) { gpu(p, n) } }
	for name, c := range map[string]struct {
		waits  func(*corev1.Pod)
		change func(r *running)
		wakes  bool
	}{
		"a pod that fits goes":              {requests("1", "1Mi"), func(r *running) { r.gone("big") }, true},
		"a pod goes where a taint is":       {requests("1", "1Mi"), func(r *running) { r.gone("on-tainted") }, false},
		"a pod goes, others are waited for": {near("nobody", zoneKey), func(r *running) { r.gone("big") }, false},
		"the taint goes from a full node":   {requests("1", "1Mi"), func(r *running) { r.node("tainted", func(n *corev1.Node) { n.Spec.Taints = nil }) }, false},
		"a label that nobody asks for":      {requests("1", "1Mi"), func(r *running) { r.node("full", func(n *corev1.Node) { n.Labels["x"] = "y" }) }, false},
		"the label that is asked for": {func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "ssd"} },
			func(r *running) { r.node("full", func(n *corev1.Node) { n.Labels["disk"] = "ssd" }) }, true},
		"the node grows":                    {requests("1", "1Mi"), func(r *running) { r.size("full", "5") }, true},
		"the node grows, but not enough":    {requests("1", "1Mi"), func(r *running) { r.size("full", "4200m") }, false},
		"a node comes":                      {requests("1", "1Mi"), func(r *running) { r.AddNode("new") }, true},
		"a node comes that is too small":    {gpuOf("1"), func(r *running) { r.AddNode("new") }, false},
		"the pod comes that is waited for":  {near("db", zoneKey), func(r *running) { r.Create(pod("db", on("full"), labelled("db"), requests("1m", "1Mi"))) }, true},
		"another pod comes":                 {near("db", zoneKey), func(r *running) { r.Create(pod("web", on("full"), labelled("web"), requests("1m", "1Mi"))) }, false},
		"the pod goes that kept it away":    {all(awayFrom("big", zoneKey), requests("1m", "1Mi")), func(r *running) { r.gone("big") }, true},
		"another pod goes, that did not":    {all(awayFrom("big", zoneKey), requests("1m", "1Mi")), func(r *running) { r.gone("on-tainted") }, false},
		"room that preemption of low gives": {all(priority(5), requests("5", "1Mi")), func(r *running) { r.size("full", "6") }, true},
		"a namespace's labels, of no terms": {requests("1", "1Mi"), func(r *running) {
			fixture.Change(r.World, fixture.Namespace, "", "default", registry.Main, func(n *corev1.Namespace) { n.Labels["a"] = "b" })
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, full, func(t *testing.T, r *running) {
				r.Create(pod("p", c.waits))
				r.after(100 * time.Millisecond)
				if n := r.attempts("p"); n != 1 {
					t.Fatalf("%d attempts before: on %q", n, nodeOf(r.World, "p"))
				}
				c.change(r)
				r.after(10 * time.Second)
				if woken := r.attempts("p") != 1; woken != c.wakes {
					t.Fatalf("woken: %v (%d attempts, on %q)", woken, r.attempts("p"), nodeOf(r.World, "p"))
				}
			})
		})
	}
}

// As many wake as could fit, and if one of them is deleted meanwhile, another
// takes its turn.
func TestWakesAsManyAsFit(t *testing.T) {
	run(t, func(w *fixture.World) {
		w.AddNode("n")
		w.Create(pod("big", on("n"), requests("4", "1Mi")))
	}, func(t *testing.T, r *running) {
		for i := range 20 {
			r.Create(pod(fmt.Sprintf("p%02d", i), requests("1", "1Mi")))
		}
		r.after(100 * time.Millisecond)
		r.gone("big")
		r.after(10 * time.Millisecond)
		if n := r.s.queue.counts(); n[inBackoff] != 4 || n[inParked] != 16 {
			t.Fatalf("queue %v", n)
		}
		r.gone("p00")
		r.after(10 * time.Second)
		placed := 0
		for i := range 19 {
			if nodeOf(r.World, fmt.Sprintf("p%02d", i+1)) != "" {
				placed++
			}
		}
		if placed != 4 {
			t.Fatalf("%d are placed", placed)
		}
	})
}

// No hint at all: the pod is looked at again all the same.
func TestBackStop(t *testing.T) {
	run(t, func(w *fixture.World) {
		w.AddNode("n")
		w.Create(pod("big", on("n"), requests("4", "1Mi")))
	}, func(t *testing.T, r *running) {
		r.Create(pod("p", requests("1", "1Mi")))
		r.after(time.Second)
		r.s.cache.drop(string(get(r.World, "big").UID)) // as if the event were lost
		r.order()
		r.after(4 * time.Minute)
		if nodeOf(r.World, "p") != "" || r.attempts("p") != 1 {
			t.Fatalf("%d attempts", r.attempts("p"))
		}
		r.order()
		r.after(2*time.Minute + 2*time.Second)
		if r.attempts("p") < 2 && r.attempts("p") >= 0 {
			t.Fatalf("after six minutes: %d attempts", r.attempts("p"))
		}
	})
}

// An impossible spec: the reason is there within two seconds, and true an
// hour later, whatever happened meanwhile; and nothing is written for it.
func TestImpossibleSpecSaysWhyAndStaysTrue(t *testing.T) {
	run(t, func(w *fixture.World) {
		for i := range 3 {
			w.AddNode(fmt.Sprintf("n%d", i))
		}
	}, func(t *testing.T, r *running) {
		r.Create(pod("impossible", requests("100", "1Mi"), func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "ssd"} }))
		r.after(2 * time.Second)
		want := "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
		if c := scheduled(r.World, "impossible"); c.Reason != corev1.PodReasonUnschedulable || c.Message != want {
			t.Fatalf("says %q, want %q", c.Message, want)
		}
		before := r.Machine.Snapshot().ResourceVersion()
		r.after(20 * time.Minute)
		if now := r.Machine.Snapshot().ResourceVersion(); now != before {
			t.Errorf("%d writes at rest", now-before)
		}
		r.AddNode("n3")
		r.node("n0", func(n *corev1.Node) { n.Labels["disk"] = "ssd" })
		r.node("n1", func(n *corev1.Node) { n.Spec.Unschedulable = true })
		for i := range 40 {
			r.Create(pod(fmt.Sprintf("other-%d", i)))
			r.after(time.Minute)
		}
		want = "0/4 nodes are available: 1 Insufficient cpu (needs 100, most free 4), 1 node(s) were unschedulable, 2 node(s) didn't match Pod's node affinity/selector."
		if c := scheduled(r.World, "impossible"); plan.WithoutFigures(c.Message) != plan.WithoutFigures(want) {
			t.Fatalf("an hour later it says %q, want %q", c.Message, want)
		}
	})
}
