package statefulset

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
)

// member is a pod of the set as the leader found it before a write.
type member struct {
	uid        types.UID
	going, fit bool
}

func (w *world) members() map[int]member {
	out := map[int]member{}
	for _, p := range w.pods() {
		i, err := strconv.Atoi(strings.TrimPrefix(p.Name, "db-"))
		if err != nil {
			w.T.Fatal(err)
		}
		m := member{uid: p.UID, going: p.DeletionTimestamp != nil}
		for _, c := range p.Status.Conditions {
			m.fit = m.fit || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}
		out[i] = m
	}
	return out
}

// wrongStep says which rule the leader's last write has broken: nothing is
// made beyond the size or taken within it; an ordered set makes a pod when all
// below it serve, and takes one when none above it is left.
func wrongStep(before, after map[int]member, size int, ordered bool) error {
	for i, m := range after {
		if before[i].uid == m.uid {
			continue
		}
		if i >= size {
			return fmt.Errorf("db-%d was made in a set of %d", i, size)
		}
		for j := range i {
			if b := before[j]; ordered && (!b.fit || b.going) {
				return fmt.Errorf("db-%d was made before db-%d served", i, j)
			}
		}
	}
	for i, m := range before {
		if a := after[i]; m.going || (a.uid == m.uid && !a.going) {
			continue
		}
		if i < size {
			return fmt.Errorf("db-%d was taken from a set of %d", i, size)
		}
		for j := range before {
			if ordered && j > i {
				return fmt.Errorf("db-%d was taken before db-%d was gone", i, j)
			}
		}
	}
	return nil
}

// Sets grow and shrink, users delete pods, and the leader dies between any two
// writes: no write breaks a rule, and in the end all that shall be is there and
// serves, and nothing else.
func TestScalingThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(t)
		size, ordered := rapid.IntRange(0, 4).Draw(rt, "size"), rapid.Bool().Draw(rt, "ordered")
		w.Create(newSet(int32(size), func(s *appsv1.StatefulSet) {
			if !ordered {
				parallel(s)
			}
		}))
		if rapid.Bool().Draw(rt, "whole at first") {
			w.turns(size, nil)
		}
		var before map[int]member
		var broken error
		check := func() {
			after := w.members()
			if broken == nil {
				broken = wrongStep(before, after, size, ordered)
			}
			before = after
		}
		for range rapid.IntRange(4, 30).Draw(rt, "steps") {
			switch rapid.IntRange(0, 6).Draw(rt, "step") {
			case 0, 1, 2:
				before = w.members()
				env := w.Killed(rapid.SampledFrom([]int{99, 0, 1, 2, 3, 4, 99}).Draw(rt, "writes"), check)
				w.Try(env, New(env))
			case 3:
				w.BindAll("n")
			case 4:
				w.Report(func(*corev1.Pod) bool { return rapid.IntRange(0, 3).Draw(rt, "ready") > 0 })
			case 5:
				size = rapid.IntRange(0, 4).Draw(rt, "new size")
				w.change(replicas(int32(size)))
			case 6:
				if pods := w.pods(); len(pods) > 0 {
					p := pods[rapid.IntRange(0, len(pods)-1).Draw(rt, "a user's")]
					w.Delete(fixture.Pod, "default", p.Name, metav1.DeletePropagationBackground)
				}
			}
			if broken != nil {
				rt.Fatalf("%v: %s", broken, w.shape())
			}
		}
		w.c = New(w.Env())
		w.turns(12, nil)
		if st := w.get().Status; int(st.Replicas) != size || int(st.ReadyReplicas) != size || len(w.pods()) != size {
			rt.Fatalf("size %d: %s, %+v", size, w.shape(), st)
		}
	})
}
