//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// podTemplate is a template of one container, as YAML below "template:".
func podTemplate(label, restart, image string) string {
	return fmt.Sprintf(`
      metadata: {labels: {app: %s}}
      spec:
        runtimeClassName: wasm
        restartPolicy: %s
        terminationGracePeriodSeconds: 1
        containers: [{name: c, image: %s, imagePullPolicy: IfNotPresent, resources: {limits: {memory: 16Mi}}}]
`, label, restart, image)
}

// TestWorkloads runs every kind that makes pods, on one real node.
func TestWorkloads(t *testing.T) {
	c := cluster.New(t)
	for _, m := range []string{"environ", "fail", "loop", "sleep"} {
		c.Import(m+".wasm", cluster.Module(t, m))
	}
	t.Run("job", func(t *testing.T) { jobs(t, c) })
	t.Run("cron job", func(t *testing.T) { cronJobs(t, c) })
	t.Run("daemon set", func(t *testing.T) { daemonSets(t, c) })
	t.Run("stateful set, budget and drain", func(t *testing.T) { statefulSets(t, c) })
}

func jobIs(c *cluster.Cluster, name string, want batchv1.JobConditionType, reason string) func() error {
	return func() error {
		var j batchv1.Job
		if err := c.Get("job/"+name, &j); err != nil {
			return err
		}
		for _, cond := range j.Status.Conditions {
			if cond.Type == want && cond.Status == corev1.ConditionTrue && cond.Reason == reason {
				return nil
			}
		}
		return fmt.Errorf("status %+v", j.Status)
	}
}

func jobs(t *testing.T, c *cluster.Cluster) {
	c.Apply(`
apiVersion: batch/v1
kind: Job
metadata: {name: indexed}
spec:
  completionMode: Indexed
  completions: 3
  parallelism: 2
  template:` + podTemplate("indexed", "Never", "environ.wasm"))
	c.Eventually(90*time.Second, "the job is complete", jobIs(c, "indexed", batchv1.JobComplete, batchv1.JobReasonCompletionsReached))
	var j batchv1.Job
	if err := c.Get("job/indexed", &j); err != nil || j.Status.CompletedIndexes != "0-2" || j.Status.Succeeded != 3 {
		t.Fatalf("%+v, %v", j.Status, err)
	}
	seen := map[string]bool{}
	for _, p := range c.Pods("app=indexed") {
		if len(p.Finalizers) != 0 {
			t.Errorf("%s is held by %v", p.Name, p.Finalizers)
		}
		for _, entry := range strings.Split(c.Run("logs", p.Name), "\x00") {
			if i, ok := strings.CutPrefix(entry, "JOB_COMPLETION_INDEX="); ok {
				seen[i] = true
			}
		}
	}
	if len(seen) != 3 {
		t.Errorf("guests saw the indexes %v", seen)
	}
	if out := c.Run("get", "jobs"); !strings.Contains(out, "Complete") || !strings.Contains(out, "3/3") {
		t.Error(out)
	}

	c.Apply(`
apiVersion: batch/v1
kind: Job
metadata: {name: fails}
spec:
  podFailurePolicy: {rules: [{action: FailJob, onExitCodes: {operator: In, values: [3]}}]}
  template:` + podTemplate("fails", "Never", "fail.wasm"))
	c.Eventually(90*time.Second, "the job has failed", jobIs(c, "fails", batchv1.JobFailed, batchv1.JobReasonPodFailurePolicy))
	if out := c.Run("describe", "job", "fails"); !strings.Contains(out, "failed with exit code 3") {
		t.Errorf("describe: %s", out)
	}

	// What runs for ever ends by its deadline, and all of it goes.
	c.Apply(`
apiVersion: batch/v1
kind: Job
metadata: {name: late}
spec:
  activeDeadlineSeconds: 3
  ttlSecondsAfterFinished: 3
  template:` + podTemplate("late", "Never", "sleep.wasm"))
	c.Eventually(90*time.Second, "the job is gone after its deadline and its time to live", func() error {
		if out, err := c.Try("get", "job", "late"); err == nil {
			return errors.New(out)
		}
		if n := len(c.Pods("app=late")); n != 0 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
	c.Run("delete", "job", "indexed", "fails", "--timeout", "60s")
	c.Eventually(60*time.Second, "the pods go with their jobs", func() error {
		if n := len(c.Pods("app in (indexed,fails)")); n != 0 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
}

func cronJobs(t *testing.T, c *cluster.Cluster) {
	c.Apply(`
apiVersion: batch/v1
kind: CronJob
metadata: {name: tick}
spec:
  schedule: "* * * * *"
  timeZone: Europe/Berlin
  jobTemplate:
    spec:
     template:` + strings.ReplaceAll(podTemplate("tick", "Never", "environ.wasm"), "\n", "\n  "))
	c.Eventually(100*time.Second, "a run has succeeded", func() error {
		var cj batchv1.CronJob
		if err := c.Get("cronjob/tick", &cj); err != nil {
			return err
		}
		if cj.Status.LastSuccessfulTime == nil || len(cj.Status.Active) != 0 {
			return fmt.Errorf("status %+v", cj.Status)
		}
		return nil
	})
	var l batchv1.JobList
	if err := c.Get("jobs", &l); err != nil || len(l.Items) == 0 || len(l.Items) > 2 || l.Items[0].Annotations[batchv1.CronJobScheduledTimestampAnnotation] == "" {
		t.Fatalf("%d jobs, %v", len(l.Items), err)
	}
	c.Run("delete", "cronjob", "tick", "--timeout", "60s")
}

func daemonSets(t *testing.T, c *cluster.Cluster) {
	set := func(image string) string {
		return `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: daemon}
spec:
  selector: {matchLabels: {app: daemon}}
  template:` + podTemplate("daemon", "Always", image)
	}
	c.Apply(set("sleep.wasm"))
	before := c.WaitReady("app=daemon", 1)[0]
	c.Apply(set("loop.wasm"))
	c.Eventually(90*time.Second, "the daemon is updated", func() error {
		var ds appsv1.DaemonSet
		if err := c.Get("daemonset/daemon", &ds); err != nil {
			return err
		}
		if ds.Status.UpdatedNumberScheduled != 1 || ds.Status.NumberAvailable != 1 || ds.Status.ObservedGeneration != ds.Generation {
			return fmt.Errorf("status %+v", ds.Status)
		}
		return nil
	})
	if after := c.WaitReady("app=daemon", 1)[0]; after.UID == before.UID || after.Spec.Containers[0].Image != "loop.wasm" {
		t.Fatalf("%s %s", after.UID, after.Spec.Containers[0].Image)
	}
	c.Run("delete", "daemonset", "daemon", "--timeout", "60s")
}

func statefulSets(t *testing.T, c *cluster.Cluster) {
	c.Apply(`
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  replicas: 2
  serviceName: db
  selector: {matchLabels: {app: db}}
  template:` + podTemplate("db", "Always", "sleep.wasm") + `---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: db}
spec: {maxUnavailable: 0, selector: {matchLabels: {app: db}}}
`)
	pods := c.WaitReady("app=db", 2)
	if pods[0].Name != "db-0" || pods[1].Name != "db-1" || pods[1].Labels[appsv1.PodIndexLabel] != "1" {
		t.Fatalf("%s %s", pods[0].Name, pods[1].Name)
	}
	_, err := c.Try("drain", "e2e", "--timeout", "3s")
	if err == nil || !strings.Contains(err.Error(), "The disruption budget db needs 2 healthy pods and has 2 currently") ||
		!strings.Contains(err.Error(), "dunlin uncordon e2e") {
		t.Fatalf("drain: %v", err)
	}
	c.WaitReady("app=db", 2)
	c.Run("delete", "pdb", "db")
	if out := c.Run("drain", "e2e", "--timeout", "60s"); !strings.Contains(out, "node/e2e drained") {
		t.Fatal(out)
	}
	c.Run("uncordon", "e2e")
	for i, p := range c.WaitReady("app=db", 2) {
		if p.Name != fmt.Sprint("db-", i) || p.UID == pods[i].UID {
			t.Fatalf("%s is still the same pod", p.Name)
		}
	}
	c.Run("scale", "statefulset/db", "--replicas=1")
	if left := c.WaitReady("app=db", 1); left[0].Name != "db-0" {
		t.Fatalf("%s is left", left[0].Name)
	}
	c.Run("delete", "statefulset", "db", "--timeout", "60s")
}

// TestWorkloadsOfANodeThatIsAway: a node is cut off. Its daemon is not waited
// for, its stateful pod is not replaced, and both are as they shall be when
// it is back.
func TestWorkloadsOfANodeThatIsAway(t *testing.T) {
	f := newFleet(t, 2)
	f.Apply(`
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: daemon}
spec:
  selector: {matchLabels: {app: daemon}}
  template:` + podTemplate("daemon", "Always", "sleep.wasm") + `---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  replicas: 1
  selector: {matchLabels: {app: db}}
  template:` + podTemplate("db", "Always", "sleep.wasm") + `        nodeSelector: {kubernetes.io/hostname: n1}
`)
	f.WaitReady("app=daemon", 3)
	db := f.WaitReady("app=db", 1)[0]
	f.machines[0].Cut()
	f.Eventually(time.Minute, "the set names the node that is away", func() error {
		return conditionSays(f.Cluster, "daemonset/daemon", "NodesAway", "n1 (up to date)")
	})
	f.Eventually(time.Minute, "the set says that db-0 waits", func() error {
		return conditionSays(f.Cluster, "statefulset/db", "NodesAway", "db-0 (node n1) may still run")
	})
	f.Run("rollout", "restart", "ds/daemon")
	if out := f.Run("rollout", "status", "ds/daemon", "--timeout", "90s"); !strings.Contains(out, "successfully rolled out; 1 node(s) are offline or not ready") {
		t.Fatal(out)
	}
	var ds appsv1.DaemonSet
	if err := f.Get("daemonset/daemon", &ds); err != nil || ds.Status.DesiredNumberScheduled != 2 || ds.Status.UpdatedNumberScheduled != 2 || ds.Status.NumberUnavailable != 0 {
		t.Fatalf("%+v, %v", ds.Status, err)
	}
	if p := f.Pods("app=db"); len(p) != 1 || p[0].UID != db.UID || p[0].DeletionTimestamp != nil {
		t.Fatalf("db: %+v", p)
	}
	f.machines[0].Heal()
	f.Eventually(2*time.Minute, "the daemon of the node that is back is updated, too", func() error {
		var ds appsv1.DaemonSet
		if err := f.Get("daemonset/daemon", &ds); err != nil {
			return err
		}
		if s := ds.Status; s.DesiredNumberScheduled != 3 || s.UpdatedNumberScheduled != 3 || s.NumberAvailable != 3 || len(s.Conditions) != 0 {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	if p := f.WaitReady("app=db", 1); p[0].UID != db.UID || p[0].Status.ContainerStatuses[0].RestartCount != 0 {
		t.Fatalf("db-0 was not left alone: %+v", p[0].Status)
	}
}

// conditionSays looks for a condition that is True with a text in its message.
func conditionSays(c *cluster.Cluster, what, condition, text string) error {
	var o struct {
		Status struct {
			Conditions []struct{ Type, Status, Message string }
		}
	}
	if err := c.Get(what, &o); err != nil {
		return err
	}
	for _, cond := range o.Status.Conditions {
		if cond.Type == condition && cond.Status == "True" && strings.Contains(cond.Message, text) {
			return nil
		}
	}
	return fmt.Errorf("conditions %+v", o.Status.Conditions)
}
