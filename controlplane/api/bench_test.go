package api

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

func serve(b *testing.B, w *world, method, path, body string, header ...string) *httptest.ResponseRecorder {
	b.Helper()
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer admin")
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	rec := httptest.NewRecorder()
	w.server.ServeHTTP(rec, r)
	if rec.Code >= 300 {
		b.Fatalf("HTTP %d %s", rec.Code, rec.Body)
	}
	return rec
}

// BenchmarkCreatePod is a POST from handler to state machine, without Raft
// and TLS; with and without managedFields.
func BenchmarkCreatePod(b *testing.B) {
	for name, tracked := range map[string]bool{"managedFields": true, "plain": false} {
		b.Run(name, func(b *testing.B) {
			w := newWorld(b, func(c *Config) {
				if !tracked {
					c.Types = nil
				}
			})
			serve(b, w, http.MethodPost, pods, podJSON("first"))
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				serve(b, w, http.MethodPost, pods, podJSON(fmt.Sprintf("p%d", i)))
				i++
			}
		})
	}
}

// BenchmarkListPods answers 1,000 pods in each form.
func BenchmarkListPods(b *testing.B) {
	w := newWorld(b)
	for i := range 1000 {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p%d", i), Namespace: "default"},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "x"}}},
		}
		if _, err := w.reg.Create(context.Background(), p, registry.WriteOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	for name, accept := range map[string]string{
		"json": "application/json", "protobuf": "application/vnd.kubernetes.protobuf",
		"table": "application/json;as=Table;v=v1;g=meta.k8s.io",
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				serve(b, w, http.MethodGet, pods, "", "Accept", accept)
			}
		})
	}
}

// BenchmarkWatchFanOut is one event on its way to one more watcher: encoded
// before, so only looked up and framed.
func BenchmarkWatchFanOut(b *testing.B) {
	w := newWorld(b)
	serve(b, w, http.MethodPost, pods, podJSON("a"))
	rec, ok := w.machine.Snapshot().Get(state.Key{Kind: "Pod", Namespace: "default", Name: "a"})
	if !ok {
		b.Fatal("no record")
	}
	r := httptest.NewRequest(http.MethodGet, pods+"?watch=true", nil)
	rq := &request{Request: r, w: &response{ResponseWriter: httptest.NewRecorder()}, info: parseInfo(r), kind: manifests.ByGVK(corev1.SchemeGroupVersion.WithKind("Pod"))}
	at, err := w.server.codecs.negotiate(r, true, true)
	if err != nil {
		b.Fatal(err)
	}
	ws := &watchStream{s: w.server, rq: rq, at: at}
	b.ReportAllocs()
	for b.Loop() {
		ws.buf = ws.buf[:0]
		if err := ws.event(watch.Modified, rec, 0); err != nil {
			b.Fatal(err)
		}
	}
}
