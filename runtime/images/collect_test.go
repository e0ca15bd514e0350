package images

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/runtime/images/registry"
)

// TestCollect: nothing that a spec names, that runs, or that was imported is
// taken; of the rest the longest unused first, and only as much as is wanted.
func TestCollect(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	now := time.Unix(1_700_000_000, 0)
	s := testStore(t)
	s.cfg.Clock = clock.Func(func() time.Time { return now })
	p := testPuller(t, s, registry.Config{})
	shared := tarOf(t, file("shared", noise(100_000, 1)))
	pull := func(tag string, own uint64) string {
		t.Helper()
		push(t, h.srv.URL, "app", tag, nil, makeImage(t, amd64(), plain, shared, tarOf(t, file("own", noise(100_000, own)))))
		img, err := p.Image(t.Context(), ask(h.host+"/app:"+tag, "IfNotPresent"), nil)
		if err != nil {
			t.Fatal(err)
		}
		now = now.Add(time.Hour)
		return img.Digest
	}
	here := func(image string) bool {
		_, err := p.Image(t.Context(), ask(image, "Never"), nil)
		return err == nil
	}
	name := func(tag string) string { return h.host + "/app:" + tag }
	pull("old", 2)
	pull("named", 3)
	pull("young", 4)
	running := pull("moved", 5)
	pull("moved", 6) // the tag has moved; what runs has the old digest
	push(t, h.srv.URL, "app", "moved", nil, makeImage(t, amd64(), plain, tarOf(t, file("own", "other"))))
	if _, err := p.Image(t.Context(), ask(name("moved"), "Always"), nil); err != nil {
		t.Fatal(err)
	}
	layer := tarOf(t, file("imported", noise(100_000, 7)))
	if _, err := s.Import(t.Context(), "", bytes.NewReader(dockerSave(t, makeImage(t, amd64(), plain, layer), "hand:1", layer)), nil); err != nil {
		t.Fatal(err)
	}
	inUse := []string{name("named"), running}
	got, err := s.Collect(t.Context(), inUse, 1)
	if err != nil || len(got.Names) > 1 || got.Freed == 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	// All that may go goes; what must not stays, whole.
	if got, err = s.Collect(t.Context(), inUse, 1<<40); err != nil {
		t.Fatal(err)
	}
	for image, want := range map[string]bool{name("old"): false, name("named"): true, name("young"): false, name("moved"): false, h.host + "/app@" + running: true, "hand:1": true} {
		if here(image) != want {
			t.Errorf("%s is here: %v", image, !want)
		}
	}
	// A name that was taken off leaves its image to Collect.
	if err := s.Forget("hand:1"); err != nil || here("hand:1") {
		t.Error(err)
	}
	if got, err := s.Collect(t.Context(), nil, 1<<40); err != nil || got.Freed < 300_000 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, d := range []string{"blobs/sha256", "names", "layers", "l"} {
		if left, err := os.ReadDir(s.path(d)); err != nil || len(left) > 0 {
			t.Errorf("%s: %v, %v", d, left, err)
		}
	}
}

// TestExportImport: an image goes to another node in a file, with its digest.
func TestExportImport(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	index := push(t, h.srv.URL, "app", "1", nil, makeImage(t, Platform{"linux", "arm64", "v8"}, plain), makeImage(t, amd64(), gzipped, tarOf(t, file("a", "b"))))
	module := []byte("\x00asm\x01\x00\x00\x00rest")
	push(t, h.srv.URL, "mod", "1", nil, moduleArtifact(t, "artifact", module))
	s := testStore(t)
	p := testPuller(t, s, registry.Config{})
	if _, err := p.Image(t.Context(), ask(h.host+"/app:1", "Always"), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Module(t.Context(), ask(h.host+"/mod:1", "Always"), nil); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := s.Export(t.Context(), &b, h.host+"/app:1", h.host+"/mod:1"); err != nil {
		t.Fatal(err)
	}
	other := testStore(t)
	got, err := other.Import(t.Context(), "", &b, nil)
	if err != nil || len(got) != 2 || got[0].Digest != index || got[0].Module || !got[1].Module {
		t.Fatalf("%+v, %v", got, err)
	}
	h.srv.Close()
	p = testPuller(t, other, registry.Config{})
	if img, err := p.Image(t.Context(), ask(h.host+"/app:1", "Never"), nil); err != nil || content(t, img, "a") != "b" {
		t.Error(img, err)
	}
	if m, err := p.Module(t.Context(), ask(h.host+"/mod:1", "Never"), nil); err != nil || m.Content != digestOf(module) {
		t.Error(m, err)
	}
	if err := s.Export(t.Context(), &b, "nobody.example/x:1"); err == nil || !strings.Contains(err.Error(), "is not on this node") || strings.Contains(err.Error(), "Policy") {
		t.Error(err)
	}
}
