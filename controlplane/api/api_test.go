package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/api/auth/reviews"
	"github.com/dunlin-project/dunlin/controlplane/api/openapi"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// world is the API over the real registry and state machine, on TLS.
type world struct {
	t       testing.TB
	reg     *registry.Registry
	machine *state.Machine
	local   *state.Local
	server  *Server
	http    *httptest.Server
	cut     atomic.Bool // from the leader
}

func newWorld(t testing.TB, set ...func(*Config)) *world {
	t.Helper()
	w := &world{t: t, machine: state.NewMachine(state.Options{})}
	w.local = state.NewLocal(w.machine)
	soft := state.NewSoft(1, state.SoftOptions{})
	var err error
	w.reg, err = registry.New(registry.Config{Durable: w.machine, Proposer: cutOff{w.local, &w.cut}, Soft: soft, SoftProposer: registry.LocalSoft(soft, w.local)})
	if err != nil {
		t.Fatal(err)
	}
	for _, ns := range []string{"default", "kube-node-lease"} {
		if _, err := w.reg.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, registry.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	cfg := Config{
		Registry: w.reg, Proposer: cutOff{w.local, &w.cut}, Types: openapi.TypeConverter,
		Authenticator: auth.AuthenticatorFunc(func(r *http.Request) (*auth.User, bool, error) {
			switch r.Header.Get("Authorization") {
			case "Bearer admin":
				return &auth.User{Name: "admin", Groups: []string{auth.AdminsGroup, auth.AuthenticatedGroup}}, true, nil
			case "Bearer nobody":
				return &auth.User{Name: "nobody", Groups: []string{auth.AuthenticatedGroup}}, true, nil
			}
			return nil, false, nil
		}),
		Authorizer: auth.NewAuthorizer(w.reg),
	}
	for _, f := range set {
		f(&cfg)
	}
	if w.server, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	w.http = httptest.NewUnstartedServer(w.server)
	w.http.EnableHTTP2 = true
	w.http.StartTLS()
	t.Cleanup(func() {
		if err := w.server.Close(); err != nil {
			t.Error(err)
		}
		w.http.Close()
	})
	return w
}

// answer is a decoded HTTP answer.
type reply struct {
	code   int
	header http.Header
	body   []byte
}

func (r reply) json(t testing.TB) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(r.body, &m); err != nil {
		t.Fatalf("HTTP %d, not JSON: %v\n%s", r.code, err, r.body)
	}
	return m
}

// at walks a JSON document: at(m, "metadata", "name").
func at(m any, path ...any) any {
	for _, p := range path {
		switch k := p.(type) {
		case string:
			obj, ok := m.(map[string]any)
			if !ok {
				return nil
			}
			m = obj[k]
		case int:
			l, ok := m.([]any)
			if !ok || k >= len(l) {
				return nil
			}
			m = l[k]
		}
	}
	return m
}

func (w *world) do(method, path, body string, header ...string) reply {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), method, w.http.URL+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer admin")
	req.Header.Set("User-Agent", "tester/v1")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := w.http.Client().Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return reply{resp.StatusCode, resp.Header, b}
}

// want runs a request and checks its code.
func (w *world) want(code int, method, path, body string, header ...string) map[string]any {
	w.t.Helper()
	r := w.do(method, path, body, header...)
	if r.code != code {
		w.t.Fatalf("%s %s: HTTP %d, want %d\n%s", method, path, r.code, code, r.body)
	}
	return r.json(w.t)
}

const (
	pods  = "/api/v1/namespaces/default/pods"
	cms   = "/api/v1/namespaces/default/configmaps"
	deps  = "/apis/apps/v1/namespaces/default/deployments"
	merge = "application/merge-patch+json"
	apply = "application/apply-patch+yaml"
)

func podJSON(name string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q,"labels":{"app":"a"}},"spec":{"containers":[{"name":"c","image":"file:///a.wasm"}]}}`, name)
}

func cmJSON(name, value string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q},"data":{"k":%q}}`, name, value)
}

const depYAML = `apiVersion: apps/v1
kind: Deployment
metadata: {name: d}
spec:
  replicas: 3
  selector: {matchLabels: {app: d}}
  template:
    metadata: {labels: {app: d}}
    spec:
      containers:
      - {name: c, image: "file:///a.wasm"}
`

func TestAuthentication(t *testing.T) {
	w := newWorld(t)
	r := w.do("GET", pods, "", "Authorization", "Bearer wrong")
	if r.code != http.StatusUnauthorized || at(r.json(t), "reason") != "Unauthorized" {
		t.Errorf("HTTP %d %s", r.code, r.body)
	}
	r = w.do("GET", pods, "", "Authorization", "Bearer nobody")
	if r.code != http.StatusForbidden || !strings.HasPrefix(at(r.json(t), "message").(string), `pods is forbidden: User "nobody" cannot list resource "pods" in API group "" in the namespace "default"`) {
		t.Errorf("HTTP %d %s", r.code, r.body)
	}
	if r := w.do("GET", "/healthz", ""); r.code != 200 || string(r.body) != "ok" {
		t.Errorf("healthz: %d %s", r.code, r.body)
	}
	if r := w.do("GET", "/apis/nothing.example/v1/things", ""); r.code != 404 {
		t.Errorf("unknown resource: %d", r.code)
	}
}

// TestActingAsAnother: administrators may, and then can do what the other
// can; everybody else may not.
func TestActingAsAnother(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Reviews = reviews.All(reviews.Config{Authorizer: c.Authorizer, Tokens: auth.UnionTokens(), Objects: c.Registry, Clock: clock.System})
	})
	m := w.want(403, "GET", pods, "", "Impersonate-User", "jane")
	if !strings.HasPrefix(at(m, "message").(string), `pods is forbidden: User "jane" cannot list resource "pods"`) {
		t.Errorf("as jane: %v", m)
	}
	w.want(200, "GET", pods, "", "Impersonate-User", "jane", "Impersonate-Group", auth.AdminsGroup)
	m = w.want(403, "GET", pods, "", "Authorization", "Bearer nobody", "Impersonate-User", "admin", "Impersonate-Group", auth.AdminsGroup)
	if !strings.HasPrefix(at(m, "message").(string), `users "admin" is forbidden: User "nobody" cannot impersonate resource "users" in API group "" at the cluster scope`) {
		t.Errorf("as admin: %v", m)
	}
	w.want(400, "GET", pods, "", "Impersonate-Group", auth.AdminsGroup)
	m = w.want(201, "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", `{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`,
		"Impersonate-User", "jane", "Impersonate-Group", "devs", "Impersonate-Uid", "7", "Impersonate-Extra-Scopes", "read")
	if got := fmt.Sprint(at(m, "status", "userInfo")); got != "map[extra:map[scopes:[read]] groups:[devs system:authenticated] uid:7 username:jane]" {
		t.Errorf("who am I: %s", got)
	}
}

func TestCreateReadUpdateDelete(t *testing.T) {
	w := newWorld(t)
	created := w.want(201, "POST", pods, podJSON("a"))
	if at(created, "metadata", "generation") != 1.0 || at(created, "status", "phase") != "Pending" || at(created, "kind") != "Pod" {
		t.Errorf("created: %v", created)
	}
	if at(created, "metadata", "managedFields", 0, "manager") != "tester" {
		t.Errorf("managedFields: %v", at(created, "metadata", "managedFields"))
	}
	w.want(409, "POST", pods, podJSON("a"))
	w.want(404, "GET", pods+"/b", "")
	if m := w.want(404, "POST", "/api/v1/namespaces/none/pods", podJSON("a")); at(m, "message") != `namespaces "none" not found` {
		t.Errorf("message %v", at(m, "message"))
	}
	w.want(405, "POST", pods+"/a", podJSON("a"))
	got := w.want(200, "GET", pods+"/a", "")

	// Update with the version read, then again with the stale one.
	meta := got["metadata"].(map[string]any)
	meta["annotations"] = map[string]any{"x": "y"}
	b, _ := json.Marshal(got)
	updated := w.want(200, "PUT", pods+"/a", string(b))
	if at(updated, "metadata", "resourceVersion") == at(got, "metadata", "resourceVersion") {
		t.Error("version did not move")
	}
	meta["annotations"] = map[string]any{"x": "z"}
	b, _ = json.Marshal(got)
	if m := w.want(409, "PUT", pods+"/a", string(b)); at(m, "reason") != "Conflict" {
		t.Errorf("stale update: %v", m)
	}
	// Status is another write path.
	m := w.want(200, "PATCH", pods+"/a/status", `{"spec":{"containers":[{"name":"c","image":"evil"}]},"metadata":{"labels":{"evil":"1"}},"status":{"phase":"Running"}}`, "Content-Type", merge)
	if at(m, "spec", "containers", 0, "image") != "file:///a.wasm" || at(m, "metadata", "labels", "evil") != nil || at(m, "status", "phase") != "Running" {
		t.Errorf("status patch: %v", m)
	}
	m = w.want(200, "PATCH", pods+"/a", `{"status":{"phase":"Failed"}}`, "Content-Type", merge)
	if at(m, "status", "phase") != "Running" {
		t.Errorf("main patch changed the status: %v", at(m, "status"))
	}
	if m := w.want(200, "DELETE", pods+"/a", ""); at(m, "kind") != "Pod" {
		t.Errorf("deleting a pod answers the pod, got %v", m)
	}
	w.want(201, "POST", cms, cmJSON("c", "v"))
	m = w.want(200, "DELETE", cms+"/c", `{"propagationPolicy":"Background"}`)
	if at(m, "kind") != "Status" || at(m, "status") != "Success" || at(m, "details", "kind") != "configmaps" || at(m, "details", "uid") == nil {
		t.Errorf("deleting a ConfigMap: %v", m)
	}
}

func TestFieldValidation(t *testing.T) {
	w := newWorld(t)
	body := `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"d"},"spec":{"foo":1,"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"x"}]}}}}`
	m := w.want(400, "POST", deps+"?fieldValidation=Strict", body)
	if at(m, "message") != `Deployment in version "v1" cannot be handled as a Deployment: strict decoding error: unknown field "spec.foo"` {
		t.Errorf("message %v", at(m, "message"))
	}
	r := w.do("POST", deps+"?dryRun=All", body)
	if r.code != 201 || !strings.Contains(strings.Join(r.header.Values("Warning"), "\n"), `299 - "unknown field \"spec.foo\""`) {
		t.Errorf("HTTP %d, warnings %q", r.code, r.header.Values("Warning"))
	}
	r = w.do("POST", deps+"?dryRun=All&fieldValidation=Ignore", body)
	if r.code != 201 || strings.Contains(strings.Join(r.header.Values("Warning"), "\n"), "spec.foo") {
		t.Errorf("HTTP %d, warnings %q", r.code, r.header.Values("Warning"))
	}
	w.want(404, "GET", deps+"/d", "")
	w.want(422, "POST", deps+"?fieldValidation=Loud", body)
}

func TestPatchTypes(t *testing.T) {
	w := newWorld(t)
	w.want(201, "POST", deps, `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"d"},"spec":{"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"x"}]}}}}`)
	m := w.want(200, "PATCH", deps+"/d", `[{"op":"replace","path":"/spec/replicas","value":2}]`, "Content-Type", "application/json-patch+json")
	if at(m, "spec", "replicas") != 2.0 || at(m, "metadata", "generation") != 2.0 {
		t.Errorf("json patch: %v", m)
	}
	m = w.want(422, "PATCH", deps+"/d", `[{"op":"test","path":"/spec/replicas","value":7}]`, "Content-Type", "application/json-patch+json")
	if at(m, "reason") != "Invalid" {
		t.Errorf("failed test: %v", m)
	}
	m = w.want(200, "PATCH", deps+"/d", `{"spec":{"template":{"spec":{"containers":[{"name":"e","image":"y"}]}}}}`, "Content-Type", "application/strategic-merge-patch+json")
	if l := at(m, "spec", "template", "spec", "containers").([]any); len(l) != 2 {
		t.Errorf("strategic merge: %v", l)
	}
	m = w.want(200, "PATCH", deps+"/d", `{"spec":{"template":{"spec":{"containers":[{"name":"e","image":"y"}]}}}}`, "Content-Type", merge)
	if l := at(m, "spec", "template", "spec", "containers").([]any); len(l) != 1 {
		t.Errorf("merge: %v", l)
	}
	w.want(415, "PATCH", deps+"/d", `{}`, "Content-Type", "text/plain")
	w.want(422, "PATCH", deps+"/d?fieldValidation=Strict", `{"spec":{"foo":1}}`, "Content-Type", merge)
	// No change: no new version.
	a := w.want(200, "GET", deps+"/d", "")
	b := w.want(200, "PATCH", deps+"/d", `{"spec":{"replicas":2}}`, "Content-Type", merge)
	if at(a, "metadata", "resourceVersion") != at(b, "metadata", "resourceVersion") {
		t.Error("a patch that changes nothing wrote")
	}
}

func TestServerSideApply(t *testing.T) {
	w := newWorld(t)
	m := w.want(201, "PATCH", deps+"/d?fieldManager=one", depYAML, "Content-Type", apply)
	if at(m, "spec", "replicas") != 3.0 || at(m, "metadata", "managedFields", 0, "operation") != "Apply" {
		t.Errorf("created: %v", m)
	}
	rv := at(m, "metadata", "resourceVersion")
	m = w.want(200, "PATCH", deps+"/d?fieldManager=one", depYAML, "Content-Type", apply)
	if at(m, "metadata", "resourceVersion") != rv {
		t.Error("applying the same wrote")
	}
	other := strings.Replace(depYAML, "replicas: 3", "replicas: 5", 1)
	m = w.want(409, "PATCH", deps+"/d?fieldManager=two", other, "Content-Type", apply)
	if at(m, "details", "causes", 0, "reason") != "FieldManagerConflict" || at(m, "details", "causes", 0, "field") != ".spec.replicas" {
		t.Errorf("conflict: %v", m)
	}
	m = w.want(200, "PATCH", deps+"/d?fieldManager=two&force=true", other, "Content-Type", apply)
	if at(m, "spec", "replicas") != 5.0 {
		t.Errorf("forced: %v", m)
	}
	m = w.want(422, "PATCH", deps+"/d", depYAML, "Content-Type", apply)
	if at(m, "details", "kind") != "PatchOptions" {
		t.Errorf("no manager: %v", m)
	}
	w.want(400, "PATCH", deps+"/d?fieldManager=one", strings.Replace(depYAML, "metadata: {name: d}", "metadata: {name: d, managedFields: [{manager: x}]}", 1), "Content-Type", apply)
	m = w.want(200, "PATCH", deps+"/d/status?fieldManager=ctl", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nstatus: {replicas: 2}\n", "Content-Type", apply)
	if at(m, "status", "replicas") != 2.0 || at(m, "spec", "replicas") != 5.0 {
		t.Errorf("status apply: %v", m)
	}
	// Leaving a field out of the next intent removes it.
	w.want(201, "PATCH", cms+"/c?fieldManager=one", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: x, b: z}\n", "Content-Type", apply)
	m = w.want(200, "PATCH", cms+"/c?fieldManager=one", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: x}\n", "Content-Type", apply)
	if at(m, "data", "b") != nil {
		t.Errorf("removed field: %v", at(m, "data"))
	}
}

func TestScale(t *testing.T) {
	w := newWorld(t)
	w.want(201, "PATCH", deps+"/d?fieldManager=one", depYAML, "Content-Type", apply)
	m := w.want(200, "GET", deps+"/d/scale", "")
	if at(m, "kind") != "Scale" || at(m, "spec", "replicas") != 3.0 || at(m, "status", "selector") != "app=d" {
		t.Errorf("scale: %v", m)
	}
	m = w.want(200, "PATCH", deps+"/d/scale", `{"spec":{"replicas":4}}`, "Content-Type", merge)
	if at(m, "spec", "replicas") != 4.0 || at(m, "metadata", "managedFields") != nil {
		t.Errorf("patched scale: %v", m)
	}
	m["spec"] = map[string]any{"replicas": 6}
	b, _ := json.Marshal(m)
	w.want(200, "PUT", deps+"/d/scale", string(b))
	w.want(409, "PUT", deps+"/d/scale", string(b))
	d := w.want(200, "GET", deps+"/d", "")
	if at(d, "spec", "replicas") != 6.0 {
		t.Errorf("deployment: %v", d)
	}
	if !strings.Contains(fmt.Sprint(at(d, "metadata", "managedFields")), "subresource:scale") {
		t.Errorf("the scaler is not among the managers: %v", at(d, "metadata", "managedFields"))
	}
	m = w.want(409, "PATCH", deps+"/d?fieldManager=one", depYAML, "Content-Type", apply)
	if at(m, "reason") != "Conflict" {
		t.Errorf("apply over a scaled field: %v", m)
	}
}

func TestPagination(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxPages = 1 })
	for i := range 7 {
		w.want(201, "POST", cms, cmJSON(fmt.Sprintf("c%d", i), "v"))
	}
	m := w.want(200, "GET", cms+"?limit=3", "")
	token, rv := at(m, "metadata", "continue").(string), at(m, "metadata", "resourceVersion")
	if len(m["items"].([]any)) != 3 || at(m, "metadata", "remainingItemCount") != 4.0 || at(m, "items", 0, "kind") != nil {
		t.Fatalf("first page: %v", m)
	}
	w.want(201, "POST", cms, cmJSON("c00", "v"))
	w.want(200, "DELETE", cms+"/c5", "")
	m = w.want(200, "GET", cms+"?limit=3&continue="+token, "")
	if at(m, "metadata", "resourceVersion") != rv || at(m, "items", 2, "metadata", "name") != "c5" || at(m, "metadata", "remainingItemCount") != 1.0 {
		t.Fatalf("second page: %v", m)
	}
	next := at(m, "metadata", "continue").(string)
	if m = w.want(200, "GET", cms+"?limit=3&continue="+next, ""); len(m["items"].([]any)) != 1 || at(m, "metadata", "continue") != nil {
		t.Fatalf("last page: %v", m)
	}
	// Another list pushes the first one out: its tokens expire.
	w.want(200, "GET", cms+"?limit=1", "")
	m = w.want(410, "GET", cms+"?limit=3&continue="+next, "")
	fresh, _ := at(m, "metadata", "continue").(string)
	if at(m, "reason") != "Expired" || fresh == "" {
		t.Fatalf("expired: %v", m)
	}
	if m = w.want(200, "GET", cms+"?limit=3&continue="+fresh, ""); at(m, "items", 0, "metadata", "name") != "c6" {
		t.Fatalf("inconsistent rest: %v", m)
	}
	// A list that goes on without its version has one again, and counts.
	w.want(200, "GET", cms+"?limit=2", "")
	token = at(w.want(200, "GET", cms+"?limit=1", ""), "metadata", "continue").(string)
	w.want(201, "POST", cms, cmJSON("c9", "v"))
	w.want(200, "GET", cms+"?limit=2", "")
	fresh = at(w.want(410, "GET", cms+"?limit=2&continue="+token, ""), "metadata", "continue").(string)
	m = w.want(200, "GET", cms+"?limit=2&continue="+fresh, "")
	if at(m, "metadata", "remainingItemCount") != 5.0 || at(m, "items", 0, "metadata", "name") != "c00" {
		t.Fatalf("inconsistent page: %v", m)
	}
	rv = at(m, "metadata", "resourceVersion")
	if m = w.want(200, "GET", cms+"?limit=9&continue="+at(m, "metadata", "continue").(string), ""); at(m, "metadata", "resourceVersion") != rv || len(m["items"].([]any)) != 5 {
		t.Fatalf("page after an inconsistent one: %v", m)
	}
	w.want(400, "GET", cms+"?limit=3&continue=garbage", "")
	w.want(400, "GET", pods+"?fieldSelector=spec.foo%3Dx", "")
	w.want(400, "GET", pods+"?labelSelector=%3D%3D", "")
	m = w.want(504, "GET", cms+"?resourceVersion=999999", "")
	if at(m, "details", "causes", 0, "reason") != "ResourceVersionTooLarge" {
		t.Errorf("future version: %v", m)
	}
}

func TestTwoPhaseDeleteOverHTTP(t *testing.T) {
	w := newWorld(t)
	w.want(201, "POST", "/api/v1/nodes", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"},"status":{"allocatable":{"cpu":"2","memory":"1Gi","pods":"10"}}}`)
	p := w.want(201, "POST", pods, podJSON("a"))
	w.want(201, "POST", pods+"/a/binding", `{"apiVersion":"v1","kind":"Binding","metadata":{"name":"a"},"target":{"kind":"Node","name":"n1"}}`)
	w.want(409, "POST", pods+"/a/binding", `{"apiVersion":"v1","kind":"Binding","metadata":{"name":"a"},"target":{"kind":"Node","name":"n1"}}`)
	s := w.watch(pods + "?watch=true&fieldSelector=spec.nodeName%3Dn1")
	s.expect("ADDED", "a")
	m := w.want(201, "POST", pods+"/a/eviction", `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"a","namespace":"default"}}`)
	if at(m, "status") != "Success" {
		t.Errorf("eviction: %v", m)
	}
	m = s.expect("MODIFIED", "a") // first it says why it goes
	if at(m, "status", "conditions", 0, "reason") != "EvictionByEvictionAPI" {
		t.Errorf("condition: %v", at(m, "status"))
	}
	m = s.expect("MODIFIED", "a")
	if at(m, "metadata", "deletionTimestamp") == nil || at(m, "metadata", "deletionGracePeriodSeconds") != 30.0 {
		t.Errorf("marked: %v", at(m, "metadata"))
	}
	w.want(409, "DELETE", pods+"/a", `{"gracePeriodSeconds":0,"preconditions":{"uid":"other"}}`)
	w.want(200, "DELETE", pods+"/a", fmt.Sprintf(`{"kind":"DeleteOptions","apiVersion":"apps/v1","gracePeriodSeconds":0,"preconditions":{"uid":%q}}`, at(p, "metadata", "uid")))
	s.expect("DELETED", "a")
}

func TestDeleteCollection(t *testing.T) {
	w := newWorld(t)
	for _, n := range []string{"a", "b", "c"} {
		w.want(201, "POST", cms, cmJSON(n, "v"))
	}
	w.want(200, "PATCH", cms+"/b", `{"metadata":{"labels":{"keep":"1"}}}`, "Content-Type", merge)
	m := w.want(200, "DELETE", cms+"?labelSelector=keep!%3D1", "")
	if at(m, "kind") != "ConfigMapList" || len(m["items"].([]any)) != 2 {
		t.Errorf("deleted: %v", m)
	}
	if m = w.want(200, "GET", cms, ""); len(m["items"].([]any)) != 1 {
		t.Errorf("left: %v", m)
	}
}

func TestNegotiation(t *testing.T) {
	w := newWorld(t)
	w.want(201, "POST", pods, podJSON("a"))
	r := w.do("GET", pods, "", "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json")
	if m := r.json(t); at(m, "kind") != "Table" || at(m, "rows", 0, "object", "metadata", "name") != "a" {
		t.Errorf("table: %s", r.body)
	}
	w.rowsSayTheirKind()
	r = w.do("GET", pods+"/a", "", "Accept", "application/vnd.kubernetes.protobuf,application/json")
	if r.header.Get("Content-Type") != "application/vnd.kubernetes.protobuf" || !bytes.HasPrefix(r.body, []byte("k8s\x00")) {
		t.Errorf("protobuf: %s %q", r.header.Get("Content-Type"), r.body[:min(len(r.body), 20)])
	}
	// A protobuf body comes back as an object.
	body := string(r.body)
	if r := w.do("PUT", pods+"/a", body, "Content-Type", "application/vnd.kubernetes.protobuf"); r.code != 200 {
		t.Errorf("protobuf PUT: %d %s", r.code, r.body)
	}
	r = w.do("GET", pods, "", "Accept", "application/cbor")
	if r.header.Get("Content-Type") != "application/cbor" || !bytes.HasPrefix(r.body, []byte{0xd9, 0xd9, 0xf7}) {
		t.Errorf("cbor: %s", r.header.Get("Content-Type"))
	}
	r = w.do("GET", pods+"/a", "", "Accept", "application/yaml")
	if !strings.HasPrefix(string(r.body), "apiVersion: v1\n") {
		t.Errorf("yaml: %s", r.body)
	}
	if r = w.do("GET", pods, "", "Accept", "text/html"); r.code != 406 {
		t.Errorf("html: %d", r.code)
	}
	if r = w.do("POST", pods, "x", "Content-Type", "text/plain"); r.code != 415 {
		t.Errorf("text body: %d", r.code)
	}
	if r = w.do("POST", cms, cmJSON("big", strings.Repeat("x", MaxBody))); r.code != 413 {
		t.Errorf("large body: %d %.200s", r.code, r.body)
	}
	w.want(201, "POST", cms, cmJSON("middle", strings.Repeat("x", 300<<10)))
	r = w.do("GET", cms, "", "Accept-Encoding", "gzip")
	if r.header.Get("Content-Encoding") != "gzip" || len(r.body) > 10<<10 {
		t.Errorf("gzip: %q, %d bytes", r.header.Get("Content-Encoding"), len(r.body))
	}
}

// rowsSayTheirKind asks for tables of lists, of one object and of a watch: a
// row's object is read by itself.
func (w *world) rowsSayTheirKind() {
	w.t.Helper()
	const accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
	for query, want := range map[string][2]any{
		"?includeObject=Object":   {"Pod", "v1"},
		"?includeObject=Metadata": {"PartialObjectMetadata", "meta.k8s.io/v1"},
		"":                        {"PartialObjectMetadata", "meta.k8s.io/v1"},
	} {
		check := func(where string, m map[string]any) {
			w.t.Helper()
			if got := [2]any{at(m, "rows", 0, "object", "kind"), at(m, "rows", 0, "object", "apiVersion")}; got != want {
				w.t.Errorf("%s%s: a row's object is %v, want %v", where, query, got, want)
			}
		}
		check("list", w.do("GET", pods+query, "", "Accept", accept).json(w.t))
		check("one", w.do("GET", pods+"/a"+query, "", "Accept", accept).json(w.t))
		follow := "?watch=true"
		if query != "" {
			follow = query + "&watch=true"
		}
		s := w.watch(pods+follow, "Accept", accept)
		typ, m := s.next()
		check("watch "+typ, m)
		s.cancel()
	}
}
