package replicaset

import (
	"cmp"
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

var controllerGK = schema.GroupKind{Kind: "ReplicationController"}

// crowd is a set of either kind and all pods that could be its own.
type crowd struct {
	*fixture.World
	rt      *rapid.T
	old     bool // a ReplicationController
	uid     types.UID
	want    int32
	leader  *fixture.Leader
	foreign map[types.UID]bool
	before  map[types.UID]*corev1.Pod
	foul    error
}

func (c *crowd) start() {
	tpl, n := fixture.Template("web"), c.want
	if c.old {
		rc, _ := c.Create(&corev1.ReplicationController{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "set"},
			Spec: corev1.ReplicationControllerSpec{Replicas: &n, Selector: tpl.Labels, Template: &tpl}}).(*corev1.ReplicationController)
		c.uid = rc.UID
		return
	}
	rs, _ := c.Create(newSet("set", n)).(*appsv1.ReplicaSet)
	c.uid = rs.UID
}

func (c *crowd) scale(n int32) {
	c.want = n
	if c.old {
		fixture.Change(c.World, controllerGK, "default", "set", registry.Main, func(rc *corev1.ReplicationController) { rc.Spec.Replicas = &n })
		return
	}
	fixture.Change(c.World, fixture.ReplicaSet, "default", "set", registry.Main, func(rs *appsv1.ReplicaSet) { rs.Spec.Replicas = &n })
}

func (c *crowd) byUID() map[types.UID]*corev1.Pod {
	out := map[types.UID]*corev1.Pod{}
	for _, p := range pods(c.World) {
		out[p.UID] = p
	}
	return out
}

func (c *crowd) owns(p *corev1.Pod) bool {
	o := metav1.GetControllerOf(p)
	return o != nil && o.UID == c.uid
}

// counted are the pods that the set has.
func (c *crowd) counted(of map[types.UID]*corev1.Pod) (n int) {
	for _, p := range of {
		if c.owns(p) && p.DeletionTimestamp == nil && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed && !lost.Is(p) {
			n++
		}
	}
	return n
}

// check holds after each write.
func (c *crowd) check() {
	now := c.byUID()
	had, have := c.counted(c.before), c.counted(now)
	if have > had && have > int(c.want) && len(now) > len(c.before) {
		c.foul = cmp.Or(c.foul, fmt.Errorf("a pod was made: %d of %d", have, c.want))
	}
	for uid, p := range c.before {
		gone := now[uid] == nil || now[uid].DeletionTimestamp != nil
		if !gone || p.DeletionTimestamp != nil {
			continue
		}
		if c.foreign[uid] || !c.owns(p) {
			c.foul = cmp.Or(c.foul, fmt.Errorf("%s is not the set's, and was deleted", p.Name))
		}
		if have < had && have < int(c.want) {
			c.foul = cmp.Or(c.foul, fmt.Errorf("%s was deleted: %d of %d are left", p.Name, have, c.want))
		}
	}
	c.before = now
}

func (c *crowd) elect(writes int) {
	env := c.Killed(writes, c.check)
	kind := New
	if c.old {
		kind = NewReplicationController
	}
	c.leader = c.Lead(env, []*loop.Controller{kind(env)}...)
}

func (c *crowd) work() {
	c.before = c.byUID()
	if err := cmp.Or(c.leader.Work(), c.foul); err != nil {
		c.rt.Fatal(err)
	}
}

func (c *crowd) happens(i int) {
	list := pods(c.World)
	what := rapid.IntRange(0, 8).Draw(c.rt, "happens")
	if what > 3 && len(list) == 0 {
		return
	}
	var p *corev1.Pod
	if what > 3 {
		p = list[rapid.IntRange(0, len(list)-1).Draw(c.rt, "which")]
	}
	running := p != nil && p.Spec.NodeName != "" && p.Status.Phase == corev1.PodRunning
	switch {
	case what == 0:
		c.scale(rapid.Int32Range(0, 6).Draw(c.rt, "replicas"))
	case what == 1:
		c.BindAll("n")
	case what == 2:
		c.Report(nil)
	case what == 3: // one that has, or had, another's owner, or none
		tpl, yes := fixture.Template("web"), true
		stray := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("stray%d", i), Labels: tpl.Labels}, Spec: tpl.Spec}
		if rapid.Bool().Draw(c.rt, "another's") {
			stray.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Other", Name: "o", UID: "o", Controller: &yes}}
		}
		made, _ := c.Create(stray).(*corev1.Pod)
		c.foreign[made.UID] = stray.OwnerReferences != nil
	case what == 4:
		c.Delete(fixture.Pod, "default", p.Name, "")
	case what == 5 && p.DeletionTimestamp == nil:
		fixture.Change(c.World, fixture.Pod, "default", p.Name, registry.Main, func(p *corev1.Pod) {
			p.Labels = map[string]string{"app": rapid.SampledFrom([]string{"web", "other"}).Draw(c.rt, "label")}
		})
	case what == 6 && running:
		c.Finish(p, 1)
	case what >= 7 && running:
		mark := what == 7
		fixture.Change(c.World, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) {
			if mark {
				lost.SetStatus(&p.Status, "n", c.Now())
			} else {
				lost.ClearStatus(&p.Status, c.Now())
			}
		})
	}
}

// Whatever befalls the pods, and wherever the leader dies: no pod is made
// above the number asked for, none deleted below it, none that is somebody
// else's; in the end the set has just as many, and says so. For ReplicaSets
// and ReplicationControllers.
func TestNumberThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := &crowd{World: fixture.New(t), rt: rt, old: rapid.Bool().Draw(rt, "old kind"), foreign: map[types.UID]bool{}, want: rapid.Int32Range(0, 5).Draw(rt, "first replicas")}
		c.AddNode("n")
		c.start()
		c.elect(1 << 20)
		for i := range rapid.IntRange(3, 30).Draw(rt, "steps") {
			switch rapid.IntRange(0, 4).Draw(rt, "step") {
			case 0:
				c.elect(rapid.IntRange(0, 6).Draw(rt, "writes"))
				c.work()
			case 1:
				c.work()
			default:
				c.happens(i)
			}
		}
		for range 2 {
			if c.work(); c.leader.Dead() {
				c.elect(1 << 20)
				c.work()
			}
			c.BindAll("n")
			c.Report(nil)
		}
		c.work()
		if got := c.counted(c.byUID()); got != int(c.want) {
			rt.Fatalf("%d pods, want %d", got, c.want)
		}
		var said int32
		if c.old {
			said = fixture.Get[*corev1.ReplicationController](c.World, controllerGK, "default", "set").Status.Replicas
		} else {
			said = status(c.World, "set").Replicas
		}
		if said != c.want {
			rt.Fatalf("status says %d, want %d", said, c.want)
		}
	})
}
