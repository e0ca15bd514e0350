package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

func TestPodFromAssignmentToGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		pod := wasmPod("a")
		b.link.put("Pod", pod)
		b.start()
		defer b.stop()
		b.after(time.Second)
		st := b.want("uid-a", "Running+Ready")
		if st.PodIP != "10.42.0.1" || st.HostIP != "192.0.2.1" || st.ContainerStatuses[0].ContainerID != "wazero://uid-a/main/0" {
			t.Fatalf("status: %+v", st)
		}
		b.link.put("Pod", deleted(pod, 30))
		b.after(time.Second)
		b.want("uid-a", "Succeeded")
		if !b.link.gone["uid-a"] || len(b.net.pods) != 0 || len(b.vols.pods) != 0 || len(b.rt.states) != 0 {
			t.Fatalf("not gone: %v %v %v %v", b.link.gone, b.net.pods, b.vols.pods, b.rt.states)
		}
		b.link.drop("uid-a")
		b.after(time.Second)
		if g, _ := b.db.Gones(); len(g) != 0 {
			t.Fatalf("tombstones left: %v", g)
		}
		if n := len(b.rt.started()); n != 1 {
			t.Fatalf("%d starts", n)
		}
	})
}

// TestCompilingIsTold: a pod that waits for its module says what happens.
func TestCompilingIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.compiles = true
		b.rt.onPrepare = func(string) (workload.ImageState, error) {
			time.Sleep(4 * time.Minute)
			return workload.ImageState{Digest: "sha256:d"}, nil
		}
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Minute)
		if !slices.ContainsFunc(b.link.events, func(e wire.EventReport) bool {
			return e.Reason == "Compiling" && strings.Contains(e.Message, "Compiling module")
		}) {
			t.Fatalf("events %+v", b.link.events)
		}
		b.after(4 * time.Minute)
		b.want("uid-a", "Running+Ready")
	})
}

// TestCrashLoop checks upstream's delays: none, 10 s, 20 s, 40 s, ...
func TestCrashLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		var at []time.Time
		b.rt.onStart = func(s workload.Spec, st *workload.State) error {
			at = append(at, time.Now())
			time.AfterFunc(time.Second, func() { b.rt.end(s.ID, 1, "Trap") })
			return nil
		}
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(95 * time.Second)
		var gaps []time.Duration
		for i := 1; i < len(at); i++ {
			gaps = append(gaps, at[i].Sub(at[i-1]).Round(100*time.Millisecond))
		}
		want := []time.Duration{time.Second, 11 * time.Second, 21 * time.Second, 41 * time.Second}
		if !slices.Equal(gaps, want) {
			t.Fatalf("gaps %v, want %v", gaps, want)
		}
		st := b.want("uid-a", "Running")
		c := st.ContainerStatuses[0]
		if c.State.Waiting == nil || c.State.Waiting.Reason != "CrashLoopBackOff" || c.RestartCount != 4 ||
			c.LastTerminationState.Terminated.Reason != "Trap" {
			t.Fatalf("status %+v", c)
		}
		if !strings.Contains(c.State.Waiting.Message, "back-off 1m20s restarting failed container=main pod=a_default(uid-a)") {
			t.Fatalf("message %q", c.State.Waiting.Message)
		}
		b.after(30 * time.Minute)
		if n := len(at); n < 9 || n > 13 { // 5 minutes apart by now
			t.Fatalf("%d starts after 30 minutes", n)
		}
	})
}

// TestCrashLoopNeverLooksNew: between two attempts a container shows how the
// last one ended, or that it backs off, as upstream's does.
func TestCrashLoopNeverLooksNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.onPull = func(context.Context, string, string) error {
			time.Sleep(500 * time.Millisecond) // there is something to see between two attempts
			return nil
		}
		b.rt.onStart = func(s workload.Spec, _ *workload.State) error {
			time.AfterFunc(time.Second, func() { b.rt.end(s.ID, 1, "Error") })
			return nil
		}
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(40 * time.Second)
		b.link.mu.Lock()
		defer b.link.mu.Unlock()
		var seen []string
		for _, r := range b.link.reports {
			for _, p := range r.Pods {
				var st corev1.PodStatus
				if len(p.Status) == 0 {
					continue
				}
				if err := direct.Unmarshal(p.Status, &st); err != nil {
					t.Fatal(err)
				}
				c := st.ContainerStatuses[0]
				word := "running"
				switch {
				case c.State.Waiting != nil:
					word = c.State.Waiting.Reason
				case c.State.Terminated != nil:
					word = c.State.Terminated.Reason
				}
				if last := c.LastTerminationState.Terminated; last != nil && c.State.Running == nil && !endedIsNewest(&c) && last.ContainerID == fmt.Sprintf("wazero://uid-a/main/%d", c.RestartCount) {
					t.Errorf("%s: the logs of %s would not be those before the current ones", word, last.ContainerID)
				}
				if line := fmt.Sprint(word, " ", c.RestartCount); len(seen) == 0 || seen[len(seen)-1] != line {
					seen = append(seen, line)
				}
			}
		}
		want := []string{"ContainerCreating 0", "running 0", "Error 0", "running 1", "CrashLoopBackOff 1", "running 2", "CrashLoopBackOff 2", "running 3", "CrashLoopBackOff 3"}
		if !slices.Equal(seen, want) {
			t.Errorf("statuses %q, want %q", seen, want)
		}
	})
}

// TestBackoffIsForgotten: ten minutes of running make the next crash the
// first.
func TestBackoffIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		var at []time.Time
		b.rt.onStart = func(s workload.Spec, st *workload.State) error {
			at = append(at, time.Now())
			life := time.Second
			if len(at) == 4 {
				life = 11 * time.Minute
			}
			time.AfterFunc(life, func() { b.rt.end(s.ID, 1, "Trap") })
			return nil
		}
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(13 * time.Minute)
		if len(at) < 5 || at[4].Sub(at[3]) > 11*time.Minute+time.Second {
			t.Fatalf("starts %v", at)
		}
	})
}

func TestRestartPolicies(t *testing.T) {
	for _, tc := range []struct {
		policy corev1.RestartPolicy
		code   int
		phase  string
		starts int
	}{
		{corev1.RestartPolicyNever, 0, "Succeeded", 1},
		{corev1.RestartPolicyNever, 3, "Failed", 1},
		{corev1.RestartPolicyOnFailure, 0, "Succeeded", 1},
		{corev1.RestartPolicyOnFailure, 3, "Running", 2},
		{corev1.RestartPolicyAlways, 0, "Running", 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t)
			b.rt.onStart = func(s workload.Spec, st *workload.State) error {
				time.AfterFunc(time.Second, func() { b.rt.end(s.ID, tc.code, "") })
				return nil
			}
			b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) { p.Spec.RestartPolicy = tc.policy }))
			b.start()
			defer b.stop()
			b.after(5 * time.Second)
			b.want("uid-a", tc.phase)
			if n := len(b.rt.started()); n != tc.starts {
				t.Fatalf("%s exit %d: %d starts", tc.policy, tc.code, n)
			}
			if tc.phase != "Running" && (len(b.net.pods) != 0 || len(b.vols.pods) != 0) {
				t.Fatalf("a finished pod holds %v %v", b.net.pods, b.vols.pods)
			}
			// A finished pod stays, also over an agent restart, and is not run again.
			if tc.phase != "Running" {
				b.stop()
				b.start()
				b.after(time.Minute)
				b.want("uid-a", tc.phase)
				if n := len(b.rt.started()); n != tc.starts {
					t.Fatalf("a finished pod was run again")
				}
			}
		})
	}
}

func TestProbesGateReadiness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		up := false
		b.net.dial = func(int32) error {
			if up {
				return nil
			}
			return errors.New("connection refused")
		}
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) {
			p.Spec.Containers[0].ReadinessProbe = tcpProbe(5, 3)
			p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "x/gate"}}
			p.Status.Conditions = []corev1.PodCondition{{Type: "x/gate", Status: corev1.ConditionTrue}}
		}))
		b.start()
		defer b.stop()
		b.after(3 * time.Second)
		b.want("uid-a", "Running")
		b.net.mu.Lock()
		up = true
		b.net.mu.Unlock()
		b.after(5 * time.Second)
		b.want("uid-a", "Running+Ready")
		b.net.mu.Lock()
		up = false
		b.net.mu.Unlock()
		b.after(10 * time.Second)
		b.want("uid-a", "Running+Ready") // two failures are below the threshold
		b.after(6 * time.Second)
		st := b.want("uid-a", "Running")
		if st.Phase != corev1.PodRunning || st.ContainerStatuses[0].RestartCount != 0 {
			t.Fatalf("a failed readiness probe must not restart: %+v", st)
		}
	})
}

func tcpProbe(period, failures int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8080)}},
		PeriodSeconds: period, FailureThreshold: failures, TimeoutSeconds: 1, SuccessThreshold: 1,
	}
}

// TestSlowStart: a program that needs 90 s to listen is killed by a liveness
// probe, and the event says so; with a startup probe it is not.
func TestSlowStart(t *testing.T) {
	for _, withStartup := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t)
			var since time.Time
			b.rt.onStart = func(workload.Spec, *workload.State) error {
				since = time.Now()
				return nil
			}
			b.net.dial = func(int32) error {
				if time.Since(since) < 90*time.Second {
					return errors.New("connection refused")
				}
				return nil
			}
			b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) {
				p.Spec.Containers[0].LivenessProbe = tcpProbe(5, 3)
				if withStartup {
					p.Spec.Containers[0].StartupProbe = tcpProbe(5, 30)
				}
			}))
			b.start()
			defer b.stop()
			b.after(3 * time.Minute)
			killed := slices.ContainsFunc(b.link.events, func(e wire.EventReport) bool {
				return e.Reason == "Killing" && strings.Contains(e.Message, "killed during start-up")
			})
			if withStartup {
				b.want("uid-a", "Running+Ready")
			}
			if killed == withStartup || (len(b.rt.started()) > 1) == withStartup {
				t.Fatalf("startup probe %v: killed %v, %d starts", withStartup, killed, len(b.rt.started()))
			}
		})
	}
}

func TestTermination(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.onStop = func(workload.ID) time.Duration { return 4 * time.Second }
		always := corev1.ContainerRestartPolicyAlways
		pod := wasmPod("a", func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "side", Image: "s.wasm", RestartPolicy: &always}}
			p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 7}}}
		})
		b.link.put("Pod", pod)
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.want("uid-a", "Running+Ready")
		b.link.put("Pod", deleted(pod, 30))
		b.after(time.Second)
		b.want("uid-a", "Running+Ready") // it serves until the hook ends
		if len(b.rt.stops) != 0 {
			t.Fatal("stopped before preStop ended")
		}
		b.after(7 * time.Second)
		b.want("uid-a", "Running") // and listens no more
		if g := b.rt.stops[workload.ID{PodUID: "uid-a", Container: "main"}]; g != 23*time.Second {
			t.Fatalf("grace after the hook: %v", g)
		}
		if len(b.rt.stops) != 1 {
			t.Fatal("the sidecar must outlive the main container")
		}
		b.after(10 * time.Second)
		if g := b.rt.stops[workload.ID{PodUID: "uid-a", Container: "side"}]; g < 18*time.Second || g > 19*time.Second {
			t.Fatalf("grace of the sidecar: %v", g)
		}
		if !b.link.gone["uid-a"] {
			t.Fatal("not gone")
		}
	})
}

// TestForceDelete: a stop under way is cut short when grace shrinks, and a
// pod that vanishes from the assignment is stopped too.
func TestGraceShortened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.onStop = func(workload.ID) time.Duration { return time.Hour }
		pod := wasmPod("a")
		b.link.put("Pod", pod)
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.link.put("Pod", deleted(pod, 3000))
		b.after(5 * time.Second)
		b.link.put("Pod", deleted(pod, 10))
		b.after(8 * time.Second)
		if len(b.rt.killed) != 1 || !b.link.gone["uid-a"] {
			t.Fatalf("killed %v, gone %v", b.rt.killed, b.link.gone)
		}
	})
}

func TestInitContainers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		fails := 2
		b.rt.onStart = func(s workload.Spec, st *workload.State) error {
			if strings.HasPrefix(s.ID.Container, "init") {
				code := 0
				if s.ID.Container == "init-2" && fails > 0 {
					fails, code = fails-1, 1
				}
				time.AfterFunc(time.Second, func() { b.rt.end(s.ID, code, "") })
			}
			return nil
		}
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "init-1", Image: "i.wasm"}, {Name: "init-2", Image: "i.wasm"}}
		}))
		b.start()
		defer b.stop()
		b.after(1500 * time.Millisecond)
		st := b.want("uid-a", "Pending")
		if condition(st, corev1.PodInitialized) != corev1.ConditionFalse || st.ContainerStatuses[0].State.Waiting.Reason != "PodInitializing" {
			t.Fatalf("status %+v", st)
		}
		b.after(30 * time.Second)
		st = b.want("uid-a", "Running+Ready")
		var order []string
		for _, id := range b.rt.started() {
			order = append(order, id.Container)
		}
		if !slices.Equal(order, []string{"init-1", "init-2", "init-2", "init-2", "main"}) {
			t.Fatalf("order %v", order)
		}
		if st.InitContainerStatuses[1].RestartCount != 2 || condition(st, corev1.PodInitialized) != corev1.ConditionTrue {
			t.Fatalf("status %+v", st)
		}
		// After a reboot of the machine all of it runs again, in order.
		b.stop()
		b.rt.states = map[workload.ID]*workload.State{}
		b.rt.starts = nil
		b.c.MachineBoot = "boot-2"
		b.start()
		b.after(time.Second)
		b.want("uid-a", "Running") // while its init containers run, too
		b.after(9 * time.Second)
		b.want("uid-a", "Running+Ready")
		if n := len(b.rt.started()); n != 3 {
			t.Fatalf("after a reboot: %v", b.rt.started())
		}
	})
}

func TestInitFailureForGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.onStart = func(s workload.Spec, st *workload.State) error {
			time.AfterFunc(time.Second, func() { b.rt.end(s.ID, 1, "") })
			return nil
		}
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) {
			p.Spec.RestartPolicy = corev1.RestartPolicyNever
			p.Spec.InitContainers = []corev1.Container{{Name: "init-1", Image: "i.wasm"}}
		}))
		b.start()
		defer b.stop()
		b.after(5 * time.Second)
		b.want("uid-a", "Failed")
	})
}

func TestActiveDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		deadline := int64(60)
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = &deadline }))
		b.start()
		defer b.stop()
		b.after(59 * time.Second)
		b.want("uid-a", "Running+Ready")
		b.after(2 * time.Second)
		if st := b.want("uid-a", "Failed"); st.Reason != "DeadlineExceeded" {
			t.Fatalf("reason %q", st.Reason)
		}
	})
}
