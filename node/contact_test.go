package node

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// However renewals, looks and sleeps of the machine come, a pod never runs
// longer than its deadline after the last acknowledged renewal was sent, and
// while one is acknowledged in time it never stops.
func TestStopLeft(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := time.Duration(rapid.Int64Range(int64(10*time.Second), int64(time.Hour)).Draw(t, "deadline"))
		now := time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "boot"))
		sent, known := time.Duration(0), false
		end := time.Duration(-1) // when the container stops; -1 is not started
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			now += time.Duration(rapid.Int64Range(0, int64(s)).Draw(t, "passes"))
			if end >= 0 && now >= end {
				if known && now-sent < s && end-sent < s {
					t.Fatalf("it stopped at %s, and a renewal of %s was acknowledged", end, sent)
				}
				end = -1
			}
			switch rapid.SampledFrom([]string{"ack", "extend", "start", "agent restarts"}).Draw(t, "what") {
			case "ack":
				// Sent a little ago, and the container was told meanwhile or is now.
				sent, known = max(sent, now-time.Duration(rapid.Int64Range(0, int64(time.Second)).Draw(t, "travel"))), true
				if left := stopLeft(s, sent, now, known); end >= 0 && left > 0 {
					end = now + left
				}
			case "extend":
				if left := stopLeft(s, sent, now, known); end >= 0 && left > 0 {
					end = now + left
				}
			case "start":
				if left := stopLeft(s, sent, now, known); end < 0 && left > 0 {
					end = now + left
				}
			case "agent restarts": // and does not know what was acknowledged before
				known = false
			}
			if end >= 0 && end > sent+s {
				t.Fatalf("it would run until %s; last acknowledged %s, deadline %s", end, sent, s)
			}
		}
	})
	for name, c := range map[string]struct {
		sent, now time.Duration
		known     bool
		want      time.Duration
	}{
		"never acknowledged": {0, time.Minute, false, 0},
		"just now":           {time.Minute, time.Minute, true, time.Minute},
		"long ago":           {time.Minute, time.Hour, true, 2*time.Minute - time.Hour},
		"another boot":       {time.Hour, time.Minute, true, 0},
	} {
		if got := stopLeft(time.Minute, c.sent, c.now, c.known); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// mortal is a runtime whose containers have stop deadlines, which they keep
// themselves: nothing of the agent's life changes them.
type mortal struct {
	*stubRuntime
	mu  sync.Mutex
	end map[workload.ID]*time.Timer
}

func (m *mortal) Start(ctx context.Context, s workload.Spec) (workload.State, error) {
	st, err := m.stubRuntime.Start(ctx, s)
	if err == nil && s.StopDeadline > 0 {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.end[s.ID] == nil {
			m.end[s.ID] = time.AfterFunc(s.StopDeadline, func() { m.stubRuntime.end(s.ID, 137, "DeadlineExceeded") })
		}
	}
	return st, err
}

// Extend implements workload.Extender.
func (m *mortal) Extend(_ context.Context, id workload.ID, until time.Duration) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.end[id] != nil {
		m.end[id].Reset(until)
	}
	return nil
}

// TestStopDeadline: a pod with a stop deadline runs while the lease is
// renewed, stops by itself after the deadline, agent or not, is not started
// before a server answers, and says why; one without runs on.
func TestStopDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		m := &mortal{stubRuntime: b.rt, end: map[workload.ID]*time.Timer{}}
		b.c.Runtimes = map[string]workload.Runtime{wasmHandler: m}
		boot := time.Now()
		b.c.Elapsed = func() time.Duration { return time.Hour + time.Since(boot) }
		var mu sync.Mutex
		connected, known, sent := true, true, time.Duration(0)
		b.c.Contact = func() (time.Duration, bool) {
			mu.Lock()
			defer mu.Unlock()
			if connected { // a renewal each 2 s
				known, sent = true, b.c.Elapsed().Truncate(2*time.Second)
			}
			return sent, known
		}
		cut := func(on, forget bool) {
			mu.Lock()
			defer mu.Unlock()
			connected, known = !on, known && !forget
		}
		b.link.put("Pod", wasmPod("once", func(p *corev1.Pod) {
			p.Annotations = map[string]string{manifests.AnnotationStopDeadline: "1m"}
		}))
		b.link.put("Pod", wasmPod("on"))
		b.start()
		b.after(10 * time.Minute)
		b.want("uid-once", "Running+Ready")
		if n := len(b.rt.started()); n != 2 {
			t.Fatalf("%d starts", n)
		}
		cut(true, false)
		b.after(55 * time.Second)
		if got := b.rt.running(); len(got) != 2 {
			t.Fatalf("before its deadline: %v", got)
		}
		b.after(6 * time.Second)
		if got := b.rt.running(); len(got) != 1 {
			t.Fatalf("after its deadline: %v", got)
		}
		b.after(time.Hour)
		w := b.want("uid-once", "Running").ContainerStatuses[0].State.Waiting
		if w == nil || w.Reason != "Disconnected" || !strings.Contains(w.Message, manifests.AnnotationStopDeadline) {
			t.Fatalf("it does not say why: %+v", w)
		}
		cut(false, false)
		b.after(5 * time.Second)
		b.want("uid-once", "Running+Ready")

		// The agent dies, and the next one finds no server: it does not know
		// what was acknowledged, so it gives nothing.
		cut(true, true)
		b.stop()
		b.start()
		b.after(50 * time.Second)
		if got := b.rt.running(); len(got) != 2 {
			t.Fatalf("agent restarted: %v", got)
		}
		b.after(12 * time.Second)
		if got := b.rt.running(); len(got) != 1 {
			t.Fatalf("after its deadline, agent restarted: %v", got)
		}
		b.after(time.Hour)
		if got := b.rt.running(); len(got) != 1 {
			t.Fatalf("started offline: %v", got)
		}
		cut(false, false)
		b.after(5 * time.Second)
		b.want("uid-once", "Running+Ready")
		b.want("uid-on", "Running+Ready")
		b.stop()
		for _, tm := range m.end {
			tm.Stop()
		}
	})
}

// TestStopDeadlineWaitsForTheCluster: a pod that had to stop by itself may run
// elsewhere by now. When a server answers again, it does not start before the
// server has said what is to run here, however long that takes.
func TestStopDeadlineWaitsForTheCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		m := &mortal{stubRuntime: b.rt, end: map[workload.ID]*time.Timer{}}
		b.c.Runtimes = map[string]workload.Runtime{wasmHandler: m}
		boot := time.Now()
		b.c.Elapsed = func() time.Duration { return time.Hour + time.Since(boot) }
		var mu sync.Mutex
		leased, sent := true, time.Duration(0)
		b.c.Contact = func() (time.Duration, bool) {
			mu.Lock()
			defer mu.Unlock()
			if leased { // a renewal each 2 s
				sent = b.c.Elapsed().Truncate(2 * time.Second)
			}
			return sent, true
		}
		lease := func(on bool) {
			mu.Lock()
			defer mu.Unlock()
			leased = on
		}
		for _, name := range []string{"moves", "replaced", "stays"} {
			b.link.put("Pod", wasmPod(name, func(p *corev1.Pod) {
				p.Annotations = map[string]string{manifests.AnnotationStopDeadline: "1m"}
			}))
		}
		b.start()
		b.after(time.Minute)
		b.want("uid-moves", "Running+Ready")
		b.want("uid-stays", "Running+Ready")
		starts := len(b.rt.started())

		lease(false)
		b.link.setCut(true)
		b.after(10 * time.Minute)
		if got := b.rt.running(); len(got) != 0 {
			t.Fatalf("after the deadline: %v", got)
		}
		b.link.drop("uid-moves")                                    // it runs elsewhere
		b.link.put("Pod", wasmPod("replaced", func(p *corev1.Pod) { // that one's controller has not decided yet
			p.Annotations = map[string]string{manifests.AnnotationStopDeadline: "1m", manifests.AnnotationLostSince: "1970-01-01T00:00:00Z"}
		}))
		b.link.setNoPull(true)
		b.link.setCut(false)
		lease(true) // and the assignment does not come through yet
		b.after(5 * time.Minute)
		if got := b.rt.started(); len(got) != starts {
			t.Fatalf("started before the cluster said so: %v", got[starts:])
		}
		w := b.link.statusOf("uid-stays").ContainerStatuses[0].State.Waiting
		if w == nil || w.Reason != "Disconnected" || !strings.Contains(w.Message, "still to run here") {
			t.Errorf("it does not say why: %+v", w)
		}
		b.link.setNoPull(false)
		b.after(2 * time.Minute)
		b.want("uid-stays", "Running+Ready")
		if got := b.rt.started(); len(got) != starts+1 {
			t.Errorf("starts %v", got[starts:])
		}
		if w := b.link.statusOf("uid-replaced").ContainerStatuses[0].State.Waiting; w == nil || w.Reason != "Disconnected" || !strings.Contains(w.Message, "another one may run in its place") {
			t.Errorf("it does not say why: %+v", w)
		}
		b.stop()
		for _, tm := range m.end {
			tm.Stop()
		}
	})
}

// TestStoppedNodeSaysSo: who asks on the machine is not told that it is Ready.
func TestStoppedNodeSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.start()
		b.after(time.Minute)
		ready := func() corev1.NodeCondition {
			for _, c := range b.agent.Node().Status.Conditions {
				if c.Type == corev1.NodeReady {
					return c
				}
			}
			return corev1.NodeCondition{}
		}
		if c := ready(); c.Status != corev1.ConditionTrue {
			t.Fatalf("%+v", c)
		}
		b.link.setCut(true)
		b.agent.Stopped("it was declared dead")
		b.after(time.Minute)
		if c := ready(); c.Status != corev1.ConditionFalse || c.Reason != "PodsStopped" || !strings.Contains(c.Message, "--local") {
			t.Errorf("%+v", c)
		}
		b.agent.Stopped("")
		b.after(time.Minute)
		if c := ready(); c.Status != corev1.ConditionTrue {
			t.Errorf("welcome again: %+v", c)
		}
		b.stop()
	})
}
