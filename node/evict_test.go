package node

import (
	"context"
	"errors"
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

// heldVolumes take space on the disk, or memory, until they are taken down,
// which takes its time, or never ends.
type heldVolumes struct {
	*stubVolumes
	takes map[string]int64
	slow  time.Duration
	stuck bool
}

func (v *heldVolumes) DiskUsage(uid string) (bytes, inodes int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.takes[uid], 1
}

func (v *heldVolumes) Teardown(ctx context.Context, uid string) error {
	if v.stuck {
		return errors.New("device or resource busy")
	}
	time.Sleep(v.slow)
	return v.stubVolumes.Teardown(ctx, uid)
}

func (v *heldVolumes) left(total int64) int64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	for uid := range v.pods {
		total -= v.takes[uid]
	}
	return total
}

// volumeMachine has the disk, or with ram the memory, that volumes leave.
type volumeMachine struct {
	v     *heldVolumes
	total int64
	ram   bool
}

func (m *volumeMachine) Facts() MachineFacts {
	f := MachineFacts{CPUMilli: 2000, Memory: 200 << 20, Addresses: []string{"192.0.2.1"}}
	if m.ram {
		f.FreeMemory = &SupplyFacts{200 << 20, m.v.left(m.total)}
	} else {
		f.Disk = &DiskFacts{Path: "/s", Size: 200 << 20, Free: m.v.left(m.total)}
	}
	return f
}

// TestNextGoesOnlyAfterTheFirstIsTakenDown: what an evicted pod's volumes hold
// is not free before they are gone. The next pod does not go for what the
// first one frees; but a volume that cannot be removed stops evictions for a
// minute only, and those for another thing not at all.
func TestNextGoesOnlyAfterTheFirstIsTakenDown(t *testing.T) {
	const mi = 1 << 20
	for name, c := range map[string]struct {
		slow       time.Duration
		stuck, ram bool
		medium     corev1.StorageMedium
		from, to   time.Duration // when the second goes, after the first; 0: never
	}{
		"disk":            {slow: 15 * time.Second},
		"disk, slow":      {slow: 50 * time.Second},
		"disk, stuck":     {stuck: true, from: 55 * time.Second, to: 90 * time.Second},
		"memory volume":   {slow: 15 * time.Second, ram: true, medium: corev1.StorageMediumMemory},
		"memory, no wait": {stuck: true, ram: true, to: 15 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t)
				v := &heldVolumes{stubVolumes: b.vols, takes: map[string]int64{}, slow: c.slow, stuck: c.stuck}
				b.c.Volumes, b.c.Machine = v, &volumeMachine{v, 80 * mi, c.ram}
				b.rt.usage = map[string]workload.Stats{"uid-large": {MemoryBytes: 20 * mi}, "uid-small": {MemoryBytes: 10 * mi}}
				for _, pod := range []string{"large", "small"} {
					b.link.put("Pod", wasmPod(pod, func(p *corev1.Pod) {
						p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: c.medium}}}}
					}))
				}
				b.start()
				defer b.stop()
				b.after(15 * time.Second)
				v.mu.Lock()
				v.takes["uid-large"], v.takes["uid-small"] = 60*mi, 8*mi // 12 of 200 are left
				v.mu.Unlock()
				gone := func(uid string, within time.Duration) time.Duration {
					for n := time.Duration(0); n < within; n += time.Second {
						if b.link.statusOf(uid).Reason == reasonEvicted {
							return n
						}
						b.after(time.Second)
					}
					return -1
				}
				if gone("uid-large", 30*time.Second) < 0 {
					t.Fatal("not evicted")
				}
				if says := b.link.statusOf("uid-large").Message; !c.ram && !strings.Contains(says, "The pod was using 60Mi, request is 0. ") {
					t.Errorf("%q", says)
				}
				after := gone("uid-small", 3*time.Minute)
				if (after < 0) != (c.to == 0) || after >= 0 && after < c.from || after > c.to {
					t.Errorf("the second went after %s, want %s to %s", after, c.from, c.to)
				}
			})
		})
	}
}
