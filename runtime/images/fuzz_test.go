package images

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// FuzzUnpack: no layer writes outside of its folder, panics, or makes a
// device; the folder beside it stays as it was.
func FuzzUnpack(f *testing.F) {
	needRoot(f)
	for _, layer := range [][]byte{
		tarOf(f, dir("a"), file("a/b", "c"), hides("a/.wh.d"), hides("a/.wh..wh..opq")),
		tarOf(f, entry{name: "l", kind: tar.TypeSymlink, link: "../beside"}, file("l/x", "evil")),
		tarOf(f, entry{name: "l", kind: tar.TypeSymlink, link: ".."}, entry{name: "h", kind: tar.TypeLink, link: "l/beside/keep"}),
		tarOf(f, file("../beside/keep", "evil")),
		tarOf(f, hides(".wh..."), hides(".wh.."), hides("a/.wh./x")),
		tarOf(f, entry{name: "d", kind: tar.TypeBlock, mode: 0o666}, entry{name: "e", kind: tar.TypeLink, link: "d"}),
		tarOf(f, file("f", "1"), dir("f"), file("f/g", "2"), hides(".wh.f"), entry{name: "p", kind: tar.TypeFifo}),
	} {
		f.Add(layer)
		f.Add(gzipped(f, layer))
		f.Add(zstandard(f, layer))
	}
	f.Fuzz(func(t *testing.T, layer []byte) {
		base := t.TempDir()
		s := &Store{cfg: Config{Dir: base, Reserve: 1}} // no more of it is used
		to, beside := filepath.Join(base, "to"), filepath.Join(base, "beside")
		for _, d := range []string{to, beside} {
			if err := os.Mkdir(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(beside, "keep"), []byte("kept"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, _ = s.unpackTo(t.Context(), to, nil, bytes.NewReader(layer))
		left, err := os.ReadDir(beside)
		if b, rerr := os.ReadFile(filepath.Join(beside, "keep")); rerr != nil || err != nil || len(left) != 1 || string(b) != "kept" {
			t.Fatalf("outside of the layer: %v, %q, %v, %v", left, b, err, rerr)
		}
		if err := filepath.WalkDir(to, func(p string, d os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if info, err := d.Info(); err == nil && info.Mode()&os.ModeDevice != 0 && !isWhiteout(info) {
				t.Errorf("%s is a device", p)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
}
