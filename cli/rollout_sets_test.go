package cli

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestDaemonSetProgress(t *testing.T) {
	three := func(edit func(*appsv1.DaemonSet)) *appsv1.DaemonSet {
		d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "agent", Generation: 2}}
		d.Status = appsv1.DaemonSetStatus{ObservedGeneration: 2, DesiredNumberScheduled: 3, UpdatedNumberScheduled: 3, NumberAvailable: 3}
		edit(d)
		return d
	}
	for want, d := range map[string]*appsv1.DaemonSet{
		`daemon set "agent" successfully rolled out`: three(func(*appsv1.DaemonSet) {}),
		"Waiting for the controller to see":          three(func(d *appsv1.DaemonSet) { d.Generation = 3 }),
		"Waiting: 1 of 3 new pods have been created": three(func(d *appsv1.DaemonSet) { d.Status.UpdatedNumberScheduled = 1 }),
		"Waiting: 2 of 3 updated pods are available": three(func(d *appsv1.DaemonSet) { d.Status.NumberAvailable = 2 }),
		`Waiting: 1 of 3 new pods have been created...; 2 node(s) are offline`: three(func(d *appsv1.DaemonSet) {
			d.Status.UpdatedNumberScheduled = 1
			d.Status.Conditions = []appsv1.DaemonSetCondition{{Type: "NodesAway", Status: corev1.ConditionTrue, Message: "2 node(s) are offline"}}
		}),
		`successfully rolled out; 2 node(s) are offline`: three(func(d *appsv1.DaemonSet) {
			d.Status.Conditions = []appsv1.DaemonSetCondition{{Type: "NodesAway", Status: corev1.ConditionTrue, Message: "2 node(s) are offline"}}
		}),
	} {
		raw, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		got, done, err := rolledSets["DaemonSet"](raw)
		if err != nil || !strings.Contains(got, want) || done != strings.Contains(want, "rolled out") {
			t.Errorf("%q %v %v, want %q", got, done, err, want)
		}
	}
	if _, _, err := daemonSetProgress(three(func(d *appsv1.DaemonSet) { d.Spec.UpdateStrategy.Type = appsv1.OnDeleteDaemonSetStrategyType })); !errors.Is(err, errOnDelete) {
		t.Error(err)
	}
}

func TestStatefulSetProgress(t *testing.T) {
	n, one := int32(3), int32(1)
	three := func(edit func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
		d := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "db"}, Spec: appsv1.StatefulSetSpec{Replicas: &n}}
		d.Status = appsv1.StatefulSetStatus{ReadyReplicas: 3, UpdatedReplicas: 3, UpdateRevision: "db-2", CurrentRevision: "db-2"}
		edit(d)
		return d
	}
	above := func(d *appsv1.StatefulSet) {
		d.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{Partition: &one}
	}
	for want, d := range map[string]*appsv1.StatefulSet{
		`stateful set "db" successfully rolled out`: three(func(*appsv1.StatefulSet) {}),
		"Waiting: 1 of 3 pods are ready...; 2 node(s) are offline": three(func(d *appsv1.StatefulSet) {
			d.Status.ReadyReplicas = 1
			d.Status.Conditions = []appsv1.StatefulSetCondition{{Type: "NodesAway", Status: corev1.ConditionTrue, Message: "2 node(s) are offline"}}
		}),
		"Waiting: 0 of 3 pods are ready...; pods are missing": three(func(d *appsv1.StatefulSet) {
			d.Status.ReadyReplicas = 0
			d.Status.Conditions = []appsv1.StatefulSetCondition{{Type: "NamesTaken", Status: corev1.ConditionTrue, Message: "pods are missing"}}
		}),
		"Waiting: 2 of 3 pods are ready":            three(func(d *appsv1.StatefulSet) { d.Status.ReadyReplicas = 2 }),
		"Waiting: 1 of 3 pods are of revision db-2": three(func(d *appsv1.StatefulSet) { d.Status.UpdatedReplicas, d.Status.CurrentRevision = 1, "db-1" }),
		"Waiting: 1 of 2 new pods above":            three(func(d *appsv1.StatefulSet) { above(d); d.Status.UpdatedReplicas = 1 }),
		"complete: 2 new pods":                      three(func(d *appsv1.StatefulSet) { above(d); d.Status.UpdatedReplicas = 2 }),
	} {
		got, done, err := statefulSetProgress(d)
		if err != nil || !strings.Contains(got, want) || done == strings.HasPrefix(want, "Waiting") {
			t.Errorf("%q %v %v, want %q", got, done, err, want)
		}
	}
}

// History and undo go by the ControllerRevisions that the controllers write.
func TestRolloutOfDaemonSets(t *testing.T) {
	w := drainWorld(t)
	var ds struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
	}
	if err := json.Unmarshal([]byte(w.ok("get", "ds", "daemon", "-o", "json")), &ds); err != nil {
		t.Fatal(err)
	}
	for i, image := range []string{"file:///old.wasm", "file:///a.wasm"} {
		w.ok("apply", "-f", w.file("rev.yaml", strings.NewReplacer("UID", string(ds.Metadata.UID), "N", string(rune('1'+i)), "IMAGE", image).Replace(`
apiVersion: apps/v1
kind: ControllerRevision
metadata: {name: daemon-N, ownerReferences: [{apiVersion: apps/v1, kind: DaemonSet, name: daemon, uid: UID, controller: true}]}
revision: N
data: {spec: {template: {$patch: replace, metadata: {labels: {app: daemon}}, spec: {nodeName: 'n', containers: [{name: c, image: 'IMAGE'}]}}}}
`)))
	}
	if out := w.ok("rollout", "history", "ds/daemon"); out != "REVISION  IMAGES\n1         file:///old.wasm\n2         file:///a.wasm\n" {
		t.Errorf("%q", out)
	}
	if out := w.ok("rollout", "undo", "ds/daemon"); !strings.Contains(out, "daemon rolled back to revision 1") {
		t.Error(out)
	}
	if out := w.ok("get", "ds", "daemon", "-o", "json"); !strings.Contains(out, "old.wasm") || strings.Contains(out, "$patch") {
		t.Error(out)
	}
	if out := w.ok("rollout", "restart", "ds/daemon"); !strings.Contains(out, "restarted") {
		t.Error(out)
	}
	code, _, errs := run("rollout", "undo", "ds/daemon", "--to-revision", "7")
	if code != 1 || !strings.Contains(errs, "has no revision 7 (there are [1 2])") {
		t.Error(errs)
	}
	if code, _, errs = run("rollout", "pause", "ds/daemon"); code != 2 || !strings.Contains(errs, "works on Deployments") {
		t.Error(code, errs)
	}
	if code, _, errs = run("rollout", "status", "ds/daemon", "--timeout", "3s"); code != 1 || !strings.Contains(errs, "is not rolled out yet: Waiting for the controller") {
		t.Error(code, errs)
	}
}
