package cli

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// drainWorld has a node with one pod of a Deployment that a budget holds, one
// daemon pod, and one that nothing holds.
func drainWorld(t *testing.T) *world {
	w := newWorld(t)
	put := func(o runtime.Object) metav1.Object {
		t.Helper()
		out, err := w.reg.Create(context.Background(), o, registry.WriteOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return out.(metav1.Object)
	}
	meta := func(name string, owners ...metav1.OwnerReference) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"app": name}, OwnerReferences: owners}
	}
	template := func(name string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": name}},
			Spec: corev1.PodSpec{NodeName: "n", Containers: []corev1.Container{{Name: "c", Image: "file:///a.wasm"}},
				Volumes: []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}}}
	}
	put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	d := put(&appsv1.Deployment{ObjectMeta: meta("web"), Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}, Template: template("web")}})
	rs := put(&appsv1.ReplicaSet{ObjectMeta: meta("web-1", *metav1.NewControllerRef(d, appsv1.SchemeGroupVersion.WithKind("Deployment"))),
		Spec: appsv1.ReplicaSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}, Template: template("web")}})
	ds := put(&appsv1.DaemonSet{ObjectMeta: meta("daemon"), Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "daemon"}}, Template: template("daemon")}})
	pod := func(name, label string, owner ...metav1.OwnerReference) {
		m := meta(name, owner...)
		m.Labels = map[string]string{"app": label}
		put(&corev1.Pod{ObjectMeta: m, Spec: template(label).Spec})
		fixed, err := w.reg.Update(context.Background(), podKind, "default", name, registry.Status, running, registry.WriteOptions{})
		if err != nil {
			t.Fatal(err, fixed)
		}
	}
	pod("web-1-a", "web", *metav1.NewControllerRef(rs, appsv1.SchemeGroupVersion.WithKind("ReplicaSet")))
	pod("daemon-a", "daemon", *metav1.NewControllerRef(ds, appsv1.SchemeGroupVersion.WithKind("DaemonSet")))
	return w
}

var podKind = schema.GroupKind{Kind: "Pod"}

// running makes a pod Running and Ready.
func running(cur runtime.Object) (runtime.Object, error) {
	p := cur.(*corev1.Pod)
	p.Status.Phase = corev1.PodRunning
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return p, nil
}

// counted writes the budget's status, as its controller does.
func (w *world) counted(healthy, desired, allowed int32) {
	w.t.Helper()
	_, err := w.reg.Update(context.Background(), schema.GroupKind{Group: "policy", Kind: "PodDisruptionBudget"}, "default", "web", registry.Status,
		func(cur runtime.Object) (runtime.Object, error) {
			b := cur.(*policyv1.PodDisruptionBudget)
			b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, CurrentHealthy: healthy, DesiredHealthy: desired, DisruptionsAllowed: allowed, ExpectedPods: 1}
			return b, nil
		}, registry.WriteOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

// A drain that a budget holds says what holds it, gives up with an error,
// and leaves the node cordoned.
func TestDrainSaysWhatBlocks(t *testing.T) {
	w := drainWorld(t)
	w.ok("apply", "-f", w.file("pdb.yaml", "apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: web}\nspec: {minAvailable: 1, selector: {matchLabels: {app: web}}}\n"))
	w.counted(1, 1, 0)
	code, out, errs := run("drain", "n", "--timeout", "2s")
	if code != 1 || !strings.Contains(out, "node/n cordoned") || strings.Contains(out, "drained") {
		t.Fatalf("exit %d\n%s", code, out)
	}
	for _, want := range []string{
		"pod/default/daemon-a stays: its DaemonSet wants it on the node",
		"the emptyDir volumes of these go with them: default/web-1-a\n",
		"pod/default/web-1-a waits: The disruption budget web needs 1 healthy pods and has 1 currently",
		"dunlin rollout restart -n default deploy/web",
		"pod/default/web-1-a is still there: The disruption budget web needs 1",
		"1 pods left after 2s; the node stays cordoned; 'dunlin uncordon n' takes that back",
	} {
		if !strings.Contains(errs, want) {
			t.Errorf("no %q in\n%s", want, errs)
		}
	}
	// With --start-first its Deployment is restarted, once.
	if code, out, errs = run("drain", "n", "--timeout", "2s", "--start-first"); code != 1 || strings.Count(out, "deployment.apps/web restarted") != 1 {
		t.Fatalf("exit %d\n%s%s", code, out, errs)
	}
	// With room in the budget it goes; the stand-in for its node is the test.
	w.counted(2, 1, 1)
	code, out, errs = run("drain", "n", "--timeout", "2s")
	if code != 1 || !strings.Contains(out, "pod/default/web-1-a evicted") || !strings.Contains(errs, "it was evicted and has not stopped yet") {
		t.Fatalf("exit %d\n%s%s", code, out, errs)
	}
	zero := int64(0)
	if _, _, err := w.reg.Delete(context.Background(), podKind, "default", "web-1-a", registry.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	if out := w.ok("drain", "n"); !strings.Contains(out, "node/n drained") || !strings.Contains(out, "node/n already cordoned") {
		t.Fatal(out)
	}
	if out := w.ok("uncordon", "n"); out != "node/n uncordoned\n" {
		t.Fatal(out)
	}
}

// Where the replacement cannot be placed, a drain that starts it first says so:
// while it waits, once, and at the end.
func TestDrainSaysWhatTheReplacementWaitsFor(t *testing.T) {
	w := drainWorld(t)
	w.ok("apply", "-f", w.file("pdb.yaml", "apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: web}\nspec: {minAvailable: 1, selector: {matchLabels: {app: web}}}\n"))
	w.counted(1, 1, 0)
	w.ok("apply", "-f", w.file("pod.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: web-2-b, labels: {app: web}}\nspec: {containers: [{name: c, image: 'file:///a.wasm'}]}\n"))
	_, err := w.reg.Update(context.Background(), podKind, "default", "web-2-b", registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		p := cur.(*corev1.Pod)
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
			Message: "0/1 nodes are available: 1 node(s) were unschedulable."}}
		return p, nil
	}, registry.WriteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	a := &app{out: &out, errw: &errs}
	err = a.drain(context.Background(), "n", drainOptions{retry: 50 * time.Millisecond, timeout: time.Second, grace: -1, startFirst: true})
	if err == nil || strings.Count(out.String(), "deployment.apps/web restarted") != 1 {
		t.Fatalf("%v\n%s", err, out.String())
	}
	why := "  pod web-2-b: 0/1 nodes are available: 1 node(s) were unschedulable.\n    next: "
	first := "deployment.apps/web has no new pod that serves yet:\n" + why
	if s := errs.String(); strings.Count(s, first) != 1 || strings.Count(s, why) != 2 || strings.LastIndex(s, why) < strings.Index(s, "is still there") {
		t.Errorf("not told once, and at the end:\n%s", s)
	}
}

// Two budgets of one pod are named, hold it only, and nothing says that it was
// evicted; what was evicted on a node out of reach waits for that.
func TestDrainSaysWhatTwoBudgetsAndADeadNodeHold(t *testing.T) {
	w := drainWorld(t)
	for _, name := range []string{"web", "other"} {
		w.ok("apply", "-f", w.file(name+".yaml", "apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: "+name+"}\nspec: {minAvailable: 1, selector: {matchLabels: {app: web}}}\n"))
	}
	w.ok("apply", "-f", w.file("pod.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: zz-bare}\nspec: {nodeName: 'n', containers: [{name: c, image: 'file:///a.wasm'}]}\n"))
	for kind, f := range map[string]func(runtime.Object) (runtime.Object, error){"Pod": running, "Node": func(cur runtime.Object) (runtime.Object, error) {
		n := cur.(*corev1.Node)
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, LastTransitionTime: metav1.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}}
		return n, nil
	}} {
		namespace, name := "default", "zz-bare"
		if kind == "Node" {
			namespace, name = "", "n"
		}
		if _, err := w.reg.Update(context.Background(), schema.GroupKind{Kind: kind}, namespace, name, registry.Status, f, registry.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	code, out, errs := run("drain", "n", "--timeout", "2s", "--force")
	if code != 1 || !strings.Contains(out, "pod/default/zz-bare evicted") || strings.Contains(out, "web-1-a evicted") {
		t.Fatalf("exit %d\n%s%s", code, out, errs)
	}
	for _, want := range []string{
		"pod/default/web-1-a waits: More than one disruption budget selects the pod (other, web)",
		"pod/default/web-1-a is still there: More than one disruption budget",
		"node/n is out of reach since 2026-03-01T12:00:00Z: its pods end when it is back. If it is off for good, 'dunlin node declare-dead n'",
		"pod/default/zz-bare is still there: it was evicted, and its node is out of reach",
		"2 pods left after 2s",
	} {
		if strings.Count(errs, want) != 1 {
			t.Errorf("no %q, or not once, in\n%s", want, errs)
		}
	}
}

func TestDrainOfBarePods(t *testing.T) {
	w := drainWorld(t)
	w.ok("apply", "-f", w.file("pod.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: bare}\nspec: {nodeName: 'n', containers: [{name: c, image: 'file:///a.wasm'}]}\n"))
	code, out, errs := run("drain", "n")
	if code != 1 || !strings.Contains(errs, "nothing would make these pods anew: default/bare; --force evicts them all the same") || strings.Contains(out, "evicted") {
		t.Fatalf("exit %d\n%s%s", code, out, errs)
	}
	code, _, errs = run("drain", "nowhere")
	if code != 1 || !strings.Contains(errs, `nodes "nowhere" not found`) {
		t.Fatalf("exit %d\n%s", code, errs)
	}
}
