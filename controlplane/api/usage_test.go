package api

import (
	"context"
	"encoding/json"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/wire"
)

// usageFake knows node n1 with one pod, by its uid.
type usageFake struct{ uid string }

func (f *usageFake) Usage(_ context.Context, node string) (*wire.NodeUsage, error) {
	if node != "n1" {
		return nil, apierrors.NewServiceUnavailable("node " + node + " is not connected")
	}
	return &wire.NodeUsage{UnixMilli: 1_750_000_000_500, WindowMillis: 1500, CPUNanos: 250_000_000, MemoryBytes: 64<<20 + 1, Pods: []wire.PodUsage{{
		Namespace: "default", Name: "a", UID: f.uid, Containers: []wire.ContainerUsage{{Name: "c", CPUNanos: 1_500_000, MemoryBytes: 2 << 20}}}}}, nil
}

// TestUsage: what metrics-server would say, in its form: of what answers, and
// only that; read only.
func TestUsage(t *testing.T) {
	f := &usageFake{}
	w := newWorld(t, func(c *Config) { c.Usage = f })
	for _, n := range []string{"n1", "away"} {
		w.want(201, "POST", "/api/v1/nodes", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"`+n+`","labels":{"on":"`+n+`"}}}`)
	}
	for name, node := range map[string]string{"a": "n1", "b": "away", "c": ""} {
		o, err := w.reg.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"app": name}},
			Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "file:///a.wasm"}}}}, registry.WriteOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if name == "a" {
			f.uid = string(o.(*corev1.Pod).UID)
		}
	}
	const base = "/apis/metrics.k8s.io/v1beta1"
	text := func(path string, keys ...any) string {
		t.Helper()
		m := w.want(200, "GET", base+path, "")
		b, err := json.Marshal(at(m, keys...))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if got := text("/nodes/n1", "usage"); got != `{"cpu":"250m","memory":"65536Ki"}` && got != `{"cpu":"250000000n","memory":"64Mi"}` && got != `{"cpu":"250m","memory":"64Mi"}` {
		t.Errorf("node: %s", got)
	}
	if got := text("/nodes/n1", "kind"); got != `"NodeMetrics"` {
		t.Errorf("kind %s", got)
	}
	if got := text("/nodes/n1", "window") + text("/nodes/n1", "timestamp"); got != `"1.5s""2025-06-15T15:06:40Z"` {
		t.Errorf("window and time %s", got)
	}
	for path, n := range map[string]int{"/nodes": 1, "/pods": 1, "/namespaces/default/pods": 1, "/namespaces/kube-system/pods": 0, "/pods?labelSelector=app%3Db": 0, "/nodes?labelSelector=on%3Dn1": 1} {
		m := w.want(200, "GET", base+path, "")
		if items, ok := at(m, "items").([]any); !ok || len(items) != n {
			t.Errorf("%s: %v", path, m)
		}
	}
	if got := text("/namespaces/default/pods/a", "containers"); got != `[{"name":"c","usage":{"cpu":"1500u","memory":"2Mi"}}]` {
		t.Errorf("pod: %s", got)
	}
	for _, path := range []string{"/nodes/away", "/nodes/none", "/namespaces/default/pods/b", "/namespaces/default/pods/none", "/namespaces/default/nodes", "/pods/a", "/services", "/nodes/n1/status"} {
		w.want(404, "GET", base+path, "")
	}
	w.want(405, "POST", base+"/nodes", "{}")
	w.want(405, "DELETE", base+"/namespaces/default/pods/a", "")
	w.want(403, "GET", base+"/nodes", "", "Authorization", "Bearer nobody")
}
