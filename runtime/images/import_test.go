package images

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

func amd64() Platform { return Platform{"linux", "amd64", ""} }

func reason(err error) string {
	var se *workload.StartError
	if errors.As(err, &se) {
		return se.Reason
	}
	return ""
}

// TestImportedImageIsOverlayfs: what an imported image's layers give, mounted
// as the runtime mounts them, is what the layers say.
func TestImportedImageIsOverlayfs(t *testing.T) {
	needRoot(t)
	lower := tarOf(t, dir("bin"), file("bin/app", "one"), file("bin/gone", "x"), dir("etc"), dir("etc/d"), file("etc/d/old", "x"),
		dir("r"), file("r/f", "becomes a file's place"), entry{name: "bin/ping", content: "p", mode: 0o4755, uid: 7, xattrs: map[string]string{
			"user.note": "n", "trusted.overlay.opaque": "y", "user.overlay.opaque": "y"}},
		entry{name: "dev-null", kind: tar.TypeChar, mode: 0o666}, entry{name: "bin/hard", kind: tar.TypeLink, link: "bin/app"},
		entry{name: "bin/soft", kind: tar.TypeSymlink, link: "/bin/app"}, entry{name: "fifo", kind: tar.TypeFifo, mode: 0o600})
	upper := tarOf(t, hides("bin/.wh.gone"), file("etc/d/new", "y"), hides("etc/d/.wh..wh..opq"), hides(".wh.r"), dir("r"), file("r/g", "new"))
	for name, compress := range map[string]func(testing.TB, []byte) []byte{"plain": plain, "gzip": gzipped, "zstd": zstandard} {
		t.Run(name, func(t *testing.T) {
			s := testStore(t)
			m := makeImage(t, amd64(), compress, lower, upper)
			got, err := s.Import(t.Context(), "", bytes.NewReader(ociLayout(t, "docker.io/team/app:1", m)), nil)
			if err != nil || len(got) != 1 || got[0].Digest != m.manifest || !reflect.DeepEqual(got[0].Names, []string{"docker.io/team/app:1"}) {
				t.Fatalf("%+v, %v", got, err)
			}
			// Another process finds the same.
			img, err := openStore(t, s.cfg.Dir).Lookup(t.Context(), "team/app:1", "")
			if err != nil {
				t.Fatal(err)
			}
			want := RunConfig{User: "1000:1000", Env: []string{"PATH=/bin", "A=b"}, Entrypoint: []string{"/bin/app"}, Cmd: []string{"serve"}, WorkingDir: "/srv",
				StopSignal: "SIGQUIT", ExposedPorts: []string{"443/tcp", "80/tcp"}, Volumes: []string{"/data"}}
			if !reflect.DeepEqual(img.Config, want) || len(img.Layers) != 2 {
				t.Errorf("%+v", img)
			}
			root := mountOverlay(t, img)
			for path, content := range map[string]string{"bin/app": "one", "bin/hard": "one", "etc/d/new": "y", "r/g": "new"} {
				if b, err := os.ReadFile(filepath.Join(root, path)); err != nil || string(b) != content {
					t.Errorf("%s: %q, %v", path, b, err)
				}
			}
			for _, path := range []string{"bin/gone", "etc/d/old", "r/f", "dev-null"} {
				if _, err := os.Lstat(filepath.Join(root, path)); err == nil {
					t.Errorf("%s is there", path)
				}
			}
			var st unix.Stat_t
			ping := filepath.Join(root, "bin/ping")
			if err := unix.Stat(ping, &st); err != nil || st.Mode != unix.S_IFREG|0o4755 || st.Uid != 7 || st.Mtim.Sec != 1_700_000_000 {
				t.Errorf("%+v, %v", st, err)
			}
			if xattr(t, ping, "user.note") != "n" {
				t.Error("a user attribute is lost")
			}
			below := filepath.Join(img.LayerDir, img.Layers[1], "bin/ping")
			if xattr(t, below, "trusted.overlay.opaque")+xattr(t, below, "user.overlay.opaque") != "" {
				t.Error("a layer may set overlayfs's attributes")
			}
		})
	}
}

// mountOverlay mounts as a runtime would: relative to the layers' folder.
func mountOverlay(t *testing.T, img *Image) string {
	t.Helper()
	at := t.TempDir()
	var lower []string
	for _, l := range img.Layers {
		lower = append(lower, filepath.Join(img.LayerDir, l))
	}
	if err := unix.Mount("overlay", at, "overlay", 0, "lowerdir="+strings.Join(lower, ":")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, 0); err != nil {
			t.Error(err)
		}
	})
	return at
}

func dockerSave(t testing.TB, m *made, tag string, layers ...[]byte) []byte {
	t.Helper()
	var conf []byte
	for d, b := range m.blobs {
		if d != m.manifest && bytes.Contains(b, []byte("rootfs")) {
			conf = b
		}
	}
	entries := []entry{file("conf.json", string(conf))}
	names := []string{}
	for i, l := range layers {
		n := string(rune('a'+i)) + "/layer.tar"
		entries, names = append(entries, file(n, string(l))), append(names, n)
	}
	list := []map[string]any{{"Config": "conf.json", "RepoTags": []string{tag}, "Layers": names}}
	return tarOf(t, append(entries, file("manifest.json", string(mustJSON(t, list))))...)
}

// TestImportDockerSave: and the same archive twice gives the same digest.
func TestImportDockerSave(t *testing.T) {
	needRoot(t)
	s := testStore(t)
	layer := tarOf(t, file("hello", "world"))
	save := dockerSave(t, makeImage(t, amd64(), plain, layer), "busybox:1.36", layer)
	var digests []string
	for _, b := range [][]byte{save, gzipped(t, save)} {
		got, err := s.Import(t.Context(), "", bytes.NewReader(b), nil)
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, got[0].Digest)
	}
	if digests[0] != digests[1] {
		t.Error(digests)
	}
	for _, name := range []string{"busybox:1.36", "docker.io/library/busybox:1.36", "busybox@" + digests[0]} {
		if _, err := s.Lookup(t.Context(), name, ""); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := s.Lookup(t.Context(), "busybox:1.37", ""); reason(err) != ReasonNeverPull {
		t.Error(err)
	}
	if _, err := s.Import(t.Context(), "own.example/x:2", bytes.NewReader(save), nil); err != nil {
		t.Error(err)
	}
	if img, err := s.Lookup(t.Context(), "own.example/x:2", ""); err != nil || img.Digest != digests[0] {
		t.Error(img, err)
	}
}

// TestImportChoosesThePlatform: of an index the one that runs here, though the
// others are not in the archive; or a line that says what there is.
func TestImportChoosesThePlatform(t *testing.T) {
	needRoot(t)
	s := testStore(t)
	arm := makeImage(t, Platform{"linux", "arm", "v7"}, gzipped, tarOf(t, file("a", "arm")))
	amd := makeImage(t, Platform{"linux", "amd64", ""}, gzipped, tarOf(t, file("a", "amd")))
	for d := range arm.blobs {
		arm.blobs[d] = append(arm.blobs[d], ' ') // not what the index names: as if it were not there
	}
	if _, err := s.Import(t.Context(), "", bytes.NewReader(ociLayout(t, "r.example/x:1", arm, amd)), nil); err != nil {
		t.Fatal(err)
	}
	img, err := s.Lookup(t.Context(), "r.example/x:1", "")
	if err != nil || img.Manifest != amd.manifest || img.Digest == amd.manifest {
		t.Fatalf("%+v, %v", img, err)
	}
	for _, images := range [][]*made{{makeImage(t, Platform{"linux", "arm64", "v8"}, plain)}, {makeImage(t, Platform{"linux", "arm64", "v8"}, plain), makeImage(t, Platform{"windows", "amd64", ""}, plain)}} {
		_, err = s.Import(t.Context(), "", bytes.NewReader(ociLayout(t, "r.example/x:1", images...)), nil)
		if err == nil || !strings.Contains(err.Error(), "is for linux/arm64/v8") || !strings.Contains(err.Error(), "this node runs linux/amd64/v1") {
			t.Error(err)
		}
	}
	// A failed import changes nothing.
	if img, err := s.Lookup(t.Context(), "r.example/x:1", ""); err != nil || img.Manifest != amd.manifest {
		t.Error(img, err)
	}
}

// TestBadArchivesAreRefused: one line each, and nothing is left.
func TestBadArchivesAreRefused(t *testing.T) {
	needRoot(t)
	good := tarOf(t, file("a", "b"))
	image := func(layers ...[]byte) []byte {
		return ociLayout(t, "r.example/x:1", makeImage(t, amd64(), plain, layers...))
	}
	lying := makeImage(t, amd64(), plain, good)
	for d, b := range lying.blobs {
		if bytes.Equal(b, good) {
			lying.blobs[d] = tarOf(t, file("a", "other"))
		}
	}
	whole := image(good)
	for name, c := range map[string]struct {
		archive []byte
		want    string
	}{
		"empty":             {nil, "no index.json"},
		"text":              {[]byte("hello, this is no archive"), "no image archive"},
		"cut":               {whole[:len(whole)/2], "ends in the middle"},
		"some tar":          {tarOf(t, file("etc/passwd", "root")), "no manifest.json"},
		"traversal":         {image(tarOf(t, file("../../etc/cron.d/x", "evil"))), "path traversal"},
		"deep traversal":    {image(tarOf(t, file("a/b/../../../x", "evil"))), "path traversal"},
		"links in a circle": {image(tarOf(t, entry{name: "l", kind: tar.TypeSymlink, link: "/m"}, entry{name: "m", kind: tar.TypeSymlink, link: "l"}, file("l/x", "x"))), "too many levels of symbolic links"},
		"link out":          {image(tarOf(t, entry{name: "l", kind: tar.TypeLink, link: "../../etc/passwd"})), "path traversal"},
		"link to nothing":   {image(tarOf(t, entry{name: "l", kind: tar.TypeLink, link: "none"})), "no such file in this layer or below"},
		"layer is no tar":   {image([]byte(strings.Repeat("x", 2000))), "read archive"},
		"empty layer":       {image(nil), "no archive"},
		"layer changed":     {ociLayout(t, "r.example/x:1", lying), "neither in the archive"},
		"two, one name":     {ociLayout(t, "bad name", makeImage(t, amd64(), plain, good)), "not the name of an image"},
		"own path in front": {tarOf(t, file("../index.json", "{}")), "path traversal"},
	} {
		t.Run(name, func(t *testing.T) {
			s := testStore(t)
			_, err := s.Import(t.Context(), "", bytes.NewReader(c.archive), nil)
			if name == "empty" {
				c.want = "no image archive"
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v", err)
			}
			for _, d := range []string{"tmp", "names", "l", "layers"} {
				if left, err := os.ReadDir(s.path(d)); err != nil || len(left) > 0 {
					t.Errorf("%s: %v, %v", d, left, err)
				}
			}
		})
	}
}

// TestDamagedLayerIsUnpackedAgain: what a power cut or a hand changed is seen
// by the next process and made good from the blob, without a network.
func TestDamagedLayerIsUnpackedAgain(t *testing.T) {
	needRoot(t)
	s := testStore(t)
	m := makeImage(t, amd64(), gzipped, tarOf(t, file("a", "content")))
	if _, err := s.Import(t.Context(), "", bytes.NewReader(ociLayout(t, "r.example/x:1", m)), nil); err != nil {
		t.Fatal(err)
	}
	img, err := s.Lookup(t.Context(), "r.example/x:1", "")
	if err != nil {
		t.Fatal(err)
	}
	a := filepath.Join(img.LayerDir, img.Layers[0], "a")
	if err := os.Truncate(a, 0); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, s.cfg.Dir)
	img, err = s.Lookup(t.Context(), "r.example/x:1", "")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(img.LayerDir, img.Layers[0], "a")); err != nil || string(b) != "content" {
		t.Errorf("%q, %v", b, err)
	}
	// With the blob damaged too it is not here any more, and says so.
	if err := errors.Join(os.Truncate(filepath.Join(img.LayerDir, img.Layers[0], "a"), 0), os.Truncate(s.blobPath(layerOf(t, m)), 0)); err != nil {
		t.Fatal(err)
	}
	if _, err = openStore(t, s.cfg.Dir).Lookup(t.Context(), "r.example/x:1", ""); reason(err) != ReasonNeverPull {
		t.Error(err)
	}
}

func layerOf(t testing.TB, m *made) string {
	t.Helper()
	mf, err := parseManifest("x", m.blobs[m.manifest])
	if err != nil {
		t.Fatal(err)
	}
	return mf.Layers[0].Digest.String()
}
