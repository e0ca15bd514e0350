package openapi

import (
	"compress/gzip"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	openapi_v2 "github.com/google/gnostic-models/openapiv2"
	"google.golang.org/protobuf/proto"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/spec3"
	openapiproto "k8s.io/kube-openapi/pkg/util/proto"

	"github.com/dunlin-project/dunlin/controlplane/api/discovery"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/manifests"
)

var now = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

func newHandler(t testing.TB) *Handler {
	t.Helper()
	h, err := New(discovery.Resources(discovery.Features{Streams: true}), clock.Func(func() time.Time { return now }))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func get(t testing.TB, h http.Handler, url string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, url, nil)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func index(t testing.TB, h *Handler) map[string]string {
	t.Helper()
	var doc struct {
		Paths map[string]struct {
			URL string `json:"serverRelativeURL"`
		} `json:"paths"`
	}
	w := get(t, h, "/openapi/v3")
	if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil {
		t.Fatalf("%v: %s", err, w.Body)
	}
	out := map[string]string{}
	for k, v := range doc.Paths {
		out[k] = v.URL
	}
	return out
}

// TestEveryKindHasAStructure also says when the embedded file is older than
// the kinds table: run tools/openapigen then.
func TestEveryKindHasAStructure(t *testing.T) {
	schemas, err := tree()
	if err != nil {
		t.Fatal(err)
	}
	names := byKind(schemas)
	for _, k := range manifests.Kinds() {
		for _, gvk := range []schema.GroupVersionKind{k.GVK, k.GVK.GroupVersion().WithKind(k.GVK.Kind + "List")} {
			if names[gvk] == "" {
				t.Errorf("no schema for %s: run tools/openapigen", gvk)
			}
		}
	}
	for name, s := range schemas {
		references(s, func(ref string) {
			if schemas[ref] == nil {
				t.Errorf("%s refers to %s, which is missing", name, ref)
			}
		})
		if _, ok := s["description"]; ok {
			t.Errorf("%s: the embedded structure has descriptions", name)
		}
	}
}

func TestTypeConverter(t *testing.T) {
	tc, err := TypeConverter()
	if err != nil {
		t.Fatal(err)
	}
	template := corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Ports: []corev1.ContainerPort{{ContainerPort: 80}}}}}}
	for _, obj := range []runtime.Object{
		&appsv1.Deployment{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"}, Spec: appsv1.DeploymentSpec{Template: template}},
		&corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, Spec: template.Spec},
		&corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}},
		&corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, Data: map[string]string{"a": "b"}},
	} {
		typed, err := tc.ObjectToTyped(obj)
		if err != nil {
			t.Errorf("%T: %v", obj, err)
			continue
		}
		back, err := tc.TypedToObject(typed)
		if err != nil || back.GetObjectKind().GroupVersionKind() != obj.GetObjectKind().GroupVersionKind() {
			t.Errorf("%T: came back as %v: %v", obj, back.GetObjectKind().GroupVersionKind(), err)
		}
	}
	for _, k := range manifests.Kinds() {
		obj := k.New()
		obj.GetObjectKind().SetGroupVersionKind(k.GVK)
		if _, err := tc.ObjectToTyped(obj); err != nil {
			t.Errorf("%s: %v", k.GVK, err)
		}
	}
}

// TestDocumentsV3: every document of the index parses, refers only to what it
// holds, and says of every kind that can be patched how.
func TestDocumentsV3(t *testing.T) {
	h := newHandler(t)
	paths := index(t, h)
	resources := discovery.Resources(discovery.Features{Streams: true})
	for _, r := range resources {
		key := "apis/" + r.GroupVersion.String()
		if r.GroupVersion.Group == "" {
			key = "api/v1"
		}
		if paths[key] == "" {
			t.Errorf("%s is not in the index", key)
		}
	}
	for key, url := range paths {
		w := get(t, h, url)
		if w.Code != http.StatusOK || w.Header().Get("Cache-Control") != "public, immutable" || w.Header().Get("Expires") != "Tue, 04 May 2027 12:00:00 GMT" {
			t.Errorf("%s: %d %v", url, w.Code, w.Header())
		}
		var doc spec3.OpenAPI
		if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil {
			t.Fatalf("%s: %v", key, err)
		}
		var plain struct {
			Components struct{ Schemas map[string]map[string]any }
			Paths      map[string]map[string]map[string]any
		}
		if err := json.Unmarshal(w.Body.Bytes(), &plain); err != nil {
			t.Fatal(err)
		}
		references(any(map[string]any{"p": toAny(plain.Paths), "s": toAny(plain.Components.Schemas)}), func(ref string) {
			if plain.Components.Schemas[ref] == nil {
				t.Errorf("%s refers to %s, which it does not hold", key, ref)
			}
		})
		t.Logf("%s: %d schemas, %d paths, %d bytes, %d compressed", key, len(plain.Components.Schemas), len(plain.Paths), w.Body.Len(), len(h.v3[key].gz))
	}
}

func toAny(v any) any {
	b, _ := json.Marshal(v)
	var out any
	_ = json.Unmarshal(b, &out)
	return out
}

// TestWhatKubectlLooksAt: the facts by which kubectl decides how to apply,
// and those that explain prints.
func TestWhatKubectlLooksAt(t *testing.T) {
	h := newHandler(t)
	w := get(t, h, "/openapi/v3/apis/apps/v1")
	var doc spec3.OpenAPI
	if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	patch := doc.Paths.Paths["/apis/apps/v1/namespaces/{namespace}/deployments/{name}"].Patch
	if patch == nil {
		t.Fatal("no PATCH of deployments")
	}
	if got := patch.Extensions["x-kubernetes-group-version-kind"]; !reflect.DeepEqual(got, map[string]any{"group": "apps", "version": "v1", "kind": "Deployment"}) {
		t.Errorf("kind of the operation: %v", got)
	}
	found := map[string]bool{}
	for _, p := range patch.Parameters {
		found[p.In+" "+p.Name] = true
	}
	for _, want := range []string{"query fieldValidation", "query dryRun", "query fieldManager", "query force"} {
		if !found[want] {
			t.Errorf("no parameter %s", want)
		}
	}
	for _, body := range []string{"application/strategic-merge-patch+json", "application/apply-patch+yaml", "application/merge-patch+json", "application/json-patch+json"} {
		if patch.RequestBody.Content[body] == nil {
			t.Errorf("no body %s", body)
		}
	}
	deployment := doc.Components.Schemas["io.k8s.api.apps.v1.Deployment"]
	if !strings.Contains(deployment.Description, "declarative updates for Pods") {
		t.Errorf("description of Deployment: %q", deployment.Description)
	}
	spec := doc.Components.Schemas["io.k8s.api.apps.v1.DeploymentSpec"]
	if !strings.Contains(spec.Properties["replicas"].Description, "Number of desired pods") {
		t.Errorf("description of replicas: %q", spec.Properties["replicas"].Description)
	}
	if d := doc.Components.Schemas["io.k8s.api.core.v1.PodSpec"].Properties["containers"].Description; !strings.Contains(d, "List of containers") {
		t.Errorf("description of containers: %q", d)
	}
	if d := deployment.Properties["kind"].Description; !strings.Contains(d, "REST resource") {
		t.Errorf("description of kind: %q", d)
	}
	if d := deployment.Properties["metadata"].Description; d == "" {
		t.Error("metadata has no description")
	}
	for gv, resource := range map[string]string{
		"authorization.k8s.io/v1": "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
		"events.k8s.io/v1":        "/apis/events.k8s.io/v1/namespaces/{namespace}/events/{name}",
	} {
		var d spec3.OpenAPI
		if err := json.Unmarshal(get(t, h, "/openapi/v3/apis/"+gv).Body.Bytes(), &d); err != nil {
			t.Fatal(err)
		}
		if d.Paths.Paths[resource] == nil {
			t.Errorf("%s has no path %s", gv, resource)
		}
	}
}

// TestDescriptionsAreComplete: nearly every schema has one; those that do
// not are written by hand upstream.
func TestDescriptionsAreComplete(t *testing.T) {
	schemas, err := tree()
	if err != nil {
		t.Fatal(err)
	}
	describe(schemas)
	// These have no SwaggerDoc.
	without := map[string]bool{
		"io.k8s.apimachinery.pkg.api.resource.Quantity": true, "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1": false,
		"io.k8s.apimachinery.pkg.apis.meta.v1.MicroTime": true, "io.k8s.apimachinery.pkg.apis.meta.v1.Time": true,
		"io.k8s.apimachinery.pkg.runtime.RawExtension": true, "io.k8s.apimachinery.pkg.util.intstr.IntOrString": true,
	}
	for name, s := range schemas {
		if s["description"] == nil && !without[name] {
			t.Logf("%s has no description", name)
			if strings.HasPrefix(name, "io.k8s.api.") {
				t.Errorf("%s has no description", name)
			}
		}
	}
}

func TestV3Errors(t *testing.T) {
	h := newHandler(t)
	if w := get(t, h, "/openapi/v3/apis/nothing/v1"); w.Code != http.StatusNotFound {
		t.Errorf("%d", w.Code)
	}
	if w := get(t, h, "/openapi/v3/api/v1", "Accept", "application/com.github.proto-openapi.spec.v3@v1.0+protobuf"); w.Code != http.StatusNotAcceptable {
		t.Errorf("%d", w.Code)
	}
	w := get(t, h, "/openapi/v3/api/v1?hash=OLD")
	if w.Code != http.StatusMovedPermanently || w.Header().Get("Location") != index(t, h)["api/v1"] {
		t.Errorf("%d %v", w.Code, w.Header())
	}
	r := httptest.NewRequest(http.MethodPost, "/openapi/v3", nil)
	rec := httptest.NewRecorder()
	if h.ServeHTTP(rec, r); rec.Code != http.StatusMethodNotAllowed {
		t.Errorf("%d", rec.Code)
	}
	for path, want := range map[string]bool{"/openapi/v2": true, "/openapi/v3": true, "/openapi/v3/api/v1": true, "/openapi": false, "/openapi/v4": false, "/api/v1": false} {
		if h.Handles(path) != want {
			t.Errorf("Handles(%s) = %v", path, !want)
		}
	}
}

func TestETagAndCompression(t *testing.T) {
	h := newHandler(t)
	for _, c := range []struct{ path, accept string }{
		{"/openapi/v3/api/v1", "application/json"}, {"/openapi/v2", v2ProtobufAsked}, {"/openapi/v2", "application/json"},
	} {
		plain := get(t, h, c.path, "Accept", c.accept)
		packed := get(t, h, c.path, "Accept", c.accept, "Accept-Encoding", "gzip")
		if packed.Header().Get("Content-Encoding") != "gzip" {
			t.Errorf("%s is not compressed", c.path)
			continue
		}
		zr, err := gzip.NewReader(packed.Body)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(zr)
		if err != nil || string(raw) != plain.Body.String() {
			t.Errorf("%s: compressed and plain differ: %v", c.path, err)
		}
		again := get(t, h, c.path, "Accept", c.accept, "If-None-Match", plain.Header().Get("ETag"))
		if again.Code != http.StatusNotModified || again.Body.Len() != 0 {
			t.Errorf("%s: %d", c.path, again.Code)
		}
	}
}

// TestV2ReadsAsOldClientsRead parses the hand-written protobuf with the
// compiled messages, and the models with kubectl's parser.
func TestV2ReadsAsOldClientsRead(t *testing.T) {
	h := newHandler(t)
	w := get(t, h, "/openapi/v2", "Accept", v2ProtobufAsked)
	if w.Code != http.StatusOK || w.Header().Get("Content-Type") != v2Protobuf {
		t.Fatalf("%d %v", w.Code, w.Header())
	}
	doc := &openapi_v2.Document{}
	if err := proto.Unmarshal(w.Body.Bytes(), doc); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes, %d compressed, %d definitions", w.Body.Len(), len(h.v2.gz), len(doc.GetDefinitions().GetAdditionalProperties()))
	if unknown := len(doc.ProtoReflect().GetUnknown()); unknown > 0 {
		t.Errorf("%d bytes of unknown fields", unknown)
	}
	models, err := openapiproto.NewOpenAPIData(doc)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range models.ListModels() {
		if models.LookupModel(name) == nil {
			t.Errorf("%s is not found", name)
		}
	}
	deployment, ok := models.LookupModel("io.k8s.api.apps.v1.Deployment").(*openapiproto.Kind)
	if !ok || deployment.Fields["spec"] == nil || !strings.Contains(deployment.GetDescription(), "declarative updates") {
		t.Fatalf("Deployment: %+v", deployment)
	}
	pod, _ := models.LookupModel("io.k8s.api.core.v1.PodSpec").(*openapiproto.Kind)
	if pod == nil || pod.Fields["containers"].GetExtensions()["x-kubernetes-patch-merge-key"] != "name" {
		t.Errorf("PodSpec.containers: %v", pod.Fields["containers"].GetExtensions())
	}
	checkOperationV2(t, doc)
}

func checkOperationV2(t *testing.T, doc *openapi_v2.Document) {
	t.Helper()
	for _, p := range doc.GetPaths().GetPath() {
		if p.GetName() != "/api/v1/namespaces/{namespace}/configmaps/{name}" {
			continue
		}
		op := p.GetValue().GetPatch()
		names := map[string]bool{}
		for _, item := range op.GetParameters() {
			names[item.GetParameter().GetNonBodyParameter().GetQueryParameterSubSchema().GetName()] = true
			names[item.GetParameter().GetBodyParameter().GetName()] = true
		}
		if !names["body"] || !names["dryRun"] || !names["fieldValidation"] {
			t.Errorf("parameters %v", names)
		}
		if len(op.GetVendorExtension()) != 2 || !strings.Contains(op.GetVendorExtension()[1].GetValue().GetYaml(), `"kind":"ConfigMap"`) {
			t.Errorf("extensions %v", op.GetVendorExtension())
		}
		return
	}
	t.Error("no path for config maps")
}

// TestV2JSONEqualsProtobuf: gnostic's own reading of the JSON form gives the
// same message as our bytes.
func TestV2JSONEqualsProtobuf(t *testing.T) {
	h := newHandler(t)
	fromJSON, err := openapi_v2.ParseDocument(get(t, h, "/openapi/v2", "Accept", "application/json").Body.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	ours := &openapi_v2.Document{}
	if err := proto.Unmarshal(get(t, h, "/openapi/v2", "Accept", v2ProtobufAsked).Body.Bytes(), ours); err != nil {
		t.Fatal(err)
	}
	a, b := map[string]*openapi_v2.Schema{}, map[string]*openapi_v2.Schema{}
	for _, d := range fromJSON.GetDefinitions().GetAdditionalProperties() {
		a[d.GetName()] = d.GetValue()
	}
	for _, d := range ours.GetDefinitions().GetAdditionalProperties() {
		b[d.GetName()] = d.GetValue()
	}
	if len(a) != len(b) || len(a) == 0 {
		t.Fatalf("%d and %d definitions", len(a), len(b))
	}
	for name := range a {
		clearExtensions(a[name])
		clearExtensions(b[name])
		if !proto.Equal(a[name], b[name]) {
			t.Errorf("%s:\n json %v\n ours %v", name, a[name], b[name])
		}
	}
}

// clearExtensions drops what differs in the form of its YAML only.
func clearExtensions(s *openapi_v2.Schema) {
	if s == nil {
		return
	}
	s.VendorExtension = nil
	for _, p := range s.GetProperties().GetAdditionalProperties() {
		clearExtensions(p.GetValue())
	}
	for _, i := range s.GetItems().GetSchema() {
		clearExtensions(i)
	}
	clearExtensions(s.GetAdditionalProperties().GetSchema())
}

func BenchmarkDocumentV3Core(b *testing.B) {
	resources := discovery.Resources(discovery.Features{})
	for b.Loop() {
		doc, err := documentV3(resources, schema.GroupVersion{Version: "v1"})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := marshal(doc); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSchemas(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		Schemas()
	}
}
