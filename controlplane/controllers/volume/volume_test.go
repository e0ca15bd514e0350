package volume

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

func claimOf(name string, set ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	class := manifests.LocalClass
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &class,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1Gi")}}},
	}
	for _, f := range set {
		f(c)
	}
	return c
}

func volumeOf(name, size string, set ...func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		Capacity: corev1.ResourceList{"storage": resource.MustParse(size)}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain, StorageClassName: "hand",
		PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}}}}
	for _, f := range set {
		f(v)
	}
	return v
}

func classOf(name, provisioner string, mode storagev1.VolumeBindingMode) *storagev1.StorageClass {
	return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: provisioner, VolumeBindingMode: &mode}
}

func world(t testing.TB) *fixture.World {
	w := fixture.New(t)
	w.Create(classOf(manifests.LocalClass, manifests.LocalProvisioner, storagev1.VolumeBindingWaitForFirstConsumer))
	w.Create(classOf("at-once", manifests.LocalProvisioner, storagev1.VolumeBindingImmediate))
	w.Create(classOf("hand", manifests.NoProvisioner, storagev1.VolumeBindingImmediate))
	return w
}

func claimNow(w *fixture.World, name string) *corev1.PersistentVolumeClaim {
	return fixture.Get[*corev1.PersistentVolumeClaim](w, claimGK, "default", name)
}

// choose plays the scheduler.
func choose(w *fixture.World, name, node string) {
	fixture.Change(w, claimGK, "default", name, registry.Main, func(c *corev1.PersistentVolumeClaim) {
		if c.Spec.VolumeName == "" && c.DeletionTimestamp == nil {
			annotate(&c.ObjectMeta, manifests.AnnotationSelectedNode, node)
		}
	})
}

func TestDecideClaim(t *testing.T) {
	protectedClaim := func(set ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
		c := claimOf("c", append([]func(*corev1.PersistentVolumeClaim){func(c *corev1.PersistentVolumeClaim) {
			c.UID, c.Finalizers, c.Status.Phase = "u", []string{manifests.FinalizerClaim}, corev1.ClaimPending
		}}, set...)...)
		return c
	}
	class := func(name string) func(*corev1.PersistentVolumeClaim) {
		return func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = &name }
	}
	named := func(volume string) func(*corev1.PersistentVolumeClaim) {
		return func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = volume }
	}
	complete := func(c *corev1.PersistentVolumeClaim) {
		annotate(&c.ObjectMeta, manifests.AnnotationBindCompleted, "yes")
	}
	local := classOf(manifests.LocalClass, manifests.LocalProvisioner, storagev1.VolumeBindingWaitForFirstConsumer)
	atOnce := classOf("at-once", manifests.LocalProvisioner, storagev1.VolumeBindingImmediate)
	hand := classOf("hand", manifests.NoProvisioner, storagev1.VolumeBindingImmediate)
	a, b := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}}
	made := newVolume(protectedClaim(), local, a)
	theirs := func(v *corev1.PersistentVolume) {
		v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "c", UID: "other"}
	}
	mine := func(v *corev1.PersistentVolume) {
		v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "c"}
	}
	for _, tc := range []struct {
		name string
		f    facts
		want verb
		note string
	}{
		{"unprotected", facts{claim: claimOf("c"), class: local}, protect, ""},
		{"going, in use", facts{claim: protectedClaim(func(c *corev1.PersistentVolumeClaim) { c.DeletionTimestamp = &metav1.Time{} }), used: true}, nothing, ""},
		{"going, free", facts{claim: protectedClaim(func(c *corev1.PersistentVolumeClaim) { c.DeletionTimestamp = &metav1.Time{} })}, unprotect, ""},
		{"no class", facts{claim: protectedClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = nil }), standard: local}, giveClass, ""},
		{"empty class", facts{claim: protectedClaim(class("")), standard: local}, nothing, "FailedBinding"},
		{"waits", facts{claim: protectedClaim(), class: local}, nothing, "WaitForFirstConsumer"},
		{"node chosen", facts{claim: protectedClaim(), class: local, selected: a}, provision, ""},
		{"made there", facts{claim: protectedClaim(), class: local, selected: a, volume: made}, bind, ""},
		{"made elsewhere", facts{claim: protectedClaim(), class: local, selected: b, volume: made}, drop, ""},
		{"node gone", facts{claim: protectedClaim(), class: local, volume: made}, drop, ""},
		{"at once", facts{claim: protectedClaim(class("at-once")), class: atOnce, anyNode: b}, provision, ""},
		{"at once, no node", facts{claim: protectedClaim(class("at-once")), class: atOnce}, nothing, "ProvisioningFailed"},
		{"unknown class", facts{claim: protectedClaim(class("nope"))}, nothing, "ProvisioningFailed"},
		{"by hand", facts{claim: protectedClaim(class("hand")), class: hand, free: []*corev1.PersistentVolume{volumeOf("v", "5Gi")}}, reserve, ""},
		{"by hand, too small", facts{claim: protectedClaim(class("hand")), class: hand, free: []*corev1.PersistentVolume{volumeOf("v", "1Mi")}}, nothing, "FailedBinding"},
		{"named", facts{claim: protectedClaim(class("hand"), named("v")), volume: volumeOf("v", "5Gi")}, reserve, ""},
		{"named, too small", facts{claim: protectedClaim(class("hand"), named("v")), volume: volumeOf("v", "1Mi")}, nothing, "VolumeMismatch"},
		{"named, missing", facts{claim: protectedClaim(class("hand"), named("v"))}, nothing, "FailedBinding"},
		{"named, another's", facts{claim: protectedClaim(class("hand"), named("v")), volume: volumeOf("v", "5Gi", theirs)}, nothing, "FailedBinding"},
		{"reserved by its user", facts{claim: protectedClaim(class("hand")), class: hand, free: []*corev1.PersistentVolume{volumeOf("v", "5Gi", mine)}}, reserve, ""},
		{"lost", facts{claim: protectedClaim(named("v"), complete)}, claimStatus, "ClaimLost"},
		{"bound", facts{claim: protectedClaim(named(made.Name), complete), volume: made}, claimStatus, ""},
		{"larger", facts{claim: protectedClaim(named(made.Name), complete, func(c *corev1.PersistentVolumeClaim) {
			c.Spec.Resources.Requests["storage"] = resource.MustParse("2Gi")
		}), volume: made}, enlarge, ""},
	} {
		if s := decideClaim(&tc.f); s.verb != tc.want || s.reason != tc.note {
			t.Errorf("%s: verb %d %q, want %d %q", tc.name, s.verb, s.reason, tc.want, tc.note)
		}
	}
}

func TestBestVolume(t *testing.T) {
	hand := "hand"
	c := claimOf("c", func(c *corev1.PersistentVolumeClaim) {
		c.Spec.StorageClassName = &hand
		c.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"disk": "ssd"}}
	})
	ssd := func(v *corev1.PersistentVolume) { v.Labels = map[string]string{"disk": "ssd"} }
	on := func(node string) func(*corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) {
			v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
				{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "kubernetes.io/hostname", Operator: "In", Values: []string{node}}}}}}}
		}
	}
	list := []*corev1.PersistentVolume{
		volumeOf("huge", "9Gi", ssd), volumeOf("right", "2Gi", ssd), volumeOf("hdd", "1Gi"), volumeOf("small", "1Mi", ssd), volumeOf("far", "1Gi", ssd, on("b")),
		volumeOf("other", "1Gi", ssd, func(v *corev1.PersistentVolume) { v.Spec.StorageClassName = "x" }),
		volumeOf("many", "1Gi", ssd, func(v *corev1.PersistentVolume) {
			v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
		}),
	}
	a := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{"kubernetes.io/hostname": "a"}}}
	if v := best(c, list, a); v == nil || v.Name != "right" {
		t.Errorf("on a: %v", v)
	}
	if v := best(c, list, nil); v == nil || v.Name != "far" {
		t.Errorf("anywhere: %v", v)
	}
}

// TestOnlyTheNodeLetsGo: a claim in use stays; then the volume is marked, and
// waits for its node, unless that was declared dead.
func TestOnlyTheNodeLetsGo(t *testing.T) {
	for _, dead := range []bool{false, true} {
		w := world(t)
		w.AddNode("a")
		w.Create(claimOf("c"))
		choose(w, "c", "a")
		w.Settle(New(w.Env()))
		c := claimNow(w, "c")
		if c.Status.Phase != corev1.ClaimBound || c.Spec.VolumeName != madeFor(c) {
			t.Fatalf("%+v %+v", c.Spec, c.Status)
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Spec: fixture.Template("p").Spec}
		pod.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}}
		made, _ := w.Create(pod).(*corev1.Pod)
		w.Bind(made, "a")
		w.Delete(claimGK, "default", "c", "")
		w.Settle(New(w.Env()))
		if claimNow(w, "c").DeletionTimestamp == nil {
			t.Fatal("not going")
		}
		zero := int64(0)
		if _, _, err := w.Store.Delete(context.Background(), podGK, "default", "p", registry.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
			t.Fatal(err)
		}
		if dead {
			fixture.Change(w, nodeGK, "", "a", registry.Main, func(n *corev1.Node) { n.Labels[manifests.LabelDead] = "true" })
		}
		w.Settle(New(w.Env()))
		left := fixture.List[*corev1.PersistentVolume](w, volumeGK, "")
		if len(fixture.List[*corev1.PersistentVolumeClaim](w, claimGK, "default")) != 0 || len(left) != map[bool]int{false: 1, true: 0}[dead] {
			t.Fatalf("dead %v: %d volumes", dead, len(left))
		}
		if !dead && (left[0].DeletionTimestamp == nil || !slices.Equal(left[0].Finalizers, []string{manifests.FinalizerData})) {
			t.Fatalf("%+v", left[0].ObjectMeta)
		}
	}
}

// TestRetainedDataStays: a volume that retains its data goes without its node,
// which is not asked to remove anything, and the event says where the data is.
func TestRetainedDataStays(t *testing.T) {
	w := world(t)
	w.AddNode("a")
	w.Create(claimOf("c"))
	choose(w, "c", "a")
	w.Settle(New(w.Env()))
	name := claimNow(w, "c").Spec.VolumeName
	fixture.Change(w, volumeGK, "", name, registry.Main, func(v *corev1.PersistentVolume) {
		v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	})
	w.Delete(claimGK, "default", "c", "")
	w.Settle(New(w.Env()))
	left := fixture.List[*corev1.PersistentVolume](w, volumeGK, "")
	if len(left) != 1 || left[0].Status.Phase != corev1.VolumeReleased || left[0].DeletionTimestamp != nil {
		t.Fatalf("%d volumes, %+v", len(left), left[0])
	}
	w.Delete(volumeGK, "", name, "")
	w.Settle(New(w.Env()))
	if waits := fixture.List[*corev1.PersistentVolume](w, volumeGK, ""); len(waits) != 0 {
		t.Fatalf("it waits for its node, which would remove the data: %+v", waits[0].ObjectMeta)
	}
	if s := decideVolume(&volumeFacts{volume: left[0]}); s.verb != nothing {
		t.Errorf("not deleted: %+v", s)
	}
	now := metav1.Now()
	going := left[0].DeepCopy()
	going.DeletionTimestamp, going.Finalizers = &now, []string{manifests.FinalizerData}
	if s := decideVolume(&volumeFacts{volume: going}); s.verb != releaseData || s.reason != "DataKept" || !strings.Contains(s.note, going.Spec.Local.Path+" on node a") {
		t.Errorf("%+v", s)
	}
}

func TestEphemeralClaims(t *testing.T) {
	w := world(t)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Spec: fixture.Template("p").Spec}
	pod.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
		VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: claimOf("").Spec}}}}}
	made, _ := w.Create(pod).(*corev1.Pod)
	w.Settle(NewEphemeral(w.Env()))
	if c := claimNow(w, "p-scratch"); !metav1.IsControlledBy(c, made) {
		t.Fatalf("owners %v", c.OwnerReferences)
	}
}

// TestBinderFromAnyState: claims come and go, their nodes are chosen anew
// while they have no volume, nodes vanish, and the controller is killed
// between any two writes. A claim's volume is never taken from it, never
// another claim's, and always on the claim's node; at the end every claim that
// can be has one, and nothing that was made in vain is left.
func TestBinderFromAnyState(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := world(t)
		nodes := []string{"a", "b", "c"}
		for _, n := range nodes {
			w.AddNode(n)
		}
		for i := range rapid.IntRange(0, 2).Draw(rt, "by hand") {
			w.Create(volumeOf(fmt.Sprintf("v%d", i), "5Gi"))
		}
		had := map[types.UID]string{}
		check := func() {
			owner := map[string]types.UID{}
			for _, c := range fixture.List[*corev1.PersistentVolumeClaim](w, claimGK, "default") {
				v := c.Spec.VolumeName
				if was := had[c.UID]; was != "" && was != v {
					rt.Fatalf("claim %s had volume %s and has %q", c.Name, was, v)
				}
				if v == "" {
					continue
				}
				had[c.UID] = v
				if other := owner[v]; other != "" {
					rt.Fatalf("volume %s is that of %s and %s", v, other, c.UID)
				}
				owner[v] = c.UID
				obj, err := w.Store.Get(volumeGK, "", v)
				if err != nil {
					rt.Fatalf("claim %s: %v", c.Name, err)
				}
				pv, _ := obj.(*corev1.PersistentVolume)
				node := c.Annotations[manifests.AnnotationSelectedNode]
				if on := manifests.LocalVolumeNode(pv); !manifests.BindsTo(pv, c) || manifests.ClaimClass(c) == manifests.LocalClass && on != node {
					rt.Fatalf("claim %s (node %s) has volume %s (node %s) of %v", c.Name, node, v, on, pv.Spec.ClaimRef)
				}
			}
		}
		names := []string{"x", "y", "z"}
		between := func() { // the scheduler, between what was read and the write
			check()
			name := rapid.SampledFrom(names).Draw(rt, "between")
			if _, err := w.Store.Get(claimGK, "default", name); err == nil && rapid.Bool().Draw(rt, "choose") {
				choose(w, name, rapid.SampledFrom(nodes).Draw(rt, "node"))
			}
			check()
		}
		for range rapid.IntRange(1, 12).Draw(rt, "acts") {
			name := rapid.SampledFrom(names).Draw(rt, "claim")
			_, err := w.Store.Get(claimGK, "default", name)
			switch act := rapid.IntRange(0, 4).Draw(rt, "act"); {
			case act == 0 && err != nil:
				class := rapid.SampledFrom([]string{manifests.LocalClass, manifests.LocalClass, "at-once", "hand"}).Draw(rt, "class")
				w.Create(claimOf(name, func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = &class }))
			case act == 1 && err == nil:
				choose(w, name, rapid.SampledFrom(nodes).Draw(rt, "node"))
			case act == 2 && err == nil:
				w.Delete(claimGK, "default", name, "")
			case act == 3:
				letGo(w)
			}
			env := w.Killed(rapid.IntRange(0, 5).Draw(rt, "writes"), check)
			env.Store = &meddled{env.Store, between}
			w.Try(w.Env(), New(env))
			check()
		}
		for range 3 {
			w.Settle(New(w.Env()))
			letGo(w)
		}
		w.Settle(New(w.Env()))
		check()
		settled(rt, w)
	})
}

// meddled is a store in which somebody writes before each write.
type meddled struct {
	registry.Store
	before func()
}

func (m *meddled) Create(ctx context.Context, obj runtime.Object, o registry.WriteOptions) (runtime.Object, error) {
	m.before()
	return m.Store.Create(ctx, obj, o)
}

func (m *meddled) Update(ctx context.Context, gk schema.GroupKind, ns, name string, sub registry.Subresource, f registry.Mutate, o registry.WriteOptions) (runtime.Object, error) {
	m.before()
	return m.Store.Update(ctx, gk, ns, name, sub, f, o)
}

// letGo plays the nodes: they remove what they are told to.
func letGo(w *fixture.World) {
	for _, v := range fixture.List[*corev1.PersistentVolume](w, volumeGK, "") {
		if v.DeletionTimestamp != nil && slices.Contains(v.Finalizers, manifests.FinalizerData) {
			_, err := w.Store.Update(context.Background(), volumeGK, "", v.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
				now, _ := cur.(*corev1.PersistentVolume)
				now.Finalizers = without(now.Finalizers, manifests.FinalizerData)
				return now, nil
			}, registry.WriteOptions{})
			if err != nil {
				w.T.Fatal(err)
			}
		}
	}
}

func settled(rt *rapid.T, w *fixture.World) {
	claims := map[types.UID]bool{}
	for _, c := range fixture.List[*corev1.PersistentVolumeClaim](w, claimGK, "default") {
		claims[c.UID] = true
		waits := manifests.ClaimClass(c) == manifests.LocalClass && c.Annotations[manifests.AnnotationSelectedNode] == "" || manifests.ClaimClass(c) == "hand"
		if c.DeletionTimestamp != nil || !waits && c.Status.Phase != corev1.ClaimBound {
			rt.Fatalf("claim %s: %+v %+v", c.Name, c.Annotations, c.Status)
		}
	}
	for _, v := range fixture.List[*corev1.PersistentVolume](w, volumeGK, "") {
		if manifests.IsLocalVolume(v) && (v.DeletionTimestamp != nil || !claims[v.Spec.ClaimRef.UID]) {
			rt.Fatalf("volume %s of %v is left: %v", v.Name, v.Spec.ClaimRef, v.Finalizers)
		}
	}
}
