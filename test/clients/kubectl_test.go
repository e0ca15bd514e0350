//go:build clients

// Package clients runs unmodified clients of Kubernetes against a real
// server: kubectl 1.37 and 1.20, Helm 3, a client-go informer, a controller-runtime
// manager. 'make clients' builds and runs them.
package clients

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// kubectl runs one binary against one cluster.
type kubectl struct {
	t   *testing.T
	c   *cluster.Cluster
	bin string
	ns  string
	env []string
}

func newKubectl(t *testing.T, c *cluster.Cluster, name, ns string) *kubectl {
	t.Helper()
	k := newProgram(t, c, name)
	k.ns = ns
	k.ok("create", "namespace", ns)
	return k
}

// newProgram is any client program that takes -n, in the default namespace.
func newProgram(t *testing.T, c *cluster.Cluster, name string) *kubectl {
	t.Helper()
	bin := filepath.Join(cluster.Root(t), "bin", "clients", name)
	if _, err := os.Stat(bin); err != nil {
		t.Skipf("SKIPPED: %v (test/clients/build.sh makes it; Debian's kubectl needs apt and root)", err)
	}
	return &kubectl{t: t, c: c, bin: bin, ns: "default", env: append(os.Environ(), "KUBECONFIG="+c.Kubeconfig(), "HOME="+t.TempDir())}
}

func (k *kubectl) command(stdin string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.bin, append([]string{"-n", k.ns}, args...)...)
	cmd.Env = k.env
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// ok runs a command that must succeed.
func (k *kubectl) ok(args ...string) string {
	k.t.Helper()
	return k.in("", args...)
}

func (k *kubectl) in(stdin string, args ...string) string {
	k.t.Helper()
	out, err := k.command(stdin, args...)
	if err != nil {
		k.t.Errorf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// has runs a command whose output must contain all the words.
func (k *kubectl) has(words []string, args ...string) string {
	k.t.Helper()
	out := k.ok(args...)
	for _, w := range words {
		if !strings.Contains(out, w) {
			k.t.Errorf("kubectl %s: no %q in:\n%s", strings.Join(args, " "), w, out)
		}
	}
	return out
}

// fails runs a command that must fail and say the words.
func (k *kubectl) fails(words string, args ...string) {
	k.t.Helper()
	out, err := k.command("", args...)
	if err == nil || !strings.Contains(out, words) {
		k.t.Errorf("kubectl %s: %v, no %q in:\n%s", strings.Join(args, " "), err, words, out)
	}
}

func w(words ...string) []string { return words }

const app = `apiVersion: apps/v1
kind: Deployment
metadata: {name: web, labels: {app: web}}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      runtimeClassName: wasm
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: print.wasm
        env: [{name: A, value: "1"}]
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {a: "1"}
`

func TestKubectl(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Import("print.wasm", filepath.Join(cluster.Root(t), "test", "clients", "testdata", "ticker.wasm"))
	c.Import("fail.wasm", cluster.Module(t, "fail"))
	c.Import("hold.wasm", cluster.Module(t, "hold"))
	for _, bin := range []string{"kubectl", "kubectl-1.20"} {
		t.Run(bin, func(t *testing.T) {
			old := bin == "kubectl-1.20"
			k := newKubectl(t, c, bin, strings.ReplaceAll(bin, ".", "-"))
			k.discovery(old)
			k.applyAndGet(old)
			k.watches(old)
			k.rollouts()
			k.change(old)
			k.logs()
			k.top(old)
			k.removal()
		})
	}
}

func (k *kubectl) discovery(old bool) {
	k.has(w("Server Version", "v1.37.2"), "version")
	k.has(w("deployments", "configmaps", "cm"), "api-resources")
	k.has(w("apps/v1", "coordination.k8s.io/v1"), "api-versions")
	k.has(w("FIELD", "replicas"), "explain", "deployment.spec")
	k.has(w("KIND", "podAffinity"), "explain", "pod.spec.affinity")
	k.has(w("yes"), "auth", "can-i", "create", "pods")
	k.fails(`User "jane" cannot list resource "pods"`, "get", "pods", "--as=jane")
	k.ok("get", "pods", "--as=jane", "--as-group=system:masters")
	k.has(w("dunlin_agent_connected 1"), "get", "--raw", "/api/v1/nodes/e2e/proxy/metrics")
	k.has(w("bind_conflicts_total", "dunlin_raft_leading 1"), "get", "--raw", "/metrics")
	k.fails(`cannot get resource "nodes/proxy"`, "get", "--raw", "/api/v1/nodes/e2e/proxy/metrics", "--as=jane")
	k.has(w("Kubernetes control plane"), "cluster-info")
	k.has(w("kube-system"), "get", "namespaces")
	k.has(w("e2e", "Ready"), "get", "nodes", "-o", "wide")
	k.has(w("Capacity", "Allocatable", "e2e"), "describe", "node", "e2e")
	if !old {
		k.has(w("system:masters"), "auth", "whoami")
		k.has(w("Resources"), "auth", "can-i", "--list")
	}
}

func (k *kubectl) applyAndGet(old bool) {
	k.in(app, "apply", "-f", "-")
	k.has(w("unchanged"), "get", "cm", "settings", "-o", "jsonpath=unchanged{.data.a}")
	if out := k.in(app, "apply", "-f", "-"); strings.Count(out, "unchanged") != 3 {
		k.t.Errorf("second apply changes something:\n%s", out)
	}
	k.ok("rollout", "status", "deploy/web", "--timeout=60s")
	k.has(w("web", "2/2"), "get", "deploy")
	k.has(w("web-", "Running"), "get", "pods", "-l", "app=web", "-o", "wide")
	k.has(w("deployment.apps/web", "service/web", "replicaset.apps/web-"), "get", "all")
	for _, f := range []string{"yaml", "json", "name", "custom-columns=N:.metadata.name", "jsonpath={.items[*].metadata.name}", "go-template={{len .items}}"} {
		k.ok("get", "pods", "-o", f)
	}
	k.sorted()
	k.has(w("web-"), "get", "pods", "--field-selector=status.phase=Running")
	k.has(w("web-"), "get", "pods", "-A", "--chunk-size=1")
	k.has(w("web-"), "get", "pods", "--show-labels", "-l", "app in (web)")
	k.has(w("Replicas:", "2 desired", "NewReplicaSet"), "describe", "deploy", "web")
	k.has(w("Containers:", "wazero", "Scheduled"), "describe", "pods", "-l", "app=web")
	k.has(w("ClusterIP", "10.43."), "describe", "svc", "web")
	k.fails("not found", "get", "pod", "nope")
	changed := strings.Replace(app, `a: "1"`, `a: "2"`, 1)
	if out, err := k.command(changed, "diff", "-f", "-"); err == nil || !strings.Contains(out, `+  a: "2"`) {
		k.t.Errorf("diff: %v\n%s", err, out)
	}
	k.in(changed, "apply", "--server-side", "--force-conflicts", "-f", "-")
	k.has(w("2"), "get", "cm", "settings", "-o", "jsonpath={.data.a}")
	k.in(app, "apply", "--dry-run=server", "-f", "-")
	k.has(w("2"), "get", "cm", "settings", "-o", "jsonpath={.data.a}")
	if !old {
		k.has(w("web"), "events", "--for", "deployment/web")
	}
	k.has(w("Scheduled"), "get", "events")
}

// sorted checks that --sort-by prints every object, in order: kubectl then
// reads the objects in the table's rows.
func (k *kubectl) sorted() {
	k.t.Helper()
	for _, c := range []string{"order-b=2", "order-c=1", "order-a=3"} {
		name, v, _ := strings.Cut(c, "=")
		k.ok("create", "cm", name, "--from-literal=rank="+v)
		k.ok("label", "cm", name, "order=yes")
	}
	for field, want := range map[string]string{
		".metadata.name": "order-a order-b order-c",
		".data.rank":     "order-c order-b order-a",
	} {
		out := k.ok("get", "cm", "-l", "order=yes", "--no-headers", "--sort-by="+field)
		var got []string
		for line := range strings.Lines(out) {
			name, _, _ := strings.Cut(line, " ")
			got = append(got, name)
		}
		if strings.Join(got, " ") != want {
			k.t.Errorf("get cm --sort-by=%s: %q, want %q\n%s", field, got, want, out)
		}
	}
	for _, kind := range []string{"pods", "deploy", "rs", "nodes", "events"} {
		if out := k.ok("get", kind, "--sort-by=.metadata.name"); strings.Count(out, "\n") < 2 {
			k.t.Errorf("get %s --sort-by prints no rows:\n%s", kind, out)
		}
	}
	k.ok("delete", "cm", "-l", "order=yes")
}

// watch runs a command that follows, has do cause something, and waits until
// the command has printed the words.
func (k *kubectl) watch(words []string, do func(), args ...string) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 45*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.bin, append([]string{"-n", k.ns}, args...)...)
	cmd.Env = k.env
	out, err := cmd.StdoutPipe()
	if err != nil {
		k.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	defer func() { cancel(); _ = cmd.Wait() }()
	var seen strings.Builder
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		seen.WriteString(lines.Text() + "\n")
		if do != nil {
			do()
			do = nil
		}
		missing := false
		for _, w := range words {
			missing = missing || !strings.Contains(seen.String(), w)
		}
		if !missing {
			return
		}
	}
	k.t.Errorf("kubectl %s ended without all of %q:\n%s", strings.Join(args, " "), words, &seen)
}

// watches follow changes as tables, names and objects, with selectors.
func (k *kubectl) watches(old bool) {
	n := 0
	change := func() {
		n++
		k.ok("annotate", "--overwrite", "cm", "settings", fmt.Sprintf("seen=%d", n))
		k.ok("create", "cm", fmt.Sprintf("late-%d", n))
	}
	k.watch(w("NAME", "settings", "late-1"), change, "get", "cm", "-w")
	k.watch(w("configmap/settings", "configmap/late-2"), change, "get", "cm", "-w", "-o", "name")
	k.watch(w("seen: \"3\"", "name: late-3"), change, "get", "cm", "-w", "-o", "yaml")
	if !old {
		k.watch(w("ADDED", "MODIFIED"), change, "get", "cm", "-w", "--output-watch-events", "--field-selector=metadata.name=settings")
	}
	k.ok("delete", "cm", "-l", "app!=web", "--field-selector=metadata.name!=settings")
	if !old {
		k.ok("wait", "--for=jsonpath={.data.a}=2", "cm/settings", "--timeout=30s")
	}
}

func (k *kubectl) rollouts() {
	k.ok("set", "env", "deploy/web", "A=2")
	k.ok("rollout", "status", "deploy/web", "--timeout=60s")
	k.has(w("1", "2"), "rollout", "history", "deploy/web")
	k.has(w("Pod Template", "A:"), "rollout", "history", "deploy/web", "--revision=2")
	k.has(w("rolled back"), "rollout", "undo", "deploy/web")
	k.ok("rollout", "status", "deploy/web", "--timeout=60s")
	k.has(w("1"), "get", "deploy", "web", "-o", "jsonpath={.spec.template.spec.containers[0].env[0].value}")
	k.paused()
	k.ok("rollout", "restart", "deploy/web")
	k.ok("rollout", "status", "deploy/web", "--timeout=60s")
	k.ok("scale", "deploy/web", "--replicas=3")
	k.ok("rollout", "status", "deploy/web", "--timeout=60s")
	k.ok("wait", "--for=condition=Available", "deploy/web", "--timeout=60s")
	k.ok("scale", "deploy/web", "--replicas=1")
	k.gone("app=web", 1) // a wait for Ready includes the pods that are ending
	k.ok("wait", "--for=condition=Ready", "pod", "-l", "app=web", "--timeout=60s")
}

// paused: what is changed meanwhile is seen, and rolled out only after.
func (k *kubectl) paused() {
	sets := func() int { return strings.Count(k.ok("get", "rs", "-l", "app=web", "-o", "name"), "replicaset") }
	k.ok("rollout", "pause", "deploy/web")
	before := sets()
	k.ok("set", "env", "deploy/web", "PAUSED=1")
	k.c.Eventually(60*time.Second, "the change is seen", func() error {
		got, err := k.command("", "get", "deploy", "web", "-o", "jsonpath={.metadata.generation} {.status.observedGeneration}")
		if a, b, _ := strings.Cut(strings.TrimSpace(got), " "); err != nil || a != b {
			return fmt.Errorf("%s %v", got, err)
		}
		return nil
	})
	if now := sets(); now != before {
		k.t.Errorf("%d replica sets, %d before the pause", now, before)
	}
	k.ok("rollout", "resume", "deploy/web")
	k.ok("rollout", "status", "deploy/web", "--timeout=60s")
	if now := sets(); now != before+1 {
		k.t.Errorf("%d replica sets after the pause, %d before", now, before)
	}
}

// gone waits until only n pods are left.
func (k *kubectl) gone(selector string, n int) {
	k.t.Helper()
	k.c.Eventually(60*time.Second, "ended pods are removed", func() error {
		out, err := k.command("", "get", "pods", "-l", selector, "-o", "name")
		if err == nil && strings.Count(out, "pod/") != n {
			err = fmt.Errorf("pods: %s", out)
		}
		return err
	})
}

func (k *kubectl) change(old bool) {
	k.ok("label", "cm", "settings", "tier=one")
	k.fails("already has a value", "label", "cm", "settings", "tier=two")
	k.ok("label", "cm", "settings", "tier=two", "--overwrite")
	k.ok("annotate", "cm", "settings", "note=x")
	k.ok("patch", "cm", "settings", "--type=merge", "-p", `{"data":{"b":"2"}}`)
	k.ok("patch", "cm", "settings", "--type=json", "-p", `[{"op":"test","path":"/data/b","value":"2"},{"op":"replace","path":"/data/b","value":"3"}]`)
	k.ok("patch", "deploy", "web", "-p", `{"spec":{"template":{"spec":{"containers":[{"name":"main","env":[{"name":"B","value":"b"}]}]}}}}`)
	k.has(w("A", "B"), "get", "deploy", "web", "-o", "jsonpath={.spec.template.spec.containers[0].env[*].name}")
	k.has(w("3"), "get", "cm", "settings", "-o", "jsonpath={.data.b}")
	k.env = append(k.env, `KUBE_EDITOR=sed -i 's/b: "3"/b: "4"/'`)
	k.ok("edit", "cm", "settings")
	k.has(w("4"), "get", "cm", "settings", "-o", "jsonpath={.data.b}")
	k.ok("create", "secret", "generic", "key", "--from-literal=a=b")
	k.ok("create", "configmap", "made", "--from-literal=a=b")
	k.fails("already exists", "create", "configmap", "made")
	k.ok("create", "serviceaccount", "robot")
	k.ok("expose", "deploy", "web", "--name=again", "--port=81")
	k.in("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: made}\ndata: {a: c}\n", "replace", "-f", "-")
	k.ok("taint", "node", "e2e", "dedicated=x:PreferNoSchedule")
	k.ok("taint", "node", "e2e", "dedicated-")
	k.ok("cordon", "e2e")
	k.has(w("SchedulingDisabled"), "get", "node", "e2e")
	k.ok("uncordon", "e2e")
	if !old {
		k.has(w("ey"), "create", "token", "robot")
		k.fails(`no matches for kind "Deploymnt" in version "apps/v1"`, "apply", "-f", k.file("apiVersion: apps/v1\nkind: Deploymnt\nmetadata: {name: m}\n"))
		k.fails("unknown field", "create", "--validate=strict", "-f", k.file("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}\ndta: {}\n"))
	}
}

func (k *kubectl) file(s string) string {
	k.t.Helper()
	f := filepath.Join(k.t.TempDir(), "m.yaml")
	if err := os.WriteFile(f, []byte(s), 0o600); err != nil {
		k.t.Error(err)
	}
	return f
}

func (k *kubectl) logs() {
	k.ok("rollout", "status", "deploy/web", "--timeout=60s")
	k.has(w("tick"), "logs", "deploy/web")
	if out := k.ok("logs", "deploy/web", "--tail=1"); strings.Count(out, "tick") != 1 {
		k.t.Errorf("--tail=1: %q", out)
	}
	k.has(w("tick", "T", "Z"), "logs", "deploy/web", "--since=10m", "--timestamps")
	k.c.Eventually(60*time.Second, "--since leaves out what is older", func() error {
		all, last := strings.Count(k.ok("logs", "deploy/web", "--since=10m"), "tick"), strings.Count(k.ok("logs", "deploy/web", "--since=1s"), "tick")
		if all <= last {
			return fmt.Errorf("%d lines of ten minutes, %d of a second", all, last)
		}
		return nil
	})
	k.watch(w("tick"), nil, "logs", "-f", "deploy/web", "--tail=0")
	k.in("apiVersion: v1\nkind: Pod\nmetadata: {name: crasher}\nspec:\n  runtimeClassName: wasm\n  containers: [{name: c, image: fail.wasm}]\n", "apply", "-f", "-")
	k.c.Eventually(60*time.Second, "the crasher was restarted", func() error {
		got, err := k.command("", "get", "pod", "crasher", "-o", "jsonpath={.status.containerStatuses[0].restartCount}")
		if err != nil || got == "0" || got == "" {
			return fmt.Errorf("%s %v", got, err)
		}
		return nil
	})
	k.has(w("no such thing!"), "logs", "crasher", "--previous")
	k.has(w("Restart Count", "Terminated"), "describe", "pod", "crasher")
}

func (k *kubectl) removal() {
	k.ok("delete", "pod", "crasher", "--wait=false")
	if out, err := k.command("", "wait", "--for=delete", "pod/crasher", "--timeout=60s"); err != nil && !strings.Contains(out, "no matching resources found") { // 1.20's word for one that is gone already
		k.t.Errorf("wait --for=delete: %s %v", out, err)
	}
	k.in("apiVersion: v1\nkind: Pod\nmetadata: {name: forced}\nspec:\n  runtimeClassName: wasm\n  containers: [{name: c, image: sleep.wasm}]\n", "apply", "-f", "-")
	k.ok("delete", "pod", "forced", "--force", "--grace-period=0")
	k.ok("delete", "svc", "again")
	k.ok("delete", "deploy", "web", "--cascade=orphan")
	k.has(w("web-"), "get", "rs")
	k.ok("delete", "rs", "-l", "app=web", "--cascade=foreground", "--timeout=60s")
	k.gone("app=web", 0)
	k.ok("create", "deployment", "quick", "--image=sleep.wasm")
	k.ok("delete", "deploy", "quick", "--cascade=background", "--wait=false")
	k.c.Eventually(60*time.Second, "what it owned is collected", func() error {
		out, err := k.command("", "get", "rs,pods", "-l", "app=quick", "-o", "name")
		if err == nil && strings.Contains(out, "/") {
			err = fmt.Errorf("left: %s", out)
		}
		return err
	})
	k.ok("delete", "cm", "--all")
	k.ok("delete", "namespace", k.ns, "--timeout=60s")
	k.ns = "default"
	k.has(w("ok"), "get", "--raw", "/readyz")
	k.has(w("[+]ping ok", "[+]leader ok", "[+]disk ok", "[+]state ok", "readyz check passed"), "get", "--raw", "/readyz?verbose")
	k.has(w("[+]ping ok", "livez check passed"), "get", "--raw", "/livez?verbose")
	k.has(w("https://kubernetes.default.svc", "/openid/v1/jwks", "ES256"), "get", "--raw", "/.well-known/openid-configuration")
	k.has(w(`"kty":"EC"`, `"alg":"ES256"`), "get", "--raw", "/openid/v1/jwks")
}
