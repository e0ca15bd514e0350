package statefulset

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/history"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func ptr[T any](v T) *T { return &v }

func newSet(n int32, set ...func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
	t := fixture.Template("db")
	s := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "db"},
		Spec: appsv1.StatefulSetSpec{Replicas: &n, ServiceName: "peers", Selector: &metav1.LabelSelector{MatchLabels: t.Labels}, Template: t}}
	for _, f := range set {
		f(s)
	}
	return s
}

func parallel(s *appsv1.StatefulSet) { s.Spec.PodManagementPolicy = appsv1.ParallelPodManagement }

func image(name string) func(*appsv1.StatefulSet) {
	return func(s *appsv1.StatefulSet) { s.Spec.Template.Spec.Containers[0].Image = name }
}

func replicas(n int32) func(*appsv1.StatefulSet) {
	return func(s *appsv1.StatefulSet) { s.Spec.Replicas = &n }
}

type world struct {
	*fixture.World
	c *loop.Controller
}

func newWorld(t testing.TB) *world {
	w := fixture.New(t)
	w.AddNode("n")
	return &world{w, New(w.Env())}
}

func (w *world) get() *appsv1.StatefulSet {
	return fixture.Get[*appsv1.StatefulSet](w.World, gk, "default", "db")
}

func (w *world) change(f func(*appsv1.StatefulSet)) {
	fixture.Change(w.World, gk, "default", "db", registry.Main, f)
}

func (w *world) pods() []*corev1.Pod {
	return fixture.List[*corev1.Pod](w.World, fixture.Pod, "default")
}

// shape is the pods' names, with the image's version.
func (w *world) shape() string {
	var out []string
	for _, p := range w.pods() {
		v := strings.TrimSuffix(strings.TrimPrefix(p.Spec.Containers[0].Image, "file:///"), ".wasm")
		s := p.Name + "=" + v
		if p.DeletionTimestamp != nil {
			s += "-"
		}
		out = append(out, s)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func (w *world) turns(n int, ready func(*corev1.Pod) bool) {
	for range n {
		w.Settle(w.c)
		w.BindAll("n")
		w.Report(ready)
	}
	w.Settle(w.c)
}

func TestOneAfterTheOther(t *testing.T) {
	w := newWorld(t)
	w.Create(newSet(3))
	for _, want := range []string{"db-0=app", "db-0=app db-1=app", "db-0=app db-1=app db-2=app"} {
		w.Settle(w.c)
		if got := w.shape(); got != want {
			t.Fatalf("%s, want %s", got, want)
		}
		w.BindAll("n")
		w.Settle(w.c)
		if got := w.shape(); got != want {
			t.Fatalf("%s before the last was ready", got)
		}
		w.Report(nil)
	}
	w.Settle(w.c)
	p := fixture.Get[*corev1.Pod](w.World, fixture.Pod, "default", "db-1")
	if p.Labels[appsv1.PodIndexLabel] != "1" || p.Labels[appsv1.StatefulSetPodNameLabel] != "db-1" || p.Spec.Hostname != "db-1" || p.Spec.Subdomain != "peers" {
		t.Fatalf("%+v", p.ObjectMeta)
	}
	st := w.get().Status
	if st.Replicas != 3 || st.ReadyReplicas != 3 || st.AvailableReplicas != 3 || st.CurrentReplicas != 3 || st.UpdatedReplicas != 3 || st.CurrentRevision != st.UpdateRevision {
		t.Fatalf("%+v", st)
	}
	before := w.Machine.Snapshot().ResourceVersion()
	w.Settle(New(w.Env()))
	if w.Machine.Snapshot().ResourceVersion() != before {
		t.Fatal("writes at rest")
	}
	w.change(replicas(1))
	w.Settle(w.c)
	if got := w.shape(); got != "db-0=app db-1=app db-2=app-" {
		t.Fatalf("scaling down: %s", got)
	}
	w.turns(3, nil)
	if got := w.shape(); got != "db-0=app" {
		t.Fatal(got)
	}
}

func TestAllAtOnceAndOrdinals(t *testing.T) {
	w := newWorld(t)
	w.Create(newSet(3, parallel, func(s *appsv1.StatefulSet) { s.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: 5} }))
	w.Settle(w.c)
	if got := w.shape(); got != "db-5=app db-6=app db-7=app" {
		t.Fatal(got)
	}
	w.turns(1, nil)
	w.change(replicas(1))
	w.Settle(w.c)
	if got := w.shape(); got != "db-5=app db-6=app- db-7=app-" {
		t.Fatal(got)
	}
}

func TestPartitionThenTheRest(t *testing.T) {
	w := newWorld(t)
	part := func(n int32) func(*appsv1.StatefulSet) {
		return func(s *appsv1.StatefulSet) {
			s.Spec.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: appsv1.RollingUpdateStatefulSetStrategyType,
				RollingUpdate: &appsv1.RollingUpdateStatefulSetStrategy{Partition: &n}}
		}
	}
	w.Create(newSet(3, part(2)))
	w.turns(4, nil)
	w.change(image("file:///v2.wasm"))
	w.Settle(w.c)
	if got := w.shape(); got != "db-0=app db-1=app db-2=app-" {
		t.Fatalf("the highest first: %s", got)
	}
	w.turns(5, nil)
	st := w.get().Status
	if got := w.shape(); got != "db-0=app db-1=app db-2=v2" || st.UpdatedReplicas != 1 || st.CurrentReplicas != 2 || st.CurrentRevision == st.UpdateRevision {
		t.Fatalf("%s, %+v", got, st)
	}
	// Below the partition a pod comes back as it was.
	w.Delete(fixture.Pod, "default", "db-1", "")
	w.turns(4, nil)
	if got := w.shape(); got != "db-0=app db-1=app db-2=v2" {
		t.Fatal(got)
	}
	w.change(part(0))
	w.turns(8, nil)
	st = w.get().Status
	if got := w.shape(); got != "db-0=v2 db-1=v2 db-2=v2" || st.CurrentRevision != st.UpdateRevision || st.CurrentReplicas != 3 {
		t.Fatalf("%s, %+v", got, st)
	}
	var numbers []int64
	for _, r := range fixture.List[*appsv1.ControllerRevision](w.World, history.GK, "default") {
		numbers = append(numbers, r.Revision)
	}
	if slices.Sort(numbers); !slices.Equal(numbers, []int64{1, 2}) {
		t.Fatalf("revisions %v", numbers)
	}
	// Undo: the earlier template is the newest revision again.
	w.change(image("file:///app.wasm"))
	w.turns(10, nil)
	if got := w.shape(); got != "db-0=app db-1=app db-2=app" {
		t.Fatal(got)
	}
}

// A version that never becomes ready stops at its first pod, and can be taken
// back without anybody deleting that one.
func TestBadUpdateIsTakenBack(t *testing.T) {
	w := newWorld(t)
	w.Create(newSet(3))
	w.turns(4, nil)
	good := func(p *corev1.Pod) bool { return p.Spec.Containers[0].Image == "file:///app.wasm" }
	w.change(image("file:///bad.wasm"))
	w.turns(6, good)
	if got := w.shape(); got != "db-0=app db-1=app db-2=bad" {
		t.Fatal(got)
	}
	w.change(image("file:///app.wasm"))
	w.turns(6, good)
	if got, st := w.shape(), w.get().Status; got != "db-0=app db-1=app db-2=app" || st.ReadyReplicas != 3 {
		t.Fatalf("%s, %+v", got, st)
	}
}

// A pod on a silent node is not replaced, whatever is asked of the set; the
// set says so. Its name is free when the user says that it is.
func TestAtMostOne(t *testing.T) {
	w := newWorld(t)
	w.AddNode("other")
	w.Create(newSet(2))
	w.turns(3, nil)
	uid := fixture.Get[*corev1.Pod](w.World, fixture.Pod, "default", "db-1").UID
	w.Silent["n"] = true
	for _, p := range w.pods() {
		fixture.Change(w.World, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) {
			if p.Name == "db-1" {
				lost.SetNotReady(&p.Status, "n", w.Now())
			}
		})
	}
	w.change(image("file:///v2.wasm"))
	w.turns(3, nil)
	if p := fixture.Get[*corev1.Pod](w.World, fixture.Pod, "default", "db-1"); p.UID != uid || p.DeletionTimestamp != nil {
		t.Fatalf("touched: %+v", p.ObjectMeta)
	}
	c := w.get().Status.Conditions
	if len(c) != 1 || c[0].Type != NodesAway || !strings.Contains(c[0].Message, "1 node(s) are offline or not ready: db-1 (node n) may still run") || len(w.Events.With("NodesAway")) != 1 {
		t.Fatalf("%+v", c)
	}
	// Deleted in the ordinary way it keeps its name until its node says so.
	w.Delete(fixture.Pod, "default", "db-1", "")
	w.turns(2, nil)
	if p := fixture.Get[*corev1.Pod](w.World, fixture.Pod, "default", "db-1"); p.UID != uid {
		t.Fatal("a second one")
	}
	zero := int64(0)
	if _, _, err := w.Store.Delete(t.Context(), fixture.Pod, "default", "db-1", registry.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	w.Settle(w.c)
	if p := fixture.Get[*corev1.Pod](w.World, fixture.Pod, "default", "db-1"); p.UID == uid {
		t.Fatal("not made anew after a forced delete")
	}
}

func TestAdoptsByName(t *testing.T) {
	w := newWorld(t)
	tpl := fixture.Template("db")
	for _, name := range []string{"db-0", "db-01", "stray"} {
		w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: tpl.Labels}, Spec: tpl.Spec})
	}
	w.Create(newSet(1))
	w.Settle(w.c)
	for name, want := range map[string]bool{"db-0": true, "db-01": false, "stray": false} {
		if p := fixture.Get[*corev1.Pod](w.World, fixture.Pod, "default", name); metav1.IsControlledBy(p, w.get()) != want {
			t.Errorf("%s: %v", name, p.OwnerReferences)
		}
	}
}

func TestDecide(t *testing.T) {
	up := func(n int) replica {
		return replica{ordinal: n, name: fmt.Sprint("p", n), exists: true, current: true, ready: true, available: true}
	}
	with := func(r replica, f func(*replica)) replica { f(&r); return r }
	old := func(r *replica) { r.current = false }
	down := func(r *replica) { r.ready, r.available = false, false }
	ordered, burst := strategy{ordered: true, maxUnavailable: 1}, strategy{maxUnavailable: 2}
	for what, c := range map[string]struct {
		replicas, condemned []replica
		s                   strategy
		create              []int
		remove              []string
	}{
		"first missing":                {[]replica{{ordinal: 0}, {ordinal: 1}}, nil, ordered, []int{0}, nil},
		"all missing":                  {[]replica{{ordinal: 0}, {ordinal: 1}}, nil, burst, []int{0, 1}, nil},
		"waits for the one before":     {[]replica{with(up(0), down), {ordinal: 1}}, nil, ordered, nil, nil},
		"over":                         {[]replica{with(up(0), func(r *replica) { r.over, r.ready, r.available = true, false, false })}, nil, ordered, nil, []string{"p0"}},
		"update, one":                  {[]replica{with(up(0), old), with(up(1), old)}, nil, ordered, nil, []string{"p1"}},
		"update, two":                  {[]replica{with(up(0), old), with(up(1), old), with(up(2), old)}, nil, burst, nil, []string{"p2", "p1"}},
		"update, one is down":          {[]replica{with(up(0), down), with(up(1), old), with(up(2), old)}, nil, burst, nil, []string{"p2"}},
		"broken in an old revision":    {[]replica{up(0), with(with(up(1), old), down)}, nil, ordered, nil, []string{"p1"}},
		"silent in an old revision":    {[]replica{up(0), with(with(up(1), old), func(r *replica) { down(r); r.silent = true })}, nil, ordered, nil, nil},
		"below the partition":          {[]replica{with(up(0), old), up(1)}, nil, strategy{ordered: true, maxUnavailable: 1, partition: 1}, nil, nil},
		"on delete":                    {[]replica{with(up(0), old)}, nil, strategy{ordered: true, onDelete: true, maxUnavailable: 1}, nil, nil},
		"scale down, highest first":    {[]replica{up(0)}, []replica{up(2), up(1)}, ordered, nil, []string{"p2"}},
		"scale down, waits":            {[]replica{up(0)}, []replica{with(up(2), func(r *replica) { r.leaving = true }), up(1)}, ordered, nil, nil},
		"scale down, the sick one":     {[]replica{up(0)}, []replica{with(up(2), down), up(1)}, ordered, nil, []string{"p2"}},
		"scale down, another is sick":  {[]replica{up(0)}, []replica{with(up(2), down), with(up(1), down)}, ordered, nil, nil},
		"scale down, all at once":      {[]replica{up(0)}, []replica{up(2), up(1)}, burst, nil, []string{"p2", "p1"}},
		"scale down before the update": {[]replica{with(up(0), old)}, []replica{up(1)}, burst, nil, []string{"p1"}},
	} {
		got := decide(c.replicas, c.condemned, c.s)
		if !reflect.DeepEqual(got.create, c.create) || !reflect.DeepEqual(got.remove, c.remove) {
			t.Errorf("%s: create %v, remove %v", what, got.create, got.remove)
		}
	}
}

// Killed between any two writes: an update ends, never has more pods down
// than it may, and an ordered set never has a gap that it made itself.
func TestUpdatesThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(t)
		n, most := rapid.Int32Range(1, 4).Draw(rt, "replicas"), rapid.Int32Range(1, 3).Draw(rt, "unavailable")
		inOrder := rapid.Bool().Draw(rt, "ordered")
		w.Create(newSet(n, func(s *appsv1.StatefulSet) {
			s.Spec.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: appsv1.RollingUpdateStatefulSetStrategyType,
				RollingUpdate: &appsv1.RollingUpdateStatefulSetStrategy{MaxUnavailable: ptr(intstr.FromInt32(most))}}
			if !inOrder {
				parallel(s)
			}
		}))
		w.turns(int(n)+1, nil)
		var broken error
		check := func() {
			up := 0
			for _, p := range w.pods() {
				for _, c := range p.Status.Conditions {
					if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && p.DeletionTimestamp == nil {
						up++
					}
				}
			}
			if down := int(n) - up; down > int(most) {
				broken = fmt.Errorf("%d of %d down, budget %d: %s", down, n, most, w.shape())
			}
		}
		version := 1
		for range rapid.IntRange(4, 20).Draw(rt, "steps") {
			switch rapid.IntRange(0, 4).Draw(rt, "step") {
			case 0, 1:
				env := w.Killed(rapid.IntRange(0, 5).Draw(rt, "writes"), check)
				w.Try(env, New(env))
			case 2:
				w.BindAll("n")
			case 3:
				w.Report(nil)
			case 4:
				version++
				w.change(image(fmt.Sprintf("file:///v%d.wasm", version)))
			}
			if check(); broken != nil {
				rt.Fatal(broken)
			}
		}
		w.c = New(w.Env())
		w.turns(4*int(n)+4, nil)
		if st := w.get().Status; st.UpdatedReplicas != n || st.AvailableReplicas != n || st.CurrentRevision != st.UpdateRevision || len(w.pods()) != int(n) {
			rt.Fatalf("%s, %+v", w.shape(), st)
		}
	})
}
