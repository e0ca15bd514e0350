package cli

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCopy(t *testing.T) {
	w := streamWorld(t)
	far, near := filepath.Join(w.dir, "far"), filepath.Join(w.dir, "near")
	for _, dir := range []string{far, filepath.Join(near, "tree", "deep"), filepath.Join(near, "back")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	big := strings.Repeat("0123456789", 100_000)
	for name, text := range map[string]string{"tree/one": big, "tree/deep/two": "2", "tree/empty": ""} {
		w.file(filepath.Join("near", name), text)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(near, "tree", "link")); err != nil {
		t.Fatal(err)
	}
	same := func(name, text string) {
		t.Helper()
		if b, err := os.ReadFile(filepath.Join(w.dir, name)); err != nil || string(b) != text {
			t.Errorf("%s: %d bytes, %v", name, len(b), err)
		}
	}
	w.ok("cp", filepath.Join(near, "tree"), "solo:"+far) // into a folder
	same("far/tree/one", big)
	same("far/tree/deep/two", "2")
	w.ok("cp", filepath.Join(near, "tree", "one"), "solo:"+far+"/new") // to a name
	same("far/new", big)
	code, _, errs := run("cp", "solo:"+far+"/tree", filepath.Join(near, "back"))
	if code != 0 || errs != "Note: tree/link is neither a file nor a folder: left out\n" {
		t.Errorf("exit %d %s", code, errs)
	}
	same("near/back/tree/one", big)
	same("near/back/tree/deep/two", "2")
	same("near/back/tree/empty", "")
	w.ok("cp", "solo:"+far+"/new", filepath.Join(near, "name"))
	same("near/name", big)
	for line, want := range map[string]struct {
		code int
		says string
	}{
		"solo:" + far + "/none " + near: {1, "tar in the container failed with exit code"},
		near + "/none solo:" + far:      {1, "no such file"},
		near + " " + far:                {2, "one of both is in a pod"},
		"solo:/a solo:/b":               {2, "one of both is in a pod"},
		"guest:/a " + near:              {1, "is a Wasm guest"},
	} {
		if code, _, errs := run(append([]string{"cp"}, strings.Fields(line)...)...); code != want.code || !strings.Contains(errs, want.says) {
			t.Errorf("dunlin cp %s: exit %d %s", line, code, errs)
		}
	}
}

// TestCopyStaysInside: what tar in a container writes cannot lead out of the
// target.
func TestCopyStaysInside(t *testing.T) {
	for _, c := range []struct {
		name string
		h    tar.Header
	}{
		{"another name", tar.Header{Name: "other", Typeflag: tar.TypeReg}},
		{"upwards", tar.Header{Name: "tree/../../evil", Typeflag: tar.TypeReg}},
		{"a name that begins alike", tar.Header{Name: "tree2", Typeflag: tar.TypeReg}},
		{"through a link that was there", tar.Header{Name: "tree/out/evil", Typeflag: tar.TypeReg}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			inside, outside := filepath.Join(dir, "in"), filepath.Join(dir, "outside")
			if err := errors.Join(os.MkdirAll(filepath.Join(inside, "to"), 0o755), os.Mkdir(outside, 0o755), os.Symlink(outside, filepath.Join(inside, "to", "out"))); err != nil {
				t.Fatal(err)
			}
			root, err := os.OpenRoot(inside)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = root.Close() }()
			var b bytes.Buffer
			tw := tar.NewWriter(&b)
			if err := errors.Join(tw.WriteHeader(&c.h), tw.Close()); err != nil {
				t.Fatal(err)
			}
			if err := (&copying{a: &app{errw: io.Discard}}).unpack(&b, root, "tree", "to"); err == nil {
				t.Error("it was taken")
			}
			left, err := os.ReadDir(outside)
			if err != nil || len(left) != 0 {
				t.Errorf("%v, %v", left, err)
			}
		})
	}
}
