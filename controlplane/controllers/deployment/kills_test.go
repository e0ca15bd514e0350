package deployment

import (
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/replicaset"
)

// A rolling update to any versions, good and bad, with whoever leads killed
// between any two writes: never more pods than the surge allows, never fewer
// ready ones than it may leave, and in the end all of the last good version.
func TestRollingUpdateThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := newCluster(t)
		n := rapid.Int32Range(1, 5).Draw(rt, "replicas")
		share := func(name string) *intstr.IntOrString {
			if rapid.Bool().Draw(rt, name+" in percent") {
				return new(intstr.FromString(fmt.Sprintf("%d%%", 10*rapid.IntRange(0, 10).Draw(rt, name))))
			}
			return new(intstr.FromInt32(rapid.Int32Range(0, n).Draw(rt, name)))
		}
		surge, unavailable := share("surge"), share("unavailable")
		if surge.IntValue() == 0 && unavailable.IntValue() == 0 {
			surge = new(intstr.FromInt32(1))
		}
		c.Create(web(n, func(d *appsv1.Deployment) {
			d.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxSurge: surge, MaxUnavailable: unavailable}
			d.Spec.RevisionHistoryLimit = new(rapid.Int32Range(0, 2).Draw(rt, "history"))
		}))
		c.turns(4, healthy)
		var broken error // found in a goroutine of a controller
		check := func() {
			if broken != nil {
				return
			}
			living, d := 0, c.get()
			for _, p := range fixture.List[*corev1.Pod](c.World, fixture.Pod, "default") {
				if p.DeletionTimestamp == nil {
					living++
				}
			}
			if most := maxReplicas(d); living > int(most) {
				broken = fmt.Errorf("%d pods, at most %d", living, most)
			}
			if floor := wanted(d) - maxUnavailable(d); int32(c.ready()) < floor {
				broken = fmt.Errorf("%d ready pods, at least %d", c.ready(), floor)
			}
		}
		version := 0
		for range rapid.IntRange(4, 30).Draw(rt, "steps") {
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 0, 1:
				env := c.Killed(rapid.IntRange(0, 8).Draw(rt, "writes"), check)
				c.Try(env, New(env), replicaset.New(env))
			case 2:
				env := c.Killed(rapid.IntRange(0, 4).Draw(rt, "writes of the sets"), check)
				c.Try(env, replicaset.New(env), New(env))
			case 3:
				c.BindAll("n1")
			case 4:
				c.Report(healthy)
			case 5:
				if rapid.Bool().Draw(rt, "new") {
					version++
				}
				c.change(image(fmt.Sprintf("file:///%s%d.wasm", rapid.SampledFrom([]string{"bad", "good", "good"}).Draw(rt, "version"), version)))
			}
			if check(); broken != nil {
				rt.Fatal(broken)
			}
		}
		c.change(image(fmt.Sprintf("file:///good%d.wasm", rapid.IntRange(0, version+1).Draw(rt, "last"))))
		for range 4 * int(n+2) {
			c.turn(healthy)
			if check(); broken != nil {
				rt.Fatal(broken)
			}
		}
		c.Settle(c.loops...)
		d := c.get()
		if s := d.Status; s.AvailableReplicas != n || s.Replicas != n || s.UpdatedReplicas != n || reason(d, appsv1.DeploymentProgressing) != "True "+reasonSetAvailable {
			rt.Fatalf("image %s: %+v", c.image(), s)
		}
		if old := len(c.sets()) - 1; old > int(*d.Spec.RevisionHistoryLimit) {
			rt.Fatalf("%d old sets, the limit is %d", old, *d.Spec.RevisionHistoryLimit)
		}
	})
}
