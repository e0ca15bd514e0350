package replicaset

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/manifests"
)

func aPod(name string, ready, returned bool, policy manifests.OnReturn) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}}}
	p.Spec.NodeName, p.Status.Phase = "n", corev1.PodRunning
	if ready {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Unix(1000, 0))}}
	}
	if returned {
		p.Annotations[lost.ReturnedAnnotation] = "2027-01-01T00:00:00Z"
	}
	if policy != "" {
		p.Annotations[manifests.AnnotationOnReturn] = string(policy)
	}
	return p
}

// The three returns, of a pod and the one that took its place.
func TestReturns(t *testing.T) {
	for name, c := range map[string]struct {
		policy             manifests.OnReturn
		original, replaced bool // ready
		want               string
	}{
		"default":                     {"", true, true, "[new]"},
		"original":                    {manifests.KeepOriginal, true, true, "[new]"},
		"original, not ready":         {manifests.KeepOriginal, false, true, "[old]"},
		"replacement":                 {manifests.KeepReplacement, true, true, "[old]"},
		"replacement, not ready yet":  {manifests.KeepReplacement, true, false, "[]"},
		"replacement, nothing ready":  {manifests.KeepReplacement, false, false, "[old]"},
		"better: what was away waits": {manifests.KeepBetter, false, true, "[old]"},
		"better: the one that works":  {manifests.KeepBetter, true, false, "[new]"},
	} {
		old, fresh := aPod("old", c.original, true, c.policy), aPod("new", c.replaced, false, c.policy)
		var got []string
		for _, p := range chooseVictims([]*corev1.Pod{fresh, old}, nil, 1) {
			got = append(got, p.Name)
		}
		if fmt.Sprint(got) != c.want {
			t.Errorf("%s: deletes %v, want %s", name, got, c.want)
		}
	}
	// Ready for longer, since nobody could say that the other one was.
	old, fresh := aPod("old", true, true, manifests.KeepBetter), aPod("new", true, false, manifests.KeepBetter)
	old.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Unix(2000, 0))
	if got := chooseVictims([]*corev1.Pod{fresh, old}, nil, 1); got[0] != old {
		t.Errorf("better: deletes %s", got[0].Name)
	}
}

// What was made while another one was away goes when that is back, and not
// one that never was away, though its node is more crowded.
func TestStandInsGo(t *testing.T) {
	at := func(s int) metav1.Time { return metav1.NewTime(time.Unix(int64(s), 0)) }
	back := aPod("back", true, false, "")
	back.Annotations[lost.ReturnedAnnotation] = at(100).UTC().Format(time.RFC3339) + "/" + at(200).UTC().Format(time.RFC3339)
	made := aPod("made", true, false, "")
	made.CreationTimestamp, made.Spec.NodeName = at(101), "empty"
	before, later := aPod("before", true, false, ""), aPod("later", true, false, "")
	before.CreationTimestamp, later.CreationTimestamp = at(50), at(300)
	pods := []*corev1.Pod{back, before, later, made}
	for range 20 {
		rand.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
		if got := chooseVictims(pods, map[string]int{"n": 3, "empty": 1}, 1); len(got) != 1 || got[0] != made {
			t.Fatalf("deletes %s", got[0].Name)
		}
	}
	back.Annotations[manifests.AnnotationOnReturn] = string(manifests.KeepBetter)
	if got := chooseVictims(pods, map[string]int{"n": 3, "empty": 1}, 1); got[0] == made {
		t.Error("where the better one is kept the ranking is upstream's")
	}
}

// Whatever came back: never more than asked for; no pod that serves goes
// while fewer than wanted would serve, if it goes only for its return; once
// all are ready exactly the surplus goes, and the kept ones are those that
// the policy keeps.
func TestReturnsProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		policy := rapid.SampledFrom([]manifests.OnReturn{"", manifests.KeepOriginal, manifests.KeepReplacement, manifests.KeepBetter}).Draw(t, "policy")
		n := rapid.IntRange(1, 8).Draw(t, "pods")
		var pods []*corev1.Pod
		for i := range n {
			pods = append(pods, aPod(fmt.Sprint(i), rapid.Bool().Draw(t, "ready"), rapid.Bool().Draw(t, "returned"), policy))
		}
		surplus := rapid.IntRange(0, n).Draw(t, "surplus")
		got := chooseVictims(pods, nil, surplus)
		if len(got) > surplus {
			t.Fatalf("%d victims for %d", len(got), surplus)
		}
		ready := func(list []*corev1.Pod) (k int) {
			for _, p := range list {
				if len(p.Status.Conditions) > 0 {
					k++
				}
			}
			return k
		}
		returned := func(p *corev1.Pod) bool { return p.Annotations[lost.ReturnedAnnotation] != "" }
		left := slices.DeleteFunc(slices.Clone(pods), func(p *corev1.Pod) bool { return slices.Contains(got, p) })
		if policy == manifests.KeepReplacement {
			if before := ready(pods); ready(left) < min(before, n-surplus) {
				t.Fatalf("%d serve of %d, wanted %d", ready(left), before, n-surplus)
			}
			for _, p := range left {
				if returned(p) && len(got) < surplus && len(p.Status.Conditions) == 0 {
					t.Fatal("a pod that came back and does not serve stays")
				}
			}
		} else if len(got) != surplus {
			t.Fatalf("%d victims, want %d", len(got), surplus)
		}
		if ready(pods) != n {
			return
		}
		if len(got) != surplus {
			t.Fatalf("all serve: %d victims, want %d", len(got), surplus)
		}
		for _, gone := range got {
			for _, kept := range left {
				switch {
				case policy == manifests.KeepReplacement && !returned(gone) && returned(kept):
					t.Fatal("a replacement went, and what came back stays")
				case (policy == "" || policy == manifests.KeepOriginal) && returned(gone) && !returned(kept):
					t.Fatal("an original went, and its replacement stays")
				}
			}
		}
	})
}
