package daemonset

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

func newSet(set ...func(*appsv1.DaemonSet)) *appsv1.DaemonSet {
	t := fixture.Template("agent")
	ds := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "agent"},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: t.Labels}, Template: t}}
	for _, f := range set {
		f(ds)
	}
	return ds
}

// rolling sets the update's budget.
func rolling(surge, unavailable int32) func(*appsv1.DaemonSet) {
	return func(ds *appsv1.DaemonSet) {
		s, u := intstr.FromInt32(surge), intstr.FromInt32(unavailable)
		ds.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{Type: appsv1.RollingUpdateDaemonSetStrategyType,
			RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxSurge: &s, MaxUnavailable: &u}}
	}
}

func image(name string) func(*appsv1.DaemonSet) {
	return func(ds *appsv1.DaemonSet) { ds.Spec.Template.Spec.Containers[0].Image = name }
}

func get(w *fixture.World) *appsv1.DaemonSet {
	return fixture.Get[*appsv1.DaemonSet](w, gk, "default", "agent")
}

func change(w *fixture.World, f func(*appsv1.DaemonSet)) {
	fixture.Change(w, gk, "default", "agent", registry.Main, f)
}

func pods(w *fixture.World) []*corev1.Pod {
	return fixture.List[*corev1.Pod](w, fixture.Pod, "default")
}

// bind plays the scheduler: each pod goes where its affinity says.
func bind(w *fixture.World) {
	for _, p := range pods(w) {
		if p.Spec.NodeName == "" && p.DeletionTimestamp == nil {
			w.Bind(p, target(p))
		}
	}
}

// turns lets everything work for a while.
func turns(w *fixture.World, n int, c *loop.Controller) {
	for range n {
		w.Settle(c)
		bind(w)
		w.Report(nil)
	}
	w.Settle(c)
}

// setAway makes a node silent, as the node lifecycle controller does, or
// takes that back.
func setAway(w *fixture.World, name string, away bool) {
	w.Silent[name] = away
	fixture.Change(w, fixture.Node, "", name, registry.Main, func(n *corev1.Node) {
		n.Spec.Taints = nil
		if away {
			n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoSchedule},
				{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute}}
		}
	})
}

func TestOneOnEachNodeThatFits(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n1")
	w.AddNode("n2", func(n *corev1.Node) { n.Spec.Unschedulable = true }) // daemons run on cordoned nodes
	w.AddNode("n3", func(n *corev1.Node) { n.Labels["disk"] = "no" })
	w.AddNode("n4", func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "mine", Effect: corev1.TaintEffectNoSchedule}}
	})
	w.Create(newSet(func(ds *appsv1.DaemonSet) {
		ds.Spec.Template.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpDoesNotExist}}}}}}}
	}))
	c := New(w.Env())
	turns(w, 2, c)
	var on []string
	for _, p := range pods(w) {
		on = append(on, p.Spec.NodeName)
	}
	slices.Sort(on)
	if !slices.Equal(on, []string{"n1", "n2"}) {
		t.Fatalf("on %v", on)
	}
	st := get(w).Status
	if st.DesiredNumberScheduled != 2 || st.CurrentNumberScheduled != 2 || st.NumberAvailable != 2 || st.UpdatedNumberScheduled != 2 ||
		st.NumberUnavailable != 0 || st.ObservedGeneration != 1 || len(st.Conditions) != 0 {
		t.Fatalf("%+v", st)
	}
	// A node that comes gets one; one that fits no longer loses it.
	w.AddNode("n5")
	fixture.Change(w, fixture.Node, "", "n1", registry.Main, func(n *corev1.Node) { n.Labels["disk"] = "no" })
	turns(w, 2, c)
	on = nil
	for _, p := range pods(w) {
		on = append(on, p.Spec.NodeName)
	}
	slices.Sort(on)
	if !slices.Equal(on, []string{"n2", "n5"}) {
		t.Fatalf("on %v", on)
	}
	before := w.Machine.Snapshot().ResourceVersion()
	w.Settle(New(w.Env()))
	if w.Machine.Snapshot().ResourceVersion() != before {
		t.Fatal("writes at rest")
	}
}

// Ten nodes, three off: the seven are updated, the three are named and take
// nothing from the budget, and they are updated when they are back.
func TestNodesThatAreAwayStopNothing(t *testing.T) {
	w := fixture.New(t)
	for i := range 10 {
		w.AddNode(fmt.Sprintf("n%d", i))
	}
	w.Create(newSet())
	c := New(w.Env())
	turns(w, 2, c)
	for i := range 3 {
		setAway(w, fmt.Sprintf("n%d", i), true)
	}
	change(w, image("file:///v2.wasm"))
	turns(w, 25, c)
	ds := get(w)
	st := ds.Status
	if st.DesiredNumberScheduled != 7 || st.UpdatedNumberScheduled != 7 || st.NumberAvailable != 7 || st.NumberMisscheduled != 0 {
		t.Fatalf("%+v", st)
	}
	if len(st.Conditions) != 1 || st.Conditions[0].Type != NodesAway ||
		!strings.Contains(st.Conditions[0].Message, "n0 (old revision), n1 (old revision), n2 (old revision)") {
		t.Fatalf("conditions %+v", st.Conditions)
	}
	if len(w.Events.With("NodesAway")) != 1 {
		t.Fatal("no event")
	}
	for _, p := range pods(w) {
		if p.DeletionTimestamp != nil {
			t.Fatalf("%s on %s is being deleted while its node is away", p.Name, p.Spec.NodeName)
		}
	}
	for i := range 3 {
		setAway(w, fmt.Sprintf("n%d", i), false)
	}
	turns(w, 12, c)
	if st := get(w).Status; st.DesiredNumberScheduled != 10 || st.UpdatedNumberScheduled != 10 || st.NumberAvailable != 10 || len(st.Conditions) != 0 {
		t.Fatalf("after the return: %+v", st)
	}
}

func TestOnDeleteWaitsForTheUser(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n1")
	w.AddNode("n2")
	w.Create(newSet(func(ds *appsv1.DaemonSet) {
		ds.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{Type: appsv1.OnDeleteDaemonSetStrategyType}
	}))
	c := New(w.Env())
	turns(w, 2, c)
	change(w, image("file:///v2.wasm"))
	turns(w, 3, c)
	if st := get(w).Status; st.UpdatedNumberScheduled != 0 || st.NumberAvailable != 2 {
		t.Fatalf("%+v", st)
	}
	w.Delete(fixture.Pod, "default", pods(w)[0].Name, "")
	turns(w, 3, c)
	if st := get(w).Status; st.UpdatedNumberScheduled != 1 || st.NumberAvailable != 2 {
		t.Fatalf("%+v", st)
	}
}

// Going back to an earlier template makes its revision the newest, and old
// ones beyond the limit go.
func TestHistoryAndUndo(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n1")
	two := int32(2)
	w.Create(newSet(image("file:///v1.wasm"), func(ds *appsv1.DaemonSet) { ds.Spec.RevisionHistoryLimit = &two }))
	c := New(w.Env())
	turns(w, 2, c)
	for i := 2; i <= 5; i++ {
		change(w, image(fmt.Sprintf("file:///v%d.wasm", i)))
		turns(w, 3, c)
	}
	numbers := func() (out []int64) {
		for _, r := range fixture.List[*appsv1.ControllerRevision](w, history.GK, "default") {
			out = append(out, r.Revision)
		}
		slices.Sort(out)
		return out
	}
	if got := numbers(); !slices.Equal(got, []int64{3, 4, 5}) {
		t.Fatalf("revisions %v", got)
	}
	change(w, image("file:///v3.wasm"))
	turns(w, 3, c)
	if got := numbers(); !slices.Equal(got, []int64{4, 5, 6}) {
		t.Fatalf("revisions after undo %v", got)
	}
	if p := pods(w); len(p) != 1 || p[0].Spec.Containers[0].Image != "file:///v3.wasm" {
		t.Fatalf("pods %v", p)
	}
	for _, r := range fixture.List[*appsv1.ControllerRevision](w, history.GK, "default") {
		if !strings.Contains(string(r.Data.Raw), `"$patch":"replace"`) || !metav1.IsControlledBy(r, get(w)) {
			t.Fatalf("revision %s: %s", r.Name, r.Data.Raw)
		}
	}
}

func TestFailedPodsAreReplacedWithBackOff(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n1")
	w.Create(newSet())
	c := New(w.Env())
	turns(w, 1, c)
	for range 3 {
		w.Settle(c)
		bind(w)
		for _, p := range pods(w) {
			w.Finish(p, 1)
		}
		w.Settle(c)
	}
	if n := len(w.Events.With("FailedDaemonPod")); n != 1 {
		t.Fatalf("%d failed pods were replaced at once", n)
	}
	if p := pods(w); len(p) != 1 || p[0].Status.Phase != corev1.PodFailed {
		t.Fatalf("pods %+v", p)
	}
}

func TestDecide(t *testing.T) {
	fresh := pod{name: "new", current: true, bound: true, ready: true, available: true}
	starting := pod{name: "starting", current: true, bound: true, created: 9}
	old := pod{name: "old", bound: true, ready: true, available: true}
	broken := pod{name: "broken", bound: true}
	on := func(name string, p ...pod) node { return node{name: name, want: true, keep: true, pods: p} }
	named := func(p pod, name string) pod { p.name = name; return p }
	for what, c := range map[string]struct {
		nodes          []node
		s              strategy
		create, remove []string
	}{
		"missing":                       {[]node{on("a")}, strategy{maxUnavailable: 1}, []string{"a"}, nil},
		"missing, one is leaving":       {[]node{{name: "a", want: true, keep: true, leaving: 1}}, strategy{maxUnavailable: 1}, nil, nil},
		"surge does not wait for it":    {[]node{{name: "a", want: true, keep: true, leaving: 1}}, strategy{surge: 1}, []string{"a"}, nil},
		"not to be there":               {[]node{{name: "a", pods: []pod{fresh}}}, strategy{maxUnavailable: 1}, nil, []string{"new"}},
		"may stay":                      {[]node{{name: "a", keep: true, pods: []pod{fresh}}}, strategy{maxUnavailable: 1}, nil, nil},
		"away":                          {[]node{{name: "a", keep: true, away: true, pods: []pod{broken}}}, strategy{maxUnavailable: 1}, nil, nil},
		"two of them":                   {[]node{on("a", old, named(fresh, "second"))}, strategy{maxUnavailable: 1}, nil, []string{"second"}},
		"update one":                    {[]node{on("a", old), on("b", named(old, "old2"))}, strategy{maxUnavailable: 1}, nil, []string{"old"}},
		"update two":                    {[]node{on("a", old), on("b", named(old, "old2"))}, strategy{maxUnavailable: 2}, nil, []string{"old", "old2"}},
		"the budget is used":            {[]node{on("a", starting), on("b", old)}, strategy{maxUnavailable: 1}, nil, nil},
		"one that does not serve goes":  {[]node{on("a", starting), on("b", broken)}, strategy{maxUnavailable: 1}, nil, []string{"broken"}},
		"silent ones are not judged":    {[]node{on("a", pod{name: "x", bound: true, silent: true}), on("b", old)}, strategy{maxUnavailable: 1}, nil, nil},
		"nothing on delete":             {[]node{on("a", old), on("b", broken)}, strategy{onDelete: true}, nil, nil},
		"surge one":                     {[]node{on("a", old), on("b", named(old, "old2"))}, strategy{surge: 1}, []string{"a"}, nil},
		"surge waits":                   {[]node{on("a", old, starting), on("b", named(old, "old2"))}, strategy{surge: 1}, nil, nil},
		"surge is done":                 {[]node{on("a", old, fresh), on("b", named(old, "old2"))}, strategy{surge: 1}, []string{"b"}, []string{"old"}},
		"surge where none serves":       {[]node{on("a", old, starting), on("b", broken)}, strategy{surge: 1}, []string{"b"}, nil},
		"surge, the old one broke":      {[]node{on("a", broken, starting)}, strategy{surge: 1}, nil, []string{"broken"}},
		"surge, not wanted, not enough": {[]node{{name: "a", keep: true, pods: []pod{old}}, on("b")}, strategy{surge: 1}, []string{"b"}, nil},
		"surge, not wanted, enough":     {[]node{{name: "a", keep: true, pods: []pod{old}}, on("b", fresh)}, strategy{surge: 1}, nil, []string{"old"}},
		"failed":                        {[]node{on("a", pod{name: "f", bound: true, failed: true})}, strategy{maxUnavailable: 1}, nil, []string{"f"}},
		"failed, backing off":           {[]node{{name: "a", want: true, keep: true, backingOff: true, pods: []pod{{name: "f", bound: true, failed: true}}}}, strategy{maxUnavailable: 1}, nil, nil},
	} {
		got := decide(c.nodes, c.s)
		if !reflect.DeepEqual(got.create, c.create) || !reflect.DeepEqual(got.remove, c.remove) {
			t.Errorf("%s: create %v, remove %v", what, got.create, got.remove)
		}
	}
}

func TestJudge(t *testing.T) {
	place := newPlacement(newSet(func(ds *appsv1.DaemonSet) {
		ds.Spec.Template.Spec.NodeSelector = map[string]string{"a": "b"}
		ds.Spec.Template.Spec.Tolerations = []corev1.Toleration{{Key: "ok", Operator: corev1.TolerationOpExists}}
	}))
	taint := func(key string, e corev1.TaintEffect) corev1.Taint { return corev1.Taint{Key: key, Effect: e} }
	for what, c := range map[string]struct {
		labels           map[string]string
		taints           []corev1.Taint
		want, keep, away bool
	}{
		"plain":            {map[string]string{"a": "b"}, nil, true, true, false},
		"no label":         {nil, nil, false, false, false},
		"tolerated":        {map[string]string{"a": "b"}, []corev1.Taint{taint("ok", corev1.TaintEffectNoExecute)}, true, true, false},
		"built in":         {map[string]string{"a": "b"}, []corev1.Taint{taint(corev1.TaintNodeUnschedulable, corev1.TaintEffectNoSchedule)}, true, true, false},
		"NoSchedule":       {map[string]string{"a": "b"}, []corev1.Taint{taint("x", corev1.TaintEffectNoSchedule)}, false, true, false},
		"NoExecute":        {map[string]string{"a": "b"}, []corev1.Taint{taint("x", corev1.TaintEffectNoExecute)}, false, false, false},
		"PreferNoSchedule": {map[string]string{"a": "b"}, []corev1.Taint{taint("x", corev1.TaintEffectPreferNoSchedule)}, true, true, false},
		"silent":           {map[string]string{"a": "b"}, []corev1.Taint{taint(corev1.TaintNodeUnreachable, corev1.TaintEffectNoSchedule)}, false, true, true},
		"silent, unwanted": {nil, []corev1.Taint{taint(corev1.TaintNodeUnreachable, corev1.TaintEffectNoSchedule)}, false, false, false},
		"not ready, foreign": {map[string]string{"a": "b"}, []corev1.Taint{taint(corev1.TaintNodeNotReady, corev1.TaintEffectNoSchedule),
			taint("x", corev1.TaintEffectNoSchedule)}, false, true, false},
	} {
		want, keep, away := place.judge(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: c.labels}, Spec: corev1.NodeSpec{Taints: c.taints}})
		if want != c.want || keep != c.keep || away != c.away {
			t.Errorf("%s: want %v, keep %v, away %v", what, want, keep, away)
		}
	}
}

// serves says whether a node has a pod that is ready and stays.
func serves(w *fixture.World, name string) bool {
	return slices.ContainsFunc(pods(w), func(p *corev1.Pod) bool {
		return p.Spec.NodeName == name && p.DeletionTimestamp == nil &&
			slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue })
	})
}

// mark makes the pods of a node not ready because it is silent, or takes that
// back.
func mark(w *fixture.World, name string, silent bool) {
	for _, p := range pods(w) {
		if p.Spec.NodeName != name {
			continue
		}
		fixture.Change(w, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) {
			if silent {
				lost.SetNotReady(&p.Status, name, w.Now())
			} else {
				lost.ClearStatus(&p.Status, w.Now())
			}
		})
	}
}

// From any half-done state, nodes that come and go, and with the controller killed between any two
// writes, an update ends and never takes more than its budget.
func TestUpdatesKeepTheirBudgetThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		n := rapid.IntRange(2, 4).Draw(rt, "nodes")
		for i := range n {
			w.AddNode(fmt.Sprintf("n%d", i))
		}
		surge, unavailable := int32(0), rapid.Int32Range(1, 3).Draw(rt, "unavailable")
		if rapid.Bool().Draw(rt, "surging") {
			surge, unavailable = unavailable, 0
		}
		w.Create(newSet(rolling(surge, unavailable)))
		turns(w, 2, New(w.Env()))
		var broken error // found in a goroutine of the controller
		away := map[string]bool{}
		check := func() {
			serving, all := map[string]bool{}, 0
			for _, p := range pods(w) {
				if p.DeletionTimestamp != nil {
					continue
				}
				all++
				for _, c := range p.Status.Conditions {
					// A silent pod is nobody's fault, and may serve.
					if c.Type == corev1.PodReady && (c.Status == corev1.ConditionTrue || c.Reason == lost.Reason) {
						serving[p.Spec.NodeName] = true
					}
				}
			}
			for name := range away {
				if away[name] {
					serving[name] = true // not counted
				}
			}
			if down := n - len(serving); down > int(unavailable) {
				broken = fmt.Errorf("%d of %d nodes do not serve, budget %d", down, n, unavailable)
			}
			// A node that went while it had two pods comes back with them.
			if all > n+int(surge)+len(away) {
				broken = fmt.Errorf("%d pods on %d nodes, surge %d", all, n, surge)
			}
		}
		version := 1
		for range rapid.IntRange(4, 16).Draw(rt, "steps") {
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 5:
				// Nodes go or come back together; their taints go before their
				// pods are known to be ready again.
				goes := rapid.Bool().Draw(rt, "goes")
				for i := range rapid.IntRange(1, n).Draw(rt, "nodes of the site") {
					name := fmt.Sprintf("n%d", i)
					if away[name] == goes || (goes && !serves(w, name)) {
						continue // one that is being updated is the budget's
					}
					away[name] = goes
					if setAway(w, name, goes); goes {
						mark(w, name, true)
					}
				}
			case 0, 1:
				env := w.Killed(rapid.IntRange(0, 6).Draw(rt, "writes"), check)
				w.Try(env, New(env))
			case 2:
				bind(w)
			case 3:
				w.Report(nil)
				for name := range away {
					if !away[name] {
						mark(w, name, false)
					}
				}
			case 4:
				version++
				change(w, image(fmt.Sprintf("file:///v%d.wasm", version)))
			}
			if check(); broken != nil {
				rt.Fatal(broken)
			}
		}
		for name := range away {
			if away[name] {
				setAway(w, name, false)
			}
			mark(w, name, false)
		}
		c := New(w.Env())
		turns(w, 3*n+3, c)
		if st := get(w).Status; int(st.UpdatedNumberScheduled) != n || int(st.NumberAvailable) != n || len(pods(w)) != n {
			rt.Fatalf("not updated: %+v, %d pods", st, len(pods(w)))
		}
	})
}
