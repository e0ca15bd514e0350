package deployment

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/replicaset"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// rollsBack asks for it, with a deadline of 30 s.
func rollsBack(value string) func(*appsv1.Deployment) {
	return func(d *appsv1.Deployment) {
		d.Annotations = map[string]string{manifests.AnnotationAutoRollback: value}
		d.Spec.ProgressDeadlineSeconds = new(int32(30))
	}
}

// pass lets time pass.
func (c *cluster) pass(d time.Duration) {
	c.Advance(d)
	if c.bubble {
		time.Sleep(d)
	}
}

// settled is how many turns, of a second, make the first version available.
const settled = 12

// healthy are the images that become ready.
func healthy(p *corev1.Pod) bool {
	i := p.Spec.Containers[0].Image
	return i == "file:///app.wasm" || strings.HasPrefix(i, "file:///good")
}

func (c *cluster) ready() int { return c.readyOf(func(*corev1.Pod) bool { return true }) }

// readyOf counts the Ready pods of some kind that nobody deletes.
func (c *cluster) readyOf(kind func(*corev1.Pod) bool) (n int) {
	for _, p := range fixture.List[*corev1.Pod](c.World, fixture.Pod, "default") {
		if !kind(p) {
			continue
		}
		for _, cond := range p.Status.Conditions {
			if cond.Type == corev1.PodReady && cond.Status == corev1.ConditionTrue && p.DeletionTimestamp == nil {
				n++
			}
		}
	}
	return n
}

// A late version has no readiness probe: it is Ready from the start, for
// lateUp, and then crashes, again and again.
const lateUp, lateDown = 15 * time.Second, 10 * time.Second

// behaves says what nodes see of a pod, and notes the crashes of a late one.
func (c *cluster) behaves(p *corev1.Pod) bool {
	if !strings.HasPrefix(p.Spec.Containers[0].Image, "file:///late") {
		return healthy(p)
	}
	age := c.Now().Sub(p.CreationTimestamp.Time)
	up := age%(lateUp+lateDown) < lateUp
	ends := int32(age / (lateUp + lateDown))
	if !up {
		ends++
	}
	if s := p.Status.ContainerStatuses; ends > 0 && (len(s) == 0 || s[0].RestartCount != ends) {
		fixture.Change(c.World, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", RestartCount: ends}}
		})
	}
	return up
}

func (c *cluster) image() string { return c.get().Spec.Template.Spec.Containers[0].Image }

// TestRollbackThroughThreeBadVersions: each bad version is given up, one after
// the other and in a row, and the good pods serve through all of it.
func TestRollbackThroughThreeBadVersions(t *testing.T) {
	for name, strategy := range map[string]*appsv1.RollingUpdateDeployment{
		"default":          nil,
		"all may go":       {MaxUnavailable: new(intstr.FromString("100%")), MaxSurge: new(intstr.FromInt32(0))},
		"no more than one": {MaxUnavailable: new(intstr.FromInt32(1)), MaxSurge: new(intstr.FromInt32(0))},
	} {
		for n := range int32(4) {
			for _, kind := range []string{"bad", "late"} {
				if kind == "late" && n%2 == 1 {
					continue
				}
				t.Run(fmt.Sprintf("%s, %s, %d", name, kind, n+1), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) { threeBadVersions(t, kind, n, strategy) })
				})
			}
		}
	}
}

func threeBadVersions(t *testing.T, kind string, n int32, strategy *appsv1.RollingUpdateDeployment) {
	t.Helper()
	c := newCluster(t)
	c.bubble = true
	c.Create(web(n+1, rollsBack("true"), func(d *appsv1.Deployment) {
		if strategy != nil {
			d.Spec.Strategy.RollingUpdate = strategy
		}
		d.Spec.RevisionHistoryLimit = new(int32(0))
	}))
	c.turns(settled, healthy)
	pass := func(turns int) {
		t.Helper()
		for range turns {
			c.turn(c.behaves)
			if c.readyOf(healthy) == 0 {
				t.Fatal("no healthy pod is left")
			}
		}
	}
	end := map[string]int{"bad": 60, "late": 90}[kind] // of a rollback
	for round := range 2 {
		for bad := range 3 {
			c.change(image(fmt.Sprintf("file:///%s%d-%d.wasm", kind, round, bad)))
			pass([]int{5, end}[round]) // in a row, or each after the other's end
		}
		pass(end)
		d := c.get()
		if got := reason(d, conditionRolledBack); got != "True ProgressDeadlineExceeded" || c.image() != "file:///app.wasm" {
			t.Fatalf("%s, image %s", got, c.image())
		}
		if s := d.Status; s.AvailableReplicas != n+1 || s.Replicas != n+1 || reason(d, appsv1.DeploymentProgressing) != "True NewReplicaSetAvailable" {
			t.Fatalf("status %+v", s)
		}
	}
	if got := len(c.Events.With("DeploymentRollback")); got != 4 {
		t.Fatalf("%d events", got)
	}
	// A good one is rolled out, and the condition goes.
	c.change(image("file:///good.wasm"))
	pass(75)
	if got := reason(c.get(), conditionRolledBack); got != "" || c.image() != "file:///good.wasm" || c.get().Annotations[manifests.AnnotationRolledBack] != "" {
		t.Fatalf("%q, image %s, %v", got, c.image(), c.get().Annotations)
	}
	before := c.Machine.Snapshot().ResourceVersion()
	c.Advance(time.Hour)
	c.Settle(c.loops...)
	if after := c.Machine.Snapshot().ResourceVersion(); after != before {
		t.Fatalf("idle writes: %d -> %d", before, after)
	}
}

// TestRollbackNeedsAGoodRevision: the first version of all, and one that the
// user did not ask it for, stall as ever.
func TestRollbackNeedsAGoodRevision(t *testing.T) {
	for value, set := range map[string]func(*appsv1.Deployment){"true": image("file:///bad.wasm"), "false": image("file:///good.wasm")} {
		c := newCluster(t)
		c.Create(web(2, rollsBack(value), set))
		c.turns(5, healthy)
		c.change(image("file:///bad2.wasm"))
		c.turns(60, healthy)
		if d := c.get(); c.image() != "file:///bad2.wasm" || reason(d, appsv1.DeploymentProgressing) != "False ProgressDeadlineExceeded" || reason(d, conditionRolledBack) != "" {
			t.Errorf("%s: image %s, %+v", value, c.image(), d.Status)
		}
	}
}

// TestRollbackWhenPodsCrash: with a percentage it does not take until the
// deadline, and one crash is none.
func TestRollbackWhenPodsCrash(t *testing.T) {
	synctest.Test(t, crashing)
}

func crashing(t *testing.T) {
	c := newCluster(t)
	c.bubble = true
	c.Create(web(4, rollsBack("50%")))
	c.turns(settled, healthy)
	c.change(image("file:///bad.wasm"))
	c.turns(3, healthy)
	crash := func(times int32) {
		for _, p := range fixture.List[*corev1.Pod](c.World, fixture.Pod, "default") {
			if healthy(p) {
				continue
			}
			fixture.Change(c.World, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) {
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", RestartCount: times - 1,
					State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
					LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1}}}}
			})
		}
		c.pass(look)
		c.Settle(c.loops...)
	}
	crash(1)
	if c.image() != "file:///bad.wasm" {
		t.Fatal("rolled back after one crash")
	}
	at := c.Machine.Snapshot().ResourceVersion()
	crash(2)
	told := c.toldFirst(at)
	if !strings.Contains(told, "was given up: 2 of its 2 pods fail again and again") {
		t.Fatalf("before the template goes back, kubectl is told %q", told)
	}
	if c.image() != "file:///app.wasm" {
		t.Fatalf("not rolled back: %+v", c.get().Status)
	}
	c.turns(6, healthy)
	if got := reason(c.get(), conditionRolledBack); got != "True PodsFailing" {
		t.Fatal(got)
	}
}

// toldFirst is what the first condition ProgressDeadlineExceeded after a
// revision says that is seen while the bad version is still in force and
// observed: what 'kubectl rollout status' ends with.
func (c *cluster) toldFirst(after uint64) string {
	w, err := c.Machine.Watch(deploymentGK.String(), "", after)
	if err != nil {
		c.T.Fatal(err)
	}
	events, _, err := w.Next(c.T.Context())
	if err != nil {
		c.T.Fatal(err)
	}
	for _, ev := range events {
		obj, err := c.Store.Decode(ev.Record)
		d, ok := obj.(*appsv1.Deployment)
		if err != nil || !ok {
			c.T.Fatal(err)
		}
		p := condition(&d.Status, appsv1.DeploymentProgressing)
		if p != nil && p.Reason == reasonTimedOut && d.Generation == d.Status.ObservedGeneration && strings.HasPrefix(d.Spec.Template.Spec.Containers[0].Image, "file:///bad") {
			return p.Message
		}
	}
	return ""
}

// From any half-done state and with the controllers killed between any two
// writes: bad versions are left, good ones kept, the last healthy pod is never
// taken, and there are never too many.
func TestRollbackThroughKills(t *testing.T) {
	synctest.Test(t, throughKills)
}

// noDeadline hides the one of the run, for which a bubble has no time.
type noDeadline struct{ *testing.T }

func (noDeadline) Deadline() (time.Time, bool) { return time.Time{}, false }

func throughKills(t *testing.T) {
	rapid.Check(noDeadline{t}, func(rt *rapid.T) {
		c := newCluster(t)
		c.bubble = true
		n := rapid.Int32Range(1, 4).Draw(rt, "replicas")
		surge, unavailable := rapid.Int32Range(0, 2).Draw(rt, "surge"), rapid.Int32Range(0, n).Draw(rt, "unavailable")
		if surge+unavailable == 0 {
			surge = 1
		}
		c.Create(web(n, rollsBack(rapid.SampledFrom([]string{"true", "50%"}).Draw(rt, "rollback")), func(d *appsv1.Deployment) {
			d.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxUnavailable: new(intstr.FromInt32(unavailable)), MaxSurge: new(intstr.FromInt32(surge))}
			d.Spec.RevisionHistoryLimit = new(rapid.Int32Range(0, 2).Draw(rt, "history"))
		}))
		c.turns(settled, healthy)
		var broken error // found in a goroutine of a controller
		check := func() {
			if c.readyOf(healthy) == 0 {
				broken = fmt.Errorf("no healthy pod is left")
			}
			living := 0
			for _, p := range fixture.List[*corev1.Pod](c.World, fixture.Pod, "default") {
				if p.DeletionTimestamp == nil {
					living++
				}
			}
			if most := maxReplicas(c.get()); living > int(most) {
				broken = fmt.Errorf("%d pods, at most %d", living, most)
			}
		}
		version := 0
		for range rapid.IntRange(4, 24).Draw(rt, "steps") {
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 0, 1:
				env := c.Killed(rapid.IntRange(0, 8).Draw(rt, "writes"), check)
				c.Try(env, New(env), replicaset.New(env))
			case 2:
				c.BindAll("n1")
				c.Report(c.behaves)
			case 3:
				// Nodes tell within seconds what they see, or their lease ends.
				for range rapid.IntRange(1, 40).Draw(rt, "seconds") {
					c.pass(time.Second)
					c.Report(c.behaves)
				}
			case 4, 5:
				kind := rapid.SampledFrom([]string{"bad", "late", "good"}).Draw(rt, "version")
				if rapid.Bool().Draw(rt, "new") {
					version++
				}
				c.change(image(fmt.Sprintf("file:///%s%d.wasm", kind, version)))
			}
			if check(); broken != nil {
				rt.Fatal(broken)
			}
		}
		last := c.image() // a good one, too, is left when its pods take too long
		for range 180 {
			c.turn(c.behaves)
			if check(); broken != nil {
				rt.Fatal(broken)
			}
			if d := c.get(); complete(d, &d.Status) && reason(d, appsv1.DeploymentProgressing) == "True "+reasonSetAvailable && healthy(&corev1.Pod{Spec: d.Spec.Template.Spec}) {
				break // it has proven itself, or was good before
			}
		}
		d := c.get()
		if s := d.Status; s.AvailableReplicas != n || s.Replicas != n || !healthy(&corev1.Pod{Spec: d.Spec.Template.Spec}) {
			rt.Fatalf("image %s, was %s: %+v", c.image(), last, s)
		}
	})
}

// TestSettle: with the annotation a new pod that is Ready for a moment only
// takes no old one's place.
func TestSettle(t *testing.T) {
	for _, tc := range []struct {
		value    string
		own      int32
		deadline *int32
		want     int32
	}{
		{"", 0, new(int32(600)), 0},
		{"", 7, new(int32(600)), 7},
		{"true", 0, new(int32(600)), 10},
		{"50%", 0, new(int32(8)), 2},
		{"50%", 0, new(int32(3)), 1},
		{"true", 0, nil, 10},
		{"true", 1, new(int32(600)), 1},
		{"nonsense", 0, new(int32(600)), 0},
	} {
		d := web(1, rollsBack(tc.value))
		if tc.value == "" {
			d.Annotations = nil
		}
		d.Spec.MinReadySeconds, d.Spec.ProgressDeadlineSeconds = tc.own, tc.deadline
		if got := minReady(d); got != tc.want {
			t.Errorf("%+v: %d", tc, got)
		}
	}
}
