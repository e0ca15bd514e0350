package images

import (
	"archive/tar"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
)

// merged are layers whose folders are links, or are not root's.
func merged(t *testing.T) []byte {
	t.Helper()
	temp, home := dir("tmp"), dir("home")
	temp.mode, home.uid = 0o1777, 1000
	return tarOf(t, dir("usr"), dir("usr/bin"), entry{name: "bin", kind: tar.TypeSymlink, link: "usr/bin"}, file("usr/bin/sh", "shell"), file("usr/bin/old", "old"),
		dir("run"), dir("var"), entry{name: "var/run", kind: tar.TypeSymlink, link: "/run"}, temp, home)
}

// TestLayersThroughLinksBelow: a layer without entries for its folders, as
// many builders make them, means those of the image that it was built on: their
// links are followed, their owners and modes stay. The same layer on another
// image means other ones.
func TestLayersThroughLinksBelow(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	upper := tarOf(t, file("bin/tool", "tool"), file("var/run/x.pid", "1"), file("tmp/f", "f"), file("home/f", "f"), hides("bin/.wh.old"))
	onMerged := makeImage(t, amd64(), gzipped, merged(t), upper)
	onPlain := makeImage(t, amd64(), gzipped, tarOf(t, dir("bin"), file("bin/sh", "another shell")), upper)
	alone := makeImage(t, amd64(), gzipped, upper)
	twice := makeImage(t, amd64(), gzipped, merged(t), upper, upper)
	links := makeImage(t, amd64(), gzipped, merged(t), tarOf(t,
		entry{name: "bin/sh2", kind: tar.TypeLink, link: "bin/sh", mode: 0o755}, entry{name: "sh3", kind: tar.TypeLink, link: "usr/bin/sh", mode: 0o755}))
	out := makeImage(t, amd64(), gzipped, tarOf(t, entry{name: "l", kind: tar.TypeSymlink, link: "../../tmp/.."}, file("l/inside", "x")))
	for name, m := range map[string]*made{"merged": onMerged, "plain": onPlain, "alone": alone, "twice": twice, "links": links, "out": out} {
		push(t, h.srv.URL, name, "1", nil, m)
	}
	store := testStore(t)
	look := func(name string, files map[string]string, more func(at string)) {
		t.Helper()
		at := t.TempDir()
		if _, err := testPuller(t, store, registry.Config{}).Mount(t.Context(), ask(h.host+"/"+name+":1", "IfNotPresent"), at, nil); err != nil {
			t.Fatal(name, err)
		}
		defer func() { _ = unix.Unmount(at, unix.MNT_DETACH) }()
		for p, want := range files {
			if b, err := os.ReadFile(filepath.Join(at, p)); err != nil && want != "" || string(b) != want {
				t.Errorf("%s: %s is %q, %v", name, p, b, err)
			}
		}
		if more != nil {
			more(at)
		}
	}
	usrMerged := func(at string) {
		t.Helper()
		if to, err := os.Readlink(filepath.Join(at, "bin")); err != nil || to != "usr/bin" {
			t.Errorf("bin leads to %q, %v", to, err)
		}
		for p, want := range map[string]struct {
			mode fs.FileMode
			uid  uint32
		}{"tmp": {fs.ModeDir | fs.ModeSticky | 0o777, 0}, "home": {fs.ModeDir | 0o755, 1000}, "run": {fs.ModeDir | 0o755, 0}} {
			st, err := os.Lstat(filepath.Join(at, p))
			if err != nil || st.Mode() != want.mode || st.Sys().(*syscall.Stat_t).Uid != want.uid || st.ModTime().Unix() != 1_700_000_000 && p != "run" {
				t.Errorf("%s: %+v, %v", p, st, err)
			}
		}
	}
	inMerged := map[string]string{"usr/bin/tool": "tool", "usr/bin/sh": "shell", "run/x.pid": "1", "tmp/f": "f", "home/f": "f", "usr/bin/old": ""}
	inPlain := map[string]string{"bin/tool": "tool", "bin/sh": "another shell", "var/run/x.pid": "1"}
	for range 2 {
		look("alone", map[string]string{"bin/tool": "tool", "var/run/x.pid": "1"}, nil)
		look("merged", inMerged, usrMerged)
		look("plain", inPlain, nil)
		look("twice", inMerged, usrMerged)
		look("out", map[string]string{"inside": "x"}, nil)
		look("links", map[string]string{"usr/bin/sh2": "shell", "sh3": "shell", "usr/bin/sh": "shell"}, func(at string) {
			if st, err := os.Stat(filepath.Join(at, "sh3")); err != nil || st.Sys().(*syscall.Stat_t).Nlink != 3 {
				t.Errorf("a hard link to a file of a layer below: %+v, %v", st, err)
			}
		})
		store = openStore(t, store.cfg.Dir) // as after a restart
	}
	// What an image needs is kept, in both forms; nothing else.
	h.srv.Close()
	if _, err := store.Collect(t.Context(), []string{h.host + "/merged:1"}, 1<<40); err != nil {
		t.Fatal(err)
	}
	look("merged", inMerged, usrMerged)
	if left, err := os.ReadDir(store.path("layers")); err != nil || len(left) != 3 { // the base, and the upper one on it and alone
		t.Errorf("%d layers are left, %v", len(left), err)
	}
}
