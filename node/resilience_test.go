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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

// TestAgentRestartAdopts: with 20 pods running, an agent restart restarts
// nothing, changes no status, and works without a network.
func TestAgentRestartAdopts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		for i := range 20 {
			b.link.put("Pod", wasmPod(fmt.Sprint("p", i), func(p *corev1.Pod) {
				p.Spec.Containers[0].ReadinessProbe = tcpProbe(10, 3)
			}))
		}
		b.start()
		b.after(15 * time.Second)
		before := b.rt.running()
		if len(before) != 20 {
			t.Fatalf("%d run", len(before))
		}
		want := map[string]corev1.PodStatus{}
		for i := range 20 {
			uid := fmt.Sprint("uid-p", i)
			want[uid] = b.want(uid, "Running+Ready")
		}
		clear(b.link.history)
		for range 3 {
			b.stop()
			b.after(time.Minute)
			b.start()
			b.after(time.Minute)
		}
		if got := b.rt.running(); !slices.Equal(got, before) || len(b.rt.started()) != 20 {
			t.Fatalf("after restarts: %d starts, %v", len(b.rt.started()), got)
		}
		for uid, h := range b.link.history {
			for _, s := range h {
				if s != "Running+Ready" {
					t.Fatalf("pod %s flapped: %v", uid, h)
				}
			}
			if now := b.link.statusOf(uid); now.PodIP != want[uid].PodIP || now.ContainerStatuses[0].RestartCount != 0 {
				t.Fatalf("status changed: %+v", now)
			}
		}
		b.stop()
	})
}

// TestOfflineBoot: after a power cut, with no server and a clock of 1970,
// all that the node knows is up again, with its counters.
func TestOfflineBoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("ConfigMap", &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c", UID: "cm"}, Data: map[string]string{"k": "v"}})
		for i := range 5 {
			b.link.put("Pod", wasmPod(fmt.Sprint("p", i), func(p *corev1.Pod) {
				p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "K", ValueFrom: &corev1.EnvVarSource{
					ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "c"}, Key: "k"},
				}}}
			}))
		}
		b.start()
		b.after(5 * time.Second)
		for boot := range 10 {
			b.stop()
			b.rt.states = map[workload.ID]*workload.State{} // nothing survives
			b.net.pods, b.net.next = map[string]networkAllocation{}, 0
			b.link.setCut(true)
			b.offset = -time.Since(time.Unix(0, 0))
			b.c.MachineBoot = fmt.Sprint("boot", boot+2)
			b.start()
			b.after(2 * time.Second)
			if got := b.rt.running(); len(got) != 5 {
				t.Fatalf("boot %d: %v run", boot, got)
			}
			for _, id := range b.rt.started() {
				if b.rt.specs[id].Env[0] != "K=v" {
					t.Fatalf("env %v", b.rt.specs[id].Env)
				}
			}
		}
		b.offset = 0
		b.link.setCut(false)
		b.after(time.Minute)
		st := b.want("uid-p0", "Running+Ready")
		if st.ContainerStatuses[0].RestartCount != 10 {
			t.Fatalf("restart count %d after 10 boots", st.ContainerStatuses[0].RestartCount)
		}
		b.stop()
	})
}

// TestBootsWithAKeptRunFolder: where the run folder is on a disk, runtimes
// still know the attempts of the boot before and say that they were lost.
// Each is one restart with a log of its own, and waits for nothing.
func TestBootsWithAKeptRunFolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("Pod", wasmPod("a"))
		b.start()
		b.after(5 * time.Second)
		for boot := range 5 {
			b.stop()
			b.rt.end(workload.ID{PodUID: "uid-a", Container: "main", Attempt: boot}, 137, reasonHostLost)
			b.c.MachineBoot = fmt.Sprint("boot", boot+2)
			b.start()
			b.after(2 * time.Second)
			st := b.want("uid-a", "Running+Ready").ContainerStatuses[0]
			if last := st.LastTerminationState.Terminated; int(st.RestartCount) != boot+1 || last == nil || last.Reason != reasonHostLost {
				t.Fatalf("boot %d: %+v", boot, st)
			}
			logs := map[string]bool{}
			for _, id := range b.rt.started() {
				logs[b.rt.specs[id].LogPath] = true
			}
			if len(logs) != boot+2 {
				t.Fatalf("boot %d: logs %v", boot, logs)
			}
		}
		// The same in one boot is the container's own affair.
		b.rt.end(workload.ID{PodUID: "uid-a", Container: "main", Attempt: 5}, 137, reasonHostLost)
		b.after(2 * time.Second)
		b.rt.end(workload.ID{PodUID: "uid-a", Container: "main", Attempt: 6}, 137, reasonHostLost)
		b.after(2 * time.Second)
		if w := b.link.statusOf("uid-a").ContainerStatuses[0].State.Waiting; w == nil || w.Reason != "CrashLoopBackOff" {
			t.Fatalf("waits for %+v", w)
		}
		b.stop()
	})
}

// TestOutage: losing contact changes nothing, also when pods come and go on
// the other side; what was deleted meanwhile goes on return.
func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		stay, leave := wasmPod("stay"), wasmPod("leave")
		b.link.put("Pod", stay)
		b.link.put("Pod", leave)
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.link.setCut(true)
		b.link.drop("uid-leave")
		b.after(3 * 24 * time.Hour)
		if got := b.rt.running(); len(got) != 2 || len(b.rt.started()) != 2 {
			t.Fatalf("in the outage: %v", got)
		}
		b.link.setCut(false)
		b.after(2 * time.Minute)
		if got := b.rt.running(); !slices.Equal(got, []string{"uid-stay/main/0"}) {
			t.Fatalf("after the outage: %v", got)
		}
	})
}

// TestIdleWritesNothing: an hour of idling, with probes, makes no write and no
// report.
func TestIdleWritesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		for i := range 10 {
			b.link.put("Pod", wasmPod(fmt.Sprint("p", i), func(p *corev1.Pod) {
				p.Spec.Containers[0].ReadinessProbe = tcpProbe(10, 3)
				p.Spec.Containers[0].LivenessProbe = tcpProbe(10, 3)
			}))
		}
		b.start()
		defer b.stop()
		b.after(time.Minute)
		writes, reports := b.db.Writes(), len(b.link.reports)
		b.after(time.Hour)
		if w, r := b.db.Writes()-writes, len(b.link.reports)-reports; w != 0 || r != 0 {
			t.Fatalf("idle for an hour: %d writes, %d reports", w, r)
		}
		if b.link.pulls > 200 {
			t.Fatalf("%d pulls", b.link.pulls)
		}
	})
}

// TestOrphans: what runs and belongs to nobody is stopped and named, but
// only once the assignment is known.
func TestOrphans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		for _, id := range []workload.ID{{PodUID: "uid-lost", Container: "main"}, {PodUID: "uid-a", Container: "main", Attempt: 4}, {PodUID: "uid-a", Container: "main", Attempt: 3}} {
			_, _ = b.rt.Start(t.Context(), workload.Spec{ID: id})
		}
		b.rt.starts = nil
		b.link.put("Pod", wasmPod("a"))
		b.link.setCut(true)
		b.start()
		defer b.stop()
		b.after(10 * time.Minute)
		if got := b.rt.running(); len(got) != 3 {
			t.Fatalf("stopped before the assignment was known: %v", got)
		}
		b.link.setCut(false)
		b.after(2 * time.Minute)
		if got := b.rt.running(); !slices.Equal(got, []string{"uid-a/main/4"}) || len(b.rt.started()) != 0 {
			t.Fatalf("run now: %v", got)
		}
		if st := b.want("uid-a", "Running+Ready"); st.ContainerStatuses[0].RestartCount != 4 {
			t.Fatalf("adopted with count %d", st.ContainerStatuses[0].RestartCount)
		}
		if !slices.ContainsFunc(b.link.events, func(e eventReport) bool { return e.Reason == "OrphanStopped" }) {
			t.Fatal("no event names the orphan")
		}
	})
}

// TestUnknownPodIsStopped: the cluster's word that it has no such pod stops
// it, and it is not started again.
func TestUnknownPodIsStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.unknown["uid-a"] = true
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Hour)
		if got := b.rt.running(); len(got) != 0 || len(b.rt.started()) > 1 {
			t.Fatalf("%v run, %d starts", got, len(b.rt.started()))
		}
	})
}

// TestDiskFull: nothing is acted on that is not durable; it goes on when
// there is room again.
func TestDiskFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("Pod", wasmPod("old"))
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.db.FailWrites(errors.New("no space left on device"))
		b.link.put("Pod", wasmPod("new"))
		b.after(time.Hour)
		if got := b.rt.running(); len(got) != 1 {
			t.Fatalf("%v run", got)
		}
		pressure := func() string {
			b.link.mu.Lock()
			defer b.link.mu.Unlock()
			i := slices.IndexFunc(b.link.node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeDiskPressure })
			return b.link.node.Status.Conditions[i].Reason
		}
		if got := pressure(); got != reasonUnsaved {
			t.Fatalf("disk pressure: %s", got)
		}
		b.rt.end(workload.ID{PodUID: "uid-old", Container: "main"}, 3, "Error")
		b.after(time.Minute) // told of, and not acted on
		if st := b.want("uid-old", "Running"); st.ContainerStatuses[0].State.Terminated == nil || len(b.rt.started()) != 1 {
			t.Fatalf("%+v, starts %v", st.ContainerStatuses, b.rt.started())
		}
		b.db.FailWrites(nil)
		b.after(2 * time.Minute)
		b.want("uid-old", "Running+Ready")
		b.want("uid-new", "Running+Ready")
		if got := pressure(); got != "KubeletHasNoDiskPressure" {
			t.Fatalf("disk pressure: %s", got)
		}
	})
}

// TestHalfMadeContainer: an agent died between the record of an attempt and the
// process. The next one starts it if the pod shall run, without counting a
// restart, and removes what is left if it shall not.
func TestHalfMadeContainer(t *testing.T) {
	for _, known := range []bool{true, false} { // does the database know of the attempt?
		t.Run(fmt.Sprintf("known=%v", known), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t)
				b.link.put("Pod", wasmPod("runs"))
				for _, uid := range []string{"uid-runs", "uid-leaves"} {
					id := workload.ID{PodUID: uid, Container: "main"}
					b.rt.states[id] = &workload.State{ID: id, Phase: workload.Created}
					rec := store.Pod{UID: uid, Namespace: "default", Name: strings.TrimPrefix(uid, "uid-"),
						Containers: []store.Container{{Name: "main", Begun: true, Boot: "boot-1"}}}
					if known {
						if err := b.db.SavePod(rec); err != nil {
							t.Fatal(err)
						}
					}
				}
				b.link.put("Pod", deleted(wasmPod("leaves"), 1))
				b.start()
				defer b.stop()
				b.after(20 * time.Second)
				if st := b.want("uid-runs", "Running+Ready"); st.ContainerStatuses[0].RestartCount != 0 {
					t.Errorf("a restart was counted: %+v", st)
				}
				if !b.link.gone["uid-leaves"] || len(b.rt.states) != 1 {
					t.Errorf("gone: %v, what is left: %v", b.link.gone, b.rt.states)
				}
			})
		})
	}
}

// TestNewsBetweenReadingAndActing lets the pull loop bring the next assignment
// while the main loop works through the one before: what is new in it must be
// seen by the next look, whether the pod was starting or running meanwhile.
func TestNewsBetweenReadingAndActing(t *testing.T) {
	for _, when := range []string{"starting", "running"} {
		t.Run(when, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t)
				a, err := New(b.c)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer a.group.Wait()
				defer cancel()
				a.swept = true
				assign := func(generation uint64, pod *corev1.Pod) {
					b.link.put("Pod", pod)
					asg := store.Assignment{Epoch: 1, Generation: generation, Known: true, Objects: map[string]wire.Object{}}
					for _, o := range b.link.asg.Objects {
						asg.Objects[o.UID] = o
					}
					a.setAssignment(asg)
				}
				pod := wasmPod("p")
				assign(1, pod)
				if when == "running" {
					a.reconcile(ctx)
					pod.Labels = map[string]string{"edited": "yes"}
					assign(2, pod)
				}
				wishes, want := a.wanted()
				assign(3, deleted(pod, 0))
				a.match(ctx, wishes, want, true)
				b.after(time.Second)
				if got := b.rt.running(); len(got) != 1 {
					t.Fatalf("%v run", got)
				}
				a.reconcile(ctx)
				b.after(time.Minute)
				if got := b.rt.running(); len(got) != 0 || !a.isGone("uid-p") {
					t.Fatalf("a deleted pod goes on: %v run", got)
				}
			})
		})
	}
}

// TestCrashBetweenWrites cuts the power of the database before each write
// of a pod's life, once on its way up and once on its way down, and starts
// another agent: no container is started twice, and all is gone in the end.
func TestCrashBetweenWrites(t *testing.T) {
	cut := errors.New("power cut")
	for n := range uint64(14) {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t)
			pod := wasmPod("a", func(p *corev1.Pod) {
				p.Spec.InitContainers = []corev1.Container{{Name: "init", Image: "i.wasm"}}
				p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
			})
			b.rt.onStart = func(s workload.Spec, st *workload.State) error {
				if s.ID.Container == "init" {
					time.AfterFunc(time.Second, func() { b.rt.end(s.ID, 0, "") })
				}
				return nil
			}
			crash := func() {
				b.after(10 * time.Second)
				b.stop()
				b.db.FailWrites(nil)
				b.start()
				b.after(10 * time.Second)
			}
			b.link.put("Pod", pod)
			b.db.FailAfter(n, cut)
			b.start()
			crash()
			b.want("uid-a", "Running+Ready")
			b.db.FailAfter(n, cut)
			b.link.put("Pod", deleted(pod, 5))
			crash()
			if !b.link.gone["uid-a"] || len(b.rt.states)+len(b.net.pods)+len(b.vols.pods) != 0 {
				t.Fatalf("write %d: left: %v %v %v", n, b.rt.states, b.net.pods, b.vols.pods)
			}
			if s := b.rt.started(); len(s) != 2 {
				t.Fatalf("write %d: started %v", n, s)
			}
			b.link.drop("uid-a")
			b.after(time.Minute)
			b.stop()
			p, _ := b.db.Pods()
			if g, _ := b.db.Gones(); len(p)+len(g) != 0 {
				t.Fatalf("write %d: records left: %v %v", n, p, g)
			}
		})
	}
}

// TestEndedElsewhere: a pod that others ended is not run, and one that runs
// is stopped.
func TestEndedElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		failed := func(p *corev1.Pod) { p.Status.Phase, p.Status.Reason = corev1.PodFailed, "NodeLost" }
		b.link.put("Pod", wasmPod("old", failed))
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Second)
		if got := b.rt.running(); !slices.Equal(got, []string{"uid-a/main/0"}) || len(b.link.history["uid-old"]) != 0 {
			t.Fatalf("run %v, said %v", got, b.link.history["uid-old"])
		}
		b.link.put("Pod", wasmPod("a", failed))
		b.after(time.Second)
		if st := b.want("uid-a", "Failed"); st.Reason != "NodeLost" || len(b.rt.running()) != 0 {
			t.Fatalf("%+v", st)
		}
		b.link.put("Pod", deleted(wasmPod("old", failed), 0))
		b.after(time.Second)
		if !b.link.gone["uid-old"] {
			t.Fatal("not gone")
		}
	})
}
