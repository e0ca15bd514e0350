package node

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

func podHere(t *testing.T, a *Agent, name string) *corev1.Pod {
	t.Helper()
	pods := a.Pods()
	i := slices.IndexFunc(pods, func(p *corev1.Pod) bool { return p.Name == name })
	if i < 0 {
		t.Fatalf("pod %s is not shown: %v", name, pods)
	}
	return pods[i]
}

// TestPodsWithoutAnyServer: after an offline boot the node shows its pods and
// itself as they are, and what happened.
func TestPodsWithoutAnyServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("Pod", wasmPod("a"))
		b.link.put("Pod", wasmPod("crasher", func(p *corev1.Pod) {
			p.Spec.Containers[0].Image = "crasher.wasm"
			p.Status.Conditions = []corev1.PodCondition{
				{Type: corev1.DisruptionTarget, Status: "True", Reason: "NodeUnreachable"}, {Type: "example.com/Gate", Status: "True"},
			}
		}))
		b.link.put("Pod", wasmPod("noimage", func(p *corev1.Pod) { p.Spec.Containers[0].Image = "missing.wasm" }))
		b.link.put("Node", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "uid-n1", Labels: map[string]string{"site": "north"}}, Spec: corev1.NodeSpec{Unschedulable: true}})
		b.rt.onPrepare = func(image string) (workload.ImageState, error) {
			if image == "missing.wasm" {
				return workload.ImageState{}, &workload.StartError{Reason: "ErrImageNeverPull", Message: "not here"}
			}
			return workload.ImageState{Digest: "sha256:" + image}, nil
		}
		b.rt.onStart = func(s workload.Spec, st *workload.State) error {
			if s.Image == "crasher.wasm" {
				time.AfterFunc(time.Second, func() { b.rt.end(s.ID, 1, "Trap") })
			}
			return nil
		}
		b.start()
		b.after(time.Second)
		b.stop()
		b.link.setCut(true)
		b.start()
		defer b.stop()
		b.after(20 * time.Second)

		if p := podHere(t, b.agent, "a"); p.Status.Phase != corev1.PodRunning || condition(p.Status, corev1.PodReady) != corev1.ConditionTrue || p.Kind != "Pod" || p.Status.PodIP == "" {
			t.Errorf("a: %+v", p)
		}
		p := podHere(t, b.agent, "crasher")
		if s := p.Status.ContainerStatuses[0]; s.State.Waiting == nil || s.State.Waiting.Reason != "CrashLoopBackOff" || s.LastTerminationState.Terminated.Reason != "Trap" {
			t.Errorf("crasher: %+v", s)
		}
		if condition(p.Status, corev1.DisruptionTarget) != "" || condition(p.Status, "example.com/Gate") != corev1.ConditionTrue {
			t.Errorf("conditions of others: %+v", p.Status.Conditions)
		}
		if s := podHere(t, b.agent, "noimage").Status.ContainerStatuses[0]; s.State.Waiting == nil || s.State.Waiting.Message != "not here" {
			t.Errorf("noimage: %+v", s)
		}
		n := b.agent.Node()
		if n.Name != "n1" || n.UID != "uid-n1" || n.Labels["site"] != "north" || n.Labels[corev1.LabelHostname] != "n1" || !n.Spec.Unschedulable || len(n.Status.Conditions) == 0 {
			t.Errorf("node: %+v", n)
		}
		events := b.agent.WaitingEvents()
		if !slices.ContainsFunc(events, func(e corev1.Event) bool {
			return e.InvolvedObject.Name == "crasher" && e.Reason == "BackOff" && e.InvolvedObject.UID == "uid-crasher"
		}) {
			t.Errorf("events: %+v", events)
		}
		// What is handed out is a copy.
		p.Status.Phase, p.Labels = "changed", map[string]string{"changed": "yes"}
		if q := podHere(t, b.agent, "crasher"); q.Status.Phase == "changed" || q.Labels["changed"] != "" {
			t.Error("the agent's own object was handed out")
		}
	})
}

// TestPodsShowWhatIsHeldBack: an adopted container's readiness is held back
// from the cluster until its first probe, and shown here meanwhile.
func TestPodsShowWhatIsHeldBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) {
			p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(80)}}, PeriodSeconds: 60, FailureThreshold: 3, TimeoutSeconds: 30}
		}))
		b.start()
		b.after(time.Minute + time.Second)
		b.want("uid-a", "Running+Ready")
		b.stop()
		b.link.setCut(true)
		b.net.dial = func(int32) error { time.Sleep(20 * time.Second); return errors.New("slow") }
		b.start()
		defer b.stop()
		b.after(5 * time.Second)
		p := podHere(t, b.agent, "a")
		if p.Status.Phase != corev1.PodRunning || len(p.Status.ContainerStatuses) != 1 || p.Status.ContainerStatuses[0].State.Running == nil {
			t.Errorf("held back and not shown: %+v", p.Status)
		}
		if b.agent.reports.waiting().pods != 0 {
			t.Error("held back and reported all the same")
		}
	})
}

// TestDeletedPodIsShownAsTerminating: also while its guest has not ended.
func TestDeletedPodIsShownAsTerminating(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.onStop = func(workload.ID) time.Duration { return 20 * time.Second }
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.link.put("Pod", deleted(wasmPod("a"), 30))
		b.after(5 * time.Second)
		if p := podHere(t, b.agent, "a"); p.DeletionTimestamp == nil {
			t.Errorf("%+v", p.ObjectMeta)
		}
		b.after(30 * time.Second)
		if pods := b.agent.Pods(); len(pods) != 0 {
			t.Errorf("gone and still shown: %v", pods)
		}
	})
}

// scrape reads the agent's figures: "name{label=value}" to value, histograms
// by their counts.
func scrape(t *testing.T, a *Agent) map[string]float64 {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(a)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "dunlin_agent_")
			for _, l := range m.GetLabel() {
				name += "," + l.GetValue()
			}
			out[name] = valueOf(m)
		}
	}
	return out
}

func valueOf(m *dto.Metric) float64 {
	switch {
	case m.GetHistogram() != nil:
		return float64(m.GetHistogram().GetSampleCount())
	case m.GetCounter() != nil:
		return m.GetCounter().GetValue()
	}
	return m.GetGauge().GetValue()
}

func TestFigures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) {
			p.Spec.Containers[0].LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(80)}}, PeriodSeconds: 10}
		}))
		b.link.put("Pod", wasmPod("crasher", func(p *corev1.Pod) { p.Spec.Containers[0].Image = "crasher.wasm" }))
		b.link.put("Pod", wasmPod("once", func(p *corev1.Pod) {
			p.Spec.RestartPolicy, p.Spec.Containers[0].Image = corev1.RestartPolicyNever, "once.wasm"
		}))
		b.rt.onStart = func(s workload.Spec, st *workload.State) error {
			switch s.Image {
			case "crasher.wasm":
				time.AfterFunc(time.Second, func() { b.rt.end(s.ID, 1, "Trap") })
			case "once.wasm":
				time.AfterFunc(time.Second, func() { b.rt.end(s.ID, 0, "Completed") })
			}
			return nil
		}
		b.start()
		b.after(8 * time.Second) // crasher: started at 0, again at 1, waits from 2 to 12
		want := func(m map[string]float64, values map[string]float64) {
			t.Helper()
			for k, v := range values {
				if got, ok := m[k]; !ok || got != v {
					t.Errorf("%s is %v (%v), want %v", k, got, ok, v)
				}
			}
		}
		m := scrape(t, b.agent)
		want(m, map[string]float64{
			"pods,Running": 2, "pods,Succeeded": 1, "pods,Pending": 0, "pods,Failed": 0, "pods,Unknown": 0,
			"containers,running": 1, "containers,waiting": 1, "containers,terminated": 1,
			"container_starts_total": 4, "container_restarts_total": 1, "pod_restarts": 1, "container_start_seconds": 4, "pod_start_seconds": 3,
			"container_exits_total,Trap": 2, "container_exits_total,Completed": 1, "container_exits_total,OOMKilled": 0,
			"probes_total,liveness,ok": 1, "probes_total,liveness,failure": 0, "image_prepares_total,error": 0,
			"reports_total,error": 0, "unreported_pods": 0, "events_waiting": 0, "events_dropped_total": 0,
		})
		if m["assignment_pulls_total,ok"] < 1 || m["reports_total,ok"] < 1 || m["image_prepares_total,ok"] < 3 || m["report_age_seconds"] > 8 || m["assignment_age_seconds"] > 8 {
			t.Errorf("%v", m)
		}
		// Cut off: errors are counted, ages rise, news wait.
		b.link.setCut(true)
		b.after(10 * time.Minute)
		m = scrape(t, b.agent)
		if m["reports_total,error"] < 1 || m["assignment_pulls_total,error"] < 1 || m["report_age_seconds"] < 590 || m["unreported_pods"] != 1 || m["events_waiting"] < 1 {
			t.Errorf("cut off: %v", m)
		}
		b.stop()
		// A pod that an earlier agent started does not count as a slow start.
		b.start()
		defer b.stop()
		b.after(time.Second)
		m = scrape(t, b.agent)
		want(m, map[string]float64{"pod_start_seconds": 0, "pods,Running": 2})
		if _, ok := m["report_age_seconds"]; ok {
			t.Errorf("an age of what never happened: %v", m)
		}
	})
}

// TestFiguresDoNotGrowWithPods: the number of series is fixed.
func TestFiguresDoNotGrowWithPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Second)
		few := len(scrape(t, b.agent))
		for _, n := range []string{"b", "c", "d", "e", "f"} {
			b.link.put("Pod", wasmPod(n))
		}
		b.rt.onStart = func(s workload.Spec, _ *workload.State) error {
			time.AfterFunc(time.Second, func() { b.rt.end(s.ID, 9, "SomethingNew"+s.ID.PodUID) })
			return nil
		}
		b.after(time.Minute)
		if m := scrape(t, b.agent); len(m) != few || m["container_exits_total,other"] < 5 {
			t.Fatalf("%d series, %d with one pod: %v", len(m), few, m)
		}
	})
}
