package cli

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane/api"
	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/api/discovery"
	"github.com/dunlin-project/dunlin/controlplane/api/openapi"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// world is the real API over the real state machine, without Raft, and a
// kubeconfig for it.
type world struct {
	t     *testing.T
	dir   string
	local *state.Local
	reg   *registry.Registry
	http  *httptest.Server
}

func newWorld(t *testing.T, edits ...func(*api.Config)) *world {
	t.Helper()
	m := state.NewMachine(state.Options{})
	w := &world{t: t, dir: t.TempDir(), local: state.NewLocal(m)}
	soft := state.NewSoft(1, state.SoftOptions{})
	reg, err := registry.New(registry.Config{Durable: m, Proposer: w.local, Soft: soft, SoftProposer: registry.LocalSoft(soft, w.local)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := reg.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, registry.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.reg = reg
	disco, err := discovery.New(discovery.Config{Version: "v0.0.0"})
	if err != nil {
		t.Fatal(err)
	}
	cfg := api.Config{
		Registry: reg, Proposer: w.local, Types: openapi.TypeConverter, Discovery: disco, Authorizer: auth.NewAuthorizer(reg),
		Authenticator: auth.AuthenticatorFunc(func(*http.Request) (*auth.User, bool, error) {
			return &auth.User{Name: "admin", Groups: []string{auth.AdminsGroup, auth.AuthenticatedGroup}}, true, nil
		}),
	}
	for _, edit := range edits {
		edit(&cfg)
	}
	server, err := api.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w.http = httptest.NewTLSServer(server)
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		w.http.Close()
	})
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: w.http.Certificate().Raw})
	w.file("kubeconfig", fmt.Sprintf(`{"current-context":"c","contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],
"clusters":[{"name":"c","cluster":{"server":%q,"certificate-authority-data":%q}}],"users":[{"name":"u","user":{"token":"t"}}]}`,
		w.http.URL, base64.StdEncoding.EncodeToString(ca)))
	t.Setenv("KUBECONFIG", filepath.Join(w.dir, "kubeconfig"))
	t.Setenv("DUNLIN_CONFIG", os.DevNull)
	return w
}

// file writes a file and returns its name.
func (w *world) file(name, text string) string {
	w.t.Helper()
	name = filepath.Join(w.dir, name)
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return name
}

// run is one command line.
func run(args ...string) (code int, out, errs string) {
	var o, e bytes.Buffer
	code = Main(args, strings.NewReader(""), &o, &e)
	return code, o.String(), e.String()
}

// ok runs a command that must work.
func (w *world) ok(args ...string) string {
	w.t.Helper()
	code, out, errs := run(args...)
	if code != 0 {
		w.t.Fatalf("dunlin %s: exit %d\n%s%s", strings.Join(args, " "), code, out, errs)
	}
	return out
}

func cm(name, labels, a string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s, labels: {%s}}\ndata: {a: %q}\n---\n", name, labels, a)
}

// TestApplyChecksFirst: an invalid object changes nothing, and each is named.
func TestApplyChecksFirst(t *testing.T) {
	w := newWorld(t)
	bad := strings.Replace(cm("bad", "app: x", "2"), "name: bad", "name: bad_name", 1)
	worse := strings.Replace(cm("worse", "app: x", "2"), "name: worse", "name: worse!", 1)
	code, out, errs := run("apply", "-f", w.file("m.yaml", cm("one", "app: x", "1")+bad+cm("three", "app: x", "3")))
	if code != 1 || out != "" || strings.Count(errs, "Error:") != 1 || !strings.Contains(errs, "bad_name") || !strings.Contains(errs, "nothing was changed") {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
	code, out, errs = run("apply", "-f", w.file("m.yaml", cm("one", "app: x", "1")+bad+worse))
	if code != 1 || out != "" || !strings.Contains(errs, "worse!") || !strings.Contains(errs, "2 of 3 objects are invalid, nothing was changed") {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
	if out := w.ok("get", "cm", "-o", "name"); strings.Contains(out, "one") || strings.Contains(out, "three") {
		t.Errorf("%s", out)
	}
	if code, out, errs = run("apply", "-f", w.file("m.yaml", cm("one", "app: x", "1")+strings.Replace(cm("x", "app: x", "1"), "name: x, ", "", 1))); code != 1 || out != "" || !strings.Contains(errs, "metadata.name is missing") {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
	// A namespace, and what would be invalid in any.
	code, out, errs = run("apply", "-f", w.file("m.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: newer}\n---\n"+cm("one", "app: x", "1")+
		"apiVersion: v1\nkind: Pod\nmetadata: {name: none, namespace: newer}\nspec: {containers: []}\n"))
	if code != 1 || out != "" || !strings.Contains(errs, "spec.containers") || !strings.Contains(errs, "nothing was changed") {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
	// A namespace and what is in it.
	ns := "apiVersion: v1\nkind: Namespace\nmetadata: {name: fresh}\n---\n"
	if out := w.ok("apply", "-f", w.file("m.yaml", ns+strings.Replace(cm("in", "app: x", "1"), "name: in", "name: in, namespace: fresh", 1))); !strings.Contains(out, "configmap/in created") {
		t.Errorf("%s", out)
	}
}

// TestApplyGoesOn: what the server refuses is reported, and the rest applied.
func TestApplyGoesOn(t *testing.T) {
	w := newWorld(t)
	file := w.file("m.yaml", cm("one", "app: x", "1")+strings.Replace(cm("two", "app: x", "2"), "name: two", "name: two, namespace: nowhere", 1)+
		strings.Replace(cm("other", "app: x", "2"), "name: other", "name: other, namespace: void", 1)+cm("three", "app: x", "3"))
	code, out, errs := run("apply", "-f", file)
	if code != 1 || out != "configmap/one created\nconfigmap/three created\n" {
		t.Errorf("exit %d\n%s", code, out)
	}
	for _, want := range []string{"m.yaml:6: ", `namespaces "nowhere" not found`, `namespaces "void" not found`, "Error: 2 of 4 objects were not applied; the reasons stand above"} {
		if !strings.Contains(errs, want) {
			t.Errorf("no %q in\n%s", want, errs)
		}
	}
	// One object: its error alone.
	code, _, errs = run("apply", "-f", w.file("n.yaml", strings.Replace(cm("two", "app: x", "2"), "name: two", "name: two, namespace: nowhere", 1)))
	if code != 1 || strings.Count(errs, "Error:") != 1 || strings.Contains(errs, "of 1") {
		t.Errorf("exit %d %s", code, errs)
	}
	// Deleting goes on, too.
	code, out, errs = run("delete", "-f", file)
	if code != 1 || !strings.Contains(out, "configmap/one deleted") || !strings.Contains(out, "configmap/three deleted") ||
		!strings.Contains(errs, "Error: 2 of 4 objects were not deleted") || !strings.Contains(errs, "configmap/two: ") {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
	if code, out, errs = run("delete", "-f", file, "--ignore-not-found"); code != 0 || out != "" || errs != "" {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
	// Without a server there is no point in going on, and that is said.
	w.http.Close()
	a := w.file("k", `{"current-context":"c","contexts":[{"name":"c","context":{"cluster":"c"}}],"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}]}`)
	if code, _, errs = run("apply", "-f", file, "--kubeconfig", a); code != 1 || strings.Count(errs, "Error:") != 1 {
		t.Errorf("exit %d\n%s", code, errs)
	}
}

// TestAttempts: what was not tried is named.
func TestAttempts(t *testing.T) {
	var errs bytes.Buffer
	a := &app{errw: &errs}
	ctx, cancel := context.WithCancel(t.Context())
	each := a.each("applied", 3)
	if err := each.note(ctx, 0, fmt.Errorf("refused")); err != nil {
		t.Fatal(err)
	}
	cancel()
	err := each.note(ctx, 1, ctx.Err())
	if err == nil || !strings.Contains(err.Error(), "the other 1 of 3 objects were not tried") || errs.String() != "Error: refused\n" {
		t.Errorf("%v, said %q", err, errs.String())
	}
}

func TestGetForms(t *testing.T) {
	w := newWorld(t)
	w.ok("apply", "-f", w.file("m.yaml", cm("b", "app: x, tier: web", "10")+cm("a", "app: x", "9")+cm("c", "app: z", "1000000")))
	for _, c := range []struct {
		args string
		want string
	}{
		{"get cm -o name", "configmap/a\nconfigmap/b\nconfigmap/c\n"},
		{"get cm -l app=x -o name", "configmap/a\nconfigmap/b\n"},
		{"get cm --field-selector metadata.name=c -o name", "configmap/c\n"},
		{"get cm -A -l app!=x -o name", "configmap/c\n"},
		{"get cm -o name --sort-by=.data.a", "configmap/a\nconfigmap/b\nconfigmap/c\n"},
		{"get cm -o name --sort-by={.metadata.labels.tier}", "configmap/a\nconfigmap/c\nconfigmap/b\n"},
		{"get cm -o name --sort-by=metadata.resourceVersion", "configmap/b\nconfigmap/a\nconfigmap/c\n"},
		{"get cm -o jsonpath={.items[*].metadata.name}", "a b c"},
		{"get cm a -o jsonpath={.data.a}:{.metadata.labels.app}:{.metadata.labels.none}", "9:x:"},
		{"get cm -o jsonpath={range|.items[?(@.data.a==\"9\")]}{.metadata.name}{\"\\n\"}{end}", "a\n"},
		{"get ns -o name", "namespace/default\n"},
	} {
		args := strings.Split(c.args, " ")
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "|", " ")
		}
		if out := w.ok(args...); out != c.want {
			t.Errorf("dunlin %s: %q, want %q", c.args, out, c.want)
		}
	}
	table := strings.Split(strings.TrimSpace(w.ok("get", "cm", "--show-labels", "--sort-by=.data.a")), "\n")
	if len(table) != 4 || !strings.HasSuffix(table[0], "   LABELS") || !strings.HasPrefix(table[1], "a ") || !strings.HasSuffix(table[2], "   app=x,tier=web") || !strings.HasPrefix(table[3], "c ") {
		t.Errorf("table:\n%s", strings.Join(table, "\n"))
	}
	if out := w.ok("get", "cm", "-o", "json", "-l", "app=none"); !strings.Contains(out, `"items": []`) {
		t.Errorf("no objects: %s", out)
	}
	for args, says := range map[string]string{
		"get cm -o jsonpath={.a":           "unclosed action",
		"get cm -o table":                  "jsonpath=TEMPLATE",
		"get cm -o json --show-labels":     "--show-labels is for tables",
		"get cm --sort-by={":               "a path such as",
		"get cm --sort-by=.spec.nothing":   "no object has this field",
		"get cm -o name --sort-by=.spec.x": "no object has this field",
	} {
		if code, _, errs := run(strings.Split(args, " ")...); code != 2 || !strings.Contains(errs, says) {
			t.Errorf("dunlin %s: exit %d, %q, want %q", args, code, errs, says)
		}
	}
}

// TestGetGoesOnAfterAMiss: what there is is printed, and every miss named.
func TestGetGoesOnAfterAMiss(t *testing.T) {
	w := newWorld(t)
	w.ok("apply", "-f", w.file("m.yaml", cm("a", "app: x", "1")+cm("b", "app: x", "2")))
	for _, c := range []struct{ args, out, errs string }{
		{"get secrets,cm a", "configmap/a ", "Error: secrets \"a\" not found\n"},
		{"get secrets,cm a -o name", "configmap/a\n", "Error: secrets \"a\" not found\n"},
		{"get cm x b y", "b ", "Error: configmaps \"x\" not found\nError: configmaps \"y\" not found\n"},
		{"get cm x b -o name", "configmap/b\n", "Error: configmaps \"x\" not found\n"},
		{"get cm x -o yaml", "", "Error: configmaps \"x\" not found\n"},
		{"get cm x", "", "Error: configmaps \"x\" not found\n"},
	} {
		code, out, errs := run(strings.Fields(c.args)...)
		if code != 1 || errs != c.errs || !strings.Contains(out, c.out) || c.out == "" && out != "" {
			t.Errorf("dunlin %s: exit %d\n%s%s", c.args, code, out, errs)
		}
	}
	if code, _, errs := run("get", "cm", "a", "b"); code != 0 {
		t.Errorf("exit %d %s", code, errs)
	}
}

// TestEventsByTime: the latest last, whichever API reported them.
func TestEventsByTime(t *testing.T) {
	w := newWorld(t)
	at := func(minute int) time.Time { return time.Date(2026, 6, 1, 12, minute, 0, 0, time.UTC) }
	for _, e := range []corev1.Event{
		{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Reason: "Third", LastTimestamp: metav1.NewTime(at(30)), FirstTimestamp: metav1.NewTime(at(1))},
		{ObjectMeta: metav1.ObjectMeta{Name: "b"}, Reason: "First", FirstTimestamp: metav1.NewTime(at(10)), LastTimestamp: metav1.NewTime(at(10))},
		{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Reason: "Fourth", EventTime: metav1.NewMicroTime(at(5)), Series: &corev1.EventSeries{Count: 2, LastObservedTime: metav1.NewMicroTime(at(40))}},
		{ObjectMeta: metav1.ObjectMeta{Name: "d"}, Reason: "Second", EventTime: metav1.NewMicroTime(at(20))},
	} {
		e.Namespace, e.Type, e.ReportingController, e.ReportingInstance, e.Action = "default", "Normal", "test", "test", "Test"
		e.InvolvedObject = corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "p", APIVersion: "v1"}
		if _, err := w.reg.Create(t.Context(), &e, registry.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"events"}, {"events", "-A"}, {"events", "--for", "pod/p"}} {
		out := w.ok(args...)
		var order []string
		for _, f := range strings.Fields(out) {
			if slices.Contains([]string{"First", "Second", "Third", "Fourth"}, f) {
				order = append(order, f)
			}
		}
		if strings.Join(order, " ") != "First Second Third Fourth" {
			t.Errorf("dunlin %s:\n%s", strings.Join(args, " "), out)
		}
	}
}

// TestWholeNumbersStayWhole: the template engine sees integers.
func TestWholeNumbersStayWhole(t *testing.T) {
	p, err := template("{.n} {.f} {.o}")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := execute(&out, p, map[string]any{"n": float64(12345678), "f": 1.5, "o": map[string]any{"a": "b"}}); err != nil || out.String() != `12345678 1.5 {"a":"b"}` {
		t.Errorf("%q, %v", out.String(), err)
	}
}

// watched is where a command writes, and who waits for it.
type watched struct {
	lines chan string
	rest  string
}

func (w *watched) Write(b []byte) (int, error) {
	w.rest += string(b)
	for {
		line, rest, ok := strings.Cut(w.rest, "\n")
		if !ok {
			return len(b), nil
		}
		w.lines <- line
		w.rest = rest
	}
}

// TestWatchInEveryForm: -w goes on after the list, also as names, YAML or a
// template.
func TestWatchInEveryForm(t *testing.T) {
	w := newWorld(t)
	w.ok("apply", "-f", w.file("m.yaml", cm("a", "app: x", "1")))
	for form, want := range map[string]string{
		"": "b ", "name": "configmap/b", "jsonpath={.metadata.name}={.data.a}": "b=2", "yaml": "  name: b", "json": `        "name": "b",`,
	} {
		ctx, cancel := context.WithCancel(t.Context())
		out := &watched{lines: make(chan string, 1000)}
		a := &app{in: strings.NewReader(""), out: out, errw: &bytes.Buffer{}}
		root := a.root()
		root.SetArgs([]string{"get", "cm", "-w", "-o", form})
		done := make(chan error, 1)
		go func() { done <- root.ExecuteContext(ctx) }()
		for line := range out.lines { // the list is there
			if strings.Contains(line, "a") && line != "---" {
				break
			}
		}
		w.ok("apply", "-f", w.file("b.yaml", cm("b", "app: x", "2")))
		for line := range out.lines {
			if strings.HasPrefix(line, want) {
				break
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("-o %s: %v", form, err)
		}
		w.ok("delete", "cm", "b")
	}
}

// TestAPIResources: the hint of a kind that is not served names a command
// that exists.
func TestAPIResources(t *testing.T) {
	w := newWorld(t)
	out := w.ok("api-resources")
	for _, want := range []string{"NAME ", "KIND\n", "deployments ", " deploy ", " apps/v1 ", " CronJob\n", "nodes "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	code, _, errs := run("apply", "-f", w.file("m.yaml", "apiVersion: example.org/v1\nkind: Xylophone\nmetadata: {name: a}\n"))
	if code != 1 || !strings.Contains(errs, "'dunlin api-resources'") {
		t.Errorf("exit %d %s", code, errs)
	}
}

// TestConfigDir: commands find this machine's kubeconfig where the server's
// --config-dir puts it, given as a flag, a variable or a key of the file.
func TestConfigDir(t *testing.T) {
	w := newWorld(t)
	dir := filepath.Join(w.dir, "srv")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	good := filepath.Join(dir, "admin.kubeconfig")
	if err := os.Rename(filepath.Join(w.dir, "kubeconfig"), good); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HOME", w.dir)
	t.Setenv("XDG_CONFIG_HOME", "")
	other := w.file("other", `{"current-context":"c","contexts":[{"name":"c","context":{"cluster":"c"}}],"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}]}`)
	path := func() string { return strings.TrimSpace(w.ok("kubeconfig", "--path")) }

	t.Setenv("KUBECONFIG", other) // the flag comes before it
	if got := strings.TrimSpace(w.ok("kubeconfig", "--path", "--config-dir", dir)); got != good {
		t.Errorf("--config-dir: %s", got)
	}
	w.ok("get", "ns", "--config-dir", dir)
	t.Setenv("DUNLIN_CONFIG_DIR", dir) // the variable does not
	if got := path(); got != other {
		t.Errorf("$KUBECONFIG and DUNLIN_CONFIG_DIR: %s", got)
	}
	t.Setenv("KUBECONFIG", "")
	if got := path(); got != good {
		t.Errorf("DUNLIN_CONFIG_DIR: %s", got)
	}
	w.ok("get", "ns")
	if err := os.Unsetenv("DUNLIN_CONFIG_DIR"); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DUNLIN_CONFIG", w.file("config.yaml", "config-dir: "+dir+"\n"))
	if got := path(); got != good {
		t.Errorf("config-dir in the file: %s", got)
	}
	if code, _, errs := run("kubeconfig", "--config-dir", w.dir); code != 1 || !strings.Contains(errs, filepath.Join(w.dir, "admin.kubeconfig")) {
		t.Errorf("a folder without one: exit %d %s", code, errs)
	}
}

// TestMissingArguments: every command that needs some says which, and shows
// a line that works.
func TestMissingArguments(t *testing.T) {
	t.Setenv("DUNLIN_CONFIG", os.DevNull)
	for line, want := range map[string]string{
		"get":               "dunlin get needs TYPE[,TYPE...] [NAME...]",
		"describe":          "dunlin describe needs (TYPE [NAME...]",
		"logs":              "dunlin logs needs (POD | TYPE/NAME)",
		"exec":              "dunlin exec needs (POD | TYPE/NAME) -- COMMAND [ARG...]",
		"exec web":          "dunlin exec needs (POD | TYPE/NAME) -- COMMAND [ARG...]",
		"attach":            "dunlin attach needs (POD | TYPE/NAME)",
		"port-forward web":  "dunlin port-forward needs (POD | TYPE/NAME) [LOCAL:]REMOTE...",
		"cp web:/a":         "dunlin cp needs (FILE POD:FILE | POD:FILE FILE)",
		"run":               "dunlin run needs MODULE.wasm",
		"import":            "dunlin import needs [NAME] FILE",
		"export x":          "dunlin export needs IMAGE... FILE",
		"scale":             "dunlin scale needs TYPE/NAME --replicas=N",
		"rollout status":    "dunlin rollout status needs deploy/NAME",
		"rollout restart":   "dunlin rollout restart needs deploy/NAME",
		"node revoke":       "dunlin node revoke needs NAME",
		"node declare-dead": "dunlin node declare-dead needs NAME",
		"install":           "dunlin install needs server | install agent --join LINE",
		"apply":             "give at least one file with -f",
		"delete":            "name what to delete",
	} {
		code, _, errs := run(strings.Split(line, " ")...)
		if code != 2 || !strings.Contains(errs, want) || !strings.Contains(errs, "xample: dunlin "+strings.Split(line, " ")[0]) {
			t.Errorf("dunlin %s: exit %d\n%s", line, code, errs)
		}
	}
	if code, _, errs := run("logs", "a", "b"); code != 2 || !strings.Contains(errs, "too many arguments") {
		t.Errorf("exit %d %s", code, errs)
	}
}

// TestApplyAfterScale: what another command of dunlin's changed is no conflict;
// what somebody else manages is.
func TestApplyAfterScale(t *testing.T) {
	w := newWorld(t)
	file := w.file("d.yaml", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {replicas: 2, selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {runtimeClassName: wasm, containers: [{name: c, image: 'file:///a.wasm'}]}}}\n")
	w.ok("apply", "-f", file)
	w.ok("scale", "deploy/web", "--replicas=3")
	if out := w.ok("apply", "-f", file); !strings.Contains(out, "configured") {
		t.Errorf("%s", out)
	}
	if out := w.ok("get", "deploy", "web", "-o", "yaml"); !strings.Contains(out, "replicas: 2") {
		t.Errorf("%s", out)
	}
	for message, own := range map[string]bool{
		`conflict with "dunlin" with subresource "scale" using apps/v1`: true,
		`conflict with "kubectl-scale" using apps/v1`:                   false,
		`conflict with "dunlin-other" using apps/v1`:                    false,
	} {
		err := &client.StatusError{Status: metav1.Status{Code: 409, Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: metav1.CauseTypeFieldManagerConflict, Message: message}}}}}
		if ownConflict(err) != own {
			t.Errorf("%s: %v", message, !own)
		}
		if hint := conflictHint(err); !strings.Contains(hint, "--force-conflicts") {
			t.Errorf("%s: %s", message, hint)
		}
	}
	// An object that is another one has no fields to take over.
	other := w.file("other.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: kube-root-ca.crt, uid: xyz}\ndata: {a: b}\n")
	if code, _, errs := run("apply", "-f", other); code == 0 || strings.Contains(errs, "--force-conflicts") || !strings.Contains(errs, "leave them out") {
		t.Errorf("exit %d\n%s", code, errs)
	}
}

// TestCheckTakesWhatTheServerTakes: what is judged here, before there is a
// namespace, is judged no stricter than there.
func TestCheckTakesWhatTheServerTakes(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "examples", "*", "*.yaml"))
	if err != nil || len(files) < 4 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, f := range files {
		list, err := (&app{}).readManifest(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range list {
			if err := d.check("default"); err != nil {
				t.Errorf("%s: %v", d.source, err)
			}
		}
	}
}
