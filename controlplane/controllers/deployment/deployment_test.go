package deployment

import (
	"fmt"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/history"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/replicaset"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

type cluster struct {
	*fixture.World
	loops []*loop.Controller
	// bubble says that the test runs in one of testing/synctest, and that
	// monotonic time passes with the wall clock's.
	bubble bool
}

func newCluster(t *testing.T) *cluster {
	w := fixture.New(t)
	w.AddNode("n1")
	return &cluster{World: w, loops: []*loop.Controller{New(w.Env()), replicaset.New(w.Env())}}
}

// turn runs the controllers to rest, then lets nodes report once.
func (c *cluster) turn(ready func(*corev1.Pod) bool) {
	c.T.Helper()
	c.Settle(c.loops...)
	c.BindAll("n1")
	c.Report(ready)
	c.pass(time.Second)
	c.check()
}

func (c *cluster) turns(n int, ready func(*corev1.Pod) bool) {
	c.T.Helper()
	for range n {
		c.turn(ready)
	}
	c.Settle(c.loops...)
}

// check holds at every moment: never more than wanted+surge, never fewer
// available than wanted-unavailable once that was reached.
func (c *cluster) check() {
	c.T.Helper()
	for _, d := range fixture.List[*appsv1.Deployment](c.World, fixture.Deployment, "default") {
		var total int32
		for _, rs := range fixture.List[*appsv1.ReplicaSet](c.World, fixture.ReplicaSet, "default") {
			total += *rs.Spec.Replicas
		}
		if isRolling(d) && !d.Spec.Paused && total > maxReplicas(d) {
			c.T.Fatalf("%d replicas, at most %d allowed", total, maxReplicas(d))
		}
	}
}

func (c *cluster) get() *appsv1.Deployment {
	c.T.Helper()
	return fixture.Get[*appsv1.Deployment](c.World, fixture.Deployment, "default", "web")
}

func (c *cluster) sets() []*appsv1.ReplicaSet {
	return fixture.List[*appsv1.ReplicaSet](c.World, fixture.ReplicaSet, "default")
}

func (c *cluster) change(f func(*appsv1.Deployment)) {
	c.T.Helper()
	fixture.Change(c.World, fixture.Deployment, "default", "web", registry.Main, f)
}

func web(n int32, set ...func(*appsv1.Deployment)) *appsv1.Deployment {
	d := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: appsv1.DeploymentSpec{Replicas: &n, Template: fixture.Template("web"),
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
	}
	for _, f := range set {
		f(d)
	}
	return d
}

func image(i string) func(*appsv1.Deployment) {
	return func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = i }
}

func imageReady(want string) func(*corev1.Pod) bool {
	return func(p *corev1.Pod) bool { return p.Spec.Containers[0].Image == want }
}

func reason(d *appsv1.Deployment, t appsv1.DeploymentConditionType) string {
	if c := condition(&d.Status, t); c != nil {
		return string(c.Status) + " " + c.Reason
	}
	return ""
}

func TestFirstRolloutBecomesAvailable(t *testing.T) {
	c := newCluster(t)
	c.Create(web(3))
	c.turns(3, nil)
	d := c.get()
	if s := d.Status; s.Replicas != 3 || s.UpdatedReplicas != 3 || s.AvailableReplicas != 3 || s.UnavailableReplicas != 0 || s.ObservedGeneration != d.Generation {
		t.Fatalf("status %+v", s)
	}
	if got := reason(d, appsv1.DeploymentProgressing); got != "True NewReplicaSetAvailable" {
		t.Fatal(got)
	}
	if got := reason(d, appsv1.DeploymentAvailable); got != "True MinimumReplicasAvailable" {
		t.Fatal(got)
	}
	if d.Annotations[revisionAnnotation] != "1" {
		t.Fatalf("annotations %v", d.Annotations)
	}
	rs := c.sets()[0]
	hash := rs.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
	if rs.Name != "web-"+hash || rs.Annotations[desiredAnnotation] != "3" || rs.Annotations[maxAnnotation] != "4" {
		t.Fatalf("set %s %v", rs.Name, rs.Annotations)
	}
	// At rest nothing is written.
	before := c.Machine.Snapshot().ResourceVersion()
	c.Settle(c.loops...)
	if after := c.Machine.Snapshot().ResourceVersion(); after != before {
		t.Fatalf("idle writes: %d -> %d", before, after)
	}
}

func TestRollingUpdateAndUndo(t *testing.T) {
	c := newCluster(t)
	c.Create(web(4))
	c.turns(3, nil)
	c.change(image("file:///v2.wasm"))
	c.turns(12, nil)
	d := c.get()
	if s := d.Status; s.UpdatedReplicas != 4 || s.Replicas != 4 || s.AvailableReplicas != 4 {
		t.Fatalf("status %+v", s)
	}
	if len(c.sets()) != 2 || d.Annotations[revisionAnnotation] != "2" {
		t.Fatalf("%d sets, revision %s", len(c.sets()), d.Annotations[revisionAnnotation])
	}
	c.change(image("file:///app.wasm")) // as rollout undo does
	c.turns(12, nil)
	d = c.get()
	if len(c.sets()) != 2 || d.Annotations[revisionAnnotation] != "3" {
		t.Fatalf("%d sets, revision %s", len(c.sets()), d.Annotations[revisionAnnotation])
	}
	for _, rs := range c.sets() {
		if rs.Annotations[revisionAnnotation] == "3" && rs.Annotations[revisionHistoryAnnotation] != "1" {
			t.Fatalf("history %v", rs.Annotations)
		}
	}
	if got := reason(d, appsv1.DeploymentProgressing); got != "True NewReplicaSetAvailable" {
		t.Fatal(got)
	}
}

func TestBadVersionStallsWithOldPodsServing(t *testing.T) {
	c := newCluster(t)
	c.Create(web(4, func(d *appsv1.Deployment) {
		d.Spec.ProgressDeadlineSeconds = new(int32)
		*d.Spec.ProgressDeadlineSeconds = 30
	}))
	c.turns(3, nil)
	c.change(image("file:///bad.wasm"))
	ok := imageReady("file:///app.wasm")
	for range 40 {
		c.turn(ok)
		if d := c.get(); d.Status.AvailableReplicas < 3 {
			t.Fatalf("only %d available", d.Status.AvailableReplicas)
		}
	}
	c.Settle(c.loops...)
	d := c.get()
	if got := reason(d, appsv1.DeploymentProgressing); got != "False ProgressDeadlineExceeded" {
		t.Fatalf("%s: %+v", got, d.Status)
	}
	c.change(image("file:///app.wasm"))
	c.turns(6, ok)
	d = c.get()
	if s := d.Status; s.AvailableReplicas != 4 || s.Replicas != 4 {
		t.Fatalf("after undo: %+v", s)
	}
	if got := reason(d, appsv1.DeploymentProgressing); got != "True NewReplicaSetAvailable" {
		t.Fatalf("after undo: %s", got)
	}
}

func TestRecreateNeverRunsTwoVersions(t *testing.T) {
	c := newCluster(t)
	c.Create(web(3, func(d *appsv1.Deployment) { d.Spec.Strategy.Type = appsv1.RecreateDeploymentStrategyType }))
	c.turns(3, nil)
	c.change(image("file:///v2.wasm"))
	for range 8 {
		c.Settle(c.loops...)
		images := map[string]bool{}
		for _, p := range fixture.List[*corev1.Pod](c.World, fixture.Pod, "default") {
			images[p.Spec.Containers[0].Image] = true
		}
		if len(images) > 1 {
			t.Fatalf("both versions at once: %v", images)
		}
		c.BindAll("n1")
		c.Report(nil)
	}
	c.Settle(c.loops...)
	if s := c.get().Status; s.UpdatedReplicas != 3 || s.AvailableReplicas != 3 {
		t.Fatalf("status %+v", s)
	}
}

func TestPauseScalesButDoesNotRoll(t *testing.T) {
	c := newCluster(t)
	c.Create(web(4))
	c.turns(3, nil)
	c.change(func(d *appsv1.Deployment) { d.Spec.Paused = true; image("file:///v2.wasm")(d); *d.Spec.Replicas = 6 })
	c.turns(3, nil)
	d := c.get()
	if len(c.sets()) != 1 || d.Status.Replicas != 6 || reason(d, appsv1.DeploymentProgressing) != "Unknown DeploymentPaused" {
		t.Fatalf("%d sets, %+v", len(c.sets()), d.Status)
	}
	c.change(func(d *appsv1.Deployment) { d.Spec.Paused = false })
	c.turns(15, nil)
	if s := c.get().Status; s.UpdatedReplicas != 6 || s.AvailableReplicas != 6 || s.Replicas != 6 {
		t.Fatalf("after resume %+v", s)
	}
}

func TestHistoryLimit(t *testing.T) {
	c := newCluster(t)
	c.Create(web(1, func(d *appsv1.Deployment) { d.Spec.RevisionHistoryLimit = new(int32); *d.Spec.RevisionHistoryLimit = 2 }))
	c.turns(3, nil)
	for i := range 5 {
		c.change(image(fmt.Sprintf("file:///v%d.wasm", i)))
		c.turns(6, nil)
	}
	if n := len(c.sets()); n != 3 {
		t.Fatalf("%d sets are left, want the new one and 2 old", n)
	}
}

func TestHashCollisionTakesAnotherName(t *testing.T) {
	c := newCluster(t)
	d := web(1)
	made := c.Create(d).(*appsv1.Deployment)
	hash, err := history.HashTemplate(&made.Spec.Template, nil)
	if err != nil {
		t.Fatal(err)
	}
	other := fixture.Template("other")
	c.Create(&appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-" + hash},
		Spec: appsv1.ReplicaSetSpec{Replicas: new(int32), Selector: &metav1.LabelSelector{MatchLabels: other.Labels}, Template: other}})
	c.turns(4, nil)
	got := c.get()
	if got.Status.CollisionCount == nil || *got.Status.CollisionCount != 1 || got.Status.AvailableReplicas != 1 {
		t.Fatalf("status %+v", got.Status)
	}
}

func TestBudget(t *testing.T) {
	pct := func(s string) *intstr.IntOrString { v := intstr.FromString(s); return &v }
	num := func(n int32) *intstr.IntOrString { v := intstr.FromInt32(n); return &v }
	for _, c := range []struct {
		n           int32
		surge, down *intstr.IntOrString
		up, un      int32
	}{
		{10, pct("25%"), pct("25%"), 3, 2},
		{1, pct("25%"), pct("25%"), 1, 0},
		{4, pct("0%"), pct("10%"), 0, 1}, // both round to 0: one may be missing
		{4, num(0), num(0), 0, 1},
		{3, num(2), num(5), 2, 5},
		{0, pct("25%"), pct("25%"), 0, 1},
	} {
		d := web(c.n)
		d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType,
			RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: c.surge, MaxUnavailable: c.down}}
		if up, un := budget(d); up != c.up || un != c.un {
			t.Errorf("%d replicas, surge %s, unavailable %s: got %d %d, want %d %d", c.n, c.surge, c.down, up, un, c.up, c.un)
		}
	}
}

func TestProportionalScaling(t *testing.T) {
	set := func(name string, n, maxBefore int32, age int) *appsv1.ReplicaSet {
		return &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(int64(1000-age), 0)),
			Annotations: map[string]string{maxAnnotation: fmt.Sprint(maxBefore)}}, Spec: appsv1.ReplicaSetSpec{Replicas: &n}}
	}
	three := intstr.FromInt32(3)
	d := web(15)
	d.Spec.Strategy = appsv1.DeploymentStrategy{RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &three}}
	// Kubernetes' documented example: 10 replicas with surge 3, 8 old and 5
	// new; scaled to 15, the 5 more go to the old (3) and the new set (2).
	got := proportional(d, []*appsv1.ReplicaSet{set("old", 8, 13, 10), set("new", 5, 13, 1)})
	sizes := map[string]int32{}
	for _, r := range got {
		sizes[r.rs.Name] = r.to
	}
	if sizes["old"] != 11 || sizes["new"] != 7 {
		t.Fatalf("sizes %v", sizes)
	}
}

// A scaling down in the middle of a rollout that is stuck takes what does not
// serve before it falls below maxUnavailable.
func TestScalingDownKeepsTheFloor(t *testing.T) {
	set := func(name string, n, available int32, age int) *appsv1.ReplicaSet {
		rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(int64(1000-age), 0)),
			Annotations: map[string]string{maxAnnotation: "5"}}, Spec: appsv1.ReplicaSetSpec{Replicas: &n}}
		rs.Status.AvailableReplicas = available
		return rs
	}
	zero, one := intstr.FromInt32(0), intstr.FromInt32(1)
	for _, c := range []struct {
		name      string
		available [3]int32
		to        int32
		want      [3]int32
	}{
		{"3 serve, 2 are the least", [3]int32{3, 0, 0}, 3, [3]int32{2, 0, 1}},
		{"2 serve, 2 are the least", [3]int32{2, 0, 0}, 3, [3]int32{2, 0, 1}},
		{"all serve: by size, as upstream", [3]int32{3, 1, 1}, 3, [3]int32{1, 1, 1}},
		{"fewer serve than the least: none of them goes", [3]int32{2, 0, 0}, 4, [3]int32{2, 1, 1}},
		{"to nothing", [3]int32{3, 0, 0}, 0, [3]int32{0, 0, 0}},
	} {
		d := web(c.to)
		d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType,
			RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &zero, MaxUnavailable: &one}}
		sets := []*appsv1.ReplicaSet{set("serves", 3, c.available[0], 30), set("crashes", 1, c.available[1], 20), set("unready", 1, c.available[2], 10)}
		got := [3]int32{}
		for _, r := range proportional(d, sets) {
			got[slices.Index(sets, r.rs)] = r.to
		}
		if got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// The new set does not grow into the room of pods that are still there, nor
// while a set's controller may still be making pods for its last size.
func TestCeilingCountsPods(t *testing.T) {
	zero, one := intstr.FromInt32(0), intstr.FromInt32(1)
	set := func(want, has int32, seen bool) *appsv1.ReplicaSet {
		rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Spec: appsv1.ReplicaSetSpec{Replicas: &want}}
		rs.Status.Replicas, rs.Status.ObservedGeneration = has, 1
		if seen {
			rs.Status.ObservedGeneration = 2
		}
		return rs
	}
	d := web(3)
	d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType,
		RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &zero, MaxUnavailable: &one}}
	for _, c := range []struct {
		name string
		old  *appsv1.ReplicaSet
		to   int32
	}{
		{"cut and gone", set(2, 2, true), 1},
		{"cut, its pod still there", set(2, 3, true), 0},
		{"cut, and its controller has not seen it", set(2, 2, false), 0},
	} {
		got, ok := growNew(d, []*appsv1.ReplicaSet{c.old}, set(0, 0, true))
		if ok != (c.to > 0) || (ok && got.to != c.to) {
			t.Errorf("%s: grows to %d (%v), want %d", c.name, got.to, ok, c.to)
		}
		d := d.DeepCopy()
		four := int32(4)
		d.Spec.Replicas = &four
		for _, z := range rescale(d, []*appsv1.ReplicaSet{c.old}, set(1, 1, true)) {
			if n := c.old.Status.Replicas + z.to; z.rs != c.old && n > 4 {
				t.Errorf("%s: scaled to 4: %d pods", c.name, n)
			}
		}
	}
}
