//go:build clients

package clients

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestHelm: a chart with hooks, a StatefulSet, a CronJob and a budget is
// installed, upgraded, rolled back and uninstalled by real Helm 3
// and Helm 4.
func TestHelm(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Import("once.wasm", cluster.Module(t, "print"))
	chart := filepath.Join(cluster.Root(t), "test", "clients", "testdata", "chart")
	for _, bin := range []string{"helm3", "helm4"} {
		t.Run(bin, func(t *testing.T) {
			k := newProgram(t, c, bin)
			hooked := func(when string) {
				t.Helper()
				var j batchv1.Job
				if err := c.Get("job/"+bin+"-"+when, &j); err != nil || j.Status.Succeeded != 1 {
					t.Errorf("hook %s: %v %+v", when, err, j.Status)
				}
			}
			running := func(version string, replicas int32) {
				t.Helper()
				var s appsv1.StatefulSet
				if err := c.Get("sts/"+bin, &s); err != nil {
					t.Fatal(err)
				}
				if got := s.Spec.Template.Spec.Containers[0].Env[0].Value; got != version || s.Status.ReadyReplicas != replicas || s.Status.UpdatedReplicas != replicas {
					t.Errorf("version %s, want %s: %+v", got, version, s.Status)
				}
			}
			k.ok("install", bin, chart, "--wait", "--timeout", "90s")
			hooked("pre-install")
			running("1", 2)
			k.ok("upgrade", bin, chart, "--set", "version=2", "--set", "replicas=3", "--wait", "--timeout", "90s")
			hooked("post-upgrade")
			running("2", 3)
			k.ok("rollback", bin, "1", "--wait", "--timeout", "90s")
			hooked("pre-rollback")
			running("1", 2)
			k.has(w("superseded", "Rollback to 1"), "history", bin)
			k.has(w("deployed"), "list")
			k.ok("uninstall", bin, "--wait", "--timeout", "90s")
			hooked("pre-delete")
			c.Eventually(60*time.Second, "nothing of the release is left", func() error {
				for _, kind := range []string{"sts", "cronjob", "pdb", "service", "pods"} {
					label := "release=" + bin
					if kind == "pods" {
						label = "app=" + bin
					}
					out, err := c.Try("get", kind, "-l", label, "-o", "name")
					if err != nil || strings.TrimSpace(out) != "" {
						return fmt.Errorf("%s: %q %v", kind, out, err)
					}
				}
				return nil
			})
		})
	}
}
