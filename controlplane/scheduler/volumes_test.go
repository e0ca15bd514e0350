package scheduler

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/volume"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// storageWorld has the built-in class, and one whose volumes people make.
func storageWorld(t *testing.T, nodes ...string) *fixture.World {
	w := fixture.New(t)
	wait := storagev1.VolumeBindingWaitForFirstConsumer
	for name, provisioner := range map[string]string{manifests.LocalClass: manifests.LocalProvisioner, "hand": manifests.NoProvisioner} {
		w.Create(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: provisioner, VolumeBindingMode: &wait})
	}
	for _, n := range nodes {
		w.AddNode(n, func(n *corev1.Node) { n.Status.Allocatable["ephemeral-storage"] = resource.MustParse("10Gi") })
	}
	return w
}

func claim(w *fixture.World, name, class, size string, modes ...corev1.PersistentVolumeAccessMode) {
	if len(modes) == 0 {
		modes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	}
	w.Create(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: modes, StorageClassName: &class, Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse(size)}}}})
}

func consumer(w *fixture.World, name, claimName string, set ...func(*corev1.Pod)) {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: fixture.Template(name).Spec}
	p.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claimName}}}}
	for _, f := range set {
		f(p)
	}
	w.Create(p)
}

func onNode(node string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"kubernetes.io/hostname": node} }
}

// turn runs the scheduler and the controller of volumes until both rest.
func turn(t *testing.T, w *fixture.World, env loop.Env) {
	t.Helper()
	for range 3 {
		if err := New(Config{Store: env.Store, Term: env.Term, Clock: w, Events: w.Events}).Settle(context.Background()); err != nil {
			t.Fatal(err)
		}
		w.Settle(volume.New(w.Env()))
	}
}

func placeOf(w *fixture.World, pod string) string {
	return fixture.Get[*corev1.Pod](w, podGK, "default", pod).Spec.NodeName
}

func why(w *fixture.World, pod string) string {
	for _, c := range fixture.Get[*corev1.Pod](w, podGK, "default", pod).Status.Conditions {
		if c.Type == corev1.PodScheduled {
			return c.Message
		}
	}
	return ""
}

// TestClaimsFollowTheirFirstPod: the claim's volume is where its first pod is
// placed, and all later pods go there; nobody else's room counts.
func TestClaimsFollowTheirFirstPod(t *testing.T) {
	w := storageWorld(t, "a", "b")
	claim(w, "data", manifests.LocalClass, "1Gi")
	consumer(w, "one", "data", onNode("b"))
	turn(t, w, w.Env())
	c := fixture.Get[*corev1.PersistentVolumeClaim](w, claimGK, "default", "data")
	if placeOf(w, "one") != "b" || c.Annotations[manifests.AnnotationSelectedNode] != "b" || c.Status.Phase != corev1.ClaimBound {
		t.Fatalf("pod on %q, claim %v %v", placeOf(w, "one"), c.Annotations, c.Status.Phase)
	}
	consumer(w, "two", "data")
	consumer(w, "three", "data", onNode("a"))
	turn(t, w, w.Env())
	if placeOf(w, "two") != "b" || placeOf(w, "three") != "" {
		t.Fatalf("two on %q, three on %q", placeOf(w, "two"), placeOf(w, "three"))
	}
	if m := why(w, "three"); !strings.Contains(m, "1 node(s) didn't match PersistentVolume's node affinity") || !strings.Contains(m, "its claim data is bound to volume "+c.Spec.VolumeName+" on node b") {
		t.Fatal(m)
	}
}

// TestClaimsOfOneBatch: two pods of one new claim, in one step, go to one
// node; of a ReadWriteOncePod claim only one is placed.
func TestClaimsOfOneBatch(t *testing.T) {
	w := storageWorld(t, "a", "b")
	claim(w, "shared", manifests.LocalClass, "1Gi")
	claim(w, "alone", manifests.LocalClass, "1Gi", corev1.ReadWriteOncePod)
	spread := func(p *corev1.Pod) { p.Annotations = map[string]string{placementAnnotation: "spread"} }
	for _, n := range []string{"s1", "s2"} {
		consumer(w, n, "shared", spread)
	}
	for _, n := range []string{"a1", "a2"} {
		consumer(w, n, "alone", spread)
	}
	turn(t, w, w.Env())
	if placeOf(w, "s1") == "" || placeOf(w, "s1") != placeOf(w, "s2") {
		t.Fatalf("%q and %q", placeOf(w, "s1"), placeOf(w, "s2"))
	}
	if (placeOf(w, "a1") == "") == (placeOf(w, "a2") == "") || !strings.Contains(why(w, "a1")+why(w, "a2"), "ReadWriteOncePod") {
		t.Fatalf("%q and %q: %s", placeOf(w, "a1"), placeOf(w, "a2"), why(w, "a2"))
	}
}

// TestClaimsThatCannotBeUsed: each says why.
func TestClaimsThatCannotBeUsed(t *testing.T) {
	w := storageWorld(t, "a")
	claim(w, "large", manifests.LocalClass, "11Gi")
	claim(w, "hand", "hand", "1Gi")
	for pod, c := range map[string]string{"p1": "missing", "p2": "large", "p3": "hand"} {
		consumer(w, pod, c)
	}
	turn(t, w, w.Env())
	for pod, want := range map[string]string{"p1": `persistentvolumeclaim "missing" not found`, "p2": "did not have enough free storage (needs 11Gi)", "p3": "didn't find available persistent volumes to bind"} {
		if m := why(w, pod); !strings.Contains(m, want) {
			t.Errorf("%s: %q", pod, m)
		}
	}
	w.Create(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Spec: corev1.PersistentVolumeSpec{
		Capacity: corev1.ResourceList{"storage": resource.MustParse("2Gi")}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: "hand",
		PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}}}})
	turn(t, w, w.Env())
	if placeOf(w, "p3") != "a" {
		t.Fatalf("%q: %s", placeOf(w, "p3"), why(w, "p3"))
	}
}

// TestVolumeOfAnotherMachine: who has the name of a volume's node and not its
// disk does not get its pods, and a silent node is named with its silence.
func TestVolumeOfAnotherMachine(t *testing.T) {
	w := storageWorld(t, "b")
	w.AddNode("a", func(n *corev1.Node) { n.Spec.ProviderID = "dunlin://c/node/first" })
	claim(w, "data", manifests.LocalClass, "1Gi")
	consumer(w, "one", "data", onNode("a"))
	turn(t, w, w.Env())
	if placeOf(w, "one") != "a" {
		t.Fatal(why(w, "one"))
	}
	fixture.Change(w, nodeGK, "", "a", registry.Status, func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })
	consumer(w, "two", "data")
	turn(t, w, w.Env())
	if m := why(w, "two"); placeOf(w, "two") != "" || !strings.Contains(m, "on node a, which is Unknown since ") {
		t.Fatalf("%q: %s", placeOf(w, "two"), m)
	}
	fixture.Change(w, nodeGK, "", "a", registry.Main, func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Value: "x", Effect: corev1.TaintEffectNoExecute}}
	})
	turn(t, w, w.Env())
	if m := why(w, "two"); !strings.Contains(m, "on node a, which is out of service (taint node.kubernetes.io/out-of-service)") {
		t.Fatal(m)
	}
	fixture.Change(w, nodeGK, "", "a", registry.Main, func(n *corev1.Node) { n.Labels[manifests.LabelDead] = "true" })
	turn(t, w, w.Env())
	if m := why(w, "two"); !strings.Contains(m, "on node a, which was declared dead: the data is lost with it; delete the claim and the pod") {
		t.Fatal(m)
	}
	w.Delete(nodeGK, "", "a", "")
	turn(t, w, w.Env())
	if m := why(w, "two"); !strings.Contains(m, "on node a, which no longer exists") {
		t.Fatal(m)
	}
	w.AddNode("a", func(n *corev1.Node) { n.Spec.ProviderID = "dunlin://c/node/second" })
	turn(t, w, w.Env())
	if m := why(w, "two"); placeOf(w, "two") != "" || !strings.Contains(m, "an earlier machine of that name") {
		t.Fatalf("%q: %s", placeOf(w, "two"), m)
	}
}

// TestKilledWhileBinding: the scheduler dies between the claim's node and the
// binding of the pod; whatever was written, claim and pod end on one node.
func TestKilledWhileBinding(t *testing.T) {
	for writes := range 4 {
		w := storageWorld(t, "a", "b")
		claim(w, "data", manifests.LocalClass, "1Gi")
		consumer(w, "one", "data")
		env := w.Killed(writes, nil)
		_ = New(Config{Store: env.Store, Term: env.Term, Clock: w, Events: w.Events}).Settle(context.Background()) // it dies
		turn(t, w, w.Env())
		c := fixture.Get[*corev1.PersistentVolumeClaim](w, claimGK, "default", "data")
		if n := placeOf(w, "one"); n == "" || c.Annotations[manifests.AnnotationSelectedNode] != n || c.Status.Phase != corev1.ClaimBound {
			t.Fatalf("after %d writes: pod on %q, claim %v %v", writes, n, c.Annotations, c.Status.Phase)
		}
	}
}
