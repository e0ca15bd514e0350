package disruption

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane/controllers/deployment"
	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/replicaset"
	"github.com/dunlin-project/dunlin/controlplane/eviction"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

func ptr[T any](v T) *T { return &v }

func budget(set func(*policyv1.PodDisruptionBudgetSpec)) *policyv1.PodDisruptionBudget {
	b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Generation: 1},
		Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}
	set(&b.Spec)
	return b
}

func minAvailable(v intstr.IntOrString) func(*policyv1.PodDisruptionBudgetSpec) {
	return func(s *policyv1.PodDisruptionBudgetSpec) { s.MinAvailable = &v }
}

func maxUnavailable(v intstr.IntOrString) func(*policyv1.PodDisruptionBudgetSpec) {
	return func(s *policyv1.PodDisruptionBudgetSpec) { s.MaxUnavailable = &v }
}

func TestComputeStatus(t *testing.T) {
	now := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	ready := func(n int) (out []member) {
		for i := range n {
			out = append(out, member{name: string(rune('a' + i)), owner: "o", ready: true})
		}
		return out
	}
	for name, c := range map[string]struct {
		spec                                func(*policyv1.PodDisruptionBudgetSpec)
		pods                                []member
		scale                               int32
		allowed, healthy, desired, expected int32
	}{
		"number":                          {minAvailable(intstr.FromInt32(2)), ready(3), 5, 1, 3, 2, 3},
		"percent of the scale, up":        {minAvailable(intstr.FromString("50%")), ready(3), 5, 0, 3, 3, 5},
		"unavailable percent, up":         {maxUnavailable(intstr.FromString("30%")), ready(5), 5, 2, 5, 3, 5},
		"unavailable number":              {maxUnavailable(intstr.FromInt32(1)), ready(4), 5, 0, 4, 4, 5},
		"more than there are":             {maxUnavailable(intstr.FromInt32(9)), ready(2), 2, 2, 2, 0, 2},
		"nothing":                         {minAvailable(intstr.FromInt32(0)), nil, 0, 0, 0, 0, 0},
		"leaving and not ready count not": {minAvailable(intstr.FromInt32(1)), append(ready(1), member{name: "x", leaving: true, ready: true}, member{name: "y"}), 3, 0, 1, 1, 3},
	} {
		st, _, err := computeStatus(budget(c.spec), c.pods, map[string]int32{"o": c.scale}, nil, nil, now)
		if err != nil || st.DisruptionsAllowed != c.allowed || st.CurrentHealthy != c.healthy || st.DesiredHealthy != c.desired || st.ExpectedPods != c.expected {
			t.Errorf("%s: %+v, %v", name, st, err)
		}
		if got := meta.IsStatusConditionTrue(st.Conditions, policyv1.DisruptionAllowedCondition); got != (c.allowed > 0) {
			t.Errorf("%s: condition %v", name, got)
		}
	}
	b := budget(minAvailable(intstr.FromInt32(1)))
	b.Status.DisruptedPods = map[string]metav1.Time{"a": metav1.NewTime(now.Add(-time.Minute)), "gone": metav1.NewTime(now)}
	st, wait, _ := computeStatus(b, ready(2), nil, nil, map[string]time.Duration{"a": time.Minute, "gone": time.Hour}, now)
	if st.CurrentHealthy != 1 || st.DisruptionsAllowed != 0 || wait != time.Minute || len(st.DisruptedPods) != 1 {
		t.Errorf("evicted a moment ago: %+v, again after %v", st, wait)
	}
	if st, wait, _ = computeStatus(b, ready(2), nil, nil, map[string]time.Duration{"a": 0}, now); st.CurrentHealthy != 2 || wait != 0 || len(st.DisruptedPods) != 0 {
		t.Errorf("was not deleted after all: %+v", st)
	}
}

type world struct {
	*fixture.World
	c []*loop.Controller
}

// newWorld has a Deployment of n pods and a budget for them.
func newWorld(t *testing.T, n int32, b *policyv1.PodDisruptionBudget) *world {
	w := &world{World: fixture.New(t)}
	w.AddNode("n")
	tpl := fixture.Template("web")
	w.Create(&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: appsv1.DeploymentSpec{Replicas: &n, Template: tpl, Selector: &metav1.LabelSelector{MatchLabels: tpl.Labels}}})
	w.Create(b)
	w.c = []*loop.Controller{deployment.New(w.Env()), replicaset.New(w.Env()), New(w.Env())}
	w.turn()
	w.turn()
	return w
}

func (w *world) turn() {
	w.Settle(w.c...)
	w.BindAll("n")
	w.Report(nil)
	w.Settle(w.c...)
}

func (w *world) status() policyv1.PodDisruptionBudgetStatus {
	return fixture.Get[*policyv1.PodDisruptionBudget](w.World, gk, "default", "web").Status
}

func (w *world) pods() []*corev1.Pod {
	return fixture.List[*corev1.Pod](w.World, fixture.Pod, "default")
}

func (w *world) evict(name string) error {
	return eviction.Evict(context.Background(), w.Store, "default", name, registry.DeleteOptions{}, w.Now)
}

// Pods go one at a time, as the budget allows; the last ones stay.
func TestEvictionKeepsTheBudget(t *testing.T) {
	w := newWorld(t, 3, budget(minAvailable(intstr.FromInt32(2))))
	if st := w.status(); st.DisruptionsAllowed != 1 || st.ExpectedPods != 3 || st.CurrentHealthy != 3 {
		t.Fatalf("%+v", st)
	}
	pods := w.pods()
	if err := w.evict(pods[0].Name); err != nil {
		t.Fatal(err)
	}
	p := fixture.Get[*corev1.Pod](w.World, fixture.Pod, "default", pods[0].Name)
	if p.DeletionTimestamp == nil || p.Status.Conditions[len(p.Status.Conditions)-1].Reason != "EvictionByEvictionAPI" {
		t.Fatalf("%+v", p.Status.Conditions)
	}
	// Before and after the controller has seen it, the next one is refused.
	for _, want := range []string{"needs 2 healthy pods and has 3 currently, 1 of which are being evicted", "needs 2 healthy pods and has 2 currently"} {
		err := w.evict(pods[1].Name)
		if !apierrors.IsTooManyRequests(err) {
			t.Fatalf("second eviction: %v", err)
		}
		if cause, ok := apierrors.StatusCause(err, policyv1.DisruptionBudgetCause); !ok || cause.Message != "The disruption budget web "+want {
			t.Fatalf("%v: %+v", err, cause)
		}
		w.Settle(w.c...)
	}
	err := w.evict(pods[1].Name)
	if cause, _ := apierrors.StatusCause(err, policyv1.DisruptionBudgetCause); cause.Message != "The disruption budget web needs 2 healthy pods and has 2 currently" {
		t.Fatalf("%+v", cause)
	}
	w.turn()
	w.turn()
	if err := w.evict(pods[1].Name); err != nil {
		t.Fatalf("after the replacement: %v", err)
	}
}

// The server that evicts and the one that counts need not agree on the time,
// nor need the clock run evenly.
func TestEvictionsOfAnotherClock(t *testing.T) {
	for name, off := range map[string]time.Duration{"behind": -time.Hour, "ahead": time.Hour} {
		w := newWorld(t, 3, budget(minAvailable(intstr.FromInt32(2))))
		pods := w.pods()
		evict := func(p *corev1.Pod, writes int) error {
			return eviction.Evict(context.Background(), &fixture.Mortal{Store: w.Store, Left: writes}, "default", p.Name, registry.DeleteOptions{},
				func() time.Time { return w.Now().Add(off) })
		}
		if err := evict(pods[0], 1); err == nil { // it died before the pod was deleted
			t.Fatal("should have died half-way")
		}
		w.Settle(w.c...)
		w.Advance(deletionTimeout - time.Second)
		w.Settle(w.c...)
		if err := evict(pods[1], 100); !apierrors.IsTooManyRequests(err) || w.status().DisruptionsAllowed != 0 {
			t.Fatalf("%s: the second eviction while the first may go on: %v, %+v", name, err, w.status())
		}
		w.Advance(time.Second)
		w.Settle(w.c...)
		if st := w.status(); st.DisruptionsAllowed != 1 || len(st.DisruptedPods) != 0 {
			t.Fatalf("%s: the first one was given up: %+v", name, st)
		}
	}
	env := newWorld(t, 1, budget(minAvailable(intstr.FromInt32(1)))).Env()
	var doubt error
	env.Trust = func() error { return doubt }
	c := &controller{env: env, going: map[state.Key]map[string]evicted{}}
	now, pods := env.Clock.Now(), map[string]metav1.Time{"a": metav1.NewTime(env.Clock.Now())}
	left := func(now time.Time) time.Duration { return c.see(state.Key{Name: "b"}, pods, now)["a"] }
	if d := left(now); d != deletionTimeout {
		t.Fatal(d)
	}
	if d := left(now.Add(time.Minute)); d != time.Minute {
		t.Fatal(d)
	}
	if d := left(now.Add(-time.Hour)); d != deletionTimeout {
		t.Fatal("back:", d)
	}
	doubt = fmt.Errorf("jumped")
	if d := left(now.Add(time.Hour)); d != deletionTimeout {
		t.Fatal("while it is not trusted:", d)
	}
	doubt = nil
	if d := left(now.Add(time.Hour + time.Minute)); d != time.Minute {
		t.Fatal("trusted again:", d)
	}
}

func TestDryRunTakesNothing(t *testing.T) {
	w := newWorld(t, 2, budget(maxUnavailable(intstr.FromInt32(1))))
	before := w.status()
	err := eviction.Evict(context.Background(), w.Store, "default", w.pods()[0].Name, registry.DeleteOptions{DryRun: true}, w.Now)
	if err != nil || w.status().DisruptionsAllowed != before.DisruptionsAllowed || w.pods()[0].DeletionTimestamp != nil {
		t.Fatalf("%v, %+v", err, w.status())
	}
}

func TestUnhealthyPods(t *testing.T) {
	w := newWorld(t, 2, budget(minAvailable(intstr.FromInt32(2))))
	sick := w.pods()[0]
	w.SetReady(sick, false)
	w.Settle(w.c...)
	if err := w.evict(sick.Name); !apierrors.IsTooManyRequests(err) {
		t.Fatalf("an unhealthy pod below the budget: %v", err)
	}
	fixture.Change(w.World, gk, "default", "web", registry.Main, func(b *policyv1.PodDisruptionBudget) {
		b.Spec.UnhealthyPodEvictionPolicy = ptr(policyv1.AlwaysAllow)
	})
	w.Settle(w.c...)
	before := w.status()
	if err := w.evict(sick.Name); err != nil {
		t.Fatal(err)
	}
	if st := w.status(); len(st.DisruptedPods) != 0 || st.DisruptionsAllowed != before.DisruptionsAllowed {
		t.Fatalf("took from the budget: %+v", st)
	}
}

func TestTwoBudgetsAndNone(t *testing.T) {
	w := newWorld(t, 1, budget(minAvailable(intstr.FromInt32(0))))
	second := budget(minAvailable(intstr.FromInt32(0)))
	second.Name = "second"
	w.Create(second)
	w.Settle(w.c...)
	err := w.evict(w.pods()[0].Name)
	if !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), "more than one PodDisruptionBudget") ||
		!strings.Contains(fmt.Sprint(err.(apierrors.APIStatus).Status().Details), "(second, web)") {
		t.Fatal(err)
	}
	w.Delete(gk, "default", "second", "")
	w.Delete(gk, "default", "web", "")
	if err := w.evict(w.pods()[0].Name); err != nil {
		t.Fatal(err)
	}
}

// What has no number of pods cannot be a fraction; the reason is told.
func TestUnknownOwner(t *testing.T) {
	w := &world{World: fixture.New(t)}
	w.AddNode("n")
	tpl := fixture.Template("web")
	yes := true
	cm := w.Create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "owner"}}).(*corev1.ConfigMap)
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", Labels: tpl.Labels,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "owner", UID: cm.UID, Controller: &yes}}}, Spec: tpl.Spec})
	w.Create(budget(maxUnavailable(intstr.FromInt32(1))))
	w.c = []*loop.Controller{New(w.Env())}
	w.turn()
	c := meta.FindStatusCondition(w.status().Conditions, policyv1.DisruptionAllowedCondition)
	if c == nil || c.Reason != policyv1.SyncFailedReason || !strings.Contains(c.Message, `found no controllers for pod "p"`) {
		t.Fatalf("%+v", c)
	}
	err := w.evict("p")
	if cause, _ := apierrors.StatusCause(err, policyv1.DisruptionBudgetCause); !strings.Contains(cause.Message, "because it failed sync") && !strings.Contains(cause.Message, "still being processed") {
		t.Fatalf("%v: %+v", err, cause)
	}
}
