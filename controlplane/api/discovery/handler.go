// Package discovery tells clients what is served: the legacy documents
// (/api, /apis, /apis/G, /apis/G/V, /api/v1), the aggregated ones (v2 and
// v2beta1, KEP-3352), and /version.
//
// Everything is computed once, from the kinds table, and is immutable after
// New: no goroutines, no locks. What does not work yet is not advertised.
package discovery

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	goruntime "runtime"
	"strings"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	apidiscoveryv2beta1 "k8s.io/api/apidiscovery/v2beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/version"
)

// KubernetesVersion is the version of the Kubernetes API that is served.
const KubernetesVersion = "1.37.2"

// Config is what New needs.
type Config struct {
	Features
	// Version is Dunlin's own version; it becomes semver build metadata.
	Version string
	// Commit and BuildDate are shown by /version; may be empty.
	Commit, BuildDate string
	// Address is where clients reach the API, host:port, for /api. Old
	// clients read it; none uses it.
	Address string
}

// Media types of the aggregated documents.
const (
	aggregatedV2      = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	aggregatedV2beta1 = "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
)

// answer is one encoded form of a document.
type answer struct {
	contentType string
	body        []byte
	etag        string // "" is none
}

// document is what one path serves.
type document struct {
	plain []answer // JSON first, then YAML and protobuf
	v2    []answer // aggregated: nil where there is none
	beta  []answer
}

// Handler serves discovery and /version.
type Handler struct {
	docs      map[string]*document
	version   version.Info
	resources []Resource
}

// New computes the documents. It fails only for a defect of ours.
func New(cfg Config) (*Handler, error) {
	h := &Handler{docs: map[string]*document{}, version: versionInfo(cfg), resources: Resources(cfg.Features)}
	codecs := newCodecs()
	var firstErr error
	add := func(path string, obj runtime.Object) *document {
		d := &document{}
		var err error
		if d.plain, err = encode(codecs, obj); err != nil && firstErr == nil {
			firstErr = fmt.Errorf("discovery: %s: %w", path, err)
		}
		h.docs[path] = d
		return d
	}
	api := add("/api", apiVersions(cfg.Address))
	groups := apiGroups(h.resources)
	apis := add("/apis", &metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}, Groups: groups})
	for i := range groups {
		g := groups[i]
		g.TypeMeta = metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"}
		add("/apis/"+g.Name, &g)
	}
	for _, gv := range groupVersions(h.resources) {
		path := "/apis/" + gv.String()
		if gv.Group == "" {
			path = "/api/" + gv.Version
		}
		add(path, resourceList(h.resources, gv))
	}
	for d, isCore := range map[*document]bool{api: true, apis: false} {
		list := aggregated(h.resources, isCore)
		var err error
		if d.v2, err = encodeAggregated(codecs, list, aggregatedV2); err == nil {
			d.beta, err = encodeAggregated(codecs, toV2beta1(list), aggregatedV2beta1)
		}
		if err != nil && firstErr == nil {
			firstErr = err
		}
	}
	return h, firstErr
}

// newCodecs knows the discovery types and nothing else.
func newCodecs() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	scheme.AddUnversionedTypes(schema.GroupVersion{Version: "v1"},
		&metav1.APIVersions{}, &metav1.APIGroup{}, &metav1.APIGroupList{}, &metav1.APIResourceList{})
	scheme.AddKnownTypes(apidiscoveryv2.SchemeGroupVersion, &apidiscoveryv2.APIGroupDiscoveryList{})
	scheme.AddKnownTypes(apidiscoveryv2beta1.SchemeGroupVersion, &apidiscoveryv2beta1.APIGroupDiscoveryList{})
	return serializer.NewCodecFactory(scheme)
}

// encode gives every supported form of a document, JSON first.
func encode(codecs serializer.CodecFactory, obj runtime.Object) ([]answer, error) {
	var out []answer
	for _, info := range codecs.SupportedMediaTypes() {
		var buf bytes.Buffer
		if err := info.Serializer.Encode(obj, &buf); err != nil {
			return nil, fmt.Errorf("encode as %s: %w", info.MediaType, err)
		}
		a := answer{contentType: info.MediaType, body: buf.Bytes()}
		if info.MediaType == runtime.ContentTypeJSON {
			out = append([]answer{a}, out...)
		} else {
			out = append(out, a)
		}
	}
	return out, nil
}

func encodeAggregated(codecs serializer.CodecFactory, obj runtime.Object, contentType string) ([]answer, error) {
	out, err := encode(codecs, obj)
	if err != nil {
		return nil, fmt.Errorf("discovery: aggregated: %w", err)
	}
	sum := sha256.Sum256(out[0].body)
	etag := `"` + strings.ToUpper(hex.EncodeToString(sum[:])) + `"`
	for i := range out {
		out[i].contentType = out[i].contentType + strings.TrimPrefix(contentType, runtime.ContentTypeJSON)
		out[i].etag = etag
	}
	return out, nil
}

// versionInfo is the answer to GET /version. Clients parse gitVersion as a
// semantic version and compare its minor with their own.
func versionInfo(cfg Config) version.Info {
	minor := strings.Split(KubernetesVersion, ".")[1]
	return version.Info{
		Major: "1", Minor: minor,
		GitVersion:   "v" + KubernetesVersion + "+dunlin." + buildMetadata(cfg.Version),
		GitCommit:    cfg.Commit,
		GitTreeState: "clean",
		BuildDate:    cfg.BuildDate,
		GoVersion:    goruntime.Version(), Compiler: goruntime.Compiler,
		Platform: goruntime.GOOS + "/" + goruntime.GOARCH,
	}
}

// buildMetadata keeps what semver 2.0 section 10 allows: dot-separated
// non-empty words of [0-9A-Za-z-].
func buildMetadata(v string) string {
	clean := strings.Map(func(r rune) rune {
		if r == '.' || r == '-' || (r >= '0' && r <= '9') || (r >= 'a' && r <= 'z') || (r >= 'A' && r <= 'Z') {
			return r
		}
		return '-'
	}, v)
	words := strings.FieldsFunc(clean, func(r rune) bool { return r == '.' })
	if len(words) == 0 {
		return "0"
	}
	return strings.Join(words, ".")
}

// Version is what /version answers.
func (h *Handler) Version() version.Info { return h.version }

// Resources is everything that is advertised.
func (h *Handler) Resources() []Resource { return h.resources }

func trim(path string) string {
	if len(path) > 1 {
		return strings.TrimRight(path, "/")
	}
	return path
}

// Handles says whether the path is one of discovery's: /version, /api,
// /apis, and one or two segments below them, known or not. A path below a
// version ("/api/v1/pods") is not.
func (h *Handler) Handles(path string) bool {
	seg := strings.Split(strings.Trim(path, "/"), "/")
	switch seg[0] {
	case "version":
		return len(seg) == 1
	case "api":
		return len(seg) <= 2
	case "apis":
		return len(seg) <= 3
	}
	return false
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		writeStatus(w, apierrors.NewMethodNotSupported(schema.GroupResource{}, strings.ToLower(r.Method)))
		return
	}
	path := trim(r.URL.Path)
	if path == "/version" {
		body, err := json.MarshalIndent(h.version, "", "  ")
		if err != nil {
			writeStatus(w, apierrors.NewInternalError(err))
			return
		}
		write(w, r, answer{contentType: runtime.ContentTypeJSON, body: body})
		return
	}
	d, ok := h.docs[path]
	if !ok {
		writeStatus(w, apierrors.NewGenericServerResponse(http.StatusNotFound, strings.ToLower(r.Method), schema.GroupResource{}, "", "", 0, true))
		return
	}
	if d.v2 != nil {
		w.Header().Set("Vary", "Accept")
	}
	a, ok := choose(d, r.Header.Get("Accept"))
	if !ok {
		writeStatus(w, notAcceptable(d))
		return
	}
	write(w, r, a)
}

func write(w http.ResponseWriter, r *http.Request, a answer) {
	head := w.Header()
	head.Set("Content-Type", a.contentType)
	if a.etag != "" {
		head.Set("ETag", a.etag)
		head.Set("Cache-Control", "public")
		if match := r.Header.Get("If-None-Match"); match == a.etag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
	} else {
		head.Set("Cache-Control", "no-cache, private")
	}
	w.WriteHeader(http.StatusOK)
	if r.Method != http.MethodHead {
		_, _ = w.Write(a.body) // a client that went away is no error of ours
	}
}

// notAcceptable is upstream's 406.
func notAcceptable(d *document) *apierrors.StatusError {
	var types []string
	for _, a := range d.plain {
		types = append(types, a.contentType)
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusNotAcceptable, Reason: metav1.StatusReasonNotAcceptable,
		Message: "only the following media types are accepted: " + strings.Join(types, ", "),
	}}
}

func writeStatus(w http.ResponseWriter, err *apierrors.StatusError) {
	st := err.Status()
	st.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	body, jsonErr := json.Marshal(st)
	if jsonErr != nil {
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	w.Header().Set("Cache-Control", "no-cache, private")
	w.WriteHeader(int(st.Code))
	_, _ = w.Write(append(body, '\n')) // a client that went away is no error of ours
}
