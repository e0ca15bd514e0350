package gc

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

var configMap = schema.GroupKind{Kind: "ConfigMap"}

// add makes a ConfigMap that is owned by others, given as name and uid.
func add(w *fixture.World, ns, name string, set func(*corev1.ConfigMap), owners ...*corev1.ConfigMap) *corev1.ConfigMap {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	for _, o := range owners {
		block := true
		cm.OwnerReferences = append(cm.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: o.Name, UID: o.UID, BlockOwnerDeletion: &block})
	}
	if set != nil {
		set(cm)
	}
	return w.Create(cm).(*corev1.ConfigMap)
}

func names(w *fixture.World) []string {
	var out []string
	for _, cm := range fixture.List[*corev1.ConfigMap](w, configMap, "") {
		out = append(out, cm.Name)
	}
	slices.Sort(out)
	return out
}

func expect(t *testing.T, w *fixture.World, want ...string) {
	t.Helper()
	if got := names(w); !slices.Equal(got, want) {
		t.Fatalf("left: %v, want %v", got, want)
	}
}

func family(w *fixture.World) {
	top := add(w, "default", "top", nil)
	mid := add(w, "default", "mid", nil, top)
	add(w, "default", "leaf", nil, mid)
	add(w, "default", "other", nil)
}

func TestBackground(t *testing.T) {
	w := fixture.New(t)
	family(w)
	w.Settle(New(w.Env()))
	expect(t, w, "leaf", "mid", "other", "top")
	w.Delete(configMap, "default", "top", metav1.DeletePropagationBackground)
	w.Settle(New(w.Env()))
	expect(t, w, "other")
}

func TestForegroundKeepsOwnerUntilDependentsAreGone(t *testing.T) {
	w := fixture.New(t)
	top := add(w, "default", "top", nil)
	add(w, "default", "dep", func(cm *corev1.ConfigMap) { cm.Finalizers = []string{"test/hold"} }, top)
	w.Delete(configMap, "default", "top", metav1.DeletePropagationForeground)
	w.Settle(New(w.Env()))
	expect(t, w, "dep", "top")
	w.Advance(2 * time.Minute)
	w.Settle(New(w.Env()))
	if ev := w.Events.With("DeletionBlocked"); len(ev) == 0 {
		t.Fatal("the stuck finalizer is not named")
	}
	fixture.Change(w, configMap, "default", "dep", registry.Main, func(cm *corev1.ConfigMap) { cm.Finalizers = nil })
	w.Settle(New(w.Env()))
	expect(t, w)
}

func TestForegroundOverTwoLevels(t *testing.T) {
	w := fixture.New(t)
	family(w)
	w.Delete(configMap, "default", "top", metav1.DeletePropagationForeground)
	w.Settle(New(w.Env()))
	expect(t, w, "other")
}

func TestOrphan(t *testing.T) {
	w := fixture.New(t)
	family(w)
	w.Delete(configMap, "default", "top", metav1.DeletePropagationOrphan)
	w.Settle(New(w.Env()))
	expect(t, w, "leaf", "mid", "other")
	if refs := fixture.Get[*corev1.ConfigMap](w, configMap, "default", "mid").OwnerReferences; len(refs) != 0 {
		t.Fatalf("references left: %v", refs)
	}
}

func TestOneOfTwoOwnersGoes(t *testing.T) {
	w := fixture.New(t)
	a, b := add(w, "default", "a", nil), add(w, "default", "b", nil)
	add(w, "default", "dep", nil, a, b)
	w.Delete(configMap, "default", "a", metav1.DeletePropagationBackground)
	w.Settle(New(w.Env()))
	refs := fixture.Get[*corev1.ConfigMap](w, configMap, "default", "dep").OwnerReferences
	if len(refs) != 1 || refs[0].UID != b.UID {
		t.Fatalf("references %v", refs)
	}
	w.Delete(configMap, "default", "b", metav1.DeletePropagationForeground)
	w.Settle(New(w.Env()))
	expect(t, w)
}

func TestOwnersThatCannotBe(t *testing.T) {
	w := fixture.New(t)
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "elsewhere"}})
	far := add(w, "elsewhere", "far", nil)
	add(w, "default", "cross", nil, far)
	add(w, "default", "wrong-name", nil, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "nobody", UID: far.UID}})
	add(w, "default", "dead", nil, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "gone", UID: types.UID("no-such-uid")}})
	add(w, "default", "unknown-kind", func(cm *corev1.ConfigMap) {
		cm.OwnerReferences = []metav1.OwnerReference{{APIVersion: "example.com/v1", Kind: "Thing", Name: "x", UID: "x"}}
	})
	w.Settle(New(w.Env()))
	got := names(w)
	if !slices.Contains(got, "cross") || !slices.Contains(got, "unknown-kind") || slices.Contains(got, "dead") {
		t.Fatalf("left: %v", got)
	}
	w.Delete(configMap, "elsewhere", "far", metav1.DeletePropagationBackground)
}

// Any graph (cycles too), any deletions with any policy, in the end: nothing
// lives whose owners are all gone, and nothing waits with a finalizer of ours.
func TestEndStateProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		n := rapid.IntRange(2, 8).Draw(rt, "objects")
		var all []*corev1.ConfigMap
		for i := range n {
			var owners []*corev1.ConfigMap
			for _, o := range all {
				if rapid.IntRange(0, 2).Draw(rt, "owns") == 0 {
					owners = append(owners, o)
				}
			}
			all = append(all, add(w, "default", fmt.Sprintf("o%d", i), nil, owners...))
		}
		if rapid.Bool().Draw(rt, "cycle") {
			first, last := all[0], all[n-1]
			fixture.Change(w, configMap, "default", first.Name, registry.Main, func(cm *corev1.ConfigMap) {
				block := true
				cm.OwnerReferences = append(cm.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: last.Name, UID: last.UID, BlockOwnerDeletion: &block})
			})
		}
		deleted := map[string]bool{}
		for range rapid.IntRange(1, 3).Draw(rt, "deletes") {
			name := fmt.Sprintf("o%d", rapid.IntRange(0, n-1).Draw(rt, "which"))
			if deleted[name] || !slices.Contains(names(w), name) {
				continue
			}
			deleted[name] = true
			w.Delete(configMap, "default", name, rapid.SampledFrom([]metav1.DeletionPropagation{
				metav1.DeletePropagationBackground, metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan}).Draw(rt, "policy"))
			w.Settle(New(w.Env()))
		}
		live := map[types.UID]bool{}
		for _, cm := range fixture.List[*corev1.ConfigMap](w, configMap, "default") {
			live[cm.UID] = true
		}
		for _, cm := range fixture.List[*corev1.ConfigMap](w, configMap, "default") {
			if cm.DeletionTimestamp != nil {
				rt.Fatalf("%s still waits with %v", cm.Name, cm.Finalizers)
			}
			for _, o := range cm.OwnerReferences {
				if !live[o.UID] {
					rt.Fatalf("%s refers to %s, which is gone", cm.Name, o.Name)
				}
			}
		}
		for name := range deleted {
			if slices.Contains(names(w), name) {
				rt.Fatalf("%s was deleted but lives", name)
			}
		}
	})
}

// A finalizer that nobody removes is named, with since when it is waited for,
// on the object itself.
func TestStuckFinalizerIsNamed(t *testing.T) {
	w := fixture.New(t)
	add(w, "default", "held", func(cm *corev1.ConfigMap) { cm.Finalizers = []string{"test/hold"} })
	at := w.Now()
	w.Delete(configMap, "default", "held", metav1.DeletePropagationBackground)
	w.Settle(New(w.Env()))
	if got := w.Events.With("DeletionBlocked"); len(got) != 0 {
		t.Fatalf("at once: %v", got)
	}
	w.Advance(2 * stuckAfter)
	w.Settle(New(w.Env()))
	got := w.Events.With("DeletionBlocked")
	want := "Deletion was asked for at " + at.Format(time.RFC3339) + " and waits for finalizer test/hold, which its own controller must remove"
	if len(got) != 1 || got[0].Message != want || got[0].About.Name != "held" || got[0].About.Kind != "ConfigMap" {
		t.Fatalf("%+v, want %q", got, want)
	}
}

// Where a kind has conditions, what a deletion waits for stands in one, with
// the deletion's time, until that is over; other conditions stay.
func TestStuckDeletionIsACondition(t *testing.T) {
	w := fixture.New(t)
	tpl := fixture.Template("a")
	hold := metav1.ObjectMeta{Namespace: "default", Name: "held", Finalizers: []string{"test/hold"}}
	held := hold
	held.Labels = tpl.Labels
	one := int32(1)
	w.Create(&corev1.Pod{ObjectMeta: held, Spec: tpl.Spec})
	w.Create(&appsv1.Deployment{ObjectMeta: held, Spec: appsv1.DeploymentSpec{Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: tpl.Labels}, Template: tpl}})
	w.Create(&corev1.Service{ObjectMeta: held, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}})
	w.Create(&policyv1.PodDisruptionBudget{ObjectMeta: held, Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: tpl.Labels}}})
	fixture.Change(w, fixture.Deployment, "default", "held", registry.Status, func(d *appsv1.Deployment) {
		d.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentAvailable, Status: corev1.ConditionTrue, Reason: "x"}}
	})
	for _, gk := range []schema.GroupKind{fixture.Pod, fixture.Deployment, fixture.Service, {Group: "policy", Kind: "PodDisruptionBudget"}} {
		at := w.Now()
		w.Delete(gk, "default", "held", metav1.DeletePropagationBackground)
		text := func() string {
			t.Helper()
			obj, err := w.Store.Get(gk, "default", "held")
			if err != nil {
				t.Fatal(err)
			}
			j, err := json.Marshal(obj)
			if err != nil {
				t.Fatal(err)
			}
			return string(j)
		}
		w.Settle(New(w.Env()))
		if strings.Contains(text(), manifests.ConditionDeletionBlocked) {
			t.Errorf("%s: at once: %s", gk, text())
		}
		w.Advance(2 * stuckAfter)
		w.Settle(New(w.Env()))
		var got struct {
			Status struct{ Conditions []metav1.Condition }
		}
		if err := json.Unmarshal([]byte(text()), &got); err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(got.Status.Conditions, func(c metav1.Condition) bool { return c.Type == manifests.ConditionDeletionBlocked })
		if i < 0 {
			t.Fatalf("%s: %s", gk, text())
		}
		c := got.Status.Conditions[i]
		if grace := 30 * time.Second; c.Status != "True" || c.Reason != reasonFinalizers || c.LastTransitionTime.Before(&metav1.Time{Time: at}) || c.LastTransitionTime.After(at.Add(grace)) ||
			!strings.Contains(c.Message, "waits for finalizer test/hold, which its own controller must remove") {
			t.Errorf("%s: %+v", gk, c)
		}
		said := 0
		for _, e := range w.Events.With("DeletionBlocked") {
			if e.About.Kind == gk.Kind {
				said++
			}
		}
		if said != 1 {
			t.Errorf("%s: %d events", gk, said)
		}
		if gk == fixture.Deployment && len(got.Status.Conditions) != 2 {
			t.Errorf("other conditions: %s", text())
		}
		before := w.Machine.Snapshot().ResourceVersion()
		w.Advance(time.Hour)
		w.Settle(New(w.Env()))
		if w.Machine.Snapshot().ResourceVersion() != before {
			t.Errorf("%s: it is written again as it ages", gk)
		}
	}
	// An owner that waits for its dependents names their kinds.
	owner := add(w, "default", "top", nil)
	rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "rs", Labels: tpl.Labels}, Spec: appsv1.ReplicaSetSpec{Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: tpl.Labels}, Template: tpl}}
	made, _ := w.Create(rs).(*appsv1.ReplicaSet)
	block := true
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "dep", Labels: tpl.Labels, Finalizers: []string{"test/hold"},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "rs", UID: made.UID, BlockOwnerDeletion: &block}}}, Spec: tpl.Spec})
	w.Delete(fixture.ReplicaSet, "default", "rs", metav1.DeletePropagationForeground)
	w.Settle(New(w.Env()))
	w.Advance(2 * stuckAfter)
	w.Settle(New(w.Env()))
	conds := fixture.Get[*appsv1.ReplicaSet](w, fixture.ReplicaSet, "default", "rs").Status.Conditions
	if len(conds) != 1 || conds[0].Reason != reasonDependents || !strings.Contains(conds[0].Message, "dependents that block it: Pod") {
		t.Errorf("%+v (beside %s)", conds, owner.Name)
	}
}
