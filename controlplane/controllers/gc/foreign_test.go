package gc

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

const elsewhere = "elsewhere"

// abroad makes an owner in another namespace than its dependent.
func abroad(w *fixture.World) (far, cross *corev1.ConfigMap) {
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: elsewhere}})
	far = add(w, elsewhere, "far", nil)
	return far, add(w, "default", "cross", nil, far)
}

// bare takes everything off an object that a manifest of it would not have, as
// kubectl replace does.
func bare(cm *corev1.ConfigMap) { cm.Annotations, cm.ManagedFields = nil, nil }

// A reference to an owner in another namespace is told once, and counts
// neither while that lives nor when it goes, in whatever way, nor for a
// collector that starts later, nor after writes that know nothing of it.
func TestOwnerInAnotherNamespace(t *testing.T) {
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationBackground, metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan} {
		t.Run(string(policy), func(t *testing.T) {
			w := fixture.New(t)
			far, _ := abroad(w)
			c := New(w.Env())
			w.Settle(c)
			fixture.Change(w, configMap, "default", "cross", registry.Main, func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"a": "1"} })
			w.Settle(c)
			said := w.Events.With("OwnerRefInvalidNamespace")
			if len(said) != 1 || said[0].About.Name != "cross" || !strings.Contains(said[0].Message, string(far.UID)) {
				t.Fatalf("events: %+v", said)
			}
			w.Delete(configMap, elsewhere, "far", policy)
			w.Settle(c)
			expect(t, w, "cross")
			w.Settle(New(w.Env()))
			expect(t, w, "cross")
			fixture.Change(w, configMap, "default", "cross", registry.Main, bare)
			w.Settle(New(w.Env()))
			expect(t, w, "cross")
			if refs := fixture.Get[*corev1.ConfigMap](w, configMap, "default", "cross").OwnerReferences; len(refs) != 1 {
				t.Fatalf("references: %v", refs)
			}
		})
	}
}

// What counts for the object is its other owner alone.
func TestOwnerInAnotherNamespaceBesideOneInItsOwn(t *testing.T) {
	w := fixture.New(t)
	far, _ := abroad(w)
	near := add(w, "default", "near", nil)
	add(w, "default", "both", nil, far, near)
	w.Delete(configMap, elsewhere, "far", metav1.DeletePropagationBackground)
	w.Settle(New(w.Env()))
	expect(t, w, "both", "cross", "near")
	w.Delete(configMap, "default", "near", metav1.DeletePropagationBackground)
	w.Settle(New(w.Env()))
	expect(t, w, "cross")
}

// older makes an object as a version wrote it that noted nothing.
func older(w *fixture.World, name string) {
	w.T.Helper()
	rec, _ := w.Machine.Snapshot().Get(state.Key{Kind: "ConfigMap", Namespace: "default", Name: name})
	codec := registry.NewCodec(nil)
	obj, err := codec.Decode(rec)
	if err != nil {
		w.T.Fatal(err)
	}
	bare(obj.(*corev1.ConfigMap))
	next, err := codec.Encode(manifests.ByGroupKind(configMap), obj)
	if err != nil {
		w.T.Fatal(err)
	}
	res, err := w.Local.Propose(context.Background(), []state.Op{{Type: state.OpUpdate, UID: rec.Header.UID, Record: next}})
	if err != nil || res[0].Reason != state.ReasonNone {
		w.T.Fatal(err, res)
	}
}

// What an older version left without a note gets one as soon as a collector
// sees it, though one died before.
func TestReferencesOfAnOlderVersionAreNoted(t *testing.T) {
	w := fixture.New(t)
	far, _ := abroad(w)
	older(w, "cross")
	noted := func() []string {
		return registry.IgnoredOwners(fixture.Get[*corev1.ConfigMap](w, configMap, "default", "cross"))
	}
	for n := range 2 {
		env := w.Killed(n, nil)
		w.Try(env, New(env))
		if got := noted(); (n == 1) != slices.Equal(got, []string{string(far.UID)}) {
			t.Fatalf("noted after %d writes: %v", n, got)
		}
	}
	w.Delete(configMap, elsewhere, "far", metav1.DeletePropagationBackground)
	w.Settle(New(w.Env()))
	expect(t, w, "cross")
}

// The end of an owner wakes what it owned, and nobody else's.
func TestOwnersEndWakesItsNamespace(t *testing.T) {
	w := fixture.New(t)
	far, _ := abroad(w)
	add(w, elsewhere, "dep", nil, far)
	rec, _ := w.Machine.Snapshot().Get(state.Key{Kind: "ConfigMap", Namespace: elsewhere, Name: "far"})
	w.Delete(configMap, elsewhere, "far", metav1.DeletePropagationBackground)
	var woken []string
	c := &controller{env: w.Env()}
	c.keys(state.Event{Type: state.Deleted, Record: rec, Prev: rec}, func(k state.Key) { woken = append(woken, k.Namespace+"/"+k.Name) })
	if !slices.Equal(woken, []string{"elsewhere/dep"}) {
		t.Fatalf("woken: %v", woken)
	}
}

// An annotation of the user's own stays when the note is written, and the
// note goes with the reference.
func TestNoteGoesWithTheReference(t *testing.T) {
	w := fixture.New(t)
	abroad(w)
	fixture.Change(w, configMap, "default", "cross", registry.Main, func(cm *corev1.ConfigMap) { cm.Annotations["mine"] = "x" })
	fixture.Change(w, configMap, "default", "cross", registry.Main, func(cm *corev1.ConfigMap) { cm.OwnerReferences = nil })
	got := fixture.Get[*corev1.ConfigMap](w, configMap, "default", "cross").Annotations
	if _, ok := got[manifests.AnnotationIgnoredOwners]; ok || got["mine"] != "x" {
		t.Fatalf("annotations: %v", got)
	}
}

// Owners and dependents in two namespaces, made, replaced and deleted with any
// policy, while collectors die between any two writes: what has an owner in
// its own namespace goes with that, and nothing goes for one in the other.
func TestForeignOwnersThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: elsewhere}})
		owners := map[string]*corev1.ConfigMap{} // that nobody deleted, by namespace/name
		near := map[string]string{}              // dependents: their owner beside them, "" for none
		all := func() map[string]*corev1.ConfigMap {
			out := map[string]*corev1.ConfigMap{}
			for _, cm := range fixture.List[*corev1.ConfigMap](w, configMap, "") {
				out[cm.Namespace+"/"+cm.Name] = cm
			}
			return out
		}
		check := func() {
			live := all()
			for name, owner := range near {
				if cm := live[name]; (owner == "" || owners[owner] != nil) && (cm == nil || cm.DeletionTimestamp != nil) {
					rt.Fatalf("%s went, whose owner beside it is %q", name, owner)
				}
			}
		}
		sorted := func(m map[string]*corev1.ConfigMap) (out []string) {
			for k := range m {
				out = append(out, k)
			}
			slices.Sort(out)
			return out
		}
		for i := range rapid.IntRange(4, 25).Draw(rt, "steps") {
			ns := rapid.SampledFrom([]string{"default", elsewhere}).Draw(rt, "namespace")
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 0:
				name := fmt.Sprintf("owner%d", i)
				owners[ns+"/"+name] = add(w, ns, name, nil)
			case 1, 2:
				var refs []*corev1.ConfigMap
				beside, far := "", false
				for _, k := range sorted(owners) {
					o := owners[k]
					if rapid.Bool().Draw(rt, "owns") && (o.Namespace != ns || beside == "") {
						if refs = append(refs, o); o.Namespace == ns {
							beside = k
						} else {
							far = true
						}
					}
				}
				if beside != "" || far {
					name := fmt.Sprintf("dep%d", i)
					add(w, ns, name, nil, refs...)
					near[ns+"/"+name] = beside
				}
			case 3:
				if len(owners) > 0 {
					k := rapid.SampledFrom(sorted(owners)).Draw(rt, "deleted")
					o := owners[k]
					delete(owners, k)
					w.Delete(configMap, o.Namespace, o.Name, rapid.SampledFrom([]metav1.DeletionPropagation{
						metav1.DeletePropagationBackground, metav1.DeletePropagationForeground}).Draw(rt, "policy"))
				}
			case 4:
				if live := all(); len(live) > 0 {
					cm := live[rapid.SampledFrom(sorted(live)).Draw(rt, "replaced")]
					fixture.Change(w, configMap, cm.Namespace, cm.Name, registry.Main, bare)
				}
			default:
				env := w.Killed(rapid.IntRange(0, 3).Draw(rt, "writes"), check)
				w.Try(env, New(env))
			}
			check()
		}
		w.Settle(New(w.Env()))
		check()
		live := all()
		for name, owner := range near {
			if owner != "" && owners[owner] == nil && live[name] != nil {
				rt.Fatalf("%s lives without %s", name, owner)
			}
		}
		for name, cm := range live {
			if cm.DeletionTimestamp != nil {
				rt.Fatalf("%s still waits with %v", name, cm.Finalizers)
			}
		}
	})
}
