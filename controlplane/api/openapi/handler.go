package openapi

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/api/discovery"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// Media types of OpenAPI v2. Clients ask with an @, which is not allowed in a
// media type, and are answered with a dot, as upstream does.
const (
	v2Protobuf      = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
	v2ProtobufAsked = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"
	contentJSON     = "application/json"
)

// lazy is one document, built when it is first asked for and kept
// compressed. Its hash is that of its inputs, so that an index can name it
// without building it.
type lazy struct {
	hash        string
	contentType string
	build       func() ([]byte, error)

	once sync.Once
	gz   []byte
	err  error
}

func (l *lazy) get() ([]byte, error) {
	l.once.Do(func() {
		raw, err := l.build()
		if err != nil {
			l.err = err
			return
		}
		var buf bytes.Buffer
		zw := gzip.NewWriter(&buf)
		if _, err := zw.Write(raw); err != nil {
			l.err = fmt.Errorf("openapi: compress: %w", err)
			return
		}
		if err := zw.Close(); err != nil {
			l.err = fmt.Errorf("openapi: compress: %w", err)
			return
		}
		l.gz = bytes.Clone(buf.Bytes())
	})
	return l.gz, l.err
}

// Handler serves /openapi/v2 and /openapi/v3.
type Handler struct {
	clock  clock.Clock
	v3     map[string]*lazy // by path below /openapi/v3/
	index  []byte
	v2     *lazy
	v2JSON *lazy
}

// New takes what discovery advertises. clk dates the Expires header.
func New(resources []discovery.Resource, clk clock.Clock) (*Handler, error) {
	// What is proxied has bodies of somebody else's.
	resources = slices.DeleteFunc(slices.Clone(resources), func(r discovery.Resource) bool {
		_, sub := r.Subresource()
		return sub == "proxy"
	})
	h := &Handler{clock: clk, v3: map[string]*lazy{}}
	inputs := sha256.Sum256(embedded)
	base := hex.EncodeToString(inputs[:]) + discovery.KubernetesVersion
	var everything strings.Builder
	lines := map[schema.GroupVersion]*strings.Builder{}
	for i := range resources {
		r := &resources[i]
		line := fmt.Sprintf("%s %s %s %v %v\n", r.GroupVersion, r.Name, r.Kind, r.Namespaced, r.Verbs)
		everything.WriteString(line)
		if lines[r.GroupVersion] == nil {
			lines[r.GroupVersion] = &strings.Builder{}
		}
		lines[r.GroupVersion].WriteString(line)
	}
	type entry struct {
		URL string `json:"serverRelativeURL"`
	}
	index := struct {
		Paths map[string]entry `json:"paths"`
	}{map[string]entry{}}
	for gv, text := range lines {
		path := "apis/" + gv.String()
		if gv.Group == "" {
			path = "api/" + gv.Version
		}
		l := &lazy{hash: hash(base, text.String()), contentType: contentJSON, build: func() ([]byte, error) {
			doc, err := documentV3(resources, gv)
			if err != nil {
				return nil, err
			}
			return marshal(doc)
		}}
		h.v3[path] = l
		index.Paths[path] = entry{URL: "/openapi/v3/" + path + "?hash=" + l.hash}
	}
	h.v2 = &lazy{hash: hash(base, "v2", everything.String()), contentType: v2Protobuf, build: func() ([]byte, error) {
		doc, err := documentV2(resources)
		if err != nil {
			return nil, err
		}
		return encodeV2(doc), nil
	}}
	h.v2JSON = &lazy{hash: hash(base, "v2 json", everything.String()), contentType: contentJSON, build: func() ([]byte, error) {
		doc, err := documentV2(resources)
		if err != nil {
			return nil, err
		}
		return marshal(doc)
	}}
	var err error
	h.index, err = marshal(index)
	return h, err
}

func marshal(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("openapi: encode: %w", err)
	}
	return b, nil
}

func hash(parts ...string) string {
	sum := sha256.New()
	for _, p := range parts {
		_, _ = io.WriteString(sum, p) // a hash never fails
	}
	return strings.ToUpper(hex.EncodeToString(sum.Sum(nil)))
}

// Handles says whether the path is OpenAPI's.
func (h *Handler) Handles(path string) bool {
	return path == "/openapi/v2" || path == "/openapi/v3" || strings.HasPrefix(path, "/openapi/v3/")
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		writeStatus(w, apierrors.NewMethodNotSupported(schema.GroupResource{}, strings.ToLower(r.Method)))
		return
	}
	w.Header().Set("Vary", "Accept")
	accept := parseAccept(r.Header.Get("Accept"))
	switch path := strings.TrimSuffix(r.URL.Path, "/"); path {
	case "/openapi/v2":
		switch {
		case accept.wants(v2Protobuf):
			h.send(w, r, h.v2, "no-cache, private")
		case accept.wants(contentJSON):
			h.send(w, r, h.v2JSON, "no-cache, private")
		default:
			writeStatus(w, notAcceptable(v2ProtobufAsked, contentJSON))
		}
	case "/openapi/v3":
		if !accept.wants(contentJSON) {
			writeStatus(w, notAcceptable(contentJSON))
			return
		}
		w.Header().Set("Content-Type", contentJSON)
		w.Header().Set("Cache-Control", "no-cache, private")
		if r.Method != http.MethodHead {
			_, _ = w.Write(h.index) // a client that went away is no error of ours
		}
	default:
		h.serveV3(w, r, strings.TrimPrefix(path, "/openapi/v3/"), accept)
	}
}

// serveV3 serves one group version. A URL that carries the right hash never
// changes its content and may be cached for ever; one with another hash is
// sent to the right one.
func (h *Handler) serveV3(w http.ResponseWriter, r *http.Request, path string, accept accepted) {
	l, ok := h.v3[path]
	if !ok {
		writeStatus(w, apierrors.NewGenericServerResponse(http.StatusNotFound, strings.ToLower(r.Method), schema.GroupResource{}, "", "", 0, true))
		return
	}
	if !accept.wants(contentJSON) {
		writeStatus(w, notAcceptable(contentJSON))
		return
	}
	switch asked := r.URL.Query().Get("hash"); asked {
	case "":
		h.send(w, r, l, "no-cache, private")
	case l.hash:
		w.Header().Set("Expires", h.clock.Now().AddDate(1, 0, 0).UTC().Format(http.TimeFormat))
		h.send(w, r, l, "public, immutable")
	default:
		http.Redirect(w, r, "/openapi/v3/"+path+"?hash="+l.hash, http.StatusMovedPermanently) //nolint:gosec // to a path of this server: it begins with /openapi/v3/
	}
}

// send writes a document, compressed if the client takes it.
func (h *Handler) send(w http.ResponseWriter, r *http.Request, l *lazy, cache string) {
	head := w.Header()
	etag := `"` + l.hash + `"`
	head.Set("ETag", etag)
	head.Set("Cache-Control", cache)
	head.Add("Vary", "Accept-Encoding")
	if r.Header.Get("If-None-Match") == etag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	gz, err := l.get()
	if err != nil {
		writeStatus(w, apierrors.NewInternalError(err))
		return
	}
	head.Set("Content-Type", l.contentType)
	if r.Method == http.MethodHead {
		return
	}
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		head.Set("Content-Encoding", "gzip")
		_, _ = w.Write(gz) // a client that went away is no error of ours
		return
	}
	zr, err := gzip.NewReader(bytes.NewReader(gz))
	if err != nil {
		writeStatus(w, apierrors.NewInternalError(err))
		return
	}
	_, _ = io.Copy(w, zr) //nolint:gosec // our own document
}

// accepted are the media types of an Accept header; empty accepts all.
type accepted []string

func parseAccept(header string) accepted {
	var list accepted
	for part := range strings.SplitSeq(header, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		// The @ of v2's media type is replaced before parsing, which refuses it.
		media, _, err := mime.ParseMediaType(strings.Replace(part, v2ProtobufAsked, v2Protobuf, 1))
		if err != nil {
			media = part // no type of ours, but not nothing either
		}
		list = append(list, media)
	}
	return list
}

// wants says whether a type is acceptable. Nothing asked for is JSON, which
// is what everybody reads.
func (a accepted) wants(media string) bool {
	if len(a) == 0 {
		return media == contentJSON
	}
	for _, m := range a {
		if m == media || ((m == "*/*" || m == "application/*") && media == contentJSON) {
			return true
		}
	}
	return false
}

func notAcceptable(types ...string) *apierrors.StatusError {
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
	w.Header().Set("Content-Type", contentJSON)
	w.Header().Set("Cache-Control", "no-cache, private")
	w.Header().Del("ETag")
	w.WriteHeader(int(st.Code))
	_, _ = w.Write(append(body, '\n')) // a client that went away is no error of ours
}
