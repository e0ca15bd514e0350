package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// What the tests' images are made of.

type entry struct {
	name, link, content string
	kind                byte
	mode                int64
	uid                 int
	xattrs              map[string]string
}

func dir(name string) entry           { return entry{name: name, kind: tar.TypeDir, mode: 0o755} }
func file(name, content string) entry { return entry{name: name, content: content, mode: 0o644} }
func hides(name string) entry         { return entry{name: name, mode: 0o644} }

func tarOf(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if e.kind == 0 {
			e.kind = tar.TypeReg
		}
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: e.mode, Size: int64(len(e.content)), Uid: e.uid, ModTime: time.Unix(1_700_000_000, 0)}
		for k, v := range e.xattrs {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func gzipped(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func zstandard(t testing.TB, b []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(b, nil)
}

func plain(_ testing.TB, b []byte) []byte { return b }

// made is an image as a registry would hold it.
type made struct {
	blobs    map[string][]byte // by digest
	manifest string            // digest
	platform Platform
}

func (m *made) add(b []byte) v1.Descriptor {
	d := digestOf(b)
	m.blobs[d] = b
	return v1.Descriptor{Digest: v1.Hash{Algorithm: "sha256", Hex: hexOf(d)}, Size: int64(len(b))}
}

func mustJSON(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// makeImage makes a container image of layers (uncompressed archives).
func makeImage(t testing.TB, p Platform, compress func(testing.TB, []byte) []byte, layers ...[]byte) *made {
	t.Helper()
	m := &made{blobs: map[string][]byte{}, platform: p}
	c := v1.ConfigFile{OS: p.OS, Architecture: p.Architecture, Variant: p.Variant, RootFS: v1.RootFS{Type: "layers"}, Config: v1.Config{
		User: "1000:1000", Env: []string{"PATH=/bin", "A=b"}, Entrypoint: []string{"/bin/app"}, Cmd: []string{"serve"}, WorkingDir: "/srv",
		StopSignal: "SIGQUIT", ExposedPorts: map[string]struct{}{"80/tcp": {}, "443/tcp": {}}, Volumes: map[string]struct{}{"/data": {}},
	}}
	mf := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	for _, l := range layers {
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, v1.Hash{Algorithm: "sha256", Hex: hexOf(digestOf(l))})
		d := m.add(compress(t, l))
		d.MediaType = types.OCILayer
		mf.Layers = append(mf.Layers, d)
	}
	mf.Config = m.add(mustJSON(t, &c))
	mf.Config.MediaType = types.OCIConfigJSON
	m.manifest = m.add(mustJSON(t, &mf)).Digest.String()
	return m
}

// ociLayout is the image, or an index of several, as a tar.
func ociLayout(t testing.TB, name string, images ...*made) []byte {
	t.Helper()
	entries := []entry{file("oci-layout", `{"imageLayoutVersion":"1.0.0"}`)}
	ix := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	for _, m := range images {
		for d, b := range m.blobs {
			entries = append(entries, file("blobs/sha256/"+hexOf(d), string(b)))
		}
		ix.Manifests = append(ix.Manifests, m.descriptor())
	}
	top := &ix
	if len(images) > 1 {
		raw := mustJSON(t, &ix)
		entries = append(entries, file("blobs/sha256/"+hexOf(digestOf(raw)), string(raw)))
		top = &v1.IndexManifest{SchemaVersion: 2, Manifests: []v1.Descriptor{{
			MediaType: types.OCIImageIndex, Size: int64(len(raw)), Digest: v1.Hash{Algorithm: "sha256", Hex: hexOf(digestOf(raw))}}}}
	}
	if name != "" {
		top.Manifests[0].Annotations = map[string]string{containerdName: name}
	}
	return tarOf(t, append(entries, file("index.json", string(mustJSON(t, top))))...)
}

func (m *made) descriptor() v1.Descriptor {
	return v1.Descriptor{MediaType: types.OCIManifestSchema1, Size: int64(len(m.blobs[m.manifest])), Digest: v1.Hash{Algorithm: "sha256", Hex: hexOf(m.manifest)},
		Platform: &v1.Platform{OS: m.platform.OS, Architecture: m.platform.Architecture, Variant: m.platform.Variant}}
}

// testStore opens a store; layers need devices and trusted attributes.
func testStore(t testing.TB) *Store {
	t.Helper()
	return openStore(t, t.TempDir())
}

func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(Config{Dir: dir, Platform: Platform{"linux", "amd64", "v1"}, Reserve: 1})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, NOTHING TESTED: layers are unpacked as root only (whiteouts are devices); run as root")
	}
}

func xattr(t testing.TB, path, name string) string {
	t.Helper()
	b := make([]byte, 64)
	n, err := unix.Lgetxattr(path, name, b)
	if err != nil {
		return ""
	}
	return string(b[:n])
}

func contains(err error, any ...string) bool {
	for _, s := range any {
		if err != nil && strings.Contains(err.Error(), s) {
			return true
		}
	}
	return false
}
