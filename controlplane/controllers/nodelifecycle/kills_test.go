package nodelifecycle

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/wire"
)

const leaseTTL = 6500 * time.Millisecond

// fleet is a world of nodes that renew, fall silent and come back, in two
// zones, and the leases that leaders keep of them.
type fleet struct {
	*fixture.World
	rt      *rapid.T
	zone    map[string]string
	silent  map[string]time.Time // since when
	stale   map[string]bool
	elected time.Time
	given   map[string]int // by this leader, per zone
	leader  *fixture.Leader
	nodes   map[string]*corev1.Node
	pods    map[types.UID]*corev1.Pod
	foul    error
}

// InTerm implements Leases: living nodes renew every two seconds, and a new
// leader gives every node a fresh TTL.
func (f *fleet) InTerm(uint64) (map[string]LeaseInfo, bool) {
	out := map[string]LeaseInfo{}
	for name := range f.zone {
		age, led := time.Since(f.elected)%(2*time.Second), time.Since(f.elected)
		if since, silent := f.silent[name]; silent {
			if f.elected.After(since) {
				since = f.elected
			}
			age, led = time.Since(since), since.Sub(f.elected)
		}
		out[name] = LeaseInfo{Age: age, Renewed: led >= 2*time.Second, Expired: age > leaseTTL, Stale: f.stale[name]}
	}
	return out, true
}

// Expired implements Leases.
func (f *fleet) Expired(node string) bool {
	leases, _ := f.InTerm(0)
	return leases[node].Expired
}

func newFleet(t testing.TB, rt *rapid.T) *fleet {
	f := &fleet{World: fixture.New(t), rt: rt, zone: map[string]string{}, silent: map[string]time.Time{}, stale: map[string]bool{}}
	for i := range 7 {
		name, zone := fmt.Sprintf("z%d", i), "z"
		if i >= 5 {
			name, zone = fmt.Sprintf("far%d", i), "far"
		}
		f.zone[name] = zone
		f.AddNode(name, func(n *corev1.Node) { n.Labels[corev1.LabelTopologyZone] = zone })
		for _, kind := range []string{"ReplicaSet", "StatefulSet", ""} {
			f.addPod(name+"-"+map[string]string{"ReplicaSet": "rs", "StatefulSet": "sts", "": "bare"}[kind], name, kind)
		}
	}
	f.Report(nil)
	return f
}

func (f *fleet) addPod(name, node, kind string) {
	tpl, yes, zero := fixture.Template("a"), true, int64(0)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: tpl.Spec}
	p.Spec.Tolerations = []corev1.Toleration{{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &zero}}
	if kind == "StatefulSet" {
		p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: "mine", Operator: corev1.TolerationOpExists})
	}
	if kind != "" {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: "o", UID: "o", Controller: &yes}}
	}
	made, _ := f.Create(p).(*corev1.Pod)
	f.Bind(made, node)
}

func (f *fleet) look() {
	f.nodes, f.pods = map[string]*corev1.Node{}, map[types.UID]*corev1.Pod{}
	for _, n := range fixture.List[*corev1.Node](f.World, fixture.Node, "") {
		f.nodes[n.Name] = n
	}
	for _, p := range fixture.List[*corev1.Pod](f.World, fixture.Pod, "") {
		f.pods[p.UID] = p
	}
}

func isReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// banned says that a taint other than that of silence drives the pod away.
func banned(n *corev1.Node, p *corev1.Pod) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoExecute && t.Key != corev1.TaintNodeUnreachable &&
			!slices.ContainsFunc(p.Spec.Tolerations, func(o corev1.Toleration) bool { return o.Key == t.Key })
	})
}

// check holds after every write.
func (f *fleet) check() {
	nodes, pods := f.nodes, f.pods
	f.look()
	for name, n := range f.nodes {
		was := nodes[name]
		if unreachable(n, corev1.TaintEffectNoExecute) && !unreachable(was, corev1.TaintEffectNoExecute) {
			f.gaveUp(name)
		}
		for _, t := range was.Spec.Taints {
			if t.Key == "mine" && !slices.ContainsFunc(n.Spec.Taints, func(x corev1.Taint) bool { return x.Key == "mine" }) {
				f.foul = cmp.Or(f.foul, fmt.Errorf("a user's taint of %s is gone", name))
			}
		}
	}
	for uid, was := range pods {
		p, node := f.pods[uid], was.Spec.NodeName
		silent, owner := f.Expired(node), metav1.GetControllerOf(was)
		switch {
		case p == nil || p.DeletionTimestamp != nil && was.DeletionTimestamp == nil:
			if !banned(f.nodes[node], was) {
				f.foul = cmp.Or(f.foul, fmt.Errorf("%s was deleted, its node has %v", was.Name, f.nodes[node].Spec.Taints))
			}
		case lost.Is(p) && !lost.Is(was):
			if !silent || owner == nil || owner.Kind != "ReplicaSet" || !unreachable(f.nodes[node], corev1.TaintEffectNoExecute) {
				f.foul = cmp.Or(f.foul, fmt.Errorf("%s was given up; silent %v, taints %v", was.Name, silent, f.nodes[node].Spec.Taints))
			}
		case isReady(was) && !isReady(p) && !silent:
			f.foul = cmp.Or(f.foul, fmt.Errorf("%s is called not ready, and its node is not silent", was.Name))
		}
	}
}

// gaveUp judges that the pods of a node may be moved from now on.
func (f *fleet) gaveUp(name string) {
	var list []ZoneNode
	for n, zone := range f.zone {
		list = append(list, ZoneNode{n, zone, f.Expired(n)})
	}
	zone := f.zone[name]
	f.given[zone]++
	most := 1 + int(time.Since(f.elected)/evictEvery)
	if !f.Expired(name) || Frozen(list, "z")[zone] || f.given[zone] > most {
		f.foul = cmp.Or(f.foul, fmt.Errorf("%s is given up, the %dth of at most %d: %v", name, f.given[zone], most, list))
	}
}

func (f *fleet) elect(writes int) {
	f.elected, f.given = time.Now(), map[string]int{}
	env := f.Killed(writes, f.check)
	f.leader = f.Lead(env, New(env, Config{Leases: f, LeaderZone: "z"}))
}

func (f *fleet) work() {
	f.look()
	f.leader.Pass()
	if err := cmp.Or(f.leader.Work(), f.foul); err != nil {
		f.rt.Fatal(err)
	}
}

// pass lets time go by, in which a living leader looks at the leases.
func (f *fleet) pass(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		step := min(2500*time.Millisecond, time.Until(end))
		time.Sleep(step)
		f.Advance(step)
		if !f.leader.Dead() {
			f.work()
		}
	}
}

func (f *fleet) happens(i int) {
	names := []string{"z0", "z1", "z2", "z3", "z4", "far5", "far6"}
	name := names[rapid.IntRange(0, len(names)-1).Draw(f.rt, "node")]
	_, silent := f.silent[name]
	switch rapid.IntRange(0, 7).Draw(f.rt, "happens") {
	case 0, 1:
		if !silent {
			f.silent[name] = time.Now()
		}
	case 2:
		if silent {
			delete(f.silent, name)
			f.stale[name] = true
		}
	case 3:
		delete(f.stale, name)
	case 4:
		f.pass(time.Duration(rapid.IntRange(1, 30).Draw(f.rt, "seconds")) * time.Second)
	case 5:
		fixture.Change(f.World, fixture.Node, "", name, registry.Main, func(n *corev1.Node) {
			had := len(n.Spec.Taints)
			n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == "mine" })
			if len(n.Spec.Taints) == had {
				n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: "mine", Effect: corev1.TaintEffectNoExecute})
			}
		})
	case 6:
		fixture.Change(f.World, fixture.Node, "", name, registry.Main, func(n *corev1.Node) { n.Spec.Unschedulable = !n.Spec.Unschedulable })
	case 7:
		f.addPod(fmt.Sprintf("late%d", i), name, rapid.SampledFrom([]string{"ReplicaSet", "StatefulSet", ""}).Draw(f.rt, "kind"))
	}
}

// rest judges the end: everybody is back but those that stay silent.
func (f *fleet) rest(gone string) {
	f.look()
	for name, n := range f.nodes {
		ready := n.Status.Conditions[0].Status
		if name == gone {
			if ready != corev1.ConditionUnknown || !unreachable(n, corev1.TaintEffectNoExecute) || !unreachable(n, corev1.TaintEffectNoSchedule) {
				f.rt.Fatalf("%s is silent: ready %s, taints %v", name, ready, n.Spec.Taints)
			}
		} else if ready == corev1.ConditionUnknown || unreachable(n, corev1.TaintEffectNoExecute) || unreachable(n, corev1.TaintEffectNoSchedule) {
			f.rt.Fatalf("%s renews: ready %s, taints %v", name, ready, n.Spec.Taints)
		}
		if tainted := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeUnschedulable }); tainted != n.Spec.Unschedulable {
			f.rt.Fatalf("%s: unschedulable %v, taints %v", name, n.Spec.Unschedulable, n.Spec.Taints)
		}
	}
	for _, p := range f.pods {
		node, owner := f.nodes[p.Spec.NodeName], metav1.GetControllerOf(p)
		if p.DeletionTimestamp == nil && banned(node, p) {
			f.rt.Fatalf("%s stays in spite of %v", p.Name, node.Spec.Taints)
		}
		if want := node.Name == gone && owner != nil && owner.Kind == "ReplicaSet"; lost.Is(p) != want && p.DeletionTimestamp == nil {
			f.rt.Fatalf("%s: lost %v, want %v", p.Name, lost.Is(p), want)
		}
		if contained := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.ContainersReady }); isReady(p) != (contained && node.Name != gone) {
			f.rt.Fatalf("%s: ready %v, conditions %v", p.Name, isReady(p), p.Status.Conditions)
		}
	}
}

// Nodes fall silent and come back, alone and together, users taint them, and
// the leader dies between any two writes: nothing is given up of a node that
// renews, in a frozen zone, or faster than the rate; no pod is deleted that a
// taint does not drive away, and only what is replaced is called lost. In the
// end everybody who is back counts again, and who is not does not.
func TestSilenceThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		inBubble(t, rt, func(t *testing.T) {
			f := newFleet(t, rt)
			f.elect(1 << 20)
			for i := range rapid.IntRange(3, 25).Draw(rt, "steps") {
				switch rapid.IntRange(0, 4).Draw(rt, "step") {
				case 0:
					f.elect(rapid.IntRange(0, 6).Draw(rt, "writes"))
					f.work()
				case 1:
					f.work()
				default:
					f.happens(i)
				}
			}
			f.work()
			f.elect(1 << 20)
			clear(f.silent)
			clear(f.stale)
			f.pass(5 * time.Second)
			f.rest("")
			f.silent["z0"] = time.Now()
			f.pass(leaseTTL + wire.ReconnectMost + evictEvery + 5*time.Second)
			f.rest("z0")
		})
	})
}

// inBubble runs one case in virtual time, and fails outside of it what failed
// inside: rapid tells failures apart by where they come from.
func inBubble(t *testing.T, rt *rapid.T, f func(t *testing.T)) {
	t.Helper()
	var end any
	synctest.Test(t, func(t *testing.T) {
		defer func() { end = recover() }()
		f(t)
	})
	switch {
	case end == nil:
	case fmt.Sprintf("%T", end) == "rapid.stopTest":
		rt.Fatal(end)
	default:
		panic(end)
	}
}
