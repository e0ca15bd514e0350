package scheduler

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func priority(n int32) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Priority = &n }
}

func on(node string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.NodeName = node } }

func all[T any](fs ...func(T)) func(T) {
	return func(x T) {
		for _, f := range fs {
			f(x)
		}
	}
}

func get(w *fixture.World, name string) *corev1.Pod {
	return fixture.Get[*corev1.Pod](w, fixture.Pod, "default", name)
}

// The least harm, in upstream's order, on real objects: who goes, what is
// said about it, and that the room is held for who it was made for.
func TestPreemptsWithTheLeastHarm(t *testing.T) {
	w := fixture.New(t)
	// Four CPUs each; what is there differs by one criterion after the other.
	for node, victims := range map[string][]struct {
		priority int32
		guarded  bool
	}{
		"budget":   {{1, true}, {1, false}},
		"higher":   {{2, false}, {1, false}},
		"more":     {{1, false}, {1, false}, {1, false}, {1, false}},
		"least":    {{1, false}, {1, false}},
		"too-high": {{20, false}, {20, false}},
	} {
		w.AddNode(node)
		for i, v := range victims {
			w.Create(pod(fmt.Sprintf("%s-%d", node, i), on(node), priority(v.priority), requests(fmt.Sprintf("%dm", 4000/len(victims)), "1Mi"), func(p *corev1.Pod) {
				if v.guarded {
					p.Labels = map[string]string{"guarded": "yes"}
				}
			}))
		}
	}
	w.Create(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MaxUnavailable: &intstr.IntOrString{}, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"guarded": "yes"}}}})
	w.Create(pod("urgent", priority(10), requests("3", "1Mi")))
	s := newScheduler(w)
	settle(t, s)
	if got := get(w, "urgent").Status.NominatedNodeName; got != "least" {
		t.Fatalf("nominated %q", got)
	}
	c := scheduled(w, "urgent")
	if want := "0/5 nodes are available: 5 Insufficient cpu (needs 3, most free 0). preemption: waits for pods to end on its nominated node least, 2 of them preempted."; c.Message != want {
		t.Errorf("says %q, want %q", c.Message, want)
	}
	for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "") {
		if goes := strings.HasPrefix(p.Name, "least-"); goes != (p.DeletionTimestamp != nil) {
			t.Errorf("%s is deleted: %v", p.Name, p.DeletionTimestamp != nil)
		} else if goes {
			if c := p.Status.Conditions; len(c) != 1 || c[0].Reason != corev1.PodReasonPreemptionByScheduler ||
				c[0].Message != "default-scheduler: preempting to accommodate a higher priority pod" || *p.DeletionGracePeriodSeconds != 30 {
				t.Errorf("%s: %+v", p.Name, c)
			}
		}
	}
	if e := w.Events.With("Preempted"); len(e) != 2 {
		t.Errorf("events %v", e)
	}
	// Nobody less important takes the room meanwhile, and nothing more goes.
	w.Create(pod("thief", priority(9), requests("3", "1Mi"), func(p *corev1.Pod) {
		p.Spec.PreemptionPolicy = new(corev1.PreemptNever)
	}))
	settle(t, s)
	w.Report(nil) // the victims are gone
	settle(t, s)
	if nodeOf(w, "urgent") != "least" || nodeOf(w, "thief") != "" || get(w, "urgent").Status.NominatedNodeName != "" {
		t.Fatalf("urgent on %q (nominated %q), thief on %q", nodeOf(w, "urgent"), get(w, "urgent").Status.NominatedNodeName, nodeOf(w, "thief"))
	}
	if m := scheduled(w, "thief").Message; !strings.HasSuffix(m, " preemption: not eligible due to preemptionPolicy=Never.") {
		t.Errorf("thief: %q", m)
	}
	if n := len(fixture.List[*corev1.Pod](w, fixture.Pod, "")); n != 12 {
		t.Errorf("%d pods are left", n)
	}
}

func TestMoreImportantTakesTheRoomOfANominatedPod(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(pod("low", on("n"), requests("3", "1Mi")))
	w.Create(pod("middle", priority(5), requests("3", "1Mi")))
	s := newScheduler(w)
	settle(t, s)
	if get(w, "middle").Status.NominatedNodeName != "n" {
		t.Fatal("not nominated")
	}
	w.Create(pod("top", priority(10), requests("3", "1Mi")))
	settle(t, s)
	settle(t, s)
	if get(w, "top").Status.NominatedNodeName != "n" || get(w, "middle").Status.NominatedNodeName != "" {
		t.Fatalf("nominated: top %q, middle %q", get(w, "top").Status.NominatedNodeName, get(w, "middle").Status.NominatedNodeName)
	}
	w.Report(nil)
	settle(t, s)
	if nodeOf(w, "top") != "n" || nodeOf(w, "middle") != "" {
		t.Fatalf("top on %q, middle on %q", nodeOf(w, "top"), nodeOf(w, "middle"))
	}
}

// Two wait for the room of one node, and a more important pod takes most of
// it: they do not keep each other out of the rest.
func TestNominatedPodsShareWhatIsLeft(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(pod("low", on("n"), requests("4", "1Mi")))
	for i := range 2 {
		w.Create(pod(fmt.Sprintf("mid-%d", i), priority(5), requests("1", "1Mi")))
	}
	s := newScheduler(w)
	settle(t, s)
	for i := range 2 {
		if got := get(w, fmt.Sprintf("mid-%d", i)).Status.NominatedNodeName; got != "n" {
			t.Fatalf("mid-%d nominated %q", i, got)
		}
	}
	w.Report(nil) // the victim is gone
	w.Create(pod("urgent", priority(10), requests("2500m", "1Mi")))
	settle(t, s)
	placed, held := 0, 0
	for i := range 2 {
		p := get(w, fmt.Sprintf("mid-%d", i))
		if p.Spec.NodeName != "" {
			placed++
		}
		if p.Status.NominatedNodeName != "" {
			held++
		}
	}
	if nodeOf(w, "urgent") != "n" || placed != 1 || held != 0 {
		t.Errorf("urgent on %q, %d others placed and %d nominated, where one fits", nodeOf(w, "urgent"), placed, held)
	}
}

// Pods of one group that keep away from each other are nominated apart.
func TestNominatedPodsSeeEachOther(t *testing.T) {
	w := threeZones(t)
	for i := range 6 {
		w.Create(pod(fmt.Sprintf("low-%d", i), on(fmt.Sprintf("n%d", i)), requests("4", "1Mi")))
	}
	for i := range 4 {
		w.Create(pod(fmt.Sprintf("apart-%d", i), priority(5), labelled("apart"), awayFrom("apart", zoneKey), requests("1", "1Mi")))
	}
	s := newScheduler(w)
	settle(t, s)
	if n := len(w.Events.With("Preempted")); n != 3 {
		t.Errorf("%d victims for three zones", n)
	}
	w.Report(nil)
	settle(t, s)
	if z := zones(w, "apart"); z["z0"] != 1 || z["z1"] != 1 || z["z2"] != 1 || z[""] != 1 {
		t.Errorf("apart in %v", z)
	}
}

// In virtual time, with graceful victims: the pod is bound when they are gone.
func TestPreemptionWaitsForGracefulVictims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := fixture.New(t)
		w.AddNode("n")
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		s := newScheduler(w)
		go func() { done <- s.Run(ctx) }()
		w.Create(pod("low", requests("3", "1Mi")))
		synctest.Wait()
		w.Create(pod("high", priority(5), requests("3", "1Mi")))
		time.Sleep(25 * time.Second)
		synctest.Wait()
		if p := get(w, "low"); p.DeletionTimestamp == nil || nodeOf(w, "high") != "" || get(w, "high").Status.NominatedNodeName != "n" {
			t.Fatalf("low goes: %v, high on %q, nominated %q", p.DeletionTimestamp, nodeOf(w, "high"), get(w, "high").Status.NominatedNodeName)
		}
		zero := int64(0)
		if _, _, err := w.Store.Delete(ctx, fixture.Pod, "default", "low", registry.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if nodeOf(w, "high") != "n" {
			t.Fatal("the victim is gone, and the pod waits on")
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

// Arbitrary pods of arbitrary importance: nobody is preempted for nothing
// (every pod that victims went for gets its place), nobody by a pod that is
// not more important, and nobody less important takes a place that is held.
func TestNobodyIsPreemptedInVain(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		nodes := rapid.IntRange(1, 4).Draw(rt, "nodes")
		for i := range nodes {
			w.AddNode(fmt.Sprintf("n%d", i), inZone(fmt.Sprintf("z%d", i%2)))
		}
		s := newScheduler(w)
		drawn := 0
		more := func(k int) {
			for range k {
				drawn++
				terms := rapid.SampledFrom([]func(*corev1.Pod){func(*corev1.Pod) {}, awayFrom("a", zoneKey), awayFrom("b", "kubernetes.io/hostname"), spreadBy(zoneKey, 1, "a")}).Draw(rt, "terms")
				w.Create(pod(fmt.Sprintf("p%d", drawn), priority(rapid.Int32Range(0, 3).Draw(rt, "priority")), requests(fmt.Sprintf("%dm", rapid.IntRange(1, 8).Draw(rt, "cpu")*500), "1Mi"),
					labelled(rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "app")), terms))
			}
		}
		for range rapid.IntRange(1, 4).Draw(rt, "rounds") {
			more(rapid.IntRange(1, 8).Draw(rt, "pods"))
			before := waitingPods(w)
			settleIn(rt, s)
			between := waitingPods(w)
			byUID := map[string]*corev1.Pod{}
			for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "") {
				byUID[string(p.UID)] = p
			}
			for _, e := range w.Events.With("Preempted") {
				victim := byUID[string(e.About.UID)]
				by, _, _ := strings.Cut(strings.TrimPrefix(e.Message, "Preempted by pod "), " on node ")
				if victim != nil && byUID[by] != nil && *victim.Spec.Priority >= *byUID[by].Spec.Priority {
					rt.Fatalf("%s (%d) went for %s (%d)", victim.Name, *victim.Spec.Priority, byUID[by].Name, *byUID[by].Spec.Priority)
				}
			}
			w.Report(nil) // victims end
			settleIn(rt, s)
			for name, p := range between {
				since := between
				if was := before[name]; was.Status.NominatedNodeName == p.Status.NominatedNodeName {
					since = before // it waited already
				}
				// The victims of another may upset a spread: then it looks again.
				if p.Status.NominatedNodeName == "" || p.Spec.TopologySpreadConstraints != nil || nodeOf(w, name) != "" || overtaken(w, p, since) {
					continue
				}
				rt.Fatalf("%s was nominated and has no place: %s", name, scheduled(w, name).Message)
			}
		}
	})
}

func waitingPods(w *fixture.World) map[string]*corev1.Pod {
	out := map[string]*corev1.Pod{}
	for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "") {
		if p.Spec.NodeName == "" {
			out[p.Name] = p
		}
	}
	return out
}

// overtaken: a nomination binds nobody more important, so one of those that
// waited may get what the victims leave, be it room or a domain without a pod
// that it keeps away from. It has it when it is placed, and also when it is
// nominated: for victims of its own on another node of that domain, say,
// where its anti-affinity keeps others away already.
func overtaken(w *fixture.World, p *corev1.Pod, waited map[string]*corev1.Pod) bool {
	for name, was := range waited {
		now := get(w, name)
		at := now.Status.NominatedNodeName
		if *was.Spec.Priority > *p.Spec.Priority && (now.Spec.NodeName != "" || at != "" && at != was.Status.NominatedNodeName) {
			return true
		}
	}
	return false
}

func settleIn(t *rapid.T, s *Scheduler) {
	if err := s.Settle(context.Background()); err != nil {
		t.Fatal(err)
	}
}
