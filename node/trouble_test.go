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

	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

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

// TestStartErrorIsAnEnd: a container that was made and could not be started has
// ended, with upstream's reason and code: pods that are not restarted fail, and
// others back off. One that the node could not make is tried again.
func TestStartErrorIsAnEnd(t *testing.T) {
	for _, c := range []struct {
		policy corev1.RestartPolicy
		ended  bool
		want   string
	}{{corev1.RestartPolicyNever, true, "Failed"}, {corev1.RestartPolicyAlways, true, "Running"}, {corev1.RestartPolicyNever, false, "Pending"}} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t)
			b.rt.onStart = func(workload.Spec, *workload.State) error {
				return &workload.StartError{Reason: "RunContainerError", Message: "exec: /none", Ended: c.ended}
			}
			b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) { p.Spec.RestartPolicy = c.policy }))
			b.start()
			defer b.stop()
			b.after(2 * time.Minute)
			st := b.want("uid-a", c.want)
			ctr := st.ContainerStatuses[0]
			for _, e := range []*corev1.ContainerStateTerminated{ctr.State.Terminated, ctr.LastTerminationState.Terminated} {
				if e != nil && (e.Reason != "StartError" || e.ExitCode != 128 || e.Message != "exec: /none") {
					t.Errorf("%s: %+v", c.policy, e)
				}
			}
			switch {
			case !c.ended:
				if w := ctr.State.Waiting; w == nil || w.Reason != "RunContainerError" || ctr.RestartCount != 0 {
					t.Errorf("%+v", ctr)
				}
			case c.policy == corev1.RestartPolicyNever:
				if ctr.State.Terminated == nil || ctr.RestartCount != 0 {
					t.Errorf("%+v", ctr)
				}
			default:
				if w := ctr.State.Waiting; w == nil || w.Reason != "CrashLoopBackOff" || ctr.LastTerminationState.Terminated == nil || ctr.RestartCount < 3 {
					t.Errorf("%+v", ctr)
				}
			}
		})
	}
}
