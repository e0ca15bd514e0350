package nodelifecycle

import (
	"context"
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
	"github.com/dunlin-project/dunlin/wire"
)

// A node that came back since the last look at the leases is not called
// Unknown again: its connection puts that right at once, and both would go on
// until the next look.
func TestNoWordAgainstALivingNode(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	leases := &fakeLeases{m: map[string]LeaseInfo{"n": {Expired: true}}}
	c := newForTest(w, leases)
	leases.set("n", LeaseInfo{Renewed: true, Stale: true})
	before := w.Machine.Snapshot().ResourceVersion()
	w.Settle(c)
	if after := w.Machine.Snapshot().ResourceVersion(); after != before {
		t.Fatalf("%d writes about a node that is back", after-before)
	}
	leases.set("n", LeaseInfo{Expired: true})
	w.Settle(c)
	if n := fixture.Get[*corev1.Node](w, fixture.Node, "", "n"); n.Status.Conditions[0].Status != corev1.ConditionUnknown {
		t.Fatalf("conditions %+v", n.Status.Conditions)
	}
}

// A pod whose node reports it ready before the mark was taken away loses the
// mark too, and is kept rather than its replacement.
func TestReadyPodLosesItsMark(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n1")
	w.AddNode("n2")
	sets := onePodOn(w, "n1")
	leases := &fakeLeases{m: map[string]LeaseInfo{"n1": {Expired: true}, "n2": {Renewed: true}}}
	c, nodes := newLooking(w, leases)
	w.Settle(nodes, sets)
	original := podsByNode(w)["n1"][0]
	if !lost.Is(original) {
		t.Fatalf("not lost: %+v", original.Status.Conditions)
	}
	w.BindAll("n2")
	w.Silent["n1"] = true
	w.Report(nil)
	w.Settle(sets)

	// The node is back, and its report comes first.
	leases.set("n1", LeaseInfo{Renewed: true})
	c.look(time.Now())
	w.Settle(nodes) // the taints go
	original = podsByNode(w)["n1"][0]
	fixture.Change(w, fixture.Pod, "default", original.Name, "status", func(p *corev1.Pod) {
		lost.SetStatus(&p.Status, "n1", w.Now())
		p.Annotations = map[string]string{lost.SinceAnnotation: "then"}
	})
	w.SetReady(original, true)
	w.Settle(sets)
	if by := podsByNode(w); len(by["n1"]) != 1 || len(by["n2"]) != 0 {
		t.Fatalf("%d originals and %d replacements are left", len(by["n1"]), len(by["n2"]))
	}
	w.Settle(nodes)
	if p := podsByNode(w)["n1"][0]; lost.Is(p) || p.Annotations[lost.SinceAnnotation] != "" {
		t.Fatalf("still marked: %+v %v", p.Status.Conditions, p.Annotations)
	}
}

// A new leader that does not know yet who lives takes nobody for alive: its
// controllers may begin before the leases are kept, and a node that has not
// renewed in its term is as dead as it was.
func TestNewLeaderRevivesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := fixture.New(t)
		w.AddNode("dead")
		w.AddNode("alive")
		sets := onePodOn(w, "dead")
		w.Settle(newForTest(w, &fakeLeases{m: map[string]LeaseInfo{"dead": {Expired: true}, "alive": {Renewed: true}}}), sets)
		w.BindAll("alive")
		w.Silent["dead"] = true
		w.Report(nil)
		w.Settle(sets)

		leases := &fakeLeases{}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() {
			done <- loop.Run(ctx, w.Env(), nil, New(w.Env(), Config{Leases: leases}), replicaset.New(w.Env()))
		}()
		same := func(when string) {
			t.Helper()
			synctest.Wait()
			by, n := podsByNode(w), fixture.Get[*corev1.Node](w, fixture.Node, "", "dead")
			if len(by["dead"]) != 1 || !lost.Is(by["dead"][0]) || len(by["alive"]) != 1 || by["alive"][0].DeletionTimestamp != nil ||
				!unreachable(n, corev1.TaintEffectNoExecute) || n.Status.Conditions[0].Status != corev1.ConditionUnknown {
				t.Errorf("%s: pods %v; taints %+v, conditions %+v", when, by, n.Spec.Taints, n.Status.Conditions)
			}
		}
		time.Sleep(time.Second)
		same("no leases are kept yet")
		for i := range 20 { // its clock may even seem to go back, where the leader stands still
			leases.mu.Lock()
			leases.m = map[string]LeaseInfo{"dead": {Age: time.Duration(i%3) * time.Second}, "alive": {Renewed: true}}
			leases.mu.Unlock()
			time.Sleep(time.Second)
			same("a fresh TTL")
		}
		leases.set("dead", LeaseInfo{Expired: true})
		time.Sleep(time.Second)
		same("it ran out")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A link heals, its nodes come back one by one, and in between another server
// leads: who is late is still not dead for it.
func TestThawGoesOnUnderANewLeader(t *testing.T) {
	w := fixture.New(t)
	names := []string{"n0", "n1", "n2", "n3"}
	leases := &fakeLeases{m: map[string]LeaseInfo{}}
	for _, n := range names {
		w.AddNode(n)
		leases.set(n, LeaseInfo{Expired: true})
	}
	w.Settle(newForTest(w, leases)) // all are silent: their zone is frozen

	for _, n := range names[1:] {
		leases.set(n, LeaseInfo{Renewed: true})
	}
	leases.set("n0", LeaseInfo{})
	c, nodes := newLooking(w, leases)
	start := time.Now()
	leases.set("n0", LeaseInfo{Expired: true})
	for _, at := range []time.Duration{10 * time.Second, wire.ReconnectMost - time.Second} {
		c.look(start.Add(at))
		w.Settle(nodes)
		if n := fixture.Get[*corev1.Node](w, fixture.Node, "", "n0"); unreachable(n, corev1.TaintEffectNoExecute) {
			t.Fatalf("after %s: it may be on its way, and is given up", at)
		}
	}
	c.look(start.Add(wire.ReconnectMost + time.Second))
	w.Settle(nodes)
	if n := fixture.Get[*corev1.Node](w, fixture.Node, "", "n0"); !unreachable(n, corev1.TaintEffectNoExecute) {
		t.Fatal("it stays away, and is not given up")
	}
}

// onePodOn makes a ReplicaSet of one pod, which runs on the node.
func onePodOn(w *fixture.World, node string) *loop.Controller {
	one := int32(1)
	tpl := fixture.Template("a")
	w.Create(&appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "rs"},
		Spec: appsv1.ReplicaSetSpec{Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: tpl.Labels}, Template: tpl}})
	sets := replicaset.New(w.Env())
	w.Settle(sets)
	w.BindAll(node)
	w.Report(nil)
	return sets
}
