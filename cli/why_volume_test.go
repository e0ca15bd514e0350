package cli

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// TestWhyItsVolumeIsAway: what the other nodes lack is no way to the data of a
// node that is not there, so the advice is about that one, whatever else the
// scheduler's message says.
func TestWhyItsVolumeIsAway(t *testing.T) {
	const others = "0/3 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/out-of-service: x}, 1 node(s) were unschedulable, 1 node(s) didn't match PersistentVolume's node affinity: "
	const bound = "its claim d-web-0 is bound to volume pvc-1 on node n11"
	for says, want := range map[string]string{
		others + bound + ", which was declared dead: the data is lost with it; delete the claim and the pod to start empty": "declared dead and cannot come back, the data is lost with it; to start empty: 'dunlin delete pvc/d-web-0 pod/web-0'",
		others + bound + ", which is out of service (taint node.kubernetes.io/out-of-service)":                              "kubectl taint node n11 node.kubernetes.io/out-of-service-",
		others + bound + ", which is Unknown since 2026-03-01T12:00:00Z":                                                    "bring it back. If it is off for good, 'dunlin node declare-dead n11'",
		others + bound + ", which no longer exists: the data is on that machine's disk; join it again, or delete the claim": "join that machine again",
		others + bound + ", but on the disk of an earlier machine of that name; delete the claim to give the data up":       "and nowhere else; to give it up: 'dunlin delete pvc/d-web-0 pod/web-0'",
		others + bound: "remove the taint shown by 'dunlin describe node NAME'",
		`0/3 nodes are available: persistentvolumeclaim "d-web-0" not found.`:                                "make that claim",
		`0/3 nodes are available: persistentvolumeclaim "d-web-0" is being deleted.`:                         "dunlin describe pvc",
		others + "its claim a is bound to volume v on node n1; " + bound + ", which was declared dead: gone": "pvc/d-web-0",
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web-0"}, Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: says}}}}
		if w, ok := whyPod(p, false); !ok || w.reason != says || !strings.Contains(w.next, want) {
			t.Errorf("%s\n  next %q\n  want %q", says, w.next, want)
		}
	}
}

// TestDescribeVolumeOfALostNode: claim and volume say what became of the node
// that has the data, as long as it is there.
func TestDescribeVolumeOfALostNode(t *testing.T) {
	w := newWorld(t)
	class := manifests.LocalClass
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n11"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionUnknown, LastTransitionTime: metav1.NewTime(time.Now().Add(-time.Hour))}}}}
	if _, err := w.reg.Create(t.Context(), node, registry.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.ok("apply", "-f", w.file("m.yaml", `apiVersion: v1
kind: PersistentVolume
metadata: {name: pvc-1, annotations: {`+manifests.AnnotationProvisionedBy+`: `+manifests.LocalProvisioner+`}}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  storageClassName: `+class+`
  local: {path: /var/lib/dunlin/volumes/pvc-1}
  claimRef: {kind: PersistentVolumeClaim, apiVersion: v1, namespace: default, name: d-web-0}
  nodeAffinity: {required: {nodeSelectorTerms: [{matchFields: [{key: metadata.name, operator: In, values: [n11]}]}]}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: d-web-0}
spec: {accessModes: [ReadWriteOnce], storageClassName: `+class+`, volumeName: pvc-1, resources: {requests: {storage: 1Gi}}}
`))
	says := func(want ...string) {
		t.Helper()
		for _, what := range []string{"pvc/d-web-0", "pv/pvc-1"} {
			out := w.ok("describe", what)
			for _, s := range want {
				if !strings.Contains(out, s) {
					t.Errorf("%s does not say %q:\n%s", what, s, out)
				}
			}
		}
	}
	change := func(f func(*corev1.Node)) {
		t.Helper()
		_, err := w.reg.Update(t.Context(), schema.GroupKind{Kind: "Node"}, "", "n11", registry.Main, func(o runtime.Object) (runtime.Object, error) {
			n, ok := o.(*corev1.Node)
			if !ok {
				t.Errorf("a %T", o)
				return o, nil
			}
			f(n)
			return n, nil
		}, registry.WriteOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	says("n11, which is Unknown since", "wait for the node; bring it back", "dunlin node declare-dead n11")
	change(func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Value: "x", Effect: corev1.TaintEffectNoExecute}}
	})
	says("n11, which is out of service", "kubectl taint node n11 node.kubernetes.io/out-of-service-")
	change(func(n *corev1.Node) { n.Labels = map[string]string{manifests.LabelDead: "true"} })
	says("n11, which was declared dead", "the data is lost with it; to start empty: 'dunlin delete pvc d-web-0' and delete its pod")
}
