package nodelifecycle

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/controllers/replicaset"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/wire"
)

func TestFrozen(t *testing.T) {
	zone := func(name string, silent, all int) (out []ZoneNode) {
		for i := range all {
			out = append(out, ZoneNode{fmt.Sprintf("%s-%d", name, i), name, i < silent})
		}
		return out
	}
	for _, c := range []struct {
		name        string
		silent, all int
		leader      bool
		want        bool
	}{
		{"nobody silent", 0, 5, false, false},
		{"one of one, another site: our link", 1, 1, false, true},
		{"one of one, own site: it is dead", 1, 1, true, false},
		{"two of two, own site", 2, 2, true, false},
		{"all of two, another site", 2, 2, false, true},
		{"one of two, another site", 1, 2, false, false},
		{"three of five, own site", 3, 5, true, true},
		{"three of six is not more than half", 3, 6, true, false},
		{"two of three are fewer than three", 2, 3, true, false},
		{"three of five, another site", 3, 5, false, true},
		{"all of four, own site", 4, 4, true, true},
	} {
		leaderZone := "elsewhere"
		if c.leader {
			leaderZone = "z"
		}
		nodes := append(zone("z", c.silent, c.all), zone("other", 0, 3)...)
		if got := Frozen(nodes, leaderZone); got["z"] != c.want || got["other"] {
			t.Errorf("%s: frozen %v", c.name, got)
		}
	}
}

// A zone whose link breaks falls silent within the 2 s between two renewals:
// its first node is not given up before the others' leases have run out.
func TestZoneThatFallsSilentLosesNoNode(t *testing.T) {
	zones := map[string]string{"f0": "far", "f1": "far", "z0": "z", "z1": "z", "z2": "z", "z3": "z", "one": "z"}
	for _, tc := range []struct {
		what   string
		ages   map[string]time.Duration
		frozen bool
	}{
		{"far: the link breaks", map[string]time.Duration{"f0": 6600 * time.Millisecond, "f1": 4600 * time.Millisecond}, true},
		{"far: one node breaks, the other's renewal was sent twice", map[string]time.Duration{"f0": 6600 * time.Millisecond, "f1": 3200 * time.Millisecond}, false},
		{"z: three of five, one after the other", map[string]time.Duration{"z0": 6600 * time.Millisecond, "z1": 5 * time.Second, "z2": 4600 * time.Millisecond}, true},
		{"z: two of five", map[string]time.Duration{"z0": 6600 * time.Millisecond, "z1": 5 * time.Second}, false},
		{"far: nobody is silent yet", map[string]time.Duration{"f0": 6 * time.Second, "f1": 5 * time.Second, "z0": 6600 * time.Millisecond}, false},
	} {
		a, now := newAssessor("z", 10*time.Second), time.Unix(0, 0)
		leases := map[string]LeaseInfo{}
		for name := range zones {
			leases[name] = LeaseInfo{Age: tc.ages[name], Expired: tc.ages[name] > 6500*time.Millisecond}
		}
		never := func(string) bool { return false }
		for name, v := range a.assess(leases, zones, never, now) {
			if v.silent && (v.frozen != tc.frozen || v.evict == tc.frozen) {
				t.Errorf("%s: %s: %+v", tc.what, name, v)
			}
			if tc.ages["f0"] < 6500*time.Millisecond && zones[name] == "far" && v.frozen {
				t.Errorf("%s: %s, where nobody is silent: %+v", tc.what, name, v)
			}
		}
		// It was in doubt and not frozen: once the others have renewed, the silent
		// one does not wait for those that may be on their way.
		for name, l := range leases {
			if !l.Expired {
				leases[name] = LeaseInfo{}
			}
		}
		for name, v := range a.assess(leases, zones, never, now.Add(time.Second)) {
			if v.silent && !v.evict {
				t.Errorf("%s: the others renewed: %s: %+v", tc.what, name, v)
			}
		}
	}
}

// One node is not "so many": what holds its pods is told as it is.
func TestHeldNodeThatIsAlone(t *testing.T) {
	for name, tc := range map[string]struct {
		zones map[string]string
		want  string
	}{
		"of the cluster": {map[string]string{"n": "far"}, "only node of the cluster, so there is nowhere to move its pods"},
		"of its zone":    {map[string]string{"n": "far", "m": "z"}, `only node of zone "far"`},
		"not alone":      {map[string]string{"n": "far", "o": "far"}, `So many nodes of zone "far"`},
	} {
		leases := map[string]LeaseInfo{}
		for node, zone := range tc.zones {
			leases[node] = LeaseInfo{Expired: zone == "far", Age: 7 * time.Second}
		}
		v := newAssessor("z", 10*time.Second).assess(leases, tc.zones, func(string) bool { return false }, time.Unix(1000, 0))
		if c := held(v["n"], "far", 10*time.Second); c.Reason != reasonFrozen || !strings.Contains(c.Message, tc.want) {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// lease of a node that is silent, or has just renewed.
func lease(silent bool) LeaseInfo {
	if silent {
		return LeaseInfo{Expired: true, Age: 7 * time.Second}
	}
	return LeaseInfo{}
}

// Every silent node whose pods are not moved says why, from the first moment
// to the last, and a healthy one never does.
func TestHeldNodesSayWhy(t *testing.T) {
	a := newAssessor("z", 10*time.Second)
	start := time.Unix(1000, 0)
	zones, leases := map[string]string{}, map[string]LeaseInfo{}
	set := func(zone string, n, silent int) {
		for i := range n {
			name := fmt.Sprintf("%s%d", zone, i)
			zones[name], leases[name] = zone, lease(i < silent)
		}
	}
	status := map[string]*corev1.NodeStatus{}
	reasons := func(at time.Duration) map[string]string {
		out := map[string]string{}
		for name, v := range a.assess(leases, zones, func(string) bool { return false }, start.Add(at)) {
			if status[name] == nil {
				status[name] = &corev1.NodeStatus{}
			}
			if c := held(v, zones[name], 10*time.Second); v.silent && !v.evict != (c.Status == corev1.ConditionTrue) {
				t.Errorf("%s: %+v and %+v", name, v, c)
			} else if setHeld(status[name], c, metav1.Now()); setHeld(status[name], c, metav1.Now()) {
				t.Errorf("%s: the same again is a change", name)
			}
			for _, c := range status[name].Conditions {
				out[name] = c.Reason
			}
		}
		return out
	}
	want := func(at time.Duration, w map[string]string) {
		t.Helper()
		if got := reasons(at); !maps.Equal(got, w) {
			t.Errorf("after %s: %v, want %v", at, got, w)
		}
	}
	set("z", 8, 0)
	set("far", 2, 0)
	want(0, map[string]string{})
	set("z", 8, 2)
	set("far", 2, 2)
	want(time.Second, map[string]string{"z1": reasonLimited, "far0": reasonFrozen, "far1": reasonFrozen})
	set("far", 2, 1)
	want(2*time.Second, map[string]string{"z1": reasonLimited, "far0": reasonReturning, "far1": reasonNotHeld})
	want(12*time.Second, map[string]string{"z1": reasonNotHeld, "far0": reasonReturning, "far1": reasonNotHeld})
	want(time.Minute, map[string]string{"z1": reasonNotHeld, "far0": reasonNotHeld, "far1": reasonNotHeld})
	set("z", 8, 0)
	set("far", 2, 0)
	want(time.Hour, map[string]string{"z1": reasonNotHeld, "far0": reasonNotHeld, "far1": reasonNotHeld})
}

func TestEvictionsOfAZoneAreSpaced(t *testing.T) {
	a := newAssessor("z", 10*time.Second)
	start := time.Unix(1000, 0)
	zones := map[string]string{}
	leases := map[string]LeaseInfo{}
	for i := range 8 {
		n := fmt.Sprintf("n%d", i)
		zones[n], leases[n] = "z", lease(i < 3)
	}
	no := func(string) bool { return false }
	for _, c := range []struct {
		at   time.Duration
		want int
	}{{0, 1}, {5 * time.Second, 1}, {10 * time.Second, 2}, {19 * time.Second, 2}, {20 * time.Second, 3}, {time.Minute, 3}} {
		got := 0
		for _, v := range a.assess(leases, zones, no, start.Add(c.at)) {
			if v.evict {
				got++
			}
		}
		if got != c.want {
			t.Fatalf("after %v: %d nodes given up, want %d", c.at, got, c.want)
		}
	}
}

// When a link is healed the nodes behind it come back one by one. Who is late
// is not dead for it; who falls silent afterwards, or stays away, is.
func TestThawWaitsForLateNodes(t *testing.T) {
	a := newAssessor("z", time.Second)
	start := time.Unix(1000, 0)
	zones := map[string]string{}
	for i := range 5 {
		zones[fmt.Sprintf("n%d", i)] = "z"
	}
	look := func(at time.Duration, silent ...string) (given []string) {
		leases := map[string]LeaseInfo{}
		for n := range zones {
			leases[n] = LeaseInfo{Expired: slices.Contains(silent, n)}
		}
		for n, v := range a.assess(leases, zones, func(string) bool { return false }, start.Add(at)) {
			if v.evict {
				given = append(given, n)
			}
		}
		return given
	}
	if got := look(0, "n0", "n1", "n2", "n3", "n4"); len(got) > 0 {
		t.Fatalf("all are silent, given up: %v", got)
	}
	heal := time.Hour
	look(heal, "n0", "n1", "n2", "n3", "n4")
	if got := look(heal+time.Second, "n0", "n1"); len(got) > 0 {
		t.Fatalf("two are late, given up: %v", got)
	}
	if got := look(heal+3*time.Second, "n0", "n1", "n2"); len(got) > 0 {
		t.Fatalf("three again, given up: %v", got)
	}
	if got := look(heal+5*time.Second, "n0", "n4"); !slices.Equal(got, []string{"n4"}) {
		t.Fatalf("n4 came back and died, given up: %v", got)
	}
	if got := look(heal+3*time.Second+wire.ReconnectMost, "n0"); !slices.Equal(got, []string{"n0"}) {
		t.Fatalf("n0 stays away, given up: %v", got)
	}
}

func TestNewLeaderWaitsForAProof(t *testing.T) {
	a := newAssessor("z", time.Second)
	start := time.Unix(1000, 0)
	zones := map[string]string{"n": "z"}
	look := func(at time.Duration, info LeaseInfo) verdict {
		return a.assess(map[string]LeaseInfo{"n": info}, zones, func(string) bool { return true }, start.Add(at))["n"]
	}
	if v := look(0, LeaseInfo{}); v.known {
		t.Fatal("a fresh TTL is no renewal")
	}
	if v := look(3*time.Second, LeaseInfo{Age: 3 * time.Second}); v.known {
		t.Fatal("nothing came")
	}
	// A server that stood still for a moment gives every lease that long more.
	if v := look(4*time.Second, LeaseInfo{Age: time.Second}); v.known {
		t.Fatal("a deadline that was moved is no renewal")
	}
	if v := look(5*time.Second, LeaseInfo{Age: time.Second, Renewed: true}); !v.known || v.silent {
		t.Fatalf("renewed: %+v", v)
	}
	if v := look(20*time.Second, LeaseInfo{Age: 17 * time.Second, Renewed: true, Expired: true}); !v.known || !v.silent || !v.evict {
		t.Fatalf("expired: %+v", v)
	}
}

func TestTolerance(t *testing.T) {
	secs := func(n int64) *int64 { return &n }
	unreachable := corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute}
	user := corev1.Taint{Key: "u", Effect: corev1.TaintEffectNoExecute}
	all := corev1.Toleration{Operator: corev1.TolerationOpExists}
	one := func(key string, s *int64) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: s}
	}
	for name, c := range map[string]struct {
		o    []corev1.Toleration
		t    []corev1.Taint
		want time.Duration
	}{
		"no taints":            {nil, nil, never},
		"not tolerated":        {nil, []corev1.Taint{user}, 0},
		"for ever":             {[]corev1.Toleration{all}, []corev1.Taint{user, unreachable}, never},
		"for a while":          {[]corev1.Toleration{one("u", secs(300))}, []corev1.Taint{user}, 290 * time.Second},
		"over":                 {[]corev1.Toleration{one("u", secs(5))}, []corev1.Taint{user}, 0},
		"0 seconds":            {[]corev1.Toleration{one("u", secs(0))}, []corev1.Taint{user}, 0},
		"negative":             {[]corev1.Toleration{one("u", secs(-5))}, []corev1.Taint{user}, 0},
		"shortest counts":      {[]corev1.Toleration{all, one("u", secs(60))}, []corev1.Taint{user}, 50 * time.Second},
		"one of two tolerated": {[]corev1.Toleration{one("u", nil)}, []corev1.Taint{user, unreachable}, 0},
	} {
		if got := tolerance(c.o, c.t, func(*corev1.Taint) time.Duration { return 10 * time.Second }); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestDesiredTaints(t *testing.T) {
	cond := func(t corev1.NodeConditionType, s corev1.ConditionStatus) corev1.NodeCondition {
		return corev1.NodeCondition{Type: t, Status: s}
	}
	users := corev1.Taint{Key: "mine", Effect: corev1.TaintEffectNoExecute}
	for name, c := range map[string]struct {
		conds  []corev1.NodeCondition
		v      verdict
		cordon bool
		want   []string
	}{
		"ready":      {[]corev1.NodeCondition{cond(corev1.NodeReady, "True")}, verdict{}, false, []string{"mine:NoExecute"}},
		"new":        {nil, verdict{}, false, []string{"mine:NoExecute", "node.kubernetes.io/not-ready:NoSchedule"}},
		"not ready":  {[]corev1.NodeCondition{cond(corev1.NodeReady, "False")}, verdict{}, false, []string{"mine:NoExecute", "node.kubernetes.io/not-ready:NoExecute", "node.kubernetes.io/not-ready:NoSchedule"}},
		"silent":     {[]corev1.NodeCondition{cond(corev1.NodeReady, "Unknown")}, verdict{silent: true}, false, []string{"mine:NoExecute", "node.kubernetes.io/unreachable:NoSchedule"}},
		"given up":   {[]corev1.NodeCondition{cond(corev1.NodeReady, "Unknown")}, verdict{silent: true, evict: true}, false, []string{"mine:NoExecute", "node.kubernetes.io/unreachable:NoExecute", "node.kubernetes.io/unreachable:NoSchedule"}},
		"full disk":  {[]corev1.NodeCondition{cond(corev1.NodeReady, "True"), cond(corev1.NodeDiskPressure, "True")}, verdict{}, false, []string{"mine:NoExecute", "node.kubernetes.io/disk-pressure:NoSchedule"}},
		"low memory": {[]corev1.NodeCondition{cond(corev1.NodeReady, "True"), cond(corev1.NodeMemoryPressure, "True")}, verdict{}, true, []string{"mine:NoExecute", "node.kubernetes.io/memory-pressure:NoSchedule", "node.kubernetes.io/unschedulable:NoSchedule"}},
	} {
		n := &corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{users}, Unschedulable: c.cordon}, Status: corev1.NodeStatus{Conditions: c.conds}}
		var got []string
		for _, x := range desiredTaints(n, c.v, time.Unix(0, 0)) {
			got = append(got, x.Key+":"+string(x.Effect))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// fakeLeases are set by the test.
type fakeLeases struct {
	mu sync.Mutex
	m  map[string]LeaseInfo // nil: not kept yet
}

func (f *fakeLeases) InTerm(uint64) (map[string]LeaseInfo, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.m), f.m != nil
}

func (f *fakeLeases) Expired(node string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.m[node].Expired
}

func (f *fakeLeases) set(node string, i LeaseInfo) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.m[node] = i
}

func podsByNode(w *fixture.World) map[string][]*corev1.Pod {
	out := map[string][]*corev1.Pod{}
	for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "default") {
		if p.DeletionTimestamp == nil {
			out[p.Spec.NodeName] = append(out[p.Spec.NodeName], p)
		}
	}
	return out
}

// The whole story, in virtual time: a node falls silent, its pods are lost
// and replaced elsewhere; it comes back, the originals count again and are
// kept, and the replacements go.
func TestLostAndFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := fixture.New(t)
		zero := int64(0)
		tolerate := []corev1.Toleration{{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &zero}}
		leases := &fakeLeases{m: map[string]LeaseInfo{"n1": {Renewed: true}, "n2": {Renewed: true}}}
		w.AddNode("n1")
		w.AddNode("n2")
		two := int32(2)
		tpl := fixture.Template("a")
		tpl.Spec.Tolerations = tolerate
		w.Create(&appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "rs"},
			Spec: appsv1.ReplicaSetSpec{Replicas: &two, Selector: &metav1.LabelSelector{MatchLabels: tpl.Labels}, Template: tpl}})
		w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "bare"}, Spec: tpl.Spec})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() {
			done <- loop.Run(ctx, w.Env(), nil, New(w.Env(), Config{Leases: leases}), replicaset.New(w.Env()))
		}()
		pass := func(d time.Duration) {
			time.Sleep(d)
			w.Advance(d)
			synctest.Wait()
		}
		pass(time.Second)
		w.BindAll("n1")
		w.Report(nil)
		pass(time.Second)

		leases.set("n1", LeaseInfo{Expired: true, Age: 7 * time.Second})
		w.Silent["n1"] = true
		pass(time.Second)
		w.BindAll("n2")
		w.Report(nil)
		pass(time.Second)
		by := podsByNode(w)
		if len(by["n2"]) != 2 || len(by["n1"]) != 3 {
			t.Fatalf("%d on n1, %d on n2", len(by["n1"]), len(by["n2"]))
		}
		for _, p := range by["n1"] {
			isLost, ready := lost.Is(p), true
			for _, c := range p.Status.Conditions {
				if c.Type == corev1.PodReady {
					ready = c.Status == corev1.ConditionTrue
				}
			}
			if ready || isLost == (p.Name == "bare") || (isLost && p.Annotations[lost.SinceAnnotation] == "") {
				t.Fatalf("pod %s: ready %v, lost %v, %v", p.Name, ready, isLost, p.Annotations)
			}
		}
		node := fixture.Get[*corev1.Node](w, fixture.Node, "", "n1")
		if !unreachable(node, corev1.TaintEffectNoExecute) || node.Status.Conditions[0].Status != corev1.ConditionUnknown {
			t.Fatalf("node %+v %+v", node.Spec.Taints, node.Status.Conditions)
		}
		rs := fixture.Get[*appsv1.ReplicaSet](w, fixture.ReplicaSet, "default", "rs")
		if rs.Status.Replicas != 2 || rs.Status.ReadyReplicas != 2 {
			t.Fatalf("status %+v", rs.Status)
		}

		// Back, but its pods are not reported yet: nothing is decided.
		leases.set("n1", LeaseInfo{Renewed: true, Stale: true})
		pass(time.Second)
		if by := podsByNode(w); len(by["n1"]) != 3 || len(by["n2"]) != 2 {
			t.Fatalf("while stale: %d and %d", len(by["n1"]), len(by["n2"]))
		}
		leases.set("n1", LeaseInfo{Renewed: true})
		pass(2 * time.Second)
		by = podsByNode(w)
		if len(by["n1"]) != 3 || len(by["n2"]) != 0 {
			t.Fatalf("after the return: %d on n1, %d on n2", len(by["n1"]), len(by["n2"]))
		}
		for _, p := range by["n1"] {
			if lost.Is(p) || p.Annotations[lost.SinceAnnotation] != "" {
				t.Fatalf("%s is still marked", p.Name)
			}
		}
		node = fixture.Get[*corev1.Node](w, fixture.Node, "", "n1")
		if len(node.Spec.Taints) != 0 || node.Status.Conditions[0].Status != corev1.ConditionTrue {
			t.Fatalf("node %+v %+v", node.Spec.Taints, node.Status.Conditions)
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

func TestFrozenZoneKeepsItsPods(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("far", func(n *corev1.Node) { n.Labels[corev1.LabelTopologyZone] = "far" })
	tpl := fixture.Template("a")
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Spec: tpl.Spec})
	w.BindAll("far")
	w.Report(nil)
	c := newForTest(w, &fakeLeases{m: map[string]LeaseInfo{"far": {Expired: true}}})
	w.Settle(c)
	p := fixture.Get[*corev1.Pod](w, fixture.Pod, "default", "p")
	node := fixture.Get[*corev1.Node](w, fixture.Node, "", "far")
	if !needed(p, unready) || lost.Is(p) || unreachable(node, corev1.TaintEffectNoExecute) {
		t.Fatalf("touched: %+v %+v", p.Status.Conditions, node.Spec.Taints)
	}
	if !unreachable(node, corev1.TaintEffectNoSchedule) {
		t.Fatal("nothing new may go there")
	}
}

// newForTest is a controller that has looked at the leases once.
func newForTest(w *fixture.World, l Leases) *loop.Controller {
	_, lc := newLooking(w, l)
	return lc
}

// newLooking also returns what looks.
func newLooking(w *fixture.World, l Leases) (*controller, *loop.Controller) {
	c := &controller{env: w.Env(), cfg: Config{Leases: l}, assessor: newAssessor("", evictEvery),
		tainted: map[string]bool{}, clocks: map[string]map[string]since{}}
	c.look(time.Now())
	return c, &loop.Controller{Name: "node-lifecycle", Sources: []loop.Source{loop.Self(nodeGK.String())}, Reconcile: c.reconcile}
}

func TestUserTaintDeletes(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	tpl := fixture.Template("a")
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "goes"}, Spec: tpl.Spec})
	tpl.Spec.Tolerations = []corev1.Toleration{{Key: "drain", Operator: corev1.TolerationOpExists}}
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "stays"}, Spec: tpl.Spec})
	w.BindAll("n")
	w.Report(nil)
	fixture.Change(w, fixture.Node, "", "n", registry.Main, func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "drain", Effect: corev1.TaintEffectNoExecute}}
	})
	w.Settle(newForTest(w, &fakeLeases{m: map[string]LeaseInfo{}}))
	if p := fixture.Get[*corev1.Pod](w, fixture.Pod, "default", "goes"); p.DeletionTimestamp == nil {
		t.Fatal("not evicted")
	}
	if p := fixture.Get[*corev1.Pod](w, fixture.Pod, "default", "stays"); p.DeletionTimestamp != nil {
		t.Fatal("evicted although it tolerates the taint")
	}
	if len(w.Events.With("TaintManagerEviction")) != 1 {
		t.Fatal("no event")
	}
}
