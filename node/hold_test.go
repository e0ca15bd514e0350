package node

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

// The cluster of these tests was restored to version 100: what is above that,
// up to sinceThen, was given up.
const (
	restored  = 100
	sinceThen = restored + 1<<32
)

var lostOnce = []wire.Lost{{Epoch: 2, After: restored, Before: sinceThen}}

// objectAt is an object of the assignment as it was at a version.
func objectAt(kind string, o metav1.Object, revision uint64) wire.Object {
	data, err := direct.Marshal(o)
	if err != nil {
		panic(err)
	}
	return wire.Object{Ref: wire.Ref{Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName()}, UID: string(o.GetUID()), ResourceVersion: revision, Revision: revision, Data: data}
}

func ownedBy(kind, name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		yes := true
		p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: name, Controller: &yes}}
		if _, hash, ok := strings.Cut(name, "-"); ok && kind == "ReplicaSet" {
			p.Labels = map[string]string{"pod-template-hash": hash}
		}
	}
}

func config(name, text string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uidOf("uid-" + name)}, Data: map[string]string{"text": text}}
}

func assigned(epoch uint64, list ...wire.Object) store.Assignment {
	a := store.Assignment{Epoch: epoch, Known: true, Objects: map[string]wire.Object{}}
	for _, o := range list {
		a.Objects[o.UID] = o
	}
	return a
}

func allRun() func(string) bool { return func(string) bool { return true } }

// after is the assignment after another one.
func after(old store.Assignment, epoch uint64, list ...wire.Object) store.Assignment {
	a := assigned(epoch, list...)
	hold(old, &a, lostOnce, allRun, "n1")
	return a
}

// what is held, as name=kind.
func heldOf(a store.Assignment) string {
	var out []string
	for uid, h := range a.Held {
		out = append(out, fmt.Sprintf("%s=%d", a.Objects[uid].Ref.Name, h.Kind))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// What is held and what is followed.
func TestHold(t *testing.T) {
	pod := func(name string, revision uint64, edit ...func(*corev1.Pod)) wire.Object {
		return objectAt("Pod", wasmPod(name, edit...), revision)
	}
	v1, v2 := ownedBy("ReplicaSet", "web-1"), ownedBy("ReplicaSet", "web-2")
	db := func(uid string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { ownedBy("StatefulSet", "db")(p); p.UID = uidOf(uid) }
	}
	old, newer := objectAt("ConfigMap", config("c", "old"), 50), objectAt("ConfigMap", config("c", "new"), 120)
	image := func(p *corev1.Pod) { p.Spec.Containers[0].Image = "newer.wasm" }
	dead := func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }
	for _, tc := range []struct {
		name         string
		has, offered []wire.Object
		held, listed string
	}{
		{"nothing newer", []wire.Object{pod("p", 90), old}, []wire.Object{pod("p", 90), old}, "", "c p"},
		{"deleted before the restored state", []wire.Object{pod("p", 90)}, nil, "", ""},
		{"a pod of the time that was given up", []wire.Object{pod("q", 120)}, nil, "q=1", "q"},
		{"the last version of the restored state", []wire.Object{pod("q", restored)}, nil, "", ""},
		{"the first after it", []wire.Object{pod("q", restored+1)}, nil, "q=1", "q"},
		{"written after the restore", []wire.Object{pod("q", sinceThen+1)}, nil, "", ""},
		{"on its way out", []wire.Object{pod("q", 120, dead)}, nil, "", ""},
		{"from a server that tells no revisions", []wire.Object{{Ref: wire.Ref{Kind: "Pod", Name: "q"}, UID: "q", ResourceVersion: 120}}, nil, "", ""},
		{"a Deployment rolled since", []wire.Object{pod("q", 120, v2)}, []wire.Object{pod("p", 90, v1)}, "p=4 q=1", "p q"},
		{"in the middle of its rolling", []wire.Object{pod("q", 120, v2), pod("p", 90, v1)}, []wire.Object{pod("p", 90, v1)}, "q=1", "p q"},
		{"another one's pod", []wire.Object{pod("q", 120, v2)}, []wire.Object{pod("p", 90, ownedBy("ReplicaSet", "other-1"))}, "q=1", "p q"},
		{"a StatefulSet's pod of the same name", []wire.Object{pod("db-0", 120, db("new"))}, []wire.Object{pod("db-0", 90, db("old"))}, "db-0=1 db-0=4", "db-0 db-0"},
		{"a bare pod", []wire.Object{pod("bare", 120)}, nil, "bare=1", "bare"},
		{"config changed since", []wire.Object{pod("p", 90), newer}, []wire.Object{pod("p", 90), old}, "c=2", "c p"},
		{"config changed before", []wire.Object{pod("p", 90), objectAt("ConfigMap", config("c", "x"), 40)}, []wire.Object{pod("p", 90), old}, "", "c p"},
		{"config written after the restore", []wire.Object{pod("p", 90), newer}, []wire.Object{pod("p", 90), objectAt("ConfigMap", config("c", "x"), sinceThen+5)}, "", "c p"},
		{"what a held pod needs", []wire.Object{pod("q", 120), old}, nil, "c=3 q=1", "c q"},
		{"what nobody needs", []wire.Object{pod("p", 90), newer}, []wire.Object{pod("p", 90)}, "", "p"},
		{"a pod's image changed since", []wire.Object{pod("p", 120, image)}, []wire.Object{pod("p", 90)}, "p=2", "p"},
		{"and it is deleted since the restore", []wire.Object{pod("p", 120, image)}, []wire.Object{pod("p", sinceThen+9, dead)}, "", "p"},
		{"a token", []wire.Object{{Ref: wire.Ref{Kind: "Secret", Namespace: "default", Name: "token.x"}, UID: "token.x", ResourceVersion: 1_700_000_000}},
			[]wire.Object{{Ref: wire.Ref{Kind: "Secret", Namespace: "default", Name: "token.x"}, UID: "token.x", ResourceVersion: 1_700_000_900}}, "", "token.x"},
	} {
		a := after(assigned(1, tc.has...), 2, tc.offered...)
		var listed []string
		for _, o := range a.Objects {
			listed = append(listed, o.Ref.Name)
		}
		slices.Sort(listed)
		if got := heldOf(a); got != tc.held || strings.Join(listed, " ") != tc.listed {
			t.Errorf("%s: held %q of %v, want %q of %q", tc.name, got, listed, tc.held, tc.listed)
		}
	}
}

// From the first assignment of an epoch on, until the operator accepts.
func TestHoldGoesOn(t *testing.T) {
	v1, v2 := ownedBy("ReplicaSet", "web-1"), ownedBy("ReplicaSet", "web-2")
	pod := func(name string, revision uint64, edit ...func(*corev1.Pod)) wire.Object {
		return objectAt("Pod", wasmPod(name, edit...), revision)
	}
	cm := func(text string, revision uint64) wire.Object {
		return objectAt("ConfigMap", config("c", text), revision)
	}
	first := after(assigned(1, pod("q", 120, v2), cm("new", 130)), 2, pod("p", 90, v1), cm("old", 50))
	if got := heldOf(first); got != "c=2 p=4 q=1" {
		t.Fatalf("first: %s", got)
	}
	// Again, with a new revision of what is as it was, and a pod made since.
	again := after(first, 2, pod("p", 90, v1), cm("old", 50), pod("r", sinceThen+7, v2))
	if got := heldOf(again); got != "c=2 p=4 q=1" || string(again.Objects["uid-c"].Data) != string(first.Objects["uid-c"].Data) {
		t.Errorf("again: %s", got)
	}
	// The config is written, and the listed pod deleted.
	written := after(again, 2, cm("third", sinceThen+8), pod("r", sinceThen+7, v2))
	if got := heldOf(written); got != "q=1" || written.Objects["uid-c"].ResourceVersion != sinceThen+8 {
		t.Errorf("written: %s", got)
	}
	// A second restore, in between which nothing was written here.
	if got := heldOf(after(again, 3, pod("p", 90, v1), cm("old", 50))); got != "c=2 p=4 q=1" {
		t.Errorf("restored again: %s", got)
	}
	node := func(epoch string) wire.Object {
		return objectAt("Node", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "n1", Annotations: map[string]string{manifests.AnnotationAcceptRestore: epoch}}}, sinceThen+9)
	}
	if got := heldOf(after(again, 2, pod("p", 90, v1), cm("old", 50), node("1"))); got != "c=2 p=4 q=1" {
		t.Errorf("another restore accepted: %s", got)
	}
	accepted := after(again, 2, pod("p", 90, v1), cm("old", 50), node("2"))
	if len(accepted.Held) > 0 || accepted.Objects["uid-c"].ResourceVersion != 50 || accepted.Objects["uid-q"].UID != "" {
		t.Errorf("accepted: %s", heldOf(accepted))
	}
}

// A node that was away for several recoveries knows of each.
func TestHoldOverSeveralRestores(t *testing.T) {
	lost := []wire.Lost{{Epoch: 2, After: 100, Before: sinceThen}, {Epoch: 3, After: sinceThen + 50, Before: sinceThen + 50 + 1<<32}}
	q := objectAt("Pod", wasmPod("q"), 120)
	for epoch, want := range map[uint64]string{1: "q=1", 2: ""} {
		next := assigned(3)
		hold(assigned(epoch, q), &next, lost, allRun, "n1")
		if got := heldOf(next); got != want {
			t.Errorf("from epoch %d: %q", epoch, got)
		}
	}
	next := assigned(2)
	hold(assigned(1, q), &next, lostOnce, func() func(string) bool { return func(string) bool { return false } }, "n1")
	if got := heldOf(next); got != "" {
		t.Errorf("a pod that has ended: %q", got)
	}
}

// A second restore is to a state that was saved in the line which the first one
// gave up: what it lists is not what this node's cluster went on from.
func TestHoldAfterARestoreAside(t *testing.T) {
	v1, v2 := ownedBy("ReplicaSet", "web-1"), ownedBy("ReplicaSet", "web-2")
	token := wire.Object{Ref: wire.Ref{Kind: "Secret", Namespace: "default", Name: "token.x"}, UID: "token.x", ResourceVersion: 1_700_000_000}
	fresh := token
	fresh.ResourceVersion++
	// Restored to 100; then to 150 of before that, by way of two epochs.
	lost := []wire.Lost{{Epoch: 3, After: 150, Before: 150 + 2<<32}}
	next := assigned(3, objectAt("Pod", wasmPod("p2", v2), 130), objectAt("ConfigMap", config("c", "second"), 140), objectAt("ConfigMap", config("same", "x"), 20), fresh)
	old := assigned(2, objectAt("Pod", wasmPod("p1", v1), 90), objectAt("ConfigMap", config("c", "first"), 80), objectAt("ConfigMap", config("same", "x"), 20), token)
	hold(old, &next, lost, allRun, "n1")
	if got := heldOf(next); got != "c=2 p1=1 p2=4" {
		t.Errorf("held: %s", got)
	}
	// One to which the second state goes back knows what it had.
	next = assigned(3, objectAt("Pod", wasmPod("p2", v2), 130))
	hold(old, &next, append([]wire.Lost{{Epoch: 2, After: 100, Before: 120}}, lost...), allRun, "n1")
	if got := heldOf(next); got != "" {
		t.Errorf("followed before: %s", got)
	}
}

// Whatever there was and is: without a new epoch nothing begins to be held,
// what is offered is there unless something held has its place, and after an
// acceptance the node has exactly what is offered.
func TestHoldProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(what string, most uint64) (list []wire.Object) {
			for i := range 6 {
				if !rapid.Bool().Draw(t, what) {
					continue
				}
				rev := rapid.Uint64Range(1, most).Draw(t, "revision")
				if i < 4 {
					owner := ownedBy("ReplicaSet", fmt.Sprintf("web%d-%d", i%2, rapid.IntRange(1, 2).Draw(t, "set")))
					list = append(list, objectAt("Pod", wasmPod(fmt.Sprint("p", i), owner), rev))
				} else {
					list = append(list, objectAt("ConfigMap", config(fmt.Sprint("c", i), fmt.Sprint(rev)), rev))
				}
			}
			return list
		}
		old := assigned(1, draw("has", 200)...)
		offered := draw("offered", restored)
		same := assigned(1, offered...)
		hold(old, &same, lostOnce, allRun, "n1")
		if len(same.Held) > 0 {
			t.Fatalf("held without a restore: %s", heldOf(same))
		}
		next := after(old, 2, offered...)
		for uid, o := range old.Objects {
			_, listed := assigned(2, offered...).Objects[uid]
			if o.Ref.Kind == "Pod" && o.Revision > restored && !listed && next.Held[uid].Kind != store.HoldPod {
				t.Fatalf("%s is not held", o.Ref.Name)
			}
			if o.Revision <= restored && next.Held[uid].Kind != 0 && next.Held[uid].Kind != store.HoldRef {
				t.Fatalf("%s was known when the state was saved, and is held", o.Ref.Name)
			}
		}
		for _, o := range offered {
			if got, ok := next.Objects[o.UID]; !ok || got.ResourceVersion != o.ResourceVersion && next.Held[o.UID].Kind != store.HoldOld {
				t.Fatalf("%s is lost", o.Ref.Name)
			}
		}
		node := objectAt("Node", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "n1", Annotations: map[string]string{manifests.AnnotationAcceptRestore: "2"}}}, sinceThen+1)
		end := after(next, 2, append(offered, node)...)
		if len(end.Held) > 0 || !maps.EqualFunc(end.Objects, assigned(2, append(offered, node)...).Objects, func(a, b wire.Object) bool { return a.ResourceVersion == b.ResourceVersion }) {
			t.Fatalf("accepted: %s", heldOf(end))
		}
	})
}

// restore makes the control plane one that was restored to version 100, and
// that lists these objects alone.
func (l *stubLink) restore(list ...wire.Object) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, o := range l.asg.Objects {
		l.unknown[o.UID] = !slices.ContainsFunc(list, func(x wire.Object) bool { return x.UID == o.UID })
	}
	l.asg.Epoch, l.asg.Lost, l.asg.Objects = 2, lostOnce, list
	l.asg.Generation, l.rv = l.asg.Generation+1, sinceThen
}

// A node that has seen newer generations holds them over a restore, an
// agent's restart and a boot without a server, and follows when it is told to.
func TestRestoreIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		v1, v2 := wasmPod("p", ownedBy("ReplicaSet", "web-1")), wasmPod("q", ownedBy("ReplicaSet", "web-2"))
		early := objectAt("ConfigMap", config("c", "old"), 50)
		b.link.rv = 110
		b.link.put("Pod", wasmPod("bare"))
		b.link.put("Pod", v2)
		b.link.put("ConfigMap", config("c", "new"))
		for i := range b.link.asg.Objects {
			b.link.asg.Objects[i].Revision = b.link.asg.Objects[i].ResourceVersion
		}
		b.start()
		b.after(5 * time.Second)
		runs := []string{"uid-bare/main/0", "uid-q/main/0"}
		check := func(when string) {
			t.Helper()
			if got := b.rt.running(); !slices.Equal(got, runs) {
				t.Fatalf("%s: runs %v, want %v", when, got, runs)
			}
			if cm, _ := b.agent.ConfigMap("default", "c"); cm.Data["text"] != "new" {
				t.Fatalf("%s: config %v", when, cm.Data)
			}
		}
		check("before")
		b.link.setCut(true)
		b.link.restore(objectAt("Pod", v1, 90), early)
		b.after(time.Minute)
		b.link.setCut(false)
		b.after(15 * time.Second)
		check("restored")
		select {
		case <-b.agent.HeldNews():
		default:
			t.Error("nobody is told of held pods")
		}
		names := []string{}
		for _, h := range b.agent.HeldPods() {
			if names = append(names, h.Pod.Name); h.Pod.Status.Phase != corev1.PodRunning {
				t.Errorf("%s is %s", h.Pod.Name, h.Pod.Status.Phase)
			}
		}
		slices.Sort(names)
		if !slices.Equal(names, []string{"bare", "q"}) {
			t.Errorf("unknown to the cluster: %v", names)
		}
		st := b.want("uid-p", "Pending")
		if w := st.ContainerStatuses[0].State.Waiting; w == nil || w.Reason != manifests.ReasonHeldAfterRestore || !strings.Contains(w.Message, "dunlin node accept-restore n1") {
			t.Errorf("the pod that is held back says %+v", st.ContainerStatuses)
		}
		told := func(want corev1.ConditionStatus) string {
			t.Helper()
			for _, c := range b.link.node.Status.Conditions {
				if c.Type == manifests.ConditionHeldAfterRestore {
					if c.Status != want {
						t.Errorf("condition is %s: %s", c.Status, c.Message)
					}
					return c.Message
				}
			}
			t.Error("no condition")
			return ""
		}
		if m := told(corev1.ConditionTrue); !strings.Contains(m, "3 held as they are (Pod default/bare, Pod default/q, ConfigMap default/c)") || !strings.Contains(m, "does not know 2 of these pods: Services lead to them on this node alone. Apply again") {
			t.Errorf("condition: %s", m)
		}
		if !slices.ContainsFunc(b.link.events, func(e wire.EventReport) bool {
			return e.Object.Kind == "Node" && e.Reason == manifests.ReasonHeldAfterRestore && e.Type == corev1.EventTypeWarning
		}) {
			t.Error("no event")
		}
		for _, p := range b.agent.Pods() {
			if held := p.Status.Reason == manifests.ReasonHeldAfterRestore; held != (p.Name != "p") {
				t.Errorf("the node's own view of %s: %q", p.Name, p.Status.Reason)
			}
		}
		b.stop()
		b.start() // connected: everything is reported anew
		b.after(time.Minute)
		check("agent restarted")
		b.link.setCut(true)
		b.stop()
		b.start()
		b.after(time.Minute)
		check("started without a server")
		b.link.setCut(false)
		b.after(time.Minute)
		check("and back")
		told(corev1.ConditionTrue)
		// Written after the restore: followed.
		b.link.put("Pod", wasmPod("r", ownedBy("ReplicaSet", "web-2")))
		b.after(10 * time.Second)
		runs = append(runs, "uid-r/main/0")
		check("a pod made since")
		b.link.put("Node", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "n1", Annotations: map[string]string{manifests.AnnotationAcceptRestore: "2"}}})
		b.after(time.Minute)
		if got := b.rt.running(); !slices.Equal(got, []string{"uid-p/main/0", "uid-r/main/0"}) {
			t.Errorf("accepted: runs %v", got)
		}
		if cm, _ := b.agent.ConfigMap("default", "c"); cm.Data["text"] != "old" {
			t.Errorf("accepted: config %v", cm.Data)
		}
		b.want("uid-p", "Running+Ready")
		told(corev1.ConditionFalse)
		b.stop()
	})
}

// An agent that hears that its pods are unknown before it has the assignment
// of the new epoch does not stop them; of two pods of one name the second one
// starts only once the first has ended; a pod that is held back can be deleted.
func TestRestoreIsHeldFromTheFirstWord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		db := func(uid string) func(*corev1.Pod) {
			return func(p *corev1.Pod) { ownedBy("StatefulSet", "db")(p); p.UID = uidOf(uid) }
		}
		b.link.rv = 110
		b.link.put("Pod", wasmPod("db-0", db("new")))
		b.link.asg.Objects[0].Revision = 111
		b.start()
		b.after(5 * time.Second)
		b.agent.acknowledged(nil, []string{"new"}, 2)
		b.after(5 * time.Second)
		if got := b.rt.running(); !slices.Equal(got, []string{"new/main/0"}) {
			t.Fatalf("a word of an epoch that is not known here yet: %v", got)
		}
		b.link.restore(objectAt("Pod", wasmPod("db-0", db("old")), 90), objectAt("Pod", wasmPod("db-1", db("other")), 91))
		b.link.hint()
		b.after(15 * time.Second)
		b.link.put("Pod", deleted(wasmPod("db-1", db("other")), 30))
		b.after(15 * time.Second)
		if got := b.rt.running(); !slices.Equal(got, []string{"new/main/0"}) || !b.link.gone["other"] {
			t.Fatalf("held: %v; gone %v", got, b.link.gone)
		}
		b.rt.mu.Lock()
		overlap := false
		b.rt.onStop = func(workload.ID) time.Duration { return 10 * time.Second }
		b.rt.mu.Unlock()
		b.link.put("Node", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "n1", Annotations: map[string]string{manifests.AnnotationAcceptRestore: "2"}}})
		for range 60 {
			b.after(time.Second)
			overlap = overlap || len(b.rt.running()) > 1
		}
		if got := b.rt.running(); !slices.Equal(got, []string{"old/main/0"}) || overlap {
			t.Errorf("accepted: %v, two at once: %v", got, overlap)
		}
		b.stop()
	})
}
