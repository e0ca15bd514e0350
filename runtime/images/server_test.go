package images

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	mem "github.com/google/go-containerregistry/pkg/registry"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// hub is a real registry (go-containerregistry's) behind a proxy that does
// what a test says.
type hub struct {
	t    testing.TB
	host string
	srv  *httptest.Server

	mu    sync.Mutex
	fault func(w http.ResponseWriter, r *http.Request) http.ResponseWriter // nil: it has answered
	asked []string
	sent  int64 // bytes of bodies
}

func newHub(t testing.TB) *hub {
	t.Helper()
	h := &hub{t: t}
	real := mem.New(mem.Logger(log.New(io.Discard, "", 0)))
	h.srv = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		fault := h.fault
		h.asked = append(h.asked, r.Method+" "+r.URL.Path+" "+r.Header.Get("Range"))
		h.mu.Unlock()
		out := http.ResponseWriter(&counted{w, h})
		if fault != nil {
			if out = fault(out, r); out == nil {
				return
			}
		}
		real.ServeHTTP(out, r)
	}))
	h.srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(h.srv.Close)
	h.host = strings.TrimPrefix(h.srv.URL, "http://")
	return h
}

type counted struct {
	http.ResponseWriter
	h *hub
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.h.mu.Lock()
	c.h.sent += int64(n)
	c.h.mu.Unlock()
	return n, err
}

func (h *hub) setFault(f func(w http.ResponseWriter, r *http.Request) http.ResponseWriter) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fault, h.asked, h.sent = f, nil, 0
}

func (h *hub) bytes() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sent
}

func (h *hub) questions() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]string(nil), h.asked...)
}

// push puts an image there by HTTP, as any client would.
func push(t testing.TB, base, repository, tag string, auth func(*http.Request), images ...*made) (digest string) {
	t.Helper()
	do := func(method, url, kind string, body []byte, want int) *http.Response {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, url, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", kind)
		if auth != nil {
			auth(r)
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Fatalf("%s %s: %d %s", method, url, resp.StatusCode, b)
		}
		return resp
	}
	root := base + "/v2/" + repository
	ix := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	for _, m := range images {
		for d, b := range m.blobs {
			if d == m.manifest {
				continue
			}
			at := do(http.MethodPost, root+"/blobs/uploads/", "", nil, http.StatusAccepted).Header.Get("Location")
			if strings.HasPrefix(at, "/") {
				at = base + at
			}
			sep := "?"
			if strings.Contains(at, "?") {
				sep = "&"
			}
			do(http.MethodPut, at+sep+"digest="+d, "application/octet-stream", b, http.StatusCreated)
		}
		ix.Manifests = append(ix.Manifests, m.descriptor())
		var head struct {
			MediaType string `json:"mediaType"`
		}
		if err := json.Unmarshal(m.blobs[m.manifest], &head); err != nil {
			t.Fatal(err)
		}
		digest = m.manifest
		do(http.MethodPut, root+"/manifests/"+digest, head.MediaType, m.blobs[digest], http.StatusCreated)
		if len(images) == 1 {
			do(http.MethodPut, root+"/manifests/"+tag, head.MediaType, m.blobs[digest], http.StatusCreated)
		}
	}
	if len(images) > 1 {
		raw := mustJSON(t, &ix)
		do(http.MethodPut, root+"/manifests/"+tag, string(types.OCIImageIndex), raw, http.StatusCreated)
		digest = digestOf(raw)
	}
	return digest
}

// puller pulls into a new store.
func testPuller(t testing.TB, s *Store, c registry.Config) *Puller {
	t.Helper()
	s.pauseUnit = time.Millisecond
	client := registry.New(c, "dunlin-test")
	t.Cleanup(client.Close)
	return NewPuller(PullerConfig{Store: s, Registry: client})
}

func ask(image, policy string) workload.ImageRequest {
	return workload.ImageRequest{Image: image, Policy: policy}
}

// noise is content that does not compress.
func noise(n int, seed uint64) string {
	b := make([]byte, n)
	for i := range b {
		seed ^= seed << 13
		seed ^= seed >> 7
		seed ^= seed << 17
		b[i] = byte(seed)
	}
	return string(b)
}

// cutAfter ends every blob's connection after n bytes.
func cutAfter(n int) func(http.ResponseWriter, *http.Request) http.ResponseWriter {
	return func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/") {
			return w
		}
		return &cutter{w, n}
	}
}

type cutter struct {
	http.ResponseWriter
	left int
}

func (c *cutter) Write(p []byte) (int, error) {
	if len(p) > c.left {
		_, _ = c.ResponseWriter.Write(p[:c.left])
		if f, ok := c.ResponseWriter.(*counted).ResponseWriter.(http.Flusher); ok {
			f.Flush()
		}
		panic(http.ErrAbortHandler)
	}
	c.left -= len(p)
	return c.ResponseWriter.Write(p)
}

// answer is a fault that answers questions whose path contains part.
func answer(part string, code int, header http.Header, body string) func(http.ResponseWriter, *http.Request) http.ResponseWriter {
	return func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		if !strings.Contains(r.URL.Path, part) {
			return w
		}
		for k, v := range header {
			w.Header()[k] = v
		}
		w.WriteHeader(code)
		_, _ = fmt.Fprint(w, body)
		return nil
	}
}
