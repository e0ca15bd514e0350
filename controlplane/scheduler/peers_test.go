package scheduler

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

const zoneKey = "topology.kubernetes.io/zone"

func inZone(zone string) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Labels[zoneKey] = zone }
}

func labelled(app string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Labels = map[string]string{"app": app} }
}

func appIs(app string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
}

// awayFrom keeps the pod off the domains of pods of the app.
func awayFrom(app, key string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{
			{LabelSelector: appIs(app), TopologyKey: key}}}}
	}
}

func near(app, key string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{
			{LabelSelector: appIs(app), TopologyKey: key}}}}
	}
}

func spreadBy(key string, skew int32, app string, keys ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{MaxSkew: skew, TopologyKey: key, WhenUnsatisfiable: corev1.DoNotSchedule,
			LabelSelector: appIs(app), MatchLabelKeys: keys}}
	}
}

func zones(w *fixture.World, prefix string) map[string]int {
	out := map[string]int{}
	for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "") {
		if !strings.HasPrefix(p.Name, prefix) {
			continue
		}
		if p.Spec.NodeName == "" {
			out[""]++
			continue
		}
		out[fixture.Get[*corev1.Node](w, fixture.Node, "", p.Spec.NodeName).Labels[zoneKey]]++
	}
	return out
}

func threeZones(t *testing.T) *fixture.World {
	w := fixture.New(t)
	for i := range 6 {
		w.AddNode(fmt.Sprintf("n%d", i), inZone(fmt.Sprintf("z%d", i%3)))
	}
	return w
}

func TestPodsOfABatchSeeEachOther(t *testing.T) {
	w := threeZones(t)
	// In one batch, by name: nobody is placed when it is taken.
	w.Create(pod("aa-early", labelled("web"), near("db", zoneKey)))
	w.Create(pod("db", labelled("db"), awayFrom("noise", zoneKey)))
	for i := range 4 {
		w.Create(pod(fmt.Sprintf("noise-%d", i), labelled("noise")))
		w.Create(pod(fmt.Sprintf("quiet-%d", i), labelled("quiet")))
	}
	for i := range 3 {
		w.Create(pod(fmt.Sprintf("apart-%d", i), labelled("apart"), awayFrom("apart", zoneKey)))
	}
	for i := range 7 {
		w.Create(pod(fmt.Sprintf("even-%d", i), labelled("even"), spreadBy(zoneKey, 1, "even")))
	}
	s := newScheduler(w)
	settle(t, s)
	db := fixture.Get[*corev1.Node](w, fixture.Node, "", nodeOf(w, "db")).Labels[zoneKey]
	if z := zones(w, "noise"); z[db] != 0 || z[""] != 0 {
		t.Errorf("noise in %v, the database in %s wants none", z, db)
	}
	if z := zones(w, "apart"); len(z) != 3 || z[""] != 0 {
		t.Errorf("apart in %v", z)
	}
	if z := zones(w, "even"); z["z0"]+z["z1"]+z["z2"] != 7 || min(z["z0"], z["z1"], z["z2"]) != 2 {
		t.Errorf("even in %v", z)
	}
	if m := scheduled(w, "aa-early").Message; m != "0/6 nodes are available: 6 node(s) didn't match pod affinity rules." {
		t.Errorf("aa-early: %q", m)
	}
	settle(t, s)
	if z := zones(w, "aa-early"); z[db] != 1 {
		t.Errorf("early in %v, wanted %s", z, db)
	}
	w.Create(pod("apart-3", labelled("apart"), awayFrom("apart", zoneKey)))
	settle(t, s)
	if m := scheduled(w, "apart-3").Message; m != "0/6 nodes are available: 6 node(s) didn't match pod anti-affinity rules." {
		t.Errorf("a fourth: %q", m)
	}
}

// TestLabelKeysOfAPod: a spread over the pods of one revision counts those
// of that revision only (KEP-3243), which the pod's creation writes down.
func TestLabelKeysOfAPod(t *testing.T) {
	w := threeZones(t)
	rev := func(hash string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Labels["pod-template-hash"] = hash }
	}
	for i := range 3 {
		w.Create(pod(fmt.Sprintf("old-%d", i), labelled("web"), rev("1"), func(p *corev1.Pod) { p.Spec.NodeName = "n0" }))
		w.Create(pod(fmt.Sprintf("new-%d", i), labelled("web"), rev("2"), spreadBy(zoneKey, 1, "web", "pod-template-hash")))
	}
	settle(t, newScheduler(w))
	if z := zones(w, "new"); len(z) != 3 || z["z0"] != 1 {
		t.Fatalf("new in %v", z)
	}
	c := fixture.Get[*corev1.Pod](w, fixture.Pod, "default", "new-0").Spec.TopologySpreadConstraints[0]
	if e := c.LabelSelector.MatchExpressions; len(e) != 1 || e[0].Key != "pod-template-hash" || e[0].Values[0] != "2" {
		t.Fatalf("selector %+v", c.LabelSelector)
	}
}

// TestWaitingForPeers: what a pod's terms wait for comes later, and the pod
// goes when it is there.
func TestWaitingForPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := threeZones(t)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		s := newScheduler(w)
		go func() { done <- s.Run(ctx) }()
		w.Create(pod("web", labelled("web"), near("db", zoneKey)))
		for i := range 3 {
			w.Create(pod(fmt.Sprintf("one-%d", i), labelled("one"), func(p *corev1.Pod) { p.Spec.NodeName = fmt.Sprintf("n%d", i) }))
		}
		synctest.Wait()
		w.Create(pod("four", labelled("one"), awayFrom("one", zoneKey)))
		synctest.Wait()
		if nodeOf(w, "web") != "" || nodeOf(w, "four") != "" {
			t.Fatal("placed against its terms")
		}
		w.Create(pod("db", labelled("db")))
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if nodeOf(w, "web") == "" {
			t.Error("its database is there, it waits on")
		}
		fixture.Change(w, fixture.Pod, "default", "one-0", registry.Main, func(p *corev1.Pod) { p.Labels = map[string]string{"app": "other"} })
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if zones(w, "four")["z0"] != 1 {
			t.Errorf("a pod in z0 has another label now; the other is in %v", zones(w, "four"))
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}
