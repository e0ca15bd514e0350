package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/node/view"
)

// cutOff is a node that has lost its server.
type cutOff struct{}

func (cutOff) Pods() []*corev1.Pod {
	pod := func(namespace, name string, edit func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: "uid-x", Labels: map[string]string{"app": name}, CreationTimestamp: metav1.NewTime(time.Now().Add(-2 * time.Hour))},
			Spec:       corev1.PodSpec{NodeName: "pi-1", Containers: []corev1.Container{{Name: "main", Image: name + ".wasm"}}},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning},
		}
		edit(p)
		return p
	}
	waiting := func(reason, message string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", Image: p.Spec.Containers[0].Image, RestartCount: 3,
				State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}},
				LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, Reason: "Error", Message: "no sensor"}}}}
		}
	}
	return []*corev1.Pod{
		pod("default", "crasher", waiting("CrashLoopBackOff", "back-off 40s restarting failed container=main")),
		pod("default", "fine", func(p *corev1.Pod) {
			p.Status.PodIP = "10.42.0.7"
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: "True"}}
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
		}),
		pod("lab", "fine", waiting("ErrImageNeverPull", "not on this node")),
		pod("lab", "noconfig", waiting("CreateContainerConfigError", `configmap "x" not found`)),
	}
}

func (cutOff) Node() *corev1.Node {
	return &corev1.Node{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: "pi-1"},
		Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: "True", Reason: "KubeletReady"}}, Allocatable: corev1.ResourceList{"pods": resource.MustParse("110")}},
	}
}

func (cutOff) WaitingEvents() []corev1.Event {
	return []corev1.Event{{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "e"}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "crasher", UID: "uid-x"}, Type: "Warning", Reason: "BackOff", Message: "Container ended", Count: 4, LastTimestamp: metav1.Now()}}
}

func (cutOff) Logs(_ context.Context, namespace, pod, _ string, o *corev1.PodLogOptions, w io.Writer) error {
	tail := int64(-1)
	if o.TailLines != nil {
		tail = *o.TailLines
	}
	_, err := fmt.Fprintf(w, "%s/%s/%s tail %d previous %v\n", namespace, pod, o.Container, tail, o.Previous)
	return err
}

// runDir has the socket of an agent that answers.
func agentRunDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dc") // socket paths are short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := view.Listen(agentSocket(dir), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "dunlin_agent_something", Help: "x"}))
	age := 3 * time.Hour
	srv := &http.Server{Handler: view.Handler(view.Config{Source: cutOff{}, Metrics: reg, Status: func() view.Status {
		return view.Status{Node: "pi-1", Version: "v1", Uptime: 5 * time.Hour, LeaseAge: &age, Reason: "connect: no route to host", Servers: []string{"10.0.0.5:6443"}}
	}}), ReadHeaderTimeout: time.Minute}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return dir
}

// dunlin runs a command line.
func dunlin(t *testing.T, args ...string) (out, errs string, code int) {
	t.Helper()
	var o, e bytes.Buffer
	code = Main(args, strings.NewReader(""), &o, &e)
	return o.String(), e.String(), code
}

// nowhere is a kubeconfig whose server does not answer.
func nowhere(t *testing.T) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "kubeconfig")
	const text = "apiVersion: v1\nkind: Config\ncurrent-context: x\ncontexts: [{name: x, context: {cluster: c, user: u}}]\nclusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\nusers: [{name: u, user: {token: t}}]\n"
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestLocalView(t *testing.T) {
	t.Setenv("DUNLIN_CONFIG", "")
	t.Setenv("KUBECONFIG", "/nonexistent")
	dir := agentRunDir(t)
	for _, f := range []struct {
		args string
		says []string
		not  []string
	}{
		{"get pods", []string{"NAMESPACE   NAME       READY   STATUS                       RESTARTS   AGE\n", "default     crasher    0/1     CrashLoopBackOff             3          120m", "lab         noconfig"}, nil},
		{"get po -n lab -o wide", []string{"NAME       READY", "NODE", "pi-1", "fine", "noconfig"}, []string{"crasher", "NAMESPACE"}},
		{"get pods -l app=crasher", []string{"crasher"}, []string{"fine"}},
		{"get pods crasher", []string{"crasher"}, []string{"fine"}},
		{"get pods --field-selector metadata.namespace=lab -o name", []string{"pod/fine\npod/noconfig\n"}, []string{"crasher"}},
		{"get pod crasher -o yaml", []string{"kind: Pod", "restartCount: 3", "apiVersion: v1"}, []string{"kind: List"}},
		{"get pods -o json", []string{`"kind": "List"`, `"name": "noconfig"`}, nil},
		{"get pods --sort-by=.spec.containers[0].image --no-headers -n lab", []string{"fine       0/1   ErrImageNeverPull", "\nnoconfig "}, nil},
		{"get pods --show-labels", []string{"LABELS", "app=crasher"}, nil},
		{"get pods -o jsonpath={.items[*].metadata.name}", []string{"crasher fine fine noconfig"}, nil},
		{"get nodes", []string{"NAME   STATUS   ROLES", "pi-1   Ready"}, []string{"NAMESPACE"}},
		{"get events", []string{"LAST SEEN", "BackOff", "pod/crasher"}, nil},
		{"events", []string{"BackOff", "pod/crasher"}, nil},
		{"events --for pod/fine -n lab", []string{""}, []string{"BackOff"}},
		{"get --raw /metrics", []string{"dunlin_agent_something 0\n"}, nil},
		{"get --raw /healthz", []string{"ok"}, nil},
		{"describe pod crasher", []string{
			"Why:           container main ended with exit code 3 (Error): no sensor, 4 times so far; back-off 40s before the next start (for 120m)",
			"Next:          'dunlin logs crasher -c main --previous --local' shows what it wrote", "Container ended", "LAST SEEN",
		}, nil},
		{"describe pod fine -n lab", []string{"ErrImageNeverPull: not on this node", "'dunlin import fine.wasm FILE.wasm' gives this node the module", "<none> that no server has been told yet"}, nil},
		{"describe pod/noconfig", []string{`configmap "x" not found`, "what is missing comes from a server: 'dunlin describe node pi-1 --local'"}, nil},
		{"describe node pi-1", []string{"Agent:         v1, up for 5h", "Control plane: out of reach for 3h: connect: no route to host", "10.0.0.5:6443", "pods   4           110", "lab/noconfig"}, nil},
		{"logs crasher --tail 3 -p", []string{"default/crasher/main tail 3 previous true\n"}, nil},
		{"logs pod/fine -n lab", []string{"lab/fine/main tail -1 previous false\n"}, nil},
	} {
		out, errs, code := dunlin(t, append(strings.Fields(f.args), "--local", "--run-dir", dir)...)
		if code != 0 {
			t.Errorf("%s: exit code %d: %s", f.args, code, errs)
		}
		for _, want := range f.says {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in:\n%s", f.args, want, out)
			}
		}
		for _, no := range f.not {
			if strings.Contains(out, no) {
				t.Errorf("%s: %q in:\n%s", f.args, no, out)
			}
		}
	}
}

func TestLocalViewRefusals(t *testing.T) {
	t.Setenv("DUNLIN_CONFIG", "")
	dir, empty := agentRunDir(t), t.TempDir()
	for _, f := range []struct {
		args string
		dir  string
		code int
		says string
	}{
		{"get deploy --local", dir, 1, `no "deploy": everything else only a server knows`},
		{"get pod fine --local", dir, 1, "in the namespaces default, lab: choose one"},
		{"get pod none --local", dir, 1, `pods "none" not found`},
		{"get pods -w --local", dir, 2, "--watch needs a server"},
		{"get pods --local --field-selector spec.x=1", dir, 1, "not supported: spec.x"},
		{"get --raw metrics --local", dir, 2, "a path such as"},
		{"get --raw /x pods --local", dir, 2, ""},
		{"get --local", dir, 2, "dunlin get needs TYPE"},
		{"describe node other --local", dir, 1, "this one is pi-1"},
		{"logs deploy/x --local", dir, 1, `no "deploy"`},
		{"logs node/x --local", dir, 2, "keeps logs of pods only"},
		{"get pods --local", empty, 1, "no agent runs here: there is no " + agentSocket(empty)},
	} {
		out, errs, code := dunlin(t, append(strings.Fields(f.args), "--run-dir", f.dir)...)
		if code != f.code || !strings.Contains(errs, f.says) || out != "" {
			t.Errorf("%s: exit code %d, %q, %q", f.args, code, errs, out)
		}
	}
}

// TestNoServerNamesTheAgent: who reaches no server is told that the agent of
// this machine can be asked, if there is one.
func TestNoServerNamesTheAgent(t *testing.T) {
	t.Setenv("DUNLIN_CONFIG", "")
	dir, empty := agentRunDir(t), t.TempDir()
	away := nowhere(t)
	for args, want := range map[string]string{
		"get pods -A":          "dunlin get pods --local --run-dir " + dir,
		"get --raw /metrics":   "dunlin get pods --local --run-dir " + dir,
		"get deploy":           "dunlin get pods --local --run-dir " + dir,
		"describe pod/crasher": "dunlin describe pod/crasher --local --run-dir " + dir,
		"events -A":            "dunlin events --local --run-dir " + dir,
		"logs crasher -f":      "dunlin logs crasher --local --run-dir " + dir,
	} {
		_, errs, code := dunlin(t, append(strings.Fields(args), "--kubeconfig", away, "--run-dir", dir)...)
		if code != 1 || !strings.Contains(errs, "cannot reach the server https://127.0.0.1:1") || !strings.HasSuffix(errs, "knows its own pods without any server: "+want+"\n") {
			t.Errorf("%s: %d %q", args, code, errs)
		}
		if _, errs, _ = dunlin(t, append(strings.Fields(args), "--kubeconfig", away, "--run-dir", empty)...); strings.Contains(errs, "--local") {
			t.Errorf("%s: no agent runs there: %q", args, errs)
		}
	}
	t.Setenv("KUBECONFIG", "")
	t.Setenv("HOME", empty)
	t.Setenv("XDG_CONFIG_HOME", empty)
	if _, err := os.Stat("/etc/dunlin/admin.kubeconfig"); err == nil {
		return // a real server's
	}
	if _, errs, code := dunlin(t, "get", "pods", "--run-dir", dir); code != 1 || !strings.Contains(errs, "no kubeconfig found") || !strings.Contains(errs, "dunlin get pods --local") {
		t.Errorf("without a kubeconfig: %d %q", code, errs)
	}
}

func TestLocalCompletion(t *testing.T) {
	t.Setenv("DUNLIN_CONFIG", "")
	dir := agentRunDir(t)
	for args, want := range map[string]string{
		"get --local --run-dir " + dir + " ":              "events\nnodes\npods\n",
		"describe --local --run-dir " + dir + " pod ":     "crasher\nfine\nfine\nnoconfig\n",
		"describe --local --run-dir " + dir + " pod/":     "pod/crasher\n",
		"logs -n lab --local --run-dir " + dir + " ":      "fine\nnoconfig\n",
		"logs -n default --run-dir " + dir + " --local c": "crasher\n",
	} {
		out, _, _ := dunlin(t, append([]string{"__complete"}, strings.Split(args, " ")...)...)
		if !strings.HasPrefix(out, want) {
			t.Errorf("%q: %q, want %q", args, out, want)
		}
	}
}
