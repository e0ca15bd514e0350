//go:build e2e

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestBadVersionsRollBackByThemselves: with the annotation a version that never
// becomes ready, and one that crashes, are left for the last good one, three
// times in a row; what served goes on, the same processes throughout.
func TestBadVersionsRollBackByThemselves(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Import("fail.wasm", cluster.Module(t, "fail"))
	version := func(image, extra string) string {
		m := deployment("web", image, 2, extra)
		m = strings.Replace(m, "metadata: {name: web}", "metadata: {name: web, annotations: {dunlin.dev/auto-rollback: 50%}}", 1)
		return strings.Replace(m, "  replicas: 2\n", "  replicas: 2\n  progressDeadlineSeconds: 5\n", 1)
	}
	c.Apply(version("sleep.wasm", ""))
	c.WaitReady("app=web", 2)
	c.Run("rollout", "status", "deploy/web", "--timeout", "60s")
	before := c.HostPIDs()
	never := ", readinessProbe: {tcpSocket: {port: 9}, periodSeconds: 1}"
	for i, bad := range []struct{ image, extra, reason string }{
		{"sleep.wasm", never, "ProgressDeadlineExceeded"},
		{"fail.wasm", ", env: [{name: A, value: b}]", "PodsFailing"},
		{"sleep.wasm", never + ", env: [{name: A, value: c}]", "ProgressDeadlineExceeded"},
	} {
		c.Apply(version(bad.image, bad.extra))
		out, err := c.Try("rollout", "status", "deploy/web", "--timeout", "90s")
		if err == nil || !strings.Contains(err.Error(), "was rolled back: revision ") && !strings.Contains(err.Error(), "is being rolled back: ") && !strings.Contains(err.Error(), "exceeded its progress deadline") {
			t.Fatalf("bad version %d: %v\n%s", i, err, out)
		}
		c.Eventually(90*time.Second, "the good version is back and complete", func() error {
			var d appsv1.Deployment
			if err := c.Get("deploy/web", &d); err != nil {
				return err
			}
			ct := &d.Spec.Template.Spec.Containers[0]
			for _, cond := range d.Status.Conditions {
				if cond.Type == "RolledBack" && cond.Reason == bad.reason && ct.Image == "sleep.wasm" && ct.ReadinessProbe == nil &&
					d.Status.ObservedGeneration == d.Generation && d.Status.Replicas == 2 && d.Status.AvailableReplicas == 2 {
					return nil
				}
			}
			return fmt.Errorf("image %s, %+v", ct.Image, d.Status)
		})
		now := c.HostPIDs()
		for id, pid := range before {
			if now[id] != pid {
				t.Fatalf("bad version %d: guest %s was %d and is %d", i, id, pid, now[id])
			}
		}
	}
	var events corev1.EventList
	if err := c.Get("events", &events); err != nil {
		t.Fatal(err)
	}
	n := int32(0)
	for i := range events.Items {
		if e := &events.Items[i]; e.Reason == "DeploymentRollback" && e.InvolvedObject.Name == "web" {
			n += max(e.Count, 1)
		}
	}
	if n != 3 {
		t.Errorf("%d events of a rollback", n)
	}
}
