package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// savedImage is what docker save would write of an image with one file.
func savedImage(t *testing.T, tag string) []byte {
	t.Helper()
	pack := func(files ...[2]string) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, f := range files {
			if err := w.WriteHeader(&tar.Header{Name: f[0], Size: int64(len(f[1])), Mode: 0o644}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write([]byte(f[1])); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	layer := pack([2]string{"hello", "world"})
	sum := sha256.Sum256(layer)
	config := fmt.Sprintf(`{"os":"linux","architecture":%q,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}`, runtime.GOARCH, hex.EncodeToString(sum[:]))
	return pack([2]string{"c.json", config}, [2]string{"l.tar", string(layer)}, [2]string{"manifest.json", fmt.Sprintf(`[{"Config":"c.json","RepoTags":[%q],"Layers":["l.tar"]}]`, tag)})
}

// TestImagesGoFromNodeToNode: import, list, export, import elsewhere, remove.
func TestImagesGoFromNodeToNode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, NOTHING TESTED: layers are unpacked as root only")
	}
	t.Setenv("DUNLIN_CONFIG", os.DevNull)
	dir := t.TempDir()
	saved := filepath.Join(dir, "saved.tar")
	if err := os.WriteFile(saved, savedImage(t, "team/app:1"), 0o600); err != nil {
		t.Fatal(err)
	}
	flags := func(n string) []string {
		return []string{"--state-dir=" + filepath.Join(dir, n), "--run-dir=" + filepath.Join(dir, n+"r"), "--config-dir=" + dir}
	}
	ok := func(want string, args ...string) string {
		t.Helper()
		code, out, errs := run(args...)
		if code != 0 || !strings.Contains(out, want) {
			t.Fatalf("dunlin %v: exit %d, %s%s", args, code, out, errs)
		}
		return out
	}
	first := ok("docker.io/team/app:1 sha256:", append([]string{"import", saved}, flags("a")...)...)
	out := filepath.Join(dir, "out.tar")
	ok(out, append([]string{"export", "team/app:1", out}, flags("a")...)...)
	if again := ok("", append([]string{"import", out}, flags("b")...)...); again != first {
		t.Errorf("%q became %q", first, again)
	}
	ok("docker.io/team/app:1   image", append([]string{"images"}, flags("b")...)...)
	ok("removed", append([]string{"images", "rm", "team/app:1"}, flags("b")...)...)
	if list := ok("NAME", append([]string{"images"}, flags("b")...)...); strings.Contains(list, "team") {
		t.Error(list)
	}
	for _, args := range [][]string{{"images", "rm", "team/app:1"}, {"export", "team/app:1", filepath.Join(dir, "none.tar")}, {"import", filepath.Join(dir, "none")}, {"import", "/dev/null"}} {
		if code, _, errs := run(append(args, flags("b")...)...); code != 1 || strings.Count(errs, "\n") > 1 {
			t.Errorf("dunlin %v: exit %d, %s", args, code, errs)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "none.tar")); err == nil {
		t.Error("a failed export left its file")
	}
	// A module that somebody compressed: a real gzip, of no tar.
	var z bytes.Buffer
	g := gzip.NewWriter(&z)
	if _, err := g.Write(append([]byte("\x00asm\x01\x00\x00\x00"), make([]byte, 2000)...)); err != nil || g.Close() != nil {
		t.Fatal(err)
	}
	packed := filepath.Join(dir, "app.wasm.gz")
	if err := os.WriteFile(packed, z.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := run(append([]string{"import", "app.wasm", packed}, flags("b")...)...); code != 1 || !strings.Contains(errs, packed+": this is no image archive") || !strings.Contains(errs, "unpack it first") {
		t.Errorf("exit %d, %s", code, errs)
	}
}

// TestReadEndsWithTheContext: a pipe that nobody writes to does not hold an
// import that was interrupted.
func TestReadEndsWithTheContext(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = errors.Join(r.Close(), w.Close()) }()
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	in := interruptible(ctx, r)
	if _, err := w.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 8)
	if n, err := in.Read(b); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	go cancel(why)
	if _, err := in.Read(b); !errors.Is(err, why) {
		t.Error(err)
	}
}

// What the Node says of its images follows what is in the stores, and says so
// by its mark.
func TestImagesOfThisNode(t *testing.T) {
	dir := t.TempDir()
	l, err := openStores(nodeOptions{dirs: dirs{state: filepath.Join(dir, "state"), run: filepath.Join(dir, "run"), config: dir}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	l.wasm = l.rt
	here := hereImages{l.nodeImages}
	old := time.Now().Add(-time.Hour)
	still := func() string { // long after the last change
		for _, d := range []string{l.store.NamesDir(), l.rt.Store().NamesDir()} {
			if err := os.Chtimes(d, old, old); err != nil {
				t.Fatal(err)
			}
		}
		old = old.Add(time.Second)
		return here.Mark()
	}
	list := func() (out []string) {
		images, err := here.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range images {
			out = append(out, fmt.Sprintf("%s of %d", strings.Join(i.Names, " "), i.SizeBytes))
		}
		return out
	}
	if got := list(); len(got) != 0 || still() == "" {
		t.Fatalf("%v in empty stores, mark %q", got, here.Mark())
	}
	before := here.Mark()
	module := []byte("\x00asm\x01\x00\x00\x00\x01\x04\x01\x60\x00\x00\x03\x02\x01\x00\x07\x0a\x01\x06_start\x00\x00\x0a\x04\x01\x02\x00\x0b")
	for _, name := range []string{"a.wasm", "b.wasm"} {
		if _, err := l.rt.Store().Import(t.Context(), name, "", bytes.NewReader(module), nil); err != nil {
			t.Fatal(err)
		}
	}
	if mark := here.Mark(); mark == before {
		t.Fatalf("mark %q did not change", mark)
	}
	if got := list(); len(got) != 1 || got[0] != "a.wasm b.wasm of 36" {
		t.Fatalf("%v", got)
	}
	before = still()
	if err := l.rt.Store().Forget("a.wasm"); err != nil {
		t.Fatal(err)
	}
	if mark := here.Mark(); mark == before {
		t.Fatalf("mark %q did not change", mark)
	}
	if got := list(); len(got) != 1 || got[0] != "b.wasm of 36" {
		t.Fatalf("%v", got)
	}
}
