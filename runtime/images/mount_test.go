package images

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
)

// TestImageAsVolume: what an image holds, of all layers together, read-only,
// with nothing in it that could be started; without a registry the second time.
func TestImageAsVolume(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	m := makeImage(t, amd64(), gzipped, tarOf(t, dir("d"), file("d/a", "1"), file("d/b", "2")), tarOf(t, dir("d"), hides("d/.wh.a"), file("d/c", "3")))
	one := makeImage(t, amd64(), gzipped, tarOf(t, file("only", "x")))
	digest := push(t, h.srv.URL, "data", "1", nil, m)
	push(t, h.srv.URL, "one", "1", nil, one)
	p := testPuller(t, testStore(t), registry.Config{})
	mount := func(image string) string {
		t.Helper()
		at := t.TempDir()
		got, err := p.Mount(t.Context(), ask(h.host+"/"+image, "IfNotPresent"), at, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
		if image == "data:1" && got != digest {
			t.Errorf("digest %s, want %s", got, digest)
		}
		return at
	}
	mount("one:1")
	mount("data:1")
	h.srv.Close()
	at := mount("data:1")
	for name, want := range map[string]string{"d/b": "2", "d/c": "3"} {
		if b, err := os.ReadFile(filepath.Join(at, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	if _, err := os.Stat(filepath.Join(at, "d/a")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file of a lower layer: %v", err)
	}
	if err := os.WriteFile(filepath.Join(at, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("written: %v", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil || st.Flags&unix.ST_NOEXEC == 0 || st.Flags&unix.ST_NOSUID == 0 || st.Flags&unix.ST_RDONLY == 0 {
		t.Errorf("flags %#x, %v", st.Flags, err)
	}
	if _, err := p.Mount(t.Context(), ask(h.host+"/none:1", "Never"), at, nil); reason(err) != ReasonNeverPull {
		t.Errorf("%v", err)
	}
}

// TestArtifactsAsVolumes: what is no image of files is refused with a line
// that says what it is; nothing is mounted.
func TestArtifactsAsVolumes(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	for _, form := range []string{"artifact", "wasm-to-oci", "single layer"} {
		push(t, h.srv.URL, "module", form[:4], nil, moduleArtifact(t, form, []byte("\x00asm\x01\x00\x00\x00")))
	}
	notes := &made{blobs: map[string][]byte{}}
	layer := notes.add([]byte("just a text"))
	layer.MediaType = "text/plain"
	mf := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: notes.add([]byte("{}")), Layers: []v1.Descriptor{layer}}
	mf.Config.MediaType = "application/vnd.oci.empty.v1+json"
	notes.manifest = notes.add(mustJSON(t, &mf)).Digest.String()
	push(t, h.srv.URL, "notes", "1", nil, notes)
	p := testPuller(t, testStore(t), registry.Config{})
	at := t.TempDir()
	for image, want := range map[string]string{
		"module:arti": "an artifact that holds a WebAssembly module", "module:wasm": "an artifact that holds a WebAssembly module",
		"module:sing": "an artifact that holds a WebAssembly module", "notes:1": "no container image",
	} {
		_, err := p.Mount(t.Context(), ask(h.host+"/"+image, "IfNotPresent"), at, nil)
		if err == nil || !contains(err, want) {
			t.Errorf("%s: %v", image, err)
		}
		if left, err := os.ReadDir(at); err != nil || len(left) > 0 {
			t.Errorf("%s: %v, %v", image, left, err)
		}
	}
}
