package node

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/node/eviction"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// leakyMachine has the memory that its pods leave.
type leakyMachine struct {
	rt    *stubRuntime
	total int64
}

func (m *leakyMachine) Facts() MachineFacts {
	m.rt.mu.Lock()
	defer m.rt.mu.Unlock()
	free := m.total
	for id, st := range m.rt.states {
		if st.Phase == workload.Running {
			free -= int64(m.rt.usage[id.PodUID].MemoryBytes)
		}
	}
	return MachineFacts{CPUMilli: 2000, Memory: m.total, FreeMemory: &SupplyFacts{m.total, free}, Addresses: []string{"192.0.2.1"}}
}

func prioritized(name string, priority int32, request string) *corev1.Pod {
	return wasmPod(name, func(p *corev1.Pod) {
		p.Spec.Priority = &priority
		if request != "" {
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse(request)}
		}
	})
}

// TestMemoryPressureEvicts: the leaker goes, with upstream's words; who stays
// within what it asked for, and critical pods, go on; new pods that ask for
// nothing are refused; and it is over by itself.
func TestMemoryPressureEvicts(t *testing.T) {
	const mi = 1 << 20
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		m := &leakyMachine{rt: b.rt, total: 200 * mi}
		b.c.Machine = m
		b.rt.usage = map[string]workload.Stats{}
		use := func(uid string, bytes uint64) {
			b.rt.mu.Lock()
			defer b.rt.mu.Unlock()
			b.rt.usage[uid] = workload.Stats{MemoryBytes: bytes}
		}
		for _, p := range []*corev1.Pod{prioritized("critical", 2_000_000_000, ""), prioritized("modest", 0, "50Mi"), prioritized("high", 100, ""), prioritized("leaker", 0, "")} {
			b.link.put("Pod", p)
		}
		b.start()
		defer func() { b.stop() }()
		b.after(20 * time.Second)
		use("uid-critical", 90*mi)
		use("uid-modest", 40*mi)
		use("uid-high", 25*mi)
		use("uid-leaker", 30*mi)
		b.after(20 * time.Second)
		st := b.want("uid-leaker", "Failed")
		for _, want := range []string{"The node was low on resource: memory. Threshold quantity: 20Mi, available: 15Mi. ",
			"Container main was using 30Mi, request is 0, has larger consumption of memory. "} {
			if st.Reason != "Evicted" || !strings.Contains(st.Message, want) {
				t.Errorf("%s: %s, want %q", st.Reason, st.Message, want)
			}
		}
		if c := condition(st, corev1.DisruptionTarget); c != corev1.ConditionTrue {
			t.Errorf("DisruptionTarget %q", c)
		}
		if got := b.rt.stops[workload.ID{PodUID: "uid-leaker", Container: "main"}]; got > hardGrace+time.Second {
			t.Errorf("it got %s to end", got)
		}
		for _, uid := range []string{"uid-critical", "uid-modest", "uid-high"} {
			b.want(uid, "Running+Ready")
		}
		pressure := func() corev1.ConditionStatus {
			i := slices.IndexFunc(b.link.node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeMemoryPressure })
			return b.link.node.Status.Conditions[i].Status
		}
		if pressure() != corev1.ConditionTrue {
			t.Error("no condition")
		}
		b.link.put("Pod", wasmPod("late"))
		b.link.put("Pod", prioritized("asks", 0, "1Mi"))
		b.after(time.Second)
		if st := b.want("uid-late", "Failed"); st.Reason != "Evicted" || st.Message != "The node had condition: [MemoryPressure]. " {
			t.Errorf("%s: %s", st.Reason, st.Message)
		}
		b.want("uid-asks", "Running+Ready")
		// A restart of the agent starts nothing again.
		b.stop()
		b.start()
		b.after(6 * time.Minute)
		if pressure() != corev1.ConditionFalse {
			t.Error("the condition stays")
		}
		if got := len(b.rt.running()); got != 4 {
			t.Errorf("%d run", got)
		}
		// Who asked for as much as it uses goes last of those that may, and only
		// after the one that uses more, and one at a time.
		use("uid-critical", 150*mi)
		b.after(time.Minute)
		b.want("uid-high", "Failed")
		b.want("uid-modest", "Failed")
		b.want("uid-critical", "Running+Ready")
		if got := b.rt.running(); len(got) != 2 { // the other uses nothing that would help
			t.Errorf("%v run", got)
		}
	})
}

// TestSoftThresholdGivesTime: it is met for its grace before a pod goes, and
// the pod has its own time to end.
func TestSoftThresholdGivesTime(t *testing.T) {
	const mi = 1 << 20
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		c, err := eviction.Flags{Hard: "memory.available<1Mi", Soft: "memory.available<50Mi", SoftGrace: "memory.available=2m"}.Parse()
		if err != nil {
			t.Fatal(err)
		}
		b.c.Eviction = c
		b.c.Machine = &leakyMachine{rt: b.rt, total: 200 * mi}
		b.rt.usage = map[string]workload.Stats{"uid-a": {MemoryBytes: 180 * mi}}
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(110 * time.Second)
		b.want("uid-a", "Running+Ready")
		b.after(2 * time.Minute)
		b.want("uid-a", "Failed")
		if got := b.rt.stops[workload.ID{PodUID: "uid-a", Container: "main"}]; got < 25*time.Second {
			t.Errorf("it got %s to end", got)
		}
	})
}
