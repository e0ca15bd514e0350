package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/node/volumes"
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
		b.db.FailWrites(nil)
		b.after(2 * time.Minute)
		b.want("uid-new", "Running+Ready")
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

// TestRejected covers the node's own admission.
func TestRejected(t *testing.T) {
	oci, odd := "oci", "odd"
	for reason, edit := range map[string]func(*corev1.Pod){
		"OutOfcpu":                 func(p *corev1.Pod) { requests(p, "cpu", "3") },
		"OutOfmemory":              func(p *corev1.Pod) { requests(p, "memory", "2Gi") },
		"NodeAffinity":             func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "ssd"} },
		"NodePorts":                func(p *corev1.Pod) { hostPort(p, 8080) },
		"RuntimeClassNotSupported": func(p *corev1.Pod) { p.Spec.RuntimeClassName = &odd },
		"": func(p *corev1.Pod) {
			requests(p, "cpu", "1")
			p.Spec.Containers[0].Resources.Requests["example.com/gpu"] = mustQuantity("1") // advertised through the API
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t)
			b.link.put("Pod", wasmPod("first", func(p *corev1.Pod) { hostPort(p, 8080) }))
			b.start()
			defer b.stop()
			b.after(time.Second)
			b.link.put("Pod", wasmPod("a", edit))
			b.after(time.Second)
			st := b.link.statusOf("uid-a")
			if st.Reason != reason || (reason != "") != (st.Phase == corev1.PodFailed) {
				t.Fatalf("want %q, got %q %q (%s)", reason, st.Phase, st.Reason, st.Message)
			}
			// It stays so when there is room, and over a restart.
			b.stop()
			b.start()
			b.after(time.Second)
			if now := b.link.statusOf("uid-a"); now.Reason != st.Reason || now.Phase != st.Phase {
				t.Fatalf("changed to %q %q", now.Phase, now.Reason)
			}
			b.link.put("Pod", deleted(wasmPod("a", edit), 0))
			b.after(5 * time.Second)
			if !b.link.gone["uid-a"] {
				t.Fatal("not gone")
			}
		})
	}
	_ = oci
}

func requests(p *corev1.Pod, name corev1.ResourceName, q string) {
	p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{name: mustQuantity(q)}
}

func hostPort(p *corev1.Pod, port int32) {
	p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: port}}
}

// TestImageTrouble covers what the user sees of images that cannot be used.
func TestImageTrouble(t *testing.T) {
	for _, tc := range []struct {
		err         error
		first, then string
	}{
		{errors.New("dial: refused"), "ErrImagePull", "ImagePullBackOff"},
		{&workload.StartError{Reason: "ErrImageNeverPull", Message: "not on this node"}, "ErrImageNeverPull", "ErrImageNeverPull"},
		{&workload.StartError{Reason: "InvalidModule", Message: "this is a component", Hint: "build for wasip1", Fatal: true}, "InvalidModule", "InvalidModule"},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t)
			var ok atomic.Bool
			b.rt.onPrepare = func(image string) (workload.ImageState, error) {
				if ok.Load() {
					return workload.ImageState{Digest: "sha256:ok"}, nil
				}
				return workload.ImageState{}, tc.err
			}
			b.link.put("Pod", wasmPod("a"))
			b.start()
			defer b.stop()
			b.after(time.Second)
			reason := func() string { return b.want("uid-a", "Pending").ContainerStatuses[0].State.Waiting.Reason }
			if r := reason(); r != tc.first {
				t.Fatalf("first %q, want %q", r, tc.first)
			}
			b.after(time.Minute)
			if r := reason(); r != tc.then {
				t.Fatalf("then %q, want %q", r, tc.then)
			}
			ok.Store(true)
			b.after(6 * time.Minute)
			if st := b.want("uid-a", "Running+Ready"); st.ContainerStatuses[0].ImageID != "sha256:ok" || st.ContainerStatuses[0].RestartCount != 0 {
				t.Fatalf("status %+v", st)
			}
		})
	}
}

// TestMissingReference: the pod says what is missing and starts at once when
// it comes.
func TestMissingReference(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.vols.prepare = func(pod *corev1.Pod, src volumes.Source) error {
			if _, ok := src.Secret("default", "s"); !ok {
				return &volumes.MissingError{Kind: "Secret", Namespace: "default", Name: "s"}
			}
			return nil
		}
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "v"}}
			p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "c"}}}}
		}))
		b.start()
		defer b.stop()
		b.after(time.Hour)
		w := b.want("uid-a", "Pending").ContainerStatuses[0].State.Waiting
		if w.Reason != "ContainerCreating" || !strings.Contains(w.Message, `secret "s" not found`) {
			t.Fatalf("waiting %+v", w)
		}
		b.link.put("Secret", &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s", UID: "s"}})
		b.after(time.Second)
		w = b.want("uid-a", "Pending").ContainerStatuses[0].State.Waiting
		if w.Reason != "CreateContainerConfigError" || w.Message != `configmap "c" not found` {
			t.Fatalf("waiting %+v", w)
		}
		b.link.put("ConfigMap", &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c", UID: "c"}, Data: map[string]string{"A": "1"}})
		b.after(time.Second)
		b.want("uid-a", "Running+Ready")
		if e := b.rt.specs[b.rt.started()[0]].Env; !slices.Contains(e, "A=1") {
			t.Fatalf("env %v", e)
		}
	})
}

// TestOldEpochIsRefused: a server from before a recovery cannot take the
// node back.
func TestOldEpochIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.asg.Epoch = 5
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.link.mu.Lock()
		b.link.asg.Epoch = 4
		b.link.mu.Unlock()
		b.link.drop("uid-a")
		b.after(time.Hour)
		if got := b.rt.running(); len(got) != 1 || b.agent.Epoch() != 5 {
			t.Fatalf("%v run, epoch %d", got, b.agent.Epoch())
		}
	})
}

type staticPods struct {
	mu   sync.Mutex
	pods []*corev1.Pod
}

func (s *staticPods) Pods() ([]*corev1.Pod, []error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pods, nil
}

func (s *staticPods) set(pods ...*corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods = pods
}

func TestStaticPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		file := func(name, uid string) *corev1.Pod {
			return wasmPod(name, func(p *corev1.Pod) {
				p.UID = "static-" + uidOf(uid)
				p.Annotations = map[string]string{ConfigSourceAnnotation: "file", ConfigHashAnnotation: uid}
			})
		}
		src := &staticPods{pods: []*corev1.Pod{file("s-n1", "1")}}
		b.c.Static = src
		b.link.setCut(true)
		b.start()
		b.after(time.Second)
		if got := b.rt.running(); len(got) != 1 {
			t.Fatalf("without a server: %v", got)
		}
		b.link.setCut(false)
		b.after(time.Minute)
		b.want("static-1", "Running+Ready")
		if m := b.link.mirrors["static-1"]; m == nil || m.Annotations[ConfigMirrorAnnotation] != "static-1" || m.Name != "s-n1" {
			t.Fatalf("mirror %+v", m)
		}
		// The mirror in the assignment is not a pod to run; Unknown makes it
		// again instead of stopping the pod.
		b.link.put("Pod", wasmPod("s-n1", func(p *corev1.Pod) {
			p.UID = "mirror-uid"
			p.Annotations = map[string]string{ConfigMirrorAnnotation: "static-1", ConfigSourceAnnotation: "file"}
		}))
		b.link.put("Pod", wasmPod("fake", func(p *corev1.Pod) { p.Annotations = map[string]string{ConfigSourceAnnotation: "file"} }))
		b.after(time.Second)
		if got := b.rt.running(); !slices.Equal(got, []string{"static-1/main/0", "uid-fake/main/0"}) {
			t.Fatalf("run: %v", got)
		}
		b.stop()
		b.start()
		b.after(time.Minute)
		if n := len(b.rt.started()); n != 2 {
			t.Fatalf("an agent restart started %d", n)
		}
		// An edited file: the old pod ends before the new one starts.
		src.set(file("s-n1", "2"))
		b.after(time.Minute)
		if got := b.rt.running(); !slices.Contains(got, "static-2/main/0") || slices.Contains(got, "static-1/main/0") {
			t.Fatalf("after the edit: %v", got)
		}
		src.set()
		b.after(time.Minute)
		if got := b.rt.running(); !slices.Equal(got, []string{"uid-fake/main/0"}) || !b.link.gone["static-2"] {
			t.Fatalf("after removal: %v", got)
		}
		b.stop()
	})
}

// TestNodeObject: the node tells what it is once, and again only when the
// meaning changes.
func TestNodeObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		m := &stubMachine{f: MachineFacts{CPUMilli: 2000, Memory: 1 << 30, Addresses: []string{"192.0.2.1"}, LimitsReason: "NoMemoryController", LimitsMessage: "edit cmdline.txt"}}
		b.c.Machine = m
		b.c.Version = "v0.1.0"
		b.start()
		defer b.stop()
		b.after(time.Hour)
		n := b.link.node
		nodes := 0
		for _, r := range b.link.reports {
			if r.Node != nil {
				nodes++
			}
		}
		if nodes != 1 || n.Labels["dunlin.dev/runtime.wazero"] != "true" || n.Labels["kubernetes.io/hostname"] != "n1" ||
			n.Status.NodeInfo.KubeletVersion != "v1.37.2+dunlin.0.1.0" || n.Status.NodeInfo.ContainerRuntimeVersion != "wazero://1.12.0" ||
			n.Status.Capacity.Pods().Value() != 110 || n.Status.Allocatable.Cpu().MilliValue() != 2000 {
			t.Fatalf("%d reports of the node: %+v", nodes, n)
		}
		c := n.Status.Conditions[len(n.Status.Conditions)-1]
		if c.Type != LimitsEnforced || c.Status != corev1.ConditionFalse || c.Message != "edit cmdline.txt" {
			t.Fatalf("condition %+v", c)
		}
		b.link.put("Pod", wasmPod("a"))
		b.after(time.Second)
		m.mu.Lock()
		m.f.Addresses = []string{"198.51.100.7"}
		m.mu.Unlock()
		b.after(time.Minute)
		if b.link.node.Status.Addresses[0].Address != "198.51.100.7" || b.link.statusOf("uid-a").HostIP != "198.51.100.7" {
			t.Fatal("a changed address is not told")
		}
	})
}

// TestEventsAreBounded: a pod that fails for hours makes few events.
func TestEventsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.net.dial = func(int32) error { return errors.New("refused") }
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) { p.Spec.Containers[0].ReadinessProbe = tcpProbe(1, 3) }))
		b.start()
		defer b.stop()
		b.after(2 * time.Hour)
		if n := len(b.link.events); n == 0 || n > 60 {
			t.Fatalf("%d events in 2 hours", n)
		}
	})
}

// TestUnreadablePodGoesOn: an object that this version cannot decode is no
// reason to stop what runs, also over a restart.
func TestUnreadablePodGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.link.mu.Lock()
		o := &b.link.asg.Objects[0]
		o.Data, o.ResourceVersion = []byte{0xff}, 99
		b.link.asg.Generation++
		b.link.mu.Unlock()
		b.link.hint()
		b.after(time.Minute)
		b.stop()
		b.start()
		b.after(time.Minute)
		if got := b.rt.running(); len(got) != 1 || len(b.rt.started()) != 1 {
			t.Fatalf("%v run", got)
		}
	})
}

func TestImageChangeRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(time.Minute)
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) { p.Spec.Containers[0].Image = "v2.wasm" }))
		b.after(2 * time.Second)
		st := b.want("uid-a", "Running+Ready")
		if c := st.ContainerStatuses[0]; c.RestartCount != 1 || c.ImageID != "sha256:v2.wasm" {
			t.Fatalf("%+v", c)
		}
	})
}

func TestPostStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		pod := wasmPod("a", func(p *corev1.Pod) {
			p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 60}}}
		})
		b.link.put("Pod", pod)
		b.start()
		defer b.stop()
		b.after(59 * time.Second)
		b.want("uid-a", "Pending")
		b.after(2 * time.Second)
		b.want("uid-a", "Running+Ready")
		// A hook under way does not hold up a stop.
		other := pod.DeepCopy()
		other.Name, other.UID = "b", "uid-b"
		b.link.put("Pod", other)
		b.after(5 * time.Second)
		b.link.put("Pod", deleted(other, 5))
		b.after(5 * time.Second)
		if !b.link.gone["uid-b"] {
			t.Fatal("not gone")
		}
	})
}

// TestHangingPullsHoldUpNobody: pods whose images are here start while
// others wait for a registry that never answers.
func TestHangingPullsHoldUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		never := make(chan struct{})
		b.rt.onPull = func(ctx context.Context, image, policy string) error {
			if image != "far.wasm" {
				return nil
			}
			if policy == "Never" {
				return &workload.StartError{Reason: "ErrImageNeverPull", Message: "not here"}
			}
			select {
			case <-never:
			case <-ctx.Done():
			}
			return ctx.Err()
		}
		for i := range 20 {
			b.link.put("Pod", wasmPod(fmt.Sprint("far", i), func(p *corev1.Pod) { p.Spec.Containers[0].Image = "far.wasm" }))
		}
		b.link.put("Pod", wasmPod("near"))
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.want("uid-near", "Running+Ready")
		b.link.put("Pod", deleted(wasmPod("far3", func(p *corev1.Pod) { p.Spec.Containers[0].Image = "far.wasm" }), 30))
		b.after(time.Second)
		if !b.link.gone["uid-far3"] {
			t.Fatal("a pull under way holds up the pod's end")
		}
	})
}
