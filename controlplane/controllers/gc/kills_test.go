package gc

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

const hold = "test/hold"

// graph is a world of objects that own each other, and what users asked for.
type graph struct {
	*fixture.World
	rt      *rapid.T
	deleted map[types.UID]bool // by a user
	cyclic  bool
	before  map[types.UID]*corev1.ConfigMap
	broken  error
}

func (g *graph) objects() map[types.UID]*corev1.ConfigMap {
	out := map[types.UID]*corev1.ConfigMap{}
	for _, cm := range fixture.List[*corev1.ConfigMap](g.World, configMap, "default") {
		out[cm.UID] = cm
	}
	return out
}

func foreground(cm *corev1.ConfigMap) bool {
	return cm.DeletionTimestamp != nil && slices.Contains(cm.Finalizers, metav1.FinalizerDeleteDependents)
}

// wanted says whether an object has an owner that lives and stays, or none.
func (g *graph) wanted(cm *corev1.ConfigMap) bool {
	for _, o := range cm.OwnerReferences {
		if owner := g.before[o.UID]; owner != nil && owner.Name == o.Name && !foreground(owner) {
			return true
		}
	}
	return len(cm.OwnerReferences) == 0
}

// check holds after every write, given what there was before it.
func (g *graph) check() {
	now := g.objects()
	for uid, was := range g.before {
		is := now[uid]
		if is != nil && (is.DeletionTimestamp == nil) == (was.DeletionTimestamp == nil) {
			continue
		}
		if was.DeletionTimestamp == nil && !g.deleted[uid] && g.wanted(was) {
			g.broken = fmt.Errorf("%s was deleted, whose owners are %v", was.Name, was.OwnerReferences)
		}
		if is != nil || g.cyclic {
			continue
		}
		if slices.Contains(was.Finalizers, hold) {
			g.broken = fmt.Errorf("%s is gone in spite of its finalizers %v", was.Name, was.Finalizers)
		}
		for _, d := range g.before {
			for _, o := range d.OwnerReferences {
				if foreground(was) && o.UID == uid && *o.BlockOwnerDeletion && d.UID != uid {
					g.broken = fmt.Errorf("%s is gone before %s", was.Name, d.Name)
				}
			}
		}
	}
	g.before = now
}

// add makes an object with some of the others, or nobody, as owners.
func (g *graph) add(name string) {
	g.before = g.objects()
	var owners []*corev1.ConfigMap
	for _, o := range g.sorted() {
		if rapid.IntRange(0, 2).Draw(g.rt, "owns") == 0 {
			owners = append(owners, o)
		}
	}
	if rapid.IntRange(0, 5).Draw(g.rt, "absent") == 0 {
		owners = append(owners, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "nobody", UID: types.UID("no-such-uid")}})
	}
	add(g.World, "default", name, func(cm *corev1.ConfigMap) {
		for i := range cm.OwnerReferences {
			block := rapid.Bool().Draw(g.rt, "blocks")
			cm.OwnerReferences[i].BlockOwnerDeletion = &block
		}
		if rapid.IntRange(0, 4).Draw(g.rt, "held") == 0 {
			cm.Finalizers = []string{hold}
		}
	}, owners...)
	g.before = g.objects()
}

func (g *graph) sorted() (out []*corev1.ConfigMap) {
	for _, cm := range g.before {
		out = append(out, cm)
	}
	slices.SortFunc(out, func(a, b *corev1.ConfigMap) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func (g *graph) pick() *corev1.ConfigMap {
	g.before = g.objects()
	if len(g.before) == 0 {
		return nil
	}
	return rapid.SampledFrom(g.sorted()).Draw(g.rt, "which")
}

func (g *graph) release(cm *corev1.ConfigMap) {
	fixture.Change(g.World, configMap, "default", cm.Name, registry.Main, func(cm *corev1.ConfigMap) {
		cm.Finalizers = slices.DeleteFunc(cm.Finalizers, func(f string) bool { return f == hold })
	})
	g.before = g.objects()
}

func (g *graph) step(i int) {
	switch rapid.IntRange(0, 6).Draw(g.rt, "step") {
	case 0, 1, 2:
		env := g.Killed(rapid.IntRange(0, 5).Draw(g.rt, "writes"), g.check)
		g.before = g.objects()
		g.Try(env, New(env))
	case 3:
		g.add(fmt.Sprintf("late%d", i)) // also below what is being deleted
	case 4:
		if cm := g.pick(); cm != nil && slices.Contains(cm.Finalizers, hold) {
			g.release(cm)
		}
	default:
		cm := g.pick()
		if cm == nil || g.deleted[cm.UID] {
			return
		}
		g.deleted[cm.UID] = true
		g.Delete(configMap, "default", cm.Name, rapid.SampledFrom([]metav1.DeletionPropagation{
			metav1.DeletePropagationBackground, metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan}).Draw(g.rt, "policy"))
		g.before = g.objects()
	}
}

// rest checks what the collector leaves alone.
func (g *graph) rest(held bool) {
	g.before = g.objects()
	for _, cm := range g.before {
		if cm.DeletionTimestamp != nil && !held {
			g.rt.Fatalf("%s still waits with %v", cm.Name, cm.Finalizers)
		}
		if g.deleted[cm.UID] && !held {
			g.rt.Fatalf("%s was deleted but lives", cm.Name)
		}
		if cm.DeletionTimestamp == nil && !g.wanted(cm) {
			g.rt.Fatalf("%s lives without an owner: %v", cm.Name, cm.OwnerReferences)
		}
	}
}

// Of any graph of owners, with absent ones and cycles, while users delete with
// any policy and others hold objects back, wherever the collector dies:
// nothing goes that somebody still owns, nothing before what it waits for, and
// what waits says for whom. Once nobody holds anything, nothing waits.
func TestOwnersThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		g := &graph{World: fixture.New(t), rt: rt, deleted: map[types.UID]bool{}}
		n := rapid.IntRange(2, 7).Draw(rt, "objects")
		for i := range n {
			g.add(fmt.Sprintf("o%d", i))
		}
		if g.cyclic = rapid.IntRange(0, 3).Draw(rt, "cycle") == 0; g.cyclic {
			last, block := fixture.Get[*corev1.ConfigMap](g.World, configMap, "default", fmt.Sprintf("o%d", n-1)), true
			fixture.Change(g.World, configMap, "default", "o0", registry.Main, func(cm *corev1.ConfigMap) {
				cm.OwnerReferences = append(cm.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: last.Name, UID: last.UID, BlockOwnerDeletion: &block})
			})
		}
		for i := range rapid.IntRange(2, 25).Draw(rt, "steps") {
			if g.step(i); g.broken != nil {
				rt.Fatal(g.broken)
			}
		}
		g.before = g.objects()
		env := g.Killed(1<<20, g.check)
		g.Try(env, New(env))
		if g.broken != nil {
			rt.Fatal(g.broken)
		}
		g.Settle(New(g.World.Env()))
		g.rest(true)
		g.Advance(stuckAfter + time.Second)
		g.Settle(New(g.World.Env()))
		said := map[string]bool{}
		for _, e := range g.Events.With("DeletionBlocked") {
			said[e.About.Name] = true
		}
		for _, cm := range g.objects() {
			if cm.DeletionTimestamp != nil && !said[cm.Name] {
				rt.Fatalf("%s waits with %v, and nobody says so", cm.Name, cm.Finalizers)
			}
		}
		for _, cm := range g.objects() {
			if slices.Contains(cm.Finalizers, hold) {
				g.release(cm)
			}
		}
		g.Settle(New(g.World.Env()))
		g.rest(false)
	})
}
