package replicaset

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

func newSet(name string, n int32, set ...func(*appsv1.ReplicaSet)) *appsv1.ReplicaSet {
	t := fixture.Template("web")
	rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: appsv1.ReplicaSetSpec{Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: t.Labels}, Template: t}}
	for _, f := range set {
		f(rs)
	}
	return rs
}

func pods(w *fixture.World) []*corev1.Pod {
	return fixture.List[*corev1.Pod](w, fixture.Pod, "default")
}

func status(w *fixture.World, name string) appsv1.ReplicaSetStatus {
	return fixture.Get[*appsv1.ReplicaSet](w, fixture.ReplicaSet, "default", name).Status
}

func TestScalesUpAndDown(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(newSet("rs", 5))
	c := New(w.Env())
	w.Settle(c)
	if len(pods(w)) != 5 || status(w, "rs").Replicas != 5 || status(w, "rs").ReadyReplicas != 0 {
		t.Fatalf("%d pods, %+v", len(pods(w)), status(w, "rs"))
	}
	w.BindAll("n")
	w.Report(nil)
	w.Settle(c)
	if s := status(w, "rs"); s.ReadyReplicas != 5 || s.AvailableReplicas != 5 || s.FullyLabeledReplicas != 5 || s.ObservedGeneration != 1 {
		t.Fatalf("%+v", s)
	}
	fixture.Change(w, fixture.ReplicaSet, "default", "rs", registry.Main, func(rs *appsv1.ReplicaSet) { *rs.Spec.Replicas = 2 })
	w.Settle(c)
	w.Report(nil)
	w.Settle(c)
	if len(pods(w)) != 2 || status(w, "rs").Replicas != 2 {
		t.Fatalf("%d pods, %+v", len(pods(w)), status(w, "rs"))
	}
	if len(w.Events.With("SuccessfulCreate")) != 5 || len(w.Events.With("SuccessfulDelete")) != 3 {
		t.Fatal("events")
	}
}

func TestAdoptsAndReleases(t *testing.T) {
	w := fixture.New(t)
	tpl := fixture.Template("web")
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "orphan", Labels: tpl.Labels}, Spec: tpl.Spec})
	yes := true
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "foreign", Labels: tpl.Labels,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Other", Name: "o", UID: "o", Controller: &yes}}}, Spec: tpl.Spec})
	made := w.Create(newSet("rs", 2)).(*appsv1.ReplicaSet)
	c := New(w.Env())
	w.Settle(c)
	orphan := fixture.Get[*corev1.Pod](w, fixture.Pod, "default", "orphan")
	if !metav1.IsControlledBy(orphan, made) || len(pods(w)) != 3 {
		t.Fatalf("orphan %v, %d pods", orphan.OwnerReferences, len(pods(w)))
	}
	if metav1.IsControlledBy(fixture.Get[*corev1.Pod](w, fixture.Pod, "default", "foreign"), made) {
		t.Fatal("took another controller's pod")
	}
	fixture.Change(w, fixture.Pod, "default", "orphan", registry.Main, func(p *corev1.Pod) { p.Labels = map[string]string{"app": "debug"} })
	w.Settle(c)
	if o := fixture.Get[*corev1.Pod](w, fixture.Pod, "default", "orphan"); len(o.OwnerReferences) != 0 || len(pods(w)) != 4 {
		t.Fatalf("not released: %v, %d pods", o.OwnerReferences, len(pods(w)))
	}
}

// An owner of the same name but another uid has no claim.
func TestUIDDecidesOwnership(t *testing.T) {
	w := fixture.New(t)
	yes := true
	tpl := fixture.Template("web")
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "old", Labels: tpl.Labels,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "rs", UID: "earlier", Controller: &yes}}}, Spec: tpl.Spec})
	w.Create(newSet("rs", 1))
	w.Settle(New(w.Env()))
	if n := len(pods(w)); n != 2 {
		t.Fatalf("%d pods: the earlier set's pod was counted", n)
	}
}

func TestLostPodsAreReplacedAndSurplusGoes(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n1")
	w.AddNode("n2")
	w.Create(newSet("rs", 2))
	c := New(w.Env())
	w.Settle(c)
	w.BindAll("n1")
	w.Report(nil)
	w.Settle(c)
	var originals []string
	for _, p := range pods(w) {
		originals = append(originals, p.Name)
		fixture.Change(w, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) { lost.SetStatus(&p.Status, "n1", w.Now()) })
	}
	w.Settle(c)
	w.BindAll("n2")
	w.Report(nil)
	w.Settle(c)
	if len(pods(w)) != 4 || status(w, "rs").ReadyReplicas != 2 {
		t.Fatalf("%d pods, %+v", len(pods(w)), status(w, "rs"))
	}
	for i, name := range originals {
		fixture.Change(w, fixture.Pod, "default", name, registry.Status, func(p *corev1.Pod) {
			lost.ClearStatus(&p.Status, w.Now())
			p.Annotations = map[string]string{lost.ReturnedAnnotation: "now"}
			if i == 1 { // came back broken
				lost.SetCondition(&p.Status, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse}, w.Now())
			}
		})
	}
	w.Settle(c)
	w.Report(nil)
	var left []string
	for _, p := range pods(w) {
		left = append(left, p.Name)
	}
	if len(left) != 2 || !slices.Contains(left, originals[0]) || slices.Contains(left, originals[1]) {
		t.Fatalf("left %v, originals %v (the second not ready)", left, originals)
	}
}

func TestMinReadySeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := fixture.New(t)
		w.AddNode("n")
		w.Create(newSet("rs", 1, func(rs *appsv1.ReplicaSet) { rs.Spec.MinReadySeconds = 10 }))
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- loop.Run(ctx, w.Env(), nil, New(w.Env())) }()
		synctest.Wait()
		w.BindAll("n")
		synctest.Wait()
		w.Report(nil)
		// The wall clock does not move here (it may well be wrong on a board):
		// the monotonic one decides.
		time.Sleep(9 * time.Second)
		synctest.Wait()
		if s := status(w, "rs"); s.ReadyReplicas != 1 || s.AvailableReplicas != 0 {
			t.Fatalf("%+v", s)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if s := status(w, "rs"); s.AvailableReplicas != 1 {
			t.Fatalf("%+v", s)
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

func TestFailedCreateShowsAndStopsEarly(t *testing.T) {
	w := fixture.New(t)
	w.Create(newSet("rs", 100))
	// The namespace is gone for new pods in a way that is an error: no term.
	w.Local.SetTerm(7)
	env := w.Env()
	env.Term = 6
	c := New(env)
	_, err := c.Reconcile(context.Background(), key("rs"))
	if err == nil {
		t.Fatal("a fenced write passed")
	}
	if n := len(w.Events.With("FailedCreate")); n != 1 {
		t.Fatalf("%d attempts in the first batch", n)
	}
}

func TestDeletionOrder(t *testing.T) {
	now := time.Unix(10000, 0)
	pod := func(name string, set ...func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(now)},
			Spec: corev1.PodSpec{NodeName: "n1"}, Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
				{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now)}}}}
		for _, f := range set {
			f(p)
		}
		return p
	}
	want := []*corev1.Pod{
		pod("1-unassigned", func(p *corev1.Pod) { p.Spec.NodeName = ""; p.Status = corev1.PodStatus{Phase: corev1.PodPending} }),
		pod("2-pending", func(p *corev1.Pod) { p.Status = corev1.PodStatus{Phase: corev1.PodPending} }),
		pod("3-not-ready", func(p *corev1.Pod) { p.Status.Conditions = nil }),
		pod("4-cheap", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.PodDeletionCost: "-5"} }),
		pod("5-crowded", func(p *corev1.Pod) { p.Spec.NodeName = "n2" }),
		pod("6-ready-lately", func(p *corev1.Pod) { p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(time.Hour)) }),
		pod("7-restarted", func(p *corev1.Pod) { p.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: 3}} }),
		pod("8-newer", func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(now.Add(time.Minute)) }),
		pod("9-older"),
		pod("a-returned", func(p *corev1.Pod) {
			p.Annotations = map[string]string{lost.ReturnedAnnotation: "x"}
			p.CreationTimestamp = metav1.NewTime(now.Add(2 * time.Hour))
		}),
		pod("b-returning", func(p *corev1.Pod) {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: lost.Reason})
		}),
	}
	mixed := slices.Clone(want)
	slices.Reverse(mixed)
	got := chooseVictims(mixed, map[string]int{"n2": 5}, len(want))
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("place %d: %s, want %s", i, got[i].Name, want[i].Name)
		}
	}
}

func TestReplicationController(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	tpl := fixture.Template("web")
	n := int32(2)
	w.Create(&corev1.ReplicationController{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "rc"},
		Spec: corev1.ReplicationControllerSpec{Replicas: &n, Selector: tpl.Labels, Template: &tpl}})
	c := NewReplicationController(w.Env())
	w.Settle(c)
	w.BindAll("n")
	w.Report(nil)
	w.Settle(c)
	rc := fixture.Get[*corev1.ReplicationController](w, replicationController.gk, "default", "rc")
	if rc.Status.Replicas != 2 || rc.Status.AvailableReplicas != 2 {
		t.Fatalf("%+v", rc.Status)
	}
}

func TestNamesAreUnique(t *testing.T) {
	w := fixture.New(t)
	w.Create(newSet("rs", 40))
	w.Settle(New(w.Env()))
	seen := map[string]bool{}
	for _, p := range pods(w) {
		seen[p.Name] = true
	}
	if len(seen) != 40 {
		t.Fatal(fmt.Sprint(len(seen), " different names"))
	}
}

func key(name string) state.Key {
	return state.Key{Kind: fixture.ReplicaSet.String(), Namespace: "default", Name: name}
}
