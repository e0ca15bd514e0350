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
	"github.com/spf13/pflag"
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
	if _, _, _, err = configured(t, file); err == nil || err.Error() != "DUNLIN_MAX_PODS=many: a whole number is wanted" {
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
		"watched": {d(func(x *appsv1.Deployment) {
			x.Status.Replicas = 4
			x.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentProgressing, Status: "True", Reason: "NewReplicaSetWatched", Message: "ReplicaSet x must stay"}}
		}), "Waiting: ReplicaSet x must stay", false, ""},
		"stalled": {d(func(x *appsv1.Deployment) {
			x.Status.AvailableReplicas = 2
			x.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentProgressing, Reason: "ProgressDeadlineExceeded", Message: "ReplicaSet x has timed out"}}
		}), "", false, "exceeded its progress deadline: ReplicaSet x has timed out"},
		"given up": {d(func(x *appsv1.Deployment) {
			x.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentProgressing, Reason: "ProgressDeadlineExceeded", Message: `ReplicaSet "x" was given up: 1 of its 2 pods fail again and again`}}
		}), "", false, `is being rolled back: ReplicaSet "x" was given up`},
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

// TestUsageSaysWhatIsRight, before anything is made.
func TestUsageSaysWhatIsRight(t *testing.T) {
	dir := t.TempDir()
	for _, f := range []string{"state", "run", "config"} {
		t.Setenv("DUNLIN_"+strings.ToUpper(f)+"_DIR", filepath.Join(dir, f))
	}
	profiles := filepath.Join(t.TempDir(), "profiles.yaml")
	if err := os.WriteFile(profiles, []byte("profiles: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for line, f := range map[string]struct {
		code int
		says []string
	}{
		"get":                     {exitUsage, []string{"dunlin get needs TYPE", "Usage: dunlin get", "Example: dunlin get pods\n", "dunlin get --help"}},
		"version a":               {exitUsage, []string{"unknown command"}},
		"run":                     {exitUsage, []string{"Usage: dunlin run"}},
		"import":                  {exitUsage, []string{"dunlin import needs [NAME] FILE", "Usage: dunlin import [NAME] FILE"}},
		"import a b c":            {exitUsage, []string{"too many arguments"}},
		"get po -o x":             {exitUsage, []string{"wide, yaml, json and name"}},
		"get --nope":              {exitUsage, []string{"unknown flag: --nope"}},
		"delete po --cascade=x":   {exitUsage, []string{"--cascade=x"}},
		"server --log-level=loud": {exitUsage, []string{"debug, info, warn and error"}},
		"version":                 {0, nil},
		"help get":                {0, nil},
		"help":                    {0, nil},
		"help rollout status":     {0, nil},
		"help foo":                {exitUsage, []string{`unknown help topic "foo"`, "dunlin --help"}},
		"help get pods":           {exitUsage, []string{`unknown help topic "get pods"`}},
		"agent --max-pods x":      {exitUsage, []string{"--max-pods=x: a whole number is wanted"}},
		"agent --max-pods 0":      {exitUsage, []string{"--max-pods=0: must be at least 1"}},
		"agent --gossip-port -1":  {exitUsage, []string{"--gossip-port=-1: a whole number from 0 to 65535"}},
		"apply --dry-run=x":       {exitUsage, []string{"--dry-run=x: server, client or none is wanted"}},
		"drain n --timeout=5":     {exitUsage, []string{"--timeout=5: a time such as 30s"}},
		"agent --node-labels x":   {exitUsage, []string{"--node-labels=x: key=value"}},
		"agent --node-labels kubernetes.io/arch=x":           {exitUsage, []string{"finds out by itself"}},
		"agent --node-labels node-role.kubernetes.io/x=y":    {exitUsage, []string{"kubectl label node NAME node-role.kubernetes.io/x=y"}},
		"server raise-level --to=-1":                         {exitUsage, []string{"--to=-1: a whole number from 0 on is wanted"}},
		"agent --netns a/b":                                  {exitUsage, []string{"--netns=a/b: a name"}},
		"server --netns a/b":                                 {exitUsage, []string{"--netns=a/b: a name"}},
		"agent --cgroup ../x":                                {exitUsage, []string{"--cgroup=../x: a name"}},
		"server --advertise fe80::1%eth0":                    {exitUsage, []string{`the zone "eth0" is this machine`}},
		"server --advertise 300.1.1.1 --listen 127.0.0.1:0":  {exitUsage, []string{"--advertise=300.1.1.1: an address or a name"}},
		"server --advertise a_b:6443 --listen 127.0.0.1:0":   {exitUsage, []string{"--advertise=a_b:6443: an address or a name"}},
		"completion tcsh":                                    {exitUsage, []string{"unknown command"}},
		"server --listen=foo":                                {exitUsage, []string{"--listen=foo: an address with its port"}},
		"server --listen=1.1.1.1":                            {exitUsage, []string{"--listen=1.1.1.1: an address with its port"}},
		"server --listen=:99999":                             {exitUsage, []string{`--listen=:99999: "99999" is no port`}},
		"server --listen=:http":                              {exitUsage, []string{`"http" is no port`}},
		"server --listen=203.0.113.7:6443":                   {exitFailed, []string{"this machine has no such address"}},
		"server --listen=nowhere.invalid:6443":               {exitFailed, []string{"this machine has no such address"}},
		"run x.wasm --port abc":                              {exitUsage, []string{"--port=abc: a port such as 8080"}},
		"run x.wasm --port a:99999":                          {exitUsage, []string{"--port=a:99999: a port such as 8080"}},
		"import  x":                                          {exitUsage, []string{"the module needs a name"}},
		"apply -f https://example.org/a.yaml":                {exitUsage, []string{"curl -fsSL https://example.org/a.yaml | dunlin apply -f -"}},
		"server --advertise pi:99999":                        {exitUsage, []string{`--advertise=pi:99999: "99999" is no port`}},
		"server --advertise pi:":                             {exitUsage, []string{`--advertise=pi:: "" is no port`}},
		"server --advertise 0.0.0.0":                         {exitUsage, []string{"stands for all addresses"}},
		"server --advertise a,b_c":                           {exitUsage, []string{"--advertise=b_c: an address or a name"}},
		"server --pod-cidr 10.1.0.0":                         {exitUsage, []string{"--pod-cidr=10.1.0.0: not a range"}},
		"server --pod-cidr 10.1.0.1/16":                      {exitUsage, []string{"the range is 10.1.0.0/16"}},
		"server --pod-cidr 10.1.0.0/31":                      {exitUsage, []string{"--pod-cidr=10.1.0.0/31: the range is too small: a /24 is the least"}},
		"server --pod-cidr fd01::/65":                        {exitUsage, []string{"a /64 is the least"}},
		"server --pod-cidr 10.1.0.0/16,10.2.0.0/16":          {exitUsage, []string{"--pod-cidr=10.1.0.0/16,10.2.0.0/16: one range of IPv4"}},
		"server --pod-cidr 10.43.0.0/17":                     {exitUsage, []string{"--pod-cidr=10.43.0.0/17 and --service-cidr=10.43.0.0/16 share addresses"}},
		"server --service-cidr 10.9.0.0/29":                  {exitUsage, []string{"--service-cidr=10.9.0.0/29: the range is too small: a /28 is the least"}},
		"server --service-cidr 10.9.0.8/28":                  {exitUsage, []string{"the range is 10.9.0.0/28"}},
		"server --scheduler-profiles /nowhere":               {exitUsage, []string{"--scheduler-profiles: open /nowhere: no such file"}},
		"server --scheduler-profiles " + profiles:            {exitUsage, []string{"profiles: a list is wanted, not string"}},
		"server --token-file /nowhere":                       {exitUsage, []string{"--token-file: open /nowhere: no such file"}},
		"server --token-file " + profiles:                    {exitUsage, []string{"line 1"}},
		"server --join x":                                    {exitUsage, []string{"--join: "}},
		"agent --join x":                                     {exitUsage, []string{"--join: "}},
		"agent":                                              {exitUsage, []string{"has not joined a cluster yet"}},
		"server --tls-names a_b":                             {exitUsage, []string{"--tls-names=a_b: names and addresses"}},
		"server --tls-names a\u00a0b":                        {exitUsage, []string{"names and addresses"}},
		"server --peers a_b":                                 {exitUsage, []string{"--peers=a_b: an address or a name"}},
		"server --peers pi:99999":                            {exitUsage, []string{"--peers=pi:99999: an address or a name"}},
		"server --default-unreachable-toleration-seconds -1": {exitUsage, []string{"toleration-seconds=-1: must not be negative"}},
		"scale deploy/a --replicas=abc":                      {exitUsage, []string{"--replicas=abc: a whole number is wanted"}},
		"logs a --tail=-5":                                   {exitUsage, []string{"--tail=-5: must not be negative"}},
		"logs a --since=-5s":                                 {exitUsage, []string{"--since=-5s: must not be negative"}},
		"import ../../x FILE":                                {exitUsage, []string{"../../x is a path", "NAME"}},
		"import a/../x FILE":                                 {exitUsage, []string{"a/../x is a path"}},
		"import /x FILE":                                     {exitUsage, []string{"/x is a path"}},
		"agent --run-dir /" + strings.Repeat("x", 97):        {exitUsage, []string{"109 bytes long", "107"}},
	} {
		t.Setenv("DUNLIN_CONFIG", os.DevNull)
		var out, errw bytes.Buffer
		if code := Main(strings.Split(line, " "), strings.NewReader(""), &out, &errw); code != f.code {
			t.Errorf("%s: exit %d: %s", line, code, errw.String())
		}
		for _, want := range f.says {
			if !strings.Contains(errw.String(), want) {
				t.Errorf("%s: %q is not in: %s", line, want, errw.String())
			}
		}
		if strings.Contains(errw.String(), "strconv") || strings.Contains(errw.String(), "Go struct") {
			t.Errorf("%s: of the program and not of the flag: %s", line, errw.String())
		}
		if made, err := os.ReadDir(dir); err != nil || len(made) > 0 {
			t.Errorf("%s: made %v, %v", line, made, err)
		}
	}
}

// TestFoldersHaveNames: a folder without a name would be the current one.
func TestFoldersHaveNames(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("DUNLIN_CONFIG", os.DevNull)
	fails := func(args []string, wants string) {
		t.Helper()
		var out, errw bytes.Buffer
		if code := Main(args, strings.NewReader(""), &out, &errw); code != exitUsage || !strings.Contains(errw.String(), wants) {
			t.Errorf("%q: exit %d: %s", args, code, errw.String())
		}
	}
	n := 0
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		for _, s := range c.Commands() {
			walk(s)
		}
		if !c.Runnable() {
			return
		}
		c.InheritedFlags() // merges them into Flags
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if !strings.HasSuffix(f.Name, "-dir") {
				return
			}
			n++
			args := append(strings.Fields(c.CommandPath())[1:], "--"+f.Name+"=")
			for i := 0; i < 3 && c.Args != nil && c.Args(c, args[len(args)-i:]) != nil; i++ {
				args = append(args, "server") // it wants so many
			}
			fails(args, "the name of a folder is wanted")
		})
	}
	walk((&app{}).root())
	if n < 30 {
		t.Errorf("only %d flags seen", n)
	}
	for _, name := range []string{"STATE", "RUN", "CONFIG"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("DUNLIN_"+name+"_DIR", "")
			fails([]string{"agent"}, "--"+strings.ToLower(name)+"-dir=: the name of a folder is wanted")
		})
	}
	if made, err := os.ReadDir("."); err != nil || len(made) > 0 {
		t.Errorf("made %v, %v", made, err)
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
