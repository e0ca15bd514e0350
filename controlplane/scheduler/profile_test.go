package scheduler

import (
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
)

func TestProfilesAreReadStrictly(t *testing.T) {
	for text, want := range map[string]string{
		"":                                   "profiles: at least one is needed",
		"profiles: x":                        "scheduler profiles: profiles: a list is wanted, not string",
		"- x":                                "scheduler profiles: the file: a map is wanted, not array",
		"profiles:\n- schedulerName: [1]":    "scheduler profiles: profiles.schedulerName: text is wanted, not array",
		"profiles: []":                       "at least one is needed",
		"profile:\n- schedulerName: a":       `unknown field "profile"`,
		"profiles:\n- name: a":               `unknown field "name"`,
		"profiles:\n- scoringStrategy: Most": "profiles[0].schedulerName: is needed",
		"profiles:\n- schedulerName: a\n  scoringStrategy: Most":                                                                                   "profiles[0].scoringStrategy: \"Most\" is neither",
		"profiles:\n- schedulerName: a\n  weights: {NodeAfinity: 1}":                                                                               "profiles[0].weights.NodeAfinity: there is no such score; known are ImageLocality, InterPodAffinity, NodeAffinity",
		"profiles:\n- schedulerName: a\n  weights: {NodeAffinity: -1}":                                                                             "weights.NodeAffinity: -1 is not between 0 and 100",
		"profiles:\n- schedulerName: a\n  weights: {NodeAffinity: 1, NodeAffinity: 2}":                                                             "already set in map",
		"profiles:\n- schedulerName: a\n- schedulerName: a":                                                                                        `"a" is there twice`,
		"profiles:\n- schedulerName: a\n  defaultConstraints: [{maxSkew: 1, topologyKey: k, whenUnsatisfiable: Never}]":                            "defaultConstraints[0].whenUnsatisfiable",
		"profiles:\n- schedulerName: a\n  defaultConstraints: [{maxSkew: 1, topologyKey: k, whenUnsatisfiable: DoNotSchedule, labelSelector: {}}]": "has no labelSelector",
		"profiles:\n- schedulerName: a\n  defaultConstraints: [{topologyKey: k, whenUnsatisfiable: DoNotSchedule}]":                                "maxSkew: must be 1 or more",
	} {
		if _, err := ParseProfiles([]byte(text)); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "Go ") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	list, err := ParseProfiles([]byte("profiles:\n- schedulerName: even\n  scoringStrategy: LeastAllocated\n  weights: {InterPodAffinity: 0}"))
	if err != nil || len(list) != 2 || list[0].weights.InterPod != 0 || list[0].weights.NodeAffinity != 2 || list[1].SchedulerName != corev1.DefaultSchedulerName {
		t.Fatalf("%+v, %v", list, err)
	}
}

// Each pod is placed as the profile of its name says; one that nobody here
// answers to waits for its own scheduler, untouched.
func TestProfilesPlaceByName(t *testing.T) {
	profiles, err := ParseProfiles([]byte(`
profiles:
- schedulerName: even
  scoringStrategy: LeastAllocated
- schedulerName: zones
  weights: {NodeResourcesFit: 0}
  defaultConstraints:
  - {maxSkew: 1, topologyKey: topology.kubernetes.io/zone, whenUnsatisfiable: DoNotSchedule}
`))
	if err != nil {
		t.Fatal(err)
	}
	w := threeZones(t)
	set, ok := w.Create(&appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: appsv1.ReplicaSetSpec{Selector: appIs("web"), Template: fixture.Template("web")}}).(*appsv1.ReplicaSet)
	if !ok {
		t.Fatal("no set")
	}
	owner := metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"))
	by := func(name string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.SchedulerName = name } }
	for i := range 6 {
		w.Create(pod(fmt.Sprintf("packed-%d", i)))
		w.Create(pod(fmt.Sprintf("even-%d", i), by("even")))
		w.Create(pod(fmt.Sprintf("zoned-%d", i), by("zones"), labelled("web"), func(p *corev1.Pod) { p.OwnerReferences = []metav1.OwnerReference{*owner} }))
	}
	w.Create(pod("foreign", by("somebody-else")))
	env := w.Env()
	s := New(Config{Store: w.Store, Term: env.Term, Clock: w, Events: w.Events, Profiles: profiles})
	settle(t, s)
	nodes := func(prefix string) map[string]int {
		out := map[string]int{}
		for i := range 6 {
			out[nodeOf(w, fmt.Sprintf("%s-%d", prefix, i))]++
		}
		return out
	}
	if n := nodes("packed"); len(n) != 1 {
		t.Errorf("packed on %v", n)
	}
	if n := nodes("even"); len(n) < 5 || n[""] != 0 {
		t.Errorf("even on %v", n)
	}
	if z := zones(w, "zoned"); z["z0"] != 2 || z["z1"] != 2 || z["z2"] != 2 {
		t.Errorf("zoned in %v", z)
	}
	if p := get(w, "foreign"); p.Spec.NodeName != "" || len(p.Status.Conditions) != 0 {
		t.Errorf("foreign: %+v", p.Status)
	}
}
