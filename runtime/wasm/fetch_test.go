package wasm

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	mem "github.com/google/go-containerregistry/pkg/registry"

	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// pushModule pushes a module as an artifact, with plain HTTP.
func pushModule(t *testing.T, base string, module []byte) {
	t.Helper()
	send := func(method, path, kind string, body []byte) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, base+path, strings.NewReader(string(body)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", kind)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusCreated {
			t.Fatal(resp.Status)
		}
	}
	sum := func(b []byte) string {
		f := filepath.Join(t.TempDir(), "b")
		if err := os.WriteFile(f, b, 0o600); err != nil {
			t.Fatal(err)
		}
		o, err := os.Open(f)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = o.Close() }()
		d, err := digestOf(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	config := []byte("{}")
	for _, b := range [][]byte{config, module} {
		send(http.MethodPost, "/v2/app/blobs/uploads/?digest="+sum(b), "application/octet-stream", b)
	}
	m := `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.wasm.config.v0+json","size":2,"digest":"` +
		sum(config) + `"},"layers":[{"mediaType":"application/wasm","size":` + itoa(len(module)) + `,"digest":"` + sum(module) + `"}]}`
	send(http.MethodPut, "/v2/app/manifests/v1", "application/vnd.oci.image.manifest.v1+json", []byte(m))
}

func reasonOf(err error) string {
	var se *workload.StartError
	if errors.As(err, &se) {
		return se.Reason
	}
	return ""
}

func itoa(n int) string {
	b, err := json.Marshal(n)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// TestModuleFromARegistry: pulled once, started without the registry, kept in
// one copy, and fetched again when the disk lost it.
func TestModuleFromARegistry(t *testing.T) {
	srv := httptest.NewServer(mem.New(mem.Logger(log.New(io.Discard, "", 0))))
	defer srv.Close()
	module, err := os.ReadFile("testdata/print.wasm")
	if err != nil {
		t.Fatal(err)
	}
	pushModule(t, srv.URL, module)
	s, err := images.Open(images.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	client := registry.New(registry.Config{}, "test")
	defer client.Close()
	b := newBench(t)
	b.cfg.Fetcher = images.NewPuller(images.PullerConfig{Store: s, Registry: client})
	b.reopen()
	req := workload.ImageRequest{Image: strings.TrimPrefix(srv.URL, "http://") + "/app:v1", Policy: "IfNotPresent"}
	st, err := b.Prepare(t.Context(), req, nil)
	if err != nil || st.Size != int64(len(module)) {
		t.Fatal(st, err)
	}
	path := b.Store().BlobPath(st.Digest)
	if info, err := os.Stat(path); err != nil || info.Sys().(*syscall.Stat_t).Nlink != 2 {
		t.Errorf("%v, %v", info, err)
	}
	if err := os.WriteFile(path, make([]byte, len(module)), 0o600); err != nil { // both names' content
		t.Fatal(err)
	}
	b.reopen()
	if got, err := b.Prepare(t.Context(), req, nil); err != nil || got != st {
		t.Fatal(got, err)
	}
	srv.Close()
	for _, policy := range []string{"Always", "IfNotPresent", "Never"} {
		req.Policy = policy
		if got, err := b.Prepare(t.Context(), req, nil); err != nil || got != st {
			t.Errorf("%s: %v, %v", policy, got, err)
		}
	}
	spec := b.spec("print", "c")
	spec.Image, spec.Digest = req.Image, st.Digest
	b.start(spec)
	// A name without a registry never reaches one.
	req.Image = "hello.wasm"
	if _, err := b.Prepare(t.Context(), req, nil); reasonOf(err) != ReasonNeverPull {
		t.Error(err)
	}
	req.Policy = "Always"
	if _, err := b.Prepare(t.Context(), req, nil); reasonOf(err) != ReasonPull || !strings.Contains(err.Error(), "begins with no registry") {
		t.Error(err)
	}
}
