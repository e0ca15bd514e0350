package cli

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/cli/client"
)

// configured runs a small command with the file and returns the values.
func configured(t *testing.T, file string, args ...string) (listen string, pods int, labels []string, err error) {
	t.Helper()
	t.Setenv("DUNLIN_CONFIG", "")
	name := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(name, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &cobra.Command{Use: "x", SilenceErrors: true, SilenceUsage: true}
	c.Flags().String("config", name, "")
	c.Flags().StringVar(&listen, "listen", ":6443", "")
	c.Flags().IntVar(&pods, "max-pods", 110, "")
	c.Flags().StringSliceVar(&labels, "labels", nil, "")
	c.RunE = func(cmd *cobra.Command, _ []string) error { return applyConfig(cmd, name) }
	c.SetArgs(args)
	err = c.Execute()
	return listen, pods, labels, err
}

func TestFlagThenVariableThenFile(t *testing.T) {
	const file = "listen: \":1\"\nmax-pods: 20\nlabels: [a, b]\n"
	listen, pods, labels, err := configured(t, file)
	if err != nil || listen != ":1" || pods != 20 || !slices.Equal(labels, []string{"a", "b"}) {
		t.Fatalf("file: %q %d %v %v", listen, pods, labels, err)
	}
	t.Setenv("DUNLIN_LISTEN", ":2")
	t.Setenv("DUNLIN_MAX_PODS", "30")
	listen, pods, _, err = configured(t, file)
	if err != nil || listen != ":2" || pods != 30 {
		t.Fatalf("variable over file: %q %d %v", listen, pods, err)
	}
	listen, pods, _, err = configured(t, file, "--listen=:3")
	if err != nil || listen != ":3" || pods != 30 {
		t.Fatalf("flag over both: %q %d %v", listen, pods, err)
	}
	t.Setenv("DUNLIN_MAX_PODS", "many")
	if _, _, _, err = configured(t, file); err == nil || !strings.Contains(err.Error(), "DUNLIN_MAX_PODS") {
		t.Fatalf("a wrong variable: %v", err)
	}
}

func TestWrongConfiguration(t *testing.T) {
	for name, f := range map[string]struct{ file, says string }{
		"unknown key":   {"listem: x\nmax-pod: 3\n", "listem, max-pod"},
		"map":           {"listen: {a: b}\n", "not a map"},
		"wrong type":    {"max-pods: many\n", "max-pods"},
		"not YAML":      {"listen: [\n", "config.yaml"},
		"duplicate key": {"listen: a\nlisten: b\n", "listen"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, _, err := configured(t, f.file); err == nil || !strings.Contains(err.Error(), f.says) {
				t.Fatalf("%v, want %q", err, f.says)
			}
		})
	}
	if v, err := readConfig(filepath.Join(t.TempDir(), "none"), false); err != nil || v != nil {
		t.Fatalf("a default file that is missing: %v, %v", v, err)
	}
	if _, err := readConfig(filepath.Join(t.TempDir(), "none"), true); err == nil {
		t.Fatal("a named file that is missing is no error")
	}
	v, err := readConfig(os.DevNull, true)
	if err != nil || len(v) != 0 {
		t.Fatalf("an empty file: %v, %v", v, err)
	}
}

// FuzzReadConfig: no file makes it panic.
func FuzzReadConfig(f *testing.F) {
	for _, s := range []string{"", "a: 1", "a: [1, x]", "a: {b: c}", "a: 1e99", "- a", "a: &x [*x]", "\x00", "a: 1.5", "a: true"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		name := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
		_, _ = readConfig(name, true)
	})
}

func TestTableWriter(t *testing.T) {
	tab := &metav1.Table{
		ColumnDefinitions: []metav1.TableColumnDefinition{{Name: "Name"}, {Name: "Ready"}, {Name: "Age"}, {Name: "Node", Priority: 1}},
		Rows: []metav1.TableRow{
			{Cells: []any{"a", "1/1", float64(12), "pi-1"}, Object: runtime.RawExtension{Raw: []byte(`{"metadata":{"namespace":"x"}}`)}},
			{Cells: []any{"longer-näme", "line\nbreak", nil}},
		},
	}
	for name, f := range map[string]struct {
		w    tableWriter
		want string
	}{
		"narrow":    {tableWriter{}, "NAME          READY        AGE\na             1/1          12\nlonger-näme   line break   <none>\n"},
		"wide":      {tableWriter{wide: true}, "NAME          READY        AGE      NODE\na             1/1          12       pi-1\nlonger-näme   line break   <none>   <none>\n"},
		"namespace": {tableWriter{withNS: true}, "NAMESPACE   NAME          READY        AGE\nx           a             1/1          12\n            longer-näme   line break   <none>\n"},
		"bare":      {tableWriter{noHeader: true, prefix: "pod/"}, "pod/a             1/1          12\npod/longer-näme   line break   <none>\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			f.w.out = &out
			if err := f.w.print(tab); err != nil {
				t.Fatal(err)
			}
			if out.String() != f.want {
				t.Fatalf("got\n%swant\n%s", out.String(), f.want)
			}
		})
	}
	// Rows of a watch come without columns, line up, and have no header.
	var out bytes.Buffer
	w := tableWriter{out: &out}
	if err := errors.Join(w.print(tab), w.print(&metav1.Table{Rows: []metav1.TableRow{{Cells: []any{"b", "0/1", "1s", ""}}}})); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(strings.TrimSpace(out.String()), "\n"); len(lines) != 4 || lines[3] != "b             0/1          1s" {
		t.Fatalf("%q", out.String())
	}
}

func TestRolloutProgress(t *testing.T) {
	three := int32(3)
	d := func(edit func(*appsv1.Deployment)) *appsv1.Deployment {
		x := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web", Generation: 2}, Spec: appsv1.DeploymentSpec{Replicas: &three}}
		x.Status = appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 3, UpdatedReplicas: 3, AvailableReplicas: 3}
		edit(x)
		return x
	}
	for name, f := range map[string]struct {
		d       *appsv1.Deployment
		message string
		done    bool
		err     string
	}{
		"done":     {d(func(*appsv1.Deployment) {}), `deployment "web" successfully rolled out`, true, ""},
		"not seen": {d(func(x *appsv1.Deployment) { x.Generation = 3 }), "Waiting for the controller to see the new specification...", false, ""},
		"creating": {d(func(x *appsv1.Deployment) { x.Status.UpdatedReplicas = 1 }), "Waiting: 1 of 3 new pods have been created...", false, ""},
		"ending":   {d(func(x *appsv1.Deployment) { x.Status.Replicas = 5 }), "Waiting: 2 old pods are still to end...", false, ""},
		"starting": {d(func(x *appsv1.Deployment) { x.Status.AvailableReplicas = 2 }), "Waiting: 2 of 3 updated pods are available...", false, ""},
		"to nothing": {d(func(x *appsv1.Deployment) {
			zero := int32(0)
			x.Spec.Replicas = &zero
			x.Status.Replicas = 3
			x.Status.UpdatedReplicas = 0
		}), "Waiting: 3 old pods are still to end...", false, ""},
		"stalled": {d(func(x *appsv1.Deployment) {
			x.Status.AvailableReplicas = 2
			x.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentProgressing, Reason: "ProgressDeadlineExceeded", Message: "ReplicaSet x has timed out"}}
		}), "", false, "exceeded its progress deadline: ReplicaSet x has timed out"},
		"old stall, new spec": {d(func(x *appsv1.Deployment) {
			x.Generation = 3
			x.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentProgressing, Reason: "ProgressDeadlineExceeded"}}
		}), "Waiting for the controller to see the new specification...", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			message, done, err := rolloutProgress(f.d)
			if message != f.message || done != f.done || (err == nil) != (f.err == "") || (err != nil && !strings.Contains(err.Error(), f.err)) {
				t.Fatalf("%q, %v, %v", message, done, err)
			}
		})
	}
}

func TestParseMount(t *testing.T) {
	m, err := parseMount("./in:/in:ro")
	if err != nil || m.Source != "./in" || m.Target != "/in" || !m.ReadOnly {
		t.Fatalf("%+v, %v", m, err)
	}
	if m, err = parseMount("/a:/b"); err != nil || m.ReadOnly {
		t.Fatalf("%+v, %v", m, err)
	}
	if m, err = parseMount("/a:/b:rw"); err != nil || m.ReadOnly {
		t.Fatalf("%+v, %v", m, err)
	}
	for _, s := range []string{"", ":", "/a", "/a:", ":/b", "/a:b", "/a:/b:rx", "/a:/b:ro:z"} {
		var usage *usageError
		if _, err := parseMount(s); !errors.As(err, &usage) {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func TestTargets(t *testing.T) {
	all := []client.Resource{
		{GVK: schema.GroupVersionKind{Version: "v1", Kind: "Pod"}, Name: "pods", Singular: "pod", ShortNames: []string{"po"}, Namespaced: true},
		{GVK: schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: "Deployment"}, Name: "deployments", Singular: "deployment", ShortNames: []string{"deploy"}, Namespaced: true},
	}
	show := func(ts []target) string {
		var parts []string
		for _, x := range ts {
			parts = append(parts, x.res.Name+" "+strings.Join(x.names, " "))
		}
		return strings.Join(parts, "; ")
	}
	for args, want := range map[string]string{
		"pods":            "pods ",
		"po a b":          "pods a b",
		"Pod a":           "pods a",
		"pods,deploy":     "pods ; deployments ",
		"po/a deploy/b":   "pods a; deployments b",
		"deployment.apps": "deployments ",
	} {
		ts, err := targets(all, strings.Fields(args))
		if err != nil || show(ts) != want {
			t.Errorf("%s: %q, %v", args, show(ts), err)
		}
	}
	for _, args := range []string{"podz", "po/a b", "po/", "/a", "podz/a"} {
		if ts, err := targets(all, strings.Fields(args)); err == nil {
			t.Errorf("%s: %s", args, show(ts))
		}
	}
}

func TestUsageSaysWhatIsRight(t *testing.T) {
	for line, f := range map[string]struct {
		code int
		says []string
	}{
		"get":                     {exitUsage, []string{"something is missing", "Usage: dunlin get", "dunlin get --help"}},
		"version a":               {exitUsage, []string{"unknown command"}},
		"run":                     {exitUsage, []string{"Usage: dunlin run"}},
		"import a":                {exitUsage, []string{"something is missing", "Usage: dunlin import NAME FILE"}},
		"import a b c":            {exitUsage, []string{"too many arguments"}},
		"get po -o x":             {exitUsage, []string{"wide, yaml, json and name"}},
		"get --nope":              {exitUsage, []string{"unknown flag: --nope"}},
		"delete po --cascade=x":   {exitUsage, []string{"--cascade=x"}},
		"server --log-level=loud": {exitUsage, []string{"debug, info, warn and error"}},
		"version":                 {0, nil},
		"help get":                {0, nil},
	} {
		t.Setenv("DUNLIN_CONFIG", os.DevNull)
		var out, errw bytes.Buffer
		if code := Main(strings.Fields(line), strings.NewReader(""), &out, &errw); code != f.code {
			t.Errorf("%s: exit %d: %s", line, code, errw.String())
		}
		for _, want := range f.says {
			if !strings.Contains(errw.String(), want) {
				t.Errorf("%s: %q is not in: %s", line, want, errw.String())
			}
		}
	}
}

func TestEveryCommandTeaches(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: its short text is %q", c.CommandPath(), c.Short)
		}
		if c.HasSubCommands() {
			for _, s := range c.Commands() {
				walk(s)
			}
		}
	}
	walk((&app{}).root())
}

func TestAge(t *testing.T) {
	if got := age(metav1.Time{}); got != "<unknown>" {
		t.Fatal(got)
	}
	if got := age(metav1.NewTime(time.Now().Add(-90 * time.Minute))); got != "90m" {
		t.Fatal(got)
	}
}

func TestVolumeText(t *testing.T) {
	for want, v := range map[string]corev1.VolumeSource{
		"emptyDir, goes with the pod":       {EmptyDir: &corev1.EmptyDirVolumeSource{}},
		"emptyDir in memory":                {EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}},
		"configMap c":                       {ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "c"}}},
		"secret s":                          {Secret: &corev1.SecretVolumeSource{SecretName: "s"}},
		"hostPath /p":                       {HostPath: &corev1.HostPathVolumeSource{Path: "/p"}},
		`{"nfs":{"server":"n","path":"/"}}`: {NFS: &corev1.NFSVolumeSource{Server: "n", Path: "/"}},
	} {
		if got := volumeText(&v); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
