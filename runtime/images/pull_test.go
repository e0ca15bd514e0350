package images

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

func content(t testing.TB, img *Image, path string) string {
	t.Helper()
	for _, l := range img.Layers {
		if b, err := os.ReadFile(filepath.Join(img.LayerDir, l, path)); err == nil {
			return string(b)
		}
	}
	return ""
}

// TestPullByPolicy: what each policy asks of the registry, and that a link
// that is gone never keeps known work from starting.
func TestPullByPolicy(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	one := makeImage(t, amd64(), gzipped, tarOf(t, file("v", "1")))
	two := makeImage(t, amd64(), zstandard, tarOf(t, file("v", "2")))
	arm := makeImage(t, Platform{"linux", "arm64", "v8"}, gzipped, tarOf(t, file("v", "arm")))
	index := push(t, h.srv.URL, "team/app", "1", nil, arm, one)
	p := testPuller(t, testStore(t), registry.Config{})
	name := h.host + "/team/app:1"
	get := func(policy string) (*Image, error) { return p.Image(t.Context(), ask(name, policy), nil) }
	if _, err := get("Never"); reason(err) != ReasonNeverPull {
		t.Error(err)
	}
	img, err := get("IfNotPresent")
	if err != nil || content(t, img, "v") != "1" || img.Digest != index || img.Manifest != one.manifest {
		t.Fatalf("%+v, %v", img, err)
	}
	push(t, h.srv.URL, "team/app", "1", nil, two)
	h.setFault(nil)
	for _, policy := range []string{"Never", "IfNotPresent"} {
		if img, err := get(policy); err != nil || content(t, img, "v") != "1" {
			t.Error(policy, img, err)
		}
	}
	if q := h.questions(); len(q) > 0 {
		t.Errorf("the registry was asked: %v", q)
	}
	if img, err := get("Always"); err != nil || content(t, img, "v") != "2" {
		t.Error(img, err)
	}
	h.setFault(nil)
	if img, err := get("Always"); err != nil || content(t, img, "v") != "2" || len(h.questions()) != 1 {
		t.Error(img, err, h.questions())
	}
	// The registry's word counts, its silence does not.
	h.setFault(answer("/manifests/", http.StatusNotFound, nil, ""))
	if _, err := get("Always"); reason(err) != ReasonPull || !strings.Contains(err.Error(), "404") {
		t.Error(err)
	}
	h.setFault(answer("/manifests/", http.StatusBadGateway, nil, ""))
	var told []string
	img, err = p.Image(t.Context(), ask(name, "Always"), func(m string) { told = append(told, m) })
	if err != nil || content(t, img, "v") != "2" || len(told) != 1 || !strings.HasPrefix(told[0], workload.Kept) {
		t.Error(img, err, told)
	}
	h.srv.Close()
	if img, err := get("Always"); err != nil || content(t, img, "v") != "2" {
		t.Error(img, err)
	}
	// By digest, both are here still.
	for digest, want := range map[string]string{index: "1", two.manifest: "2"} {
		if img, err := p.Image(t.Context(), ask(h.host+"/team/app@"+digest, "Always"), nil); err != nil || content(t, img, "v") != want {
			t.Error(digest, img, err)
		}
	}
}

// TestPullGoesOnAfterCuts: a link that breaks every 100 kB brings 2 MB, and no
// byte twice; without ranges it still ends.
func TestPullGoesOnAfterCuts(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	layer := tarOf(t, file("big", noise(2<<20, 1)))
	m := makeImage(t, amd64(), plain, layer)
	push(t, h.srv.URL, "app", "1", nil, m)
	p := testPuller(t, testStore(t), registry.Config{})
	h.setFault(cutAfter(100_000))
	img, err := p.Image(t.Context(), ask(h.host+"/app:1", "IfNotPresent"), nil)
	if err != nil || content(t, img, "big") != noise(2<<20, 1) {
		t.Fatal(img, err)
	}
	if sent, size := h.bytes(), int64(len(layer)); sent > size+size/10 {
		t.Errorf("%d bytes for an image of %d", sent, size)
	}
	if n := len(h.questions()); n < 20 {
		t.Errorf("%d questions: nothing was cut", n)
	}
	// A registry without ranges sends from the beginning: it ends if one
	// connection lasts.
	p = testPuller(t, testStore(t), registry.Config{})
	cuts := 0
	h.setFault(func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		r.Header.Del("Range")
		if cuts++; cuts < 5 {
			return cutAfter(900_000)(w, r)
		}
		return w
	})
	if img, err := p.Image(t.Context(), ask(h.host+"/app:1", "IfNotPresent"), nil); err != nil || content(t, img, "big") != noise(2<<20, 1) {
		t.Fatal(img, err)
	}
}

// TestPullGoesOnInAnotherProcess: what an agent that ended had fetched is not
// fetched again, even if its last checkpoint is old or the part grew rubbish
// behind it.
func TestPullGoesOnInAnotherProcess(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	layer := tarOf(t, file("big", noise(2<<20, 2)))
	m := makeImage(t, amd64(), plain, layer)
	push(t, h.srv.URL, "app", "1", nil, m)
	digest := layerOf(t, m)
	for name, spoil := range map[string]func(path string) error{
		"as it was": func(string) error { return nil },
		"rubbish behind": func(p string) error {
			f, err := os.OpenFile(p, os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteString(strings.Repeat("\x00", 500_000))
			return errors.Join(err, f.Close())
		},
		"part lost":      func(p string) error { return os.Truncate(p, 1000) },
		"record emptied": func(p string) error { return os.Truncate(statePath(p), 0) },
		"zeroes inside": func(p string) error {
			f, err := os.OpenFile(p, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt(make([]byte, 4096), 300_000)
			return errors.Join(err, f.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			ctx, cancel := context.WithCancelCause(t.Context())
			cuts := 0
			h.setFault(func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
				if strings.Contains(r.URL.Path, digest) {
					if cuts++; cuts == 10 {
						cancel(errors.New("the agent ends"))
					}
				}
				return cutAfter(100_000)(w, r)
			})
			if _, err := testPuller(t, openStore(t, dir), registry.Config{}).Image(ctx, ask(h.host+"/app:1", "IfNotPresent"), nil); err == nil {
				t.Fatal("it was not stopped")
			}
			if err := spoil(openStore(t, dir).partialPath(digest)); err != nil {
				t.Fatal(err)
			}
			h.setFault(nil)
			img, err := testPuller(t, openStore(t, dir), registry.Config{}).Image(t.Context(), ask(h.host+"/app:1", "IfNotPresent"), nil)
			if err != nil || content(t, img, "big") != noise(2<<20, 2) {
				t.Fatal(img, err)
			}
			if name == "as it was" || name == "rubbish behind" {
				if sent := h.bytes(); sent > int64(len(layer))-800_000 {
					t.Errorf("%d bytes were fetched again", sent)
				}
			}
			if left, err := os.ReadDir(filepath.Join(dir, "partial")); err != nil || len(left) > 0 {
				t.Errorf("%v, %v", left, err)
			}
		})
	}
}

// TestOnePullForMany: ten pods that want one image fetch it once.
func TestOnePullForMany(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	layer := tarOf(t, file("big", noise(1<<20, 3)))
	push(t, h.srv.URL, "app", "1", nil, makeImage(t, amd64(), plain, layer))
	p := testPuller(t, testStore(t), registry.Config{})
	h.setFault(nil)
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			if _, err := p.Image(t.Context(), ask(h.host+"/app:1", "IfNotPresent"), nil); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if sent, size := h.bytes(), int64(len(layer)); sent > size+size/10 {
		t.Errorf("%d bytes for an image of %d", sent, size)
	}
	if len(p.s.busy)+len(p.s.held) > 0 {
		t.Errorf("left: %v %v", p.s.busy, p.s.held)
	}
}

// TestWhatRegistriesDoWrong: one clear line each, with the reason's name.
func TestWhatRegistriesDoWrong(t *testing.T) {
	needRoot(t)
	m := makeImage(t, amd64(), gzipped, tarOf(t, file("a", "b")))
	blob := layerOf(t, m)
	many := make([][]byte, 200)
	for i := range many {
		many[i] = tarOf(t, file("n", strconv.Itoa(i)))
	}
	for name, c := range map[string]struct {
		image []*made
		fault func(http.ResponseWriter, *http.Request) http.ResponseWriter
		want  string // "" is success
	}{
		"200 layers":      {image: []*made{makeImage(t, amd64(), plain, many...)}},
		"wrong platform":  {image: []*made{makeImage(t, Platform{"linux", "s390x", ""}, plain)}, want: "is for linux/s390x, and this node runs linux/amd64/v1"},
		"wrong platforms": {image: []*made{makeImage(t, Platform{"linux", "arm", "v7"}, plain), makeImage(t, Platform{"linux", "arm64", "v8"}, plain)}, want: "is for linux/arm/v7, linux/arm64/v8, and this node"},
		"traversal":       {image: []*made{makeImage(t, amd64(), plain, tarOf(t, file("../x", "y")))}, want: "path traversal"},
		"401":             {fault: answer("/manifests/", 401, http.Header{"Www-Authenticate": {`Basic realm="x"`}}, ""), want: "401 Unauthorized (the image needs a login"},
		"403":             {fault: answer("/manifests/", 403, nil, `{"errors":[{"code":"DENIED","message":"not\nyours"}]}`), want: "403 Forbidden: DENIED not yours"},
		"404":             {fault: answer("/manifests/", 404, nil, ""), want: "no such repository or tag"},
		"429":             {fault: answer("/manifests/", 429, http.Header{"Retry-After": {"77"}}, ""), want: "asks to wait 1m17s"},
		"429 for a blob":  {fault: answer(blob, 429, http.Header{"Retry-After": {"77"}}, ""), want: "asks to wait 1m17s"},
		"500":             {fault: answer("/manifests/", 500, nil, "<html>oops</html>"), want: "500 Internal Server Error"},
		"500 for a blob":  {fault: answer(blob, 500, nil, ""), want: "500 Internal Server Error"},
		"html":            {fault: answer("/manifests/", 200, nil, "<html>log in to the wifi</html>"), want: "manifest cannot be read"},
		"5 MB manifest":   {fault: answer("/manifests/", 200, nil, `{"x":"`+strings.Repeat("y", 5<<20)+`"}`), want: "larger than the limit of 4 MiB"},
		"other content":   {fault: answer(blob, 200, nil, strings.Repeat("x", len(m.blobs[blob]))), want: "has digest"},
		"lying length":    {fault: answer(blob, 200, nil, "short"), want: "sends 5 bytes of sha256:" + hexOf(blob)[:12] + ", and the manifest says"},
		"empty blob":      {fault: answer(blob, 200, nil, ""), want: "sends 0 bytes"},
		"wrong range":     {fault: answer(blob, 206, http.Header{"Content-Range": {"bytes 7-9/10"}}, "abc"), want: "asked for bytes from 0"},
		"schema 1":        {fault: answer("/manifests/", 200, nil, `{"schemaVersion":1,"config":{"digest":"`+m.manifest+`"}}`), want: "schema version 1"},
		"loop":            {fault: answer("/manifests/", 200, nil, `{"manifests":[]}`), want: "is for nothing"},
		"not TLS": {fault: func(w http.ResponseWriter, _ *http.Request) http.ResponseWriter {
			w.Header().Set("Location", "http://127.0.0.1:1/")
			w.WriteHeader(307)
			return nil
		}, want: "cannot be reached: connect: connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			if c.image == nil {
				c.image = []*made{m}
			}
			push(t, h.srv.URL, "app", "1", nil, c.image...)
			h.setFault(c.fault)
			s := testStore(t)
			img, err := testPuller(t, s, registry.Config{}).Image(t.Context(), ask(h.host+"/app:1", "IfNotPresent"), nil)
			if c.want == "" {
				if err != nil || content(t, img, "n") != "199" {
					t.Fatal(img, err)
				}
				mountOverlayRelative(t, img)
				return
			}
			if reason(err) != ReasonPull || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v", err)
			}
			var se *workload.StartError
			if strings.HasPrefix(name, "429") && (!errors.As(err, &se) || se.RetryAfter.Seconds() != 77) {
				t.Errorf("%+v", se)
			}
			if _, ok := s.readName(h.host + "/app:1"); ok {
				t.Error("the name stands for something")
			}
		})
	}
	p := testPuller(t, testStore(t), registry.Config{})
	for _, bad := range []string{"UPPER/case:1", "a b", "x@sha256:12", "", "http://x/y:1", "x:y:z"} {
		var se *workload.StartError
		if _, err := p.Image(t.Context(), ask(bad, "Always"), nil); !errors.As(err, &se) || se.Reason != ReasonInvalidName || !se.Fatal {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// mountOverlayRelative mounts hundreds of layers, whose absolute names would
// not fit into mount(2)'s page.
func mountOverlayRelative(t *testing.T, img *Image) {
	t.Helper()
	if n := len(strings.Join(img.Layers, ":")); len(img.Layers) != 200 || n > 700 {
		t.Errorf("%d layers in %d bytes", len(img.Layers), n)
	}
}

// TestDisksTooSmallAreSaidBeforehand: not one byte of a layer is asked for.
func TestDisksTooSmallAreSaidBeforehand(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	m := makeImage(t, amd64(), plain, tarOf(t, file("a", "b")))
	push(t, h.srv.URL, "app", "1", nil, m)
	s, err := Open(Config{Dir: t.TempDir(), Platform: amd64(), Reserve: 1 << 60})
	if err != nil {
		t.Fatal(err)
	}
	h.setFault(nil)
	_, err = testPuller(t, s, registry.Config{}).Image(t.Context(), ask(h.host+"/app:1", "IfNotPresent"), nil)
	if reason(err) != ReasonPull || !strings.Contains(err.Error(), "not enough space") {
		t.Error(err)
	}
	for _, q := range h.questions() {
		if strings.Contains(q, layerOf(t, m)) {
			t.Error(q)
		}
	}
}

// moduleArtifact makes the forms in which modules are pushed.
func moduleArtifact(t testing.TB, form string, module []byte) *made {
	t.Helper()
	m := &made{blobs: map[string][]byte{}}
	mf := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	layer := m.add(module)
	switch form {
	case "artifact":
		mf.Config, layer.MediaType = m.add([]byte(`{"created":"2024-01-01T00:00:00Z","architecture":"wasm","os":"wasip1","layerDigests":[]}`)), wasmLayer
		mf.Config.MediaType = wasmConfig
	case "wasm-to-oci":
		mf.Config, layer.MediaType = m.add([]byte(`{}`)), wasmLayerOld
		mf.Config.MediaType = wasmConfigOld
	case "single layer":
		mf.Config, layer.MediaType = m.add([]byte(`{}`)), wasmLayer
		mf.Config.MediaType = "application/vnd.oci.empty.v1+json"
	case "compat", "compat without annotation":
		p := Platform{"wasi", "wasm", ""}
		img := makeImage(t, p, gzipped, tarOf(t, file("readme", "x"), file("bin/app", string(module))))
		if form == "compat" {
			mf, err := parseManifest("x", img.blobs[img.manifest])
			if err != nil {
				t.Fatal(err)
			}
			mf.Annotations = map[string]string{compatMark: "compat"}
			img.manifest = img.add(mustJSON(t, mf)).Digest.String()
		}
		return img
	}
	mf.Layers = []v1.Descriptor{layer}
	m.manifest = m.add(mustJSON(t, &mf)).Digest.String()
	return m
}

// TestModulesInEveryForm: what is pulled is the module to the byte, and an
// image that has none says so.
func TestModulesInEveryForm(t *testing.T) {
	h := newHub(t)
	module := []byte("\x00asm\x01\x00\x00\x00" + noise(5000, 9))
	p := testPuller(t, testStore(t), registry.Config{})
	for _, form := range []string{"artifact", "wasm-to-oci", "single layer", "compat", "compat without annotation"} {
		repo := strings.ReplaceAll(form, " ", "-")
		push(t, h.srv.URL, repo, "v1", nil, moduleArtifact(t, form, module))
		got, err := p.Module(t.Context(), ask(h.host+"/"+repo+":v1", "IfNotPresent"), nil)
		if err != nil {
			t.Errorf("%s: %v", form, err)
			continue
		}
		r, err := got.Open()
		if err != nil {
			t.Errorf("%s: %v", form, err)
			continue
		}
		b, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(b, module) || got.Content != "" && got.Content != digestOf(module) {
			t.Errorf("%s: %d bytes, %v, %v", form, len(b), err, got)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if _, err := p.Image(t.Context(), ask(h.host+"/"+repo+":v1", "IfNotPresent"), nil); err == nil {
			t.Errorf("%s starts as a container", form)
		}
	}
	// In an index beside container images it is the entry for wasm.
	m := moduleArtifact(t, "artifact", module)
	m.platform = Platform{"wasip1", "wasm", ""}
	push(t, h.srv.URL, "both", "v1", nil, makeImage(t, amd64(), plain, tarOf(t, file("a", "b"))), m)
	if got, err := p.Module(t.Context(), ask(h.host+"/both:v1", "IfNotPresent"), nil); err != nil || got.Content != digestOf(module) {
		t.Error(got, err)
	}
	push(t, h.srv.URL, "none", "v1", nil, makeImage(t, amd64(), plain, tarOf(t, file("a", "b"))))
	got, err := p.Module(t.Context(), ask(h.host+"/none:v1", "IfNotPresent"), nil)
	if err == nil {
		_, err = got.Open()
	}
	if err == nil || !strings.Contains(err.Error(), "there is no WebAssembly module in it") {
		t.Error(err)
	}
}

// TestLogins: basic and token authentication; the second secret when the first
// is refused; a mirror never sees a pod's login.
func TestLogins(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	push(t, h.srv.URL, "app", "1", nil, makeImage(t, amd64(), plain, tarOf(t, file("a", "b"))))
	creds := []workload.RegistryCredential{{Registry: h.host, Username: "u", Password: "old"}, {Registry: h.host, Username: "u", Password: "new"}}
	for name, fault := range map[string]func(http.ResponseWriter, *http.Request) http.ResponseWriter{
		"basic": func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
			if _, p, _ := r.BasicAuth(); p == "new" {
				return w
			}
			return answer("/", 401, http.Header{"Www-Authenticate": {`Basic realm="x"`}}, "")(w, r)
		},
		"token": func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
			if r.URL.Path == "/token" {
				if _, p, _ := r.BasicAuth(); p != "new" {
					return answer("/", 401, nil, "")(w, r)
				}
				if r.URL.Query().Get("scope") != "repository:app:pull" || r.URL.Query().Get("service") != "s" {
					t.Errorf("token asked with %s", r.URL)
				}
				return answer("/", 200, nil, `{"token":"good"}`)(w, r)
			}
			if r.Header.Get("Authorization") == "Bearer good" {
				return w
			}
			return answer("/", 401, http.Header{"Www-Authenticate": {`Bearer realm="` + h.srv.URL + `/token",service="s"`}}, "")(w, r)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h.setFault(fault)
			mirror := newHub(t)
			mirror.setFault(func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
				if r.Header.Get("Authorization") != "" {
					t.Error("the mirror saw a login")
				}
				return answer("/", 404, nil, "")(w, r)
			})
			c := registry.Config{Mirrors: map[string]registry.Mirror{h.host: {Endpoint: []string{mirror.srv.URL}}}}
			req := ask(h.host+"/app:1", "IfNotPresent")
			if _, err := testPuller(t, testStore(t), c).Image(t.Context(), req, nil); !contains(err, "401 Unauthorized", "(before that: ") {
				t.Error(err)
			}
			req.Credentials = creds
			if _, err := testPuller(t, testStore(t), c).Image(t.Context(), req, nil); err != nil {
				t.Error(err)
			}
			if len(mirror.questions()) == 0 {
				t.Error("the mirror was not asked")
			}
		})
	}
}
