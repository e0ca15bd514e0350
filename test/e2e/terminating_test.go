//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// stopTakes is how long the pods of leavingPod serve after their deletion.
const stopTakes = 15 * time.Second

func leavingPod(name string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: hello}}
spec:
  runtimeClassName: wasm
  terminationGracePeriodSeconds: 40
  containers:
  - name: main
    image: hello.wasm
    env: [{name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
    ports: [{containerPort: 8080, name: http}]
    lifecycle: {preStop: {sleep: {seconds: %d}}}
    readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
`, name, int(stopTakes/time.Second))
}

// terminating waits until a pod's endpoint shows that it ends and still serves.
func terminating(c *cluster.Cluster, pod string) {
	c.Eventually(10*time.Second, "the endpoint of "+pod+" serves and terminates", func() error {
		var l discoveryv1.EndpointSliceList
		if err := c.Get("endpointslices", &l); err != nil {
			return err
		}
		for i := range l.Items {
			for _, e := range l.Items[i].Endpoints {
				if e.TargetRef == nil || e.TargetRef.Name != pod {
					continue
				}
				if k := e.Conditions; *k.Ready || !*k.Serving || !*k.Terminating {
					return fmt.Errorf("ready %v, serving %v, terminating %v", *k.Ready, *k.Serving, *k.Terminating)
				}
				return nil
			}
		}
		return errors.New("there is no endpoint")
	})
}

// The only pod of a Service is deleted and takes its time: until it ends,
// requests to the Service and by an Ingress succeed, each on a connection of
// its own. Beside one that is ready it gets none.
func TestTheLastPodServesToItsEnd(t *testing.T) {
	c := cluster.New(t)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	c.Apply(leavingPod("one") + "---\n" + helloService + "---\n" + webIngress("web", "a.example", "", ""))
	c.WaitReady("app=hello", 1)
	ip, port := clusterIP(t, c, "hello")
	byIngress := func() (string, error) {
		req, err := http.NewRequest(http.MethodGet, "http://127.0.0.1/", nil)
		if err != nil {
			return "", err
		}
		req.Host = "a.example"
		cl := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
		r, err := cl.Do(req)
		if err != nil {
			return "", err
		}
		defer func() { _ = r.Body.Close() }()
		b, err := io.ReadAll(r.Body)
		if err == nil && r.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", r.Status, b)
		}
		return string(b), err
	}
	ways := map[string]func() (string, error){
		"the Service":   func() (string, error) { return get("http://" + ip + "/") },
		"the node port": func() (string, error) { return get(fmt.Sprintf("http://127.0.0.1:%d/", port)) },
		"the Ingress":   byIngress,
	}
	for name, ask := range ways {
		c.Eventually(30*time.Second, name+" answers", func() error { _, err := ask(); return err })
	}
	// answered asks all ways again and again, and wants every answer from a pod.
	answered := func(by string, until time.Time) (n int) {
		t.Helper()
		for ; time.Now().Before(until); <-time.After(20 * time.Millisecond) {
			for name, ask := range ways {
				if b, err := ask(); err != nil || !strings.Contains(b, "from "+by+" ") {
					t.Fatalf("%s, after %d answers, %v before the end: %q, %v", name, n, time.Until(until), b, err)
				}
				n++
			}
		}
		return n
	}

	began := time.Now()
	c.Run("delete", "pod", "one", "--wait=false")
	terminating(c, "one")
	if n := answered("one", began.Add(stopTakes-time.Second)); n < 30 {
		t.Fatalf("%d answers in all", n)
	}
	c.Eventually(30*time.Second, "the pod is gone", func() error {
		if n := len(c.Pods("app=hello")); n != 0 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})

	c.Apply(leavingPod("two") + "---\n" + leavingPod("three"))
	c.WaitReady("app=hello", 2)
	began = time.Now()
	c.Run("delete", "pod", "two", "--wait=false")
	terminating(c, "two")
	c.Eventually(5*time.Second, "three alone is asked", func() error {
		for range 10 {
			for name, ask := range ways {
				if b, err := ask(); err != nil || !strings.Contains(b, "from three ") {
					return fmt.Errorf("%s: %q, %w", name, b, err)
				}
			}
		}
		return nil
	})
	answered("three", began.Add(stopTakes-time.Second))
	var p corev1.Pod
	if err := c.Get("pod/two", &p); err != nil || p.DeletionTimestamp == nil {
		t.Fatalf("pod two was to be there until now: %v", err)
	}
}
