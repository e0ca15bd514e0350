package view

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// known is a node with pods of two namespaces.
type known struct{ asked *corev1.PodLogOptions }

func pod(namespace, name, app string, containers ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: "u", Labels: map[string]string{"app": app}}, Spec: corev1.PodSpec{NodeName: "n1"}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	for _, c := range containers {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: c})
	}
	return p
}

func (k *known) Pods() []*corev1.Pod {
	return []*corev1.Pod{pod("a", "one", "x", "main"), pod("a", "two", "y", "main", "side"), pod("b", "two", "x", "main")}
}

func (k *known) Node() *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
}

func (k *known) WaitingEvents() []corev1.Event {
	return []corev1.Event{
		{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "e1"}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: "one", UID: "u"}, Reason: "BackOff"},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "e2"}, InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: "n1"}, Reason: "Rebooted"},
	}
}

func (k *known) Logs(_ context.Context, namespace, pod, _ string, o *corev1.PodLogOptions, w io.Writer) error {
	k.asked = o
	if o.Container == "none" {
		return apierrors.NewBadRequest("container none is not valid for pod " + pod)
	}
	if _, err := fmt.Fprintf(w, "%s/%s/%s\n", namespace, pod, o.Container); err != nil {
		return err
	}
	if o.Previous {
		return io.ErrUnexpectedEOF // breaks after the first line
	}
	return nil
}

func serve(t *testing.T) (*known, func(method, path string) (int, string, error)) {
	t.Helper()
	k := &known{}
	reg := prometheus.NewRegistry()
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "dunlin_agent_things_total", Help: "Things."})
	c.Add(3)
	reg.MustRegister(c)
	age := time.Minute
	srv := httptest.NewServer(Handler(Config{Source: k, Metrics: reg, Status: func() Status { return Status{Node: "n1", AssignmentAge: &age} }}))
	t.Cleanup(srv.Close)
	return k, func(method, path string) (int, string, error) {
		req, err := http.NewRequestWithContext(t.Context(), method, srv.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b), err
	}
}

func TestListsAndObjects(t *testing.T) {
	_, get := serve(t)
	for path, want := range map[string]string{
		"/api/v1/pods":                                                         "a/one a/two b/two",
		"/api/v1/pods?labelSelector=app%3Dx":                                   "a/one b/two",
		"/api/v1/pods?fieldSelector=metadata.name%3Dtwo":                       "a/two b/two",
		"/api/v1/pods?fieldSelector=spec.nodeName%3Dn2":                        "",
		"/api/v1/pods?fieldSelector=spec.nodeName%3Dn1,status.phase!%3DFailed": "a/one a/two b/two",
		"/api/v1/namespaces/b/pods":                                            "b/two",
		"/api/v1/namespaces/c/pods":                                            "",
		"/api/v1/nodes":                                                        "/n1",
		"/api/v1/events":                                                       "a/e1 default/e2",
		"/api/v1/events?fieldSelector=involvedObject.kind%3DPod,involvedObject.uid%3Du": "a/e1",
		"/api/v1/namespaces/default/events":                                             "default/e2",
	} {
		code, body, err := get("GET", path)
		var l metav1.PartialObjectMetadataList
		if err != nil || code != 200 || json.Unmarshal([]byte(body), &l) != nil {
			t.Errorf("%s: %d %v %s", path, code, err, body)
			continue
		}
		var names []string
		for _, i := range l.Items {
			names = append(names, i.Namespace+"/"+i.Name)
		}
		if got := strings.Join(names, " "); got != want || !strings.Contains(body, `"items":[`) {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	for path, want := range map[string]string{"/api/v1/pods/one": "a", "/api/v1/namespaces/b/pods/two": "b", "/api/v1/nodes/n1": ""} {
		code, body, err := get("GET", path)
		var o metav1.PartialObjectMetadata
		if err != nil || code != 200 || json.Unmarshal([]byte(body), &o) != nil || o.Namespace != want {
			t.Errorf("%s: %d %v %s", path, code, err, body)
		}
	}
}

func TestWhatIsRefused(t *testing.T) {
	_, get := serve(t)
	for _, f := range []struct {
		method, path string
		code         int
		says         string
	}{
		{"GET", "/api/v1/pods/two", 400, "in the namespaces a, b"},
		{"GET", "/api/v1/pods/none", 404, `pods \"none\" not found`},
		{"GET", "/api/v1/namespaces/b/pods/one", 404, "not found"},
		{"GET", "/api/v1/nodes/n2", 404, "this one is n1"},
		{"GET", "/api/v1/pods?watch=true", 400, "watches"},
		{"GET", "/api/v1/pods?labelSelector=%21%21", 400, "labelSelector"},
		{"GET", "/api/v1/pods?fieldSelector=spec.x%3D1", 400, "not supported: spec.x"},
		{"GET", "/api/v1/secrets", 404, ""},
		{"DELETE", "/api/v1/pods/one", 405, ""},
		{"POST", "/api/v1/pods", 405, ""},
		{"GET", "/api/v1/namespaces/a/pods/two/log", 400, "choose one of: [main side]"},
		{"GET", "/api/v1/pods/one/log?container=none", 400, "not valid"},
		{"GET", "/api/v1/pods/one/log?tailLines=-1", 400, "tailLines=-1"},
		{"GET", "/api/v1/pods/one/log?follow=perhaps", 400, "follow=perhaps"},
		{"GET", "/api/v1/pods/one/log?sinceTime=now", 400, "RFC 3339"},
	} {
		code, body, err := get(f.method, f.path)
		if err != nil || code != f.code || !strings.Contains(body, f.says) {
			t.Errorf("%s %s: %d %v %s", f.method, f.path, code, err, body)
		}
	}
}

func TestLogsPassOptionsOn(t *testing.T) {
	k, get := serve(t)
	code, body, err := get("GET", "/api/v1/namespaces/a/pods/two/log?container=side&tailLines=5&sinceSeconds=7&timestamps=true&follow=true&limitBytes=100")
	if err != nil || code != 200 || body != "a/two/side\n" {
		t.Fatalf("%d %v %q", code, err, body)
	}
	if o := k.asked; *o.TailLines != 5 || *o.SinceSeconds != 7 || !o.Timestamps || !o.Follow || *o.LimitBytes != 100 || o.Previous {
		t.Fatalf("%+v", o)
	}
	// A log that breaks off does not look like one that ended.
	if _, body, err = get("GET", "/api/v1/pods/one/log?previous=true"); err == nil {
		t.Fatalf("a broken log looks whole: %q", body)
	}
}

func TestHealthStatusAndMetrics(t *testing.T) {
	_, get := serve(t)
	if code, body, _ := get("GET", "/healthz"); code != 200 || body != "ok" {
		t.Errorf("%d %q", code, body)
	}
	_, body, _ := get("GET", "/status")
	var s Status
	if err := json.Unmarshal([]byte(body), &s); err != nil || s.Node != "n1" || s.AssignmentAge == nil || *s.AssignmentAge != time.Minute || s.LeaseAge != nil {
		t.Errorf("%v %s", err, body)
	}
	_, body, _ = get("GET", "/metrics")
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(strings.NewReader(body))
	if err != nil || families["dunlin_agent_things_total"].GetMetric()[0].GetCounter().GetValue() != 3 {
		t.Errorf("%v %s", err, body)
	}
}
