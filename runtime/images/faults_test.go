package images

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/time/rate"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// TestEmptyBlobsAreFetchedAgain: what a power cut left with its name and no
// content is seen by the next process, and fetched again; without a registry
// the image is not there, whatever the policy.
func TestEmptyBlobsAreFetchedAgain(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	m := makeImage(t, amd64(), gzipped, tarOf(t, file("a", "content")))
	index := push(t, h.srv.URL, "app", "1", nil, makeImage(t, Platform{"linux", "arm64", "v8"}, plain), m)
	mf, err := parseManifest("x", m.blobs[m.manifest])
	if err != nil {
		t.Fatal(err)
	}
	image := h.host + "/app:1"
	for name, digest := range map[string]string{"index": index, "manifest": m.manifest, "config": mf.Config.Digest.String(), "layer": layerOf(t, m)} {
		t.Run(name, func(t *testing.T) {
			s := testStore(t)
			if _, err := testPuller(t, s, registry.Config{}).Image(t.Context(), ask(image, "IfNotPresent"), nil); err != nil {
				t.Fatal(err)
			}
			img, err := s.Lookup(t.Context(), image, "")
			if err != nil {
				t.Fatal(err)
			}
			// A layer is unpacked again only when it is damaged, too.
			if err := errors.Join(os.Truncate(filepath.Join(img.LayerDir, img.Layers[0], "a"), 0), os.Truncate(s.blobPath(digest), 0)); err != nil {
				t.Fatal(err)
			}
			p := testPuller(t, openStore(t, s.cfg.Dir), registry.Config{})
			if _, err := p.Image(t.Context(), ask(image, "Never"), nil); reason(err) != ReasonNeverPull {
				t.Errorf("Never: %v", err)
			}
			if img, err := p.Image(t.Context(), ask(image, "IfNotPresent"), nil); err != nil || content(t, img, "a") != "content" {
				t.Fatal(img, err)
			}
			if st, err := os.Stat(s.blobPath(digest)); err != nil || st.Size() == 0 {
				t.Errorf("%v, %v", st, err)
			}
		})
	}
}

// TestADamagedImportIsNamed: where nobody has the image but who imported it, a
// pull that fails says what to do; of one that never was imported it does not.
func TestADamagedImportIsNamed(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	s := testStore(t)
	m := makeImage(t, amd64(), gzipped, tarOf(t, file("x", "y")))
	name := h.host + "/mine:1"
	if _, err := s.Import(t.Context(), "", bytes.NewReader(ociLayout(t, name, m)), nil); err != nil {
		t.Fatal(err)
	}
	p := testPuller(t, s, registry.Config{})
	if _, err := p.Image(t.Context(), ask(name, "IfNotPresent"), nil); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(s.blobPath(m.manifest), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Image(t.Context(), ask(name, "IfNotPresent"), nil); err == nil || !contains(err, "import it again") {
		t.Errorf("damaged: %v", err)
	}
	if _, err := p.Image(t.Context(), ask(h.host+"/never:1", "IfNotPresent"), nil); err == nil || contains(err, "import it again") {
		t.Errorf("never imported: %v", err)
	}
}

// TestPullsAreCappedInNumber: no more images than that are on their way at a
// time, and each of them comes.
func TestPullsAreCappedInNumber(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	const images, most = 6, 2
	for i := range images {
		push(t, h.srv.URL, "app"+strconv.Itoa(i), "1", nil, makeImage(t, amd64(), plain, tarOf(t, file("n", strconv.Itoa(i)))))
	}
	var mu sync.Mutex
	under, seen := map[string]bool{}, 0
	h.setFault(func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		mu.Lock()
		defer mu.Unlock()
		under[strings.Split(r.URL.Path, "/")[2]] = true
		seen = max(seen, len(under))
		return w
	})
	s := testStore(t)
	client := registry.New(registry.Config{}, "dunlin-test")
	t.Cleanup(client.Close)
	p := NewPuller(PullerConfig{Store: s, Registry: client, Pulls: most})
	var all sync.WaitGroup
	for i := range images {
		all.Go(func() {
			repo := "app" + strconv.Itoa(i)
			img, err := p.Image(t.Context(), ask(h.host+"/"+repo+":1", "IfNotPresent"), func(m string) {
				if m == "unpacking" { // nothing more is asked for
					mu.Lock()
					defer mu.Unlock()
					delete(under, repo)
				}
			})
			if err != nil || content(t, img, "n") != strconv.Itoa(i) {
				t.Error(img, err)
			}
		})
	}
	all.Wait()
	if seen > most {
		t.Errorf("%d were fetched at a time", seen)
	}
}

// TestDownloadsAreCappedInRate: all of a node share what it may take.
func TestDownloadsAreCappedInRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPuller(PullerConfig{BytesPerSecond: 10_000})
		began := time.Now()
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				n, err := io.Copy(io.Discard, &limitedRate{t.Context(), bytes.NewReader(make([]byte, 100_000)), p.limiter})
				if n != 100_000 || err != nil {
					t.Error(n, err)
				}
			})
		}
		all.Wait()
		// The first second's bytes come at once.
		if took := time.Since(began).Round(time.Second); took != 19*time.Second {
			t.Errorf("200 kB at 10 kB/s took %s", took)
		}
	})
	if p := NewPuller(PullerConfig{}); p.limiter != nil {
		t.Error("bounded though nobody asked for it")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (&limitedRate{ctx, strings.NewReader("x"), rate.NewLimiter(1, 1)}).Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestPullTellsHowFar: at once how much comes, then every quarter of a minute
// how far it is and how fast; and how much was here from before.
func TestPullTellsHowFar(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []string
		m := newMeter(100<<20, 20<<20, func(s string) { told = append(told, s) })
		for range 60 {
			time.Sleep(time.Second)
			m.came(1 << 20)
		}
		want := []string{
			"pulling: 100.0 MiB, of which 20.0 MiB are here from before",
			"pulling: 35.0 MiB of 100.0 MiB, 1024.0 KiB/s", "pulling: 50.0 MiB of 100.0 MiB, 1024.0 KiB/s",
			"pulling: 65.0 MiB of 100.0 MiB, 1024.0 KiB/s", "pulling: 80.0 MiB of 100.0 MiB, 1024.0 KiB/s",
		}
		if !slices.Equal(told, want) {
			t.Errorf("%q", told)
		}
	})
	needRoot(t)
	h := newHub(t)
	push(t, h.srv.URL, "app", "1", nil, makeImage(t, amd64(), plain, tarOf(t, file("big", noise(2<<20, 1)))))
	var told []string
	if _, err := testPuller(t, testStore(t), registry.Config{}).Image(t.Context(), ask(h.host+"/app:1", "IfNotPresent"), func(s string) { told = append(told, s) }); err != nil {
		t.Fatal(err)
	}
	if len(told) < 2 || !strings.HasPrefix(told[0], workload.Pulling+"2.0 MiB") || told[len(told)-1] != "unpacking" {
		t.Errorf("%q", told)
	}
}

// TestPlatformsOfUserSpaces: what each machine takes of an index, by what its
// user space runs and not by its kernel's name.
func TestPlatformsOfUserSpaces(t *testing.T) {
	for machine, want := range map[string]string{"armv5tejl": "v5", "armv6l": "v6", "armv7l": "v7", "armv8l": "v7", "aarch64": "v7", "": "v6"} {
		if got := armVariant(machine); got != want {
			t.Errorf("%s: %s, want %s", machine, got, want)
		}
	}
	offers := func(names ...string) *v1.IndexManifest {
		ix := &v1.IndexManifest{}
		for _, n := range names {
			p := append(strings.Split(n, "/"), "")
			ix.Manifests = append(ix.Manifests, v1.Descriptor{Platform: &v1.Platform{OS: p[0], Architecture: p[1], Variant: p[2]}, ArtifactType: n})
		}
		return ix
	}
	all := []string{"linux/amd64", "linux/arm/v5", "linux/arm/v6", "linux/arm/v7", "linux/arm64/v8", "windows/amd64", "wasi/wasm"}
	for _, c := range []struct {
		node   Platform
		offers []string
		wasm   bool
		want   string // "" is none
	}{
		{Platform{"linux", "arm", "v7"}, all, false, "linux/arm/v7"},
		{Platform{"linux", "arm", "v6"}, all, false, "linux/arm/v6"},
		{Platform{"linux", "arm", "v5"}, all, false, "linux/arm/v5"},
		{Platform{"linux", "arm64", "v8"}, all, false, "linux/arm64/v8"},
		{Platform{"linux", "amd64", "v3"}, all, false, "linux/amd64"},
		{Platform{"linux", "amd64", "v2"}, []string{"linux/amd64/v3", "linux/amd64/v2", "linux/amd64"}, false, "linux/amd64/v2"},
		{Platform{"linux", "amd64", "v1"}, []string{"linux/amd64/v3", "linux/amd64"}, false, "linux/amd64"},
		{Platform{"linux", "arm", "v7"}, []string{"linux/arm/v5", "linux/arm/v6"}, false, "linux/arm/v6"},
		{Platform{"linux", "arm", "v7"}, []string{"linux/arm", "linux/arm64"}, false, "linux/arm"},
		{Platform{"linux", "arm64", "v8"}, []string{"linux/arm64"}, false, "linux/arm64"},
		{Platform{"linux", "arm", "v6"}, []string{"linux/arm/v7", "linux/arm64/v8"}, false, ""},
		{Platform{"linux", "riscv64", ""}, all, false, ""},
		{Platform{"linux", "arm", "v6"}, all, true, "wasi/wasm"},
		{Platform{"linux", "arm", "v6"}, all[:6], true, ""},
	} {
		d, err := choose("x", offers(c.offers...), c.node, c.wasm)
		if got := d.ArtifactType; got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%s of %v: %q, %v, want %q", c.node, c.offers, got, err, c.want)
		}
		if err != nil && (!strings.Contains(err.Error(), "is for "+strings.Join(c.offers, ", ")) || !strings.Contains(err.Error(), "this node runs ")) {
			t.Errorf("%s of %v: %v", c.node, c.offers, err)
		}
	}
}
