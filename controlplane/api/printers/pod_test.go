package printers

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
)

var now = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

type podOption func(*corev1.Pod)

func pod(phase corev1.PodPhase, opts ...podOption) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "d", CreationTimestamp: ago(time.Hour)}}
	p.Status.Phase = phase
	for _, o := range opts {
		o(p)
	}
	return p
}

func running(ready bool) corev1.ContainerStatus {
	started := true
	return corev1.ContainerStatus{Ready: ready, Started: &started, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
}

func waiting(reason string) corev1.ContainerStatus {
	return corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}
}

func ended(code, signal int32, reason string) corev1.ContainerStatus {
	return corev1.ContainerStatus{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Signal: signal, Reason: reason}}}
}

func restarted(s corev1.ContainerStatus, n int32, at metav1.Time) corev1.ContainerStatus {
	s.RestartCount = n
	if !at.IsZero() {
		s.LastTerminationState.Terminated = &corev1.ContainerStateTerminated{FinishedAt: at}
	}
	return s
}

// main adds containers with these states.
func main(list ...corev1.ContainerStatus) podOption {
	return func(p *corev1.Pod) {
		for i, s := range list {
			s.Name = "c" + string(rune('0'+i))
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: s.Name})
			p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, s)
		}
	}
}

func inits(sidecar bool, list ...corev1.ContainerStatus) podOption {
	return func(p *corev1.Pod) {
		for _, s := range list {
			s.Name = "i" + string(rune('0'+len(p.Spec.InitContainers)))
			c := corev1.Container{Name: s.Name}
			if sidecar {
				always := corev1.ContainerRestartPolicyAlways
				c.RestartPolicy = &always
			}
			p.Spec.InitContainers = append(p.Spec.InitContainers, c)
			p.Status.InitContainerStatuses = append(p.Status.InitContainerStatuses, s)
		}
	}
}

func condition(t corev1.PodConditionType, ok bool, reason string) podOption {
	status := corev1.ConditionFalse
	if ok {
		status = corev1.ConditionTrue
	}
	return func(p *corev1.Pod) {
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: t, Status: status, Reason: reason})
	}
}

func deleting(p *corev1.Pod) { d := ago(0); p.DeletionTimestamp = &d }

func reason(r string) podOption { return func(p *corev1.Pod) { p.Status.Reason = r } }

func TestPodCells(t *testing.T) {
	never := metav1.Time{}
	for _, c := range []struct {
		name                     string
		pod                      *corev1.Pod
		ready, status, restartsS string
	}{
		{"nothing known yet", pod(corev1.PodPending, main(corev1.ContainerStatus{})), "0/1", "Pending", "0"},
		{"no phase at all", pod(""), "0/0", "", "0"},
		{"running", pod(corev1.PodRunning, main(running(true), running(true))), "2/2", "Running", "0"},
		{"one not ready", pod(corev1.PodRunning, main(running(true), running(false))), "1/2", "Running", "0"},
		{"creating", pod(corev1.PodPending, main(waiting("ContainerCreating"))), "0/1", "ContainerCreating", "0"},
		{"crash loop", pod(corev1.PodRunning, main(restarted(waiting("CrashLoopBackOff"), 3, ago(5*time.Minute)))), "0/1", "CrashLoopBackOff", "3 (5m ago)"},
		{"restarts without a date", pod(corev1.PodRunning, main(restarted(running(true), 3, never))), "1/1", "Running", "3"},
		{"newest restart counts", pod(corev1.PodRunning, main(restarted(running(true), 3, ago(2*time.Hour)), restarted(running(true), 1, ago(90*time.Second)))), "2/2", "Running", "4 (90s ago)"},
		{"image", pod(corev1.PodPending, main(waiting("ErrImagePull"), running(true))), "1/2", "ErrImagePull", "0"},
		{"first trouble wins", pod(corev1.PodPending, main(waiting("ErrImagePull"), waiting("CrashLoopBackOff"))), "0/2", "ErrImagePull", "0"},
		{"waiting without a reason", pod(corev1.PodPending, main(waiting(""))), "0/1", "Pending", "0"},
		{"completed", pod(corev1.PodSucceeded, main(ended(0, 0, "Completed"))), "0/1", "Completed", "0"},
		{"failed", pod(corev1.PodFailed, main(ended(1, 0, "Error"))), "0/1", "Error", "0"},
		{"OOM", pod(corev1.PodRunning, main(ended(137, 9, "OOMKilled"))), "0/1", "OOMKilled", "0"},
		{"exit code only", pod(corev1.PodRunning, main(ended(3, 0, ""))), "0/1", "ExitCode:3", "0"},
		{"signal only", pod(corev1.PodRunning, main(ended(139, 11, ""))), "0/1", "Signal:11", "0"},
		{"exit 0 without a reason", pod(corev1.PodSucceeded, main(ended(0, 0, ""))), "0/1", "ExitCode:0", "0"},
		{"one completed, one runs, pod ready", pod(corev1.PodRunning, main(ended(0, 0, "Completed"), running(true)), condition(corev1.PodReady, true, "")), "1/2", "Running", "0"},
		{"one completed, one runs, pod not ready", pod(corev1.PodRunning, main(ended(0, 0, "Completed"), running(true))), "1/2", "NotReady", "0"},
		{"first completed, second failed", pod(corev1.PodFailed, main(ended(0, 0, "Completed"), ended(1, 0, "Error"))), "0/2", "Error", "0"},
		{"failed beats not ready", pod(corev1.PodRunning, main(ended(0, 0, "Completed"), ended(1, 0, "Error"), running(true))), "1/3", "Error", "0"},
		{"evicted", pod(corev1.PodFailed, main(), reason("Evicted")), "0/0", "Evicted", "0"},
		{"no resources on the node", pod(corev1.PodFailed, reason("OutOfcpu")), "0/0", "OutOfcpu", "0"},
		{"gated", pod(corev1.PodPending, condition(corev1.PodScheduled, false, corev1.PodReasonSchedulingGated)), "0/0", "SchedulingGated", "0"},
		{"unschedulable", pod(corev1.PodPending, condition(corev1.PodScheduled, false, corev1.PodReasonUnschedulable)), "0/0", "Pending", "0"},

		{"init running", pod(corev1.PodPending, inits(false, running(false), waiting("PodInitializing")), main(waiting("PodInitializing"))), "0/1", "Init:0/2", "0"},
		{"second init", pod(corev1.PodPending, inits(false, ended(0, 0, "Completed"), waiting("PodInitializing")), main(waiting("PodInitializing"))), "0/1", "Init:1/2", "0"},
		{"init crash loop", pod(corev1.PodPending, inits(false, restarted(waiting("CrashLoopBackOff"), 4, ago(10*time.Second))), main(waiting("PodInitializing"))), "0/1", "Init:CrashLoopBackOff", "4 (10s ago)"},
		{"init failed", pod(corev1.PodFailed, inits(false, ended(1, 0, "Error")), main(waiting("PodInitializing"))), "0/1", "Init:Error", "0"},
		{"init exit code", pod(corev1.PodPending, inits(false, ended(7, 0, "")), main(waiting("PodInitializing"))), "0/1", "Init:ExitCode:7", "0"},
		{"init signal", pod(corev1.PodPending, inits(false, ended(137, 9, "")), main(waiting("PodInitializing"))), "0/1", "Init:Signal:9", "0"},
		{"inits done, starting", pod(corev1.PodPending, inits(false, ended(0, 0, "Completed")), main(waiting("PodInitializing")), condition(corev1.PodInitialized, true, "")), "0/1", "PodInitializing", "0"},
		{"init restarts do not count later", pod(corev1.PodRunning, inits(false, restarted(ended(0, 0, "Completed"), 5, ago(time.Hour))), main(restarted(running(true), 1, ago(time.Minute)))), "1/1", "Running", "1 (60s ago)"},
		{"initialized outranks a late init state", pod(corev1.PodRunning, inits(false, waiting("PodInitializing")), main(running(true)), condition(corev1.PodInitialized, true, "")), "1/1", "Init:0/1", "0"},

		{"sidecar counts", pod(corev1.PodRunning, inits(true, running(true)), main(running(true))), "2/2", "Running", "0"},
		{"sidecar not ready", pod(corev1.PodRunning, inits(true, running(false)), main(running(true))), "1/2", "Running", "0"},
		{"sidecar not started", pod(corev1.PodPending, inits(true, waiting("PodInitializing")), main(waiting("PodInitializing"))), "0/2", "Init:0/1", "0"},
		{"sidecar restarts stay", pod(corev1.PodRunning, inits(true, restarted(running(true), 2, ago(time.Minute))), main(running(true))), "2/2", "Running", "2 (60s ago)"},

		{"terminating", pod(corev1.PodRunning, main(running(true)), deleting), "1/1", "Terminating", "0"},
		{"terminating after a crash", pod(corev1.PodRunning, main(waiting("CrashLoopBackOff")), deleting), "0/1", "Terminating", "0"},
		{"deleted when done", pod(corev1.PodSucceeded, main(ended(0, 0, "Completed")), deleting), "0/1", "Completed", "0"},
		{"deleted when failed", pod(corev1.PodFailed, main(ended(1, 0, "Error")), deleting), "0/1", "Error", "0"},
		{"node lost", pod(corev1.PodRunning, main(running(true)), reason("NodeLost")), "1/1", "NodeLost", "0"},
		{"node lost and deleting", pod(corev1.PodRunning, main(running(true)), reason("NodeLost"), deleting), "1/1", "Unknown", "0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cells, _ := podRow(c.pod, now)
			if cells[1] != c.ready || cells[2] != c.status || cells[3] != c.restartsS {
				t.Errorf("got READY %v, STATUS %v, RESTARTS %v; want %s, %s, %s", cells[1], cells[2], cells[3], c.ready, c.status, c.restartsS)
			}
		})
	}
}

func TestPodWideCells(t *testing.T) {
	p := pod(corev1.PodRunning, condition("a.example/x", true, ""), condition("a.example/y", false, ""))
	cells, _ := podRow(p, now)
	for i := 5; i < 9; i++ {
		if cells[i] != none {
			t.Errorf("cell %d is %v", i, cells[i])
		}
	}
	p.Status.PodIP, p.Spec.NodeName, p.Status.NominatedNodeName = "10.0.0.9", "n1", "n2"
	p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "a.example/x"}, {ConditionType: "a.example/y"}, {ConditionType: "a.example/z"}}
	cells, _ = podRow(p, now)
	for i, want := range []any{"60m", "10.0.0.9", "n1", "n2", "1/3"} {
		if cells[4+i] != want {
			t.Errorf("cell %d is %v, want %v", 4+i, cells[4+i], want)
		}
	}
}

func TestFinishedPodsCarryACondition(t *testing.T) {
	for phase, want := range map[corev1.PodPhase]int{corev1.PodRunning: 0, corev1.PodSucceeded: 1, corev1.PodFailed: 1} {
		if _, conditions := podRow(pod(phase), now); len(conditions) != want {
			t.Errorf("%s: %v", phase, conditions)
		}
	}
}

// TestPodSummaryInvariants: whatever a node reports, the columns stay within
// their bounds and nothing panics.
func TestPodSummaryInvariants(t *testing.T) {
	state := rapid.Custom(func(t *rapid.T) corev1.ContainerStatus {
		s := rapid.SampledFrom([]corev1.ContainerStatus{
			{}, running(true), running(false), waiting(""), waiting("CrashLoopBackOff"), waiting("PodInitializing"),
			ended(0, 0, "Completed"), ended(1, 0, "Error"), ended(0, 0, ""), ended(137, 9, ""),
		}).Draw(t, "state")
		if rapid.Bool().Draw(t, "restarted") {
			s = restarted(s, rapid.Int32Range(1, 9).Draw(t, "n"), ago(time.Minute))
		}
		return s
	})
	rapid.Check(t, func(t *rapid.T) {
		phase := rapid.SampledFrom([]corev1.PodPhase{"", corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded, corev1.PodFailed}).Draw(t, "phase")
		p := pod(phase,
			inits(true, rapid.SliceOfN(state, 0, 3).Draw(t, "sidecars")...),
			inits(false, rapid.SliceOfN(state, 0, 3).Draw(t, "inits")...),
			main(rapid.SliceOfN(state, 0, 3).Draw(t, "containers")...))
		if rapid.Bool().Draw(t, "deleting") {
			deleting(p)
		}
		s := SummarizePod(p)
		if s.Ready < 0 || s.Ready > s.Total || s.Restarts < 0 {
			t.Fatalf("%+v", s)
		}
		if phase != "" && s.Reason == "" {
			t.Fatalf("no reason: %+v", s)
		}
		if p.DeletionTimestamp != nil && phase == corev1.PodRunning && s.Reason != "Terminating" {
			t.Fatalf("%+v", s)
		}
	})
}
