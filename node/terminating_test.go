package node

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// TestTerminatingPodServes: while a pod is being deleted its readiness is what
// its probes say, or True without one, until it ends; a module's also ends when
// it is asked to end, since its listeners are closed then. A pod that ends for
// another reason is not ready at once: nothing marks it as terminating.
func TestTerminatingPodServes(t *testing.T) {
	ready, not := "Running+Ready", "Running"
	for name, tc := range map[string]struct {
		runtime  string
		probe    bool
		preStop  int64
		deadline bool
		want     []string // after 1 s, after 9 s (the program refuses from the 4th on), and 14 s
	}{
		"container":                       {runtime: "other", want: []string{ready, ready, ready}},
		"container with a probe":          {runtime: "other", probe: true, want: []string{ready, not, not}},
		"module":                          {want: []string{not, not, not}},
		"module with a hook":              {preStop: 12, want: []string{ready, ready, not}},
		"module with a hook and probe":    {preStop: 12, probe: true, want: []string{ready, not, not}},
		"container, its deadline is over": {runtime: "other", deadline: true, want: []string{not, not, not}},
		"container with hook and probe":   {runtime: "other", probe: true, preStop: 12, want: []string{ready, not, not}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t)
				b.rt.name = tc.runtime
				b.rt.onStop = func(workload.ID) time.Duration { return 20 * time.Second }
				refused := false
				b.net.dial = func(int32) error {
					if refused {
						return errors.New("connection refused")
					}
					return nil
				}
				pod := wasmPod("a", func(p *corev1.Pod) {
					p.Spec.HostNetwork = tc.runtime != ""
					if tc.probe {
						p.Spec.Containers[0].ReadinessProbe = tcpProbe(2, 1)
					}
					if tc.deadline {
						p.Spec.ActiveDeadlineSeconds = new(int64(4))
					}
					if tc.preStop > 0 {
						p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: tc.preStop}}}
					}
				})
				b.link.put("Pod", pod)
				b.start()
				defer b.stop()
				b.after(3500 * time.Millisecond)
				b.want("uid-a", ready)
				if !tc.deadline {
					b.link.put("Pod", deleted(pod, 60))
				}
				b.after(time.Second)
				b.want("uid-a", tc.want[0])
				b.after(3 * time.Second)
				b.net.mu.Lock()
				refused = true
				b.net.mu.Unlock()
				b.after(5 * time.Second)
				b.want("uid-a", tc.want[1])
				b.after(5 * time.Second)
				b.want("uid-a", tc.want[2])
				b.after(time.Minute)
				if !tc.deadline && !b.link.gone["uid-a"] {
					t.Error("the pod does not end")
				}
				if len(b.rt.killed) > 0 {
					t.Errorf("killed: %v", b.rt.killed)
				}
			})
		})
	}
}

// TestAgentRestartWhileTerminating: a pod that serves while it ends is not
// shown as unready because the agent comes back meanwhile, and ends all the same.
func TestAgentRestartWhileTerminating(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.name = "other"
		b.rt.onStop = func(workload.ID) time.Duration { return 40 * time.Second }
		pod := wasmPod("a", func(p *corev1.Pod) {
			p.Spec.HostNetwork = true
			p.Spec.Containers[0].StartupProbe = tcpProbe(1, 3)
			p.Spec.Containers[0].ReadinessProbe = tcpProbe(5, 3)
		})
		b.link.put("Pod", pod)
		b.start()
		b.after(10 * time.Second)
		b.want("uid-a", "Running+Ready")
		b.link.put("Pod", deleted(pod, 90))
		b.after(2 * time.Second)
		b.stop()
		clear(b.link.history)
		b.start()
		defer b.stop()
		b.after(20 * time.Second)
		b.want("uid-a", "Running+Ready")
		if h := b.link.history["uid-a"]; slices.Contains(h, "Running") {
			t.Errorf("it flapped: %v", h)
		}
		b.after(90 * time.Second)
		if !b.link.gone["uid-a"] {
			t.Error("the pod does not end")
		}
	})
}
