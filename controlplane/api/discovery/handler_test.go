package discovery

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilversion "k8s.io/apimachinery/pkg/util/version"

	"github.com/dunlin-project/dunlin/manifests"
)

var everything = Features{Streams: true, EphemeralContainers: true, Resize: true}

func newHandler(t *testing.T, f Features) *Handler {
	t.Helper()
	h, err := New(Config{Features: f, Version: "0.1.0", Address: "10.0.0.1:6443"})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func get(t *testing.T, h http.Handler, path, accept string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, path, nil)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func golden(t *testing.T, name string, into any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatal(err)
	}
}

// TestLegacyEqualsUpstream compares every resource that is served with the
// same entry of a real server's document, as raw JSON.
func TestLegacyEqualsUpstream(t *testing.T) {
	h := newHandler(t, everything)
	for _, gv := range groupVersions(h.resources) {
		path := "/apis/" + gv.String()
		file := "apis__" + gv.Group + "__" + gv.Version + ".json"
		if gv.Group == "" {
			path, file = "/api/v1", "api__v1.json"
		}
		var want, got map[string]any
		if _, err := os.Stat(filepath.Join("testdata", file)); err != nil {
			t.Errorf("%s is served but testdata has no %s", gv, file)
			continue
		}
		golden(t, file, &want)
		w := get(t, h, path, "application/json")
		if w.Code != http.StatusOK {
			t.Fatalf("GET %s: %d %s", path, w.Code, w.Body)
		}
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		byName := map[string]any{}
		for _, r := range want["resources"].([]any) {
			byName[r.(map[string]any)["name"].(string)] = r
		}
		var names []string
		for _, r := range got["resources"].([]any) {
			name := r.(map[string]any)["name"].(string)
			names = append(names, name)
			if !reflect.DeepEqual(r, byName[name]) {
				t.Errorf("%s %s:\n got %v\nwant %v", gv, name, r, byName[name])
			}
		}
		if !slices.IsSorted(names) {
			t.Errorf("%s: not sorted: %v", gv, names)
		}
		delete(want, "resources")
		delete(got, "resources")
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: envelope got %v, want %v", gv, got, want)
		}
	}
}

func TestEverySubresourceOfAServedKindIsKnown(t *testing.T) {
	// What upstream has and we do not must be a decision, not an omission.
	decided := map[string]string{
		"nodes/proxy": "only GET of /metrics and /healthz, which is too little to advertise",
	}
	h := newHandler(t, everything)
	served := map[string]bool{}
	for _, r := range h.resources {
		served[r.GroupVersion.String()+" "+r.Name] = true
	}
	for _, gv := range groupVersions(h.resources) {
		file := "apis__" + gv.Group + "__" + gv.Version + ".json"
		if gv.Group == "" {
			file = "api__v1.json"
		}
		var want metav1.APIResourceList
		golden(t, file, &want)
		for _, r := range want.APIResources {
			name, sub, ok := strings.Cut(r.Name, "/")
			if ok && sub != "" && served[gv.String()+" "+name] && !served[gv.String()+" "+r.Name] && decided[r.Name] == "" {
				t.Errorf("%s %s is upstream's and not served", gv, r.Name)
			}
		}
	}
}

func TestAggregatedEqualsUpstream(t *testing.T) {
	h := newHandler(t, everything)
	var want apidiscoveryv2.APIGroupDiscoveryList
	golden(t, "aggregated_v2.json", &want)
	w := get(t, h, "/apis", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json")
	if ct := w.Header().Get("Content-Type"); ct != aggregatedV2 {
		t.Errorf("Content-Type %q", ct)
	}
	if w.Header().Get("Vary") != "Accept" || w.Header().Get("ETag") == "" {
		t.Errorf("headers %v", w.Header())
	}
	var got apidiscoveryv2.APIGroupDiscoveryList
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Kind != "APIGroupDiscoveryList" || got.APIVersion != "apidiscovery.k8s.io/v2" || len(got.Items) == 0 {
		t.Fatalf("got %s", w.Body)
	}
	var order []string
	for _, g := range want.Items {
		order = append(order, g.Name)
	}
	last := -1
	for _, g := range got.Items {
		at := slices.Index(order, g.Name)
		if at < last {
			t.Errorf("group %s out of upstream's order", g.Name)
		}
		last = at
		for _, v := range g.Versions {
			for _, r := range v.Resources {
				if up := find(want, g.Name, v.Version, r.Resource); up == nil || !equalResource(r, *up) {
					t.Errorf("%s/%s %s:\n got %+v\nwant %+v", g.Name, v.Version, r.Resource, r, up)
				}
			}
		}
	}
}

// equalResource ignores the sub-resources that we do not have.
func equalResource(got, want apidiscoveryv2.APIResourceDiscovery) bool {
	want.Subresources = slices.DeleteFunc(slices.Clone(want.Subresources), func(s apidiscoveryv2.APISubresourceDiscovery) bool {
		return s.Subresource == "proxy" && want.Resource == "nodes"
	})
	a, _ := json.Marshal(got)
	b, _ := json.Marshal(want)
	return string(a) == string(b)
}

func find(l apidiscoveryv2.APIGroupDiscoveryList, group, version, resource string) *apidiscoveryv2.APIResourceDiscovery {
	for _, g := range l.Items {
		for _, v := range g.Versions {
			for i := range v.Resources {
				if g.Name == group && v.Version == version && v.Resources[i].Resource == resource {
					return &v.Resources[i]
				}
			}
		}
	}
	return nil
}

func TestDocuments(t *testing.T) {
	h := newHandler(t, Features{})
	const v2 = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	const beta = "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
	for _, c := range []struct {
		path, accept string
		code         int
		contentType  string
		contains     string
	}{
		{"/api", "", 200, "application/json", `"kind":"APIVersions"`},
		{"/api/", "*/*", 200, "application/json", `"serverAddress":"10.0.0.1:6443"`},
		{"/api", v2 + ",application/json", 200, v2, `"metadata":{}`},
		{"/api", beta, 200, beta, `"apiVersion":"apidiscovery.k8s.io/v2beta1"`},
		{"/apis", "application/json;q=0.5," + beta, 200, beta, `"name":"apps"`},
		{"/apis", "application/json", 200, "application/json", `"kind":"APIGroupList"`},
		{"/apis", "application/vnd.kubernetes.protobuf", 200, "application/vnd.kubernetes.protobuf", "k8s\x00"},
		{"/apis", "application/yaml", 200, "application/yaml", "kind: APIGroupList"},
		{"/apis", "text/html", 406, "application/json", "only the following media types are accepted"},
		{"/apis", "application/json;g=apidiscovery.k8s.io;v=v3;as=APIGroupDiscoveryList", 406, "application/json", "NotAcceptable"},
		{"/apis/apps", "", 200, "application/json", `"preferredVersion":{"groupVersion":"apps/v1","version":"v1"}`},
		{"/apis/apps/v1", "application/json, */*", 200, "application/json", `"deployments/scale"`},
		{"/apis/apps/v1", v2 + ",application/json", 200, "application/json", `"kind":"APIResourceList"`},
		{"/apis/apps/v2", "", 404, "application/json", "the server could not find the requested resource"},
		{"/apis/nothing.example", "", 404, "application/json", `"reason":"NotFound"`},
		{"/api/v1", "", 200, "application/json", `"name":"pods/eviction"`},
		{"/api/v2", "", 404, "application/json", `"reason":"NotFound"`},
		{"/version", "", 200, "application/json", `"gitVersion": "v1.37.2+dunlin.0.1.0"`},
	} {
		if !h.Handles(c.path) {
			t.Errorf("%s is not ours", c.path)
		}
		w := get(t, h, c.path, c.accept)
		if w.Code != c.code || w.Header().Get("Content-Type") != c.contentType || !strings.Contains(w.Body.String(), c.contains) {
			t.Errorf("GET %s (%s): %d %q\n%.300s\nwant %d %q with %s", c.path, c.accept, w.Code, w.Header().Get("Content-Type"), w.Body, c.code, c.contentType, c.contains)
		}
	}
	for _, path := range []string{"/", "/healthz", "/api/v1/pods", "/apis/apps/v1/deployments", "/openapi/v3", "/apisx"} {
		if h.Handles(path) {
			t.Errorf("%s is not discovery's", path)
		}
	}
}

func TestETag(t *testing.T) {
	h := newHandler(t, Features{})
	first := get(t, h, "/apis", aggregatedV2)
	again := get(t, h, "/apis", aggregatedV2, "If-None-Match", first.Header().Get("ETag"))
	if again.Code != http.StatusNotModified || again.Body.Len() != 0 {
		t.Errorf("%d %s", again.Code, again.Body)
	}
	other := newHandler(t, everything)
	if a, b := get(t, h, "/api", aggregatedV2).Header().Get("ETag"), get(t, other, "/api", aggregatedV2).Header().Get("ETag"); a == b {
		t.Error("different documents have the same ETag")
	}
}

func TestNothingIsAdvertisedThatDoesNotWork(t *testing.T) {
	for _, r := range Resources(Features{}) {
		switch r.Name {
		case "pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "pods/resize":
			t.Errorf("%s is advertised", r.Name)
		}
	}
}

func TestEveryKindIsAdvertised(t *testing.T) {
	have := map[string]bool{}
	for _, r := range Resources(Features{}) {
		have[r.GroupVersion.String()+"/"+r.Name] = true
	}
	for _, k := range manifests.Kinds() {
		for name, want := range map[string]bool{k.Resource: true, k.Resource + "/status": k.Status, k.Resource + "/scale": k.Scale} {
			if have[k.GVK.GroupVersion().String()+"/"+name] != want {
				t.Errorf("%s %s: advertised %v", k.GVK, name, !want)
			}
		}
	}
}

func TestVersionIsSemantic(t *testing.T) {
	for in, want := range map[string]string{
		"0.1.0":          "v1.37.2+dunlin.0.1.0",
		"0.1.0-rc.1+abc": "v1.37.2+dunlin.0.1.0-rc.1-abc",
		"":               "v1.37.2+dunlin.0",
		"dev build":      "v1.37.2+dunlin.dev-build",
		"..1..":          "v1.37.2+dunlin.1",
	} {
		got := versionInfo(Config{Version: in}).GitVersion
		if got != want {
			t.Errorf("%q gives %q, want %q", in, got, want)
		}
		if _, err := utilversion.ParseSemantic(got); err != nil {
			t.Errorf("%q: %v", got, err)
		}
	}
}

func FuzzAccept(f *testing.F) {
	for _, s := range []string{"", "*/*", aggregatedV2, "application/json;q=0.1, text/*;q=x", ";;,,", "a/b;as=\"x,y\""} {
		f.Add(s)
	}
	d := &document{plain: []answer{{contentType: "application/json"}}}
	f.Fuzz(func(_ *testing.T, s string) { choose(d, s) })
}
