package scheduler

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func newScheduler(w *fixture.World) *Scheduler {
	env := w.Env()
	return New(Config{Store: w.Store, Term: env.Term, Clock: w, Log: env.Log, Events: w.Events, Rand: env.Rand})
}

func pod(name string, set ...func(*corev1.Pod)) *corev1.Pod {
	t := fixture.Template("a")
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: t.Labels}, Spec: t.Spec}
	for _, f := range set {
		f(p)
	}
	return p
}

func requests(cpu, memory string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse(cpu), "memory": resource.MustParse(memory)}
	}
}

func nodeOf(w *fixture.World, name string) string {
	return fixture.Get[*corev1.Pod](w, fixture.Pod, "default", name).Spec.NodeName
}

func scheduled(w *fixture.World, name string) corev1.PodCondition {
	for _, c := range fixture.Get[*corev1.Pod](w, fixture.Pod, "default", name).Status.Conditions {
		if c.Type == corev1.PodScheduled {
			return c
		}
	}
	return corev1.PodCondition{}
}

func settle(t *testing.T, s *Scheduler) {
	t.Helper()
	if err := s.Settle(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func TestPacksAndSpreads(t *testing.T) {
	w := fixture.New(t)
	for i := range 3 {
		w.AddNode(fmt.Sprintf("n%d", i))
	}
	for i := range 6 {
		w.Create(pod(fmt.Sprintf("packed-%d", i)))
	}
	s := newScheduler(w)
	settle(t, s)
	used := map[string]int{}
	for i := range 6 {
		used[nodeOf(w, fmt.Sprintf("packed-%d", i))]++
	}
	if len(used) != 1 || used[""] != 0 {
		t.Fatalf("packed onto %v", used)
	}
	owner := []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "r", UID: "u", Controller: new(bool)}}
	*owner[0].Controller = true
	for i := range 6 {
		w.Create(pod(fmt.Sprintf("spread-%d", i), func(p *corev1.Pod) {
			p.Annotations = map[string]string{placementAnnotation: "spread"}
			p.OwnerReferences = owner
		}))
		if i == 2 {
			settle(t, s) // half in one batch, half in another
		}
	}
	settle(t, s)
	used = map[string]int{}
	for i := range 6 {
		used[nodeOf(w, fmt.Sprintf("spread-%d", i))]++
	}
	if len(used) != 3 || used["n0"] != 2 || used["n1"] != 2 || used["n2"] != 2 {
		t.Fatalf("spread over %v", used)
	}
}

func TestUnschedulableSaysWhyOnceAndIsRetried(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("small", func(n *corev1.Node) { n.Status.Allocatable["memory"] = resource.MustParse("210Mi") })
	w.AddNode("tainted", func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "k", Value: "v", Effect: corev1.TaintEffectNoSchedule}}
	})
	w.AddNode("cordoned", func(n *corev1.Node) { n.Spec.Unschedulable = true })
	w.Create(pod("big", requests("100m", "300Mi")))
	s := newScheduler(w)
	settle(t, s)
	c := scheduled(w, "big")
	want := "0/3 nodes are available: 1 Insufficient memory (needs 300Mi, most free 210Mi), 1 node(s) had untolerated taint {k: v}, 1 node(s) were unschedulable."
	if c.Status != corev1.ConditionFalse || c.Reason != corev1.PodReasonUnschedulable || c.Message != want {
		t.Fatalf("condition %+v", c)
	}
	if n := len(w.Events.With("FailedScheduling")); n != 1 {
		t.Fatalf("%d events", n)
	}
	before := w.Machine.Snapshot().ResourceVersion()
	settle(t, s)
	if after := w.Machine.Snapshot().ResourceVersion(); after != before {
		t.Fatalf("the same reason was written again: %d -> %d", before, after)
	}
	fixture.Change(w, fixture.Node, "", "cordoned", registry.Main, func(n *corev1.Node) { n.Spec.Unschedulable = false })
	settle(t, s)
	if nodeOf(w, "big") != "cordoned" {
		t.Fatal("not placed after uncordon")
	}
	if c := scheduled(w, "big"); c.Status != corev1.ConditionTrue || c.Reason != "" {
		t.Fatalf("still says %+v", c)
	}
}

func TestFilters(t *testing.T) {
	in := func(key string, values ...string) *corev1.Affinity {
		return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}}}}}}}
	}
	for name, c := range map[string]struct {
		pod  func(*corev1.Pod)
		want string // node, or part of the message
	}{
		"architecture":  {func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"kubernetes.io/arch": "arm64"} }, "pi"},
		"affinity":      {func(p *corev1.Pod) { p.Spec.Affinity = in("disk", "ssd") }, "pc"},
		"no match":      {func(p *corev1.Pod) { p.Spec.Affinity = in("disk", "tape") }, "2 node(s) didn't match Pod's node affinity/selector"},
		"runtime class": {func(p *corev1.Pod) { p.Spec.RuntimeClassName = new(string); *p.Spec.RuntimeClassName = "oci" }, "pc"},
		"unknown class": {func(p *corev1.Pod) { p.Spec.RuntimeClassName = new(string); *p.Spec.RuntimeClassName = "kata" }, "cannot run RuntimeClass kata (handler kata, where they have wazero)"},
		"extended":      {func(p *corev1.Pod) { gpu(p, "1") }, "pc"},
		"too many gpus": {func(p *corev1.Pod) { gpu(p, "3") }, "2 Insufficient example.com/gpu (needs 3, most free 2)"},
		"host port": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 80}}
		}, "pi"},
		"preferred": {func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{
				Weight: 10, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "kubernetes.io/arch", Operator: corev1.NodeSelectorOpIn, Values: []string{"arm64"}}}}}}}}
		}, "pi"},
		"gated": {func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "g"}} }, "Scheduling is blocked due to non-empty scheduling gates"},
	} {
		t.Run(name, func(t *testing.T) {
			w := fixture.New(t)
			w.Create(&nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "oci"}, Handler: "runc"})
			w.AddNode("pc", func(n *corev1.Node) {
				n.Labels["kubernetes.io/arch"], n.Labels["disk"], n.Labels["dunlin.dev/runtime.runc"] = "amd64", "ssd", "true"
				n.Status.Allocatable["example.com/gpu"] = resource.MustParse("2")
			})
			w.AddNode("pi", func(n *corev1.Node) { n.Labels["kubernetes.io/arch"] = "arm64" })
			w.Create(pod("on-pc", func(p *corev1.Pod) {
				p.Spec.NodeName = "pc"
				p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 80}}
			}))
			w.Create(pod("p", c.pod))
			settle(t, newScheduler(w))
			if got := nodeOf(w, "p"); got != c.want && !strings.Contains(scheduled(w, "p").Message, c.want) {
				t.Fatalf("node %q, message %q; want %q", got, scheduled(w, "p").Message, c.want)
			}
		})
	}
}

func gpu(p *corev1.Pod, n string) {
	q := corev1.ResourceList{"example.com/gpu": resource.MustParse(n)}
	p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: q, Limits: q}
}

// TestAbsurdRequestsAreShownAsTheyAre: headers cap what would overflow sums;
// what people read is not capped.
func TestAbsurdRequestsAreShownAsTheyAre(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n", func(n *corev1.Node) { n.Status.Allocatable["memory"] = resource.MustParse("210Mi") })
	w.Create(pod("nine", requests("100m", "9Ti")))
	w.Create(pod("ten", requests("100m", "10Ti")))
	w.Create(pod("exact", requests("100m", "8Ti")))
	s := newScheduler(w)
	settle(t, s)
	for name, figure := range map[string]string{"nine": "9Ti", "ten": "10Ti", "exact": "8Ti"} {
		want := "0/1 nodes are available: 1 Insufficient memory (needs " + figure + ", most free 210Mi)."
		if c := scheduled(w, name); c.Message != want {
			t.Errorf("%s: %q, want %q", name, c.Message, want)
		}
	}
}

func TestPriorityGoesFirst(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n", func(n *corev1.Node) { n.Status.Allocatable["pods"] = resource.MustParse("1") })
	w.Create(pod("low"))
	w.Create(pod("high", func(p *corev1.Pod) { p.Spec.Priority = new(int32); *p.Spec.Priority = 100 }))
	settle(t, newScheduler(w))
	if nodeOf(w, "high") != "n" || nodeOf(w, "low") != "" {
		t.Fatalf("high on %q, low on %q", nodeOf(w, "high"), nodeOf(w, "low"))
	}
	if m := scheduled(w, "low").Message; m != "0/1 nodes are available: 1 Too many pods." {
		t.Fatal(m)
	}
}

// Run, with real events and timers in virtual time.
func TestRunPlacesWhenRoomAppears(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := fixture.New(t)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		s := newScheduler(w)
		go func() { done <- s.Run(ctx) }()
		w.Create(pod("p"))
		synctest.Wait()
		if c := scheduled(w, "p"); c.Reason != corev1.PodReasonUnschedulable || !strings.HasPrefix(c.Message, "no nodes available") {
			t.Fatalf("condition %+v", c)
		}
		w.AddNode("n", func(n *corev1.Node) { n.Status.Allocatable["pods"] = resource.MustParse("1") })
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if nodeOf(w, "p") != "n" {
			t.Fatal("not placed when the node came")
		}
		w.Create(pod("q"))
		synctest.Wait()
		if nodeOf(w, "q") != "" {
			t.Fatal("overcommitted")
		}
		zero := int64(0)
		if _, _, err := w.Store.Delete(ctx, fixture.Pod, "default", "p", registry.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if nodeOf(w, "q") != "n" {
			t.Fatal("not placed when room appeared")
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

func TestLostRaceIsForgottenAndQueuedAgain(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n", func(n *corev1.Node) { n.Status.Allocatable["pods"] = resource.MustParse("1") })
	w.Create(pod("p"))
	s := newScheduler(w)
	s.resync()
	// Someone else takes the room before the binding.
	w.Create(pod("rival", func(p *corev1.Pod) { p.Spec.NodeName = "n" }))
	if err := s.Step(context.Background()); err != nil {
		t.Fatal(err)
	}
	if nodeOf(w, "p") != "" {
		t.Fatal("bound beyond the node's room")
	}
	if len(s.cache.placed) != 0 {
		t.Fatalf("still assumed: %v", s.cache.placed)
	}
	if n := s.queue.counts(); n[inBackoff] != 1 {
		t.Fatalf("queue %v", n)
	}
}

// A large image, or module, draws its pod to where it is; pods that differ in
// nothing but images that are somewhere are placed apart.
func TestGoesWhereItsImageIs(t *testing.T) {
	w := fixture.New(t)
	has := func(name string) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Status.Images = []corev1.ContainerImage{{Names: []string{name}, SizeBytes: 3000 << 20}}
		}
	}
	w.AddNode("a")
	w.AddNode("b", has("docker.io/team/app:1"))
	w.AddNode("c", has("docker.io/library/model.wasm:latest"))
	image := func(image string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Containers[0].Image = image }
	}
	w.Create(pod("app", image("team/app:1")))
	w.Create(pod("module", image("model.wasm")))
	w.Create(pod("other", image("elsewhere:2")))
	settle(t, newScheduler(w))
	if app, module, other := nodeOf(w, "app"), nodeOf(w, "module"), nodeOf(w, "other"); app != "b" || module != "c" || other == "" {
		t.Fatalf("app on %s, module on %s, other on %s", app, module, other)
	}
}
