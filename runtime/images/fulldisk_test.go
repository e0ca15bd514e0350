package images

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
)

// fill leaves so many bytes free, and takes the rest with a file of its own.
func (d *disk) fill(leave int64) {
	d.t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(d.dir, &st); err != nil {
		d.t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(d.dir, "full"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		d.t.Fatal(err)
	}
	// Its extents take room too: with nothing left free, the last of it comes in
	// pieces that get smaller.
	n, size := int64(st.Bavail)*int64(st.Bsize)-leave, int64(0) //nolint:unconvert // an int32 on arm
	for piece := n; piece >= 4096 && size < n; {
		switch err := unix.Fallocate(int(f.Fd()), 0, size, piece); {
		case err == nil:
			size += piece
			piece = min(piece, n-size)
		case errors.Is(err, unix.ENOSPC):
			piece /= 2
		default:
			d.t.Error(err)
			piece = 0
		}
	}
	if err := f.Close(); err != nil {
		d.t.Error(err)
	}
}

func (d *disk) empty() {
	d.t.Helper()
	if err := os.Remove(filepath.Join(d.dir, "full")); err != nil {
		d.t.Fatal(err)
	}
}

// TestFullDiskInEveryStepOfAPull: it says so, what is there is never half an
// image, and once there is room the next pull makes it whole and leaves nothing.
func TestFullDiskInEveryStepOfAPull(t *testing.T) {
	d := newDisk(t)
	h := newHub(t)
	const size = 4 << 20
	push(t, h.srv.URL, "app", "1", nil, makeImage(t, amd64(), plain, tarOf(t, dir("bin"), file("bin/one", noise(size, 7))), tarOf(t, dir("bin"), file("bin/two", noise(size, 8)))))
	image := h.host + "/app:1"
	whole := func(img *Image) bool {
		return content(t, img, "bin/one") == noise(size, 7) && content(t, img, "bin/two") == noise(size, 8)
	}
	open := func(name string, step func(string)) (*Puller, string) {
		store := filepath.Join(d.dir, name)
		s := openStore(t, store)
		s.checkpoint, s.step = size/4, step
		return testPuller(t, s, registry.Config{}), store
	}
	// Full beforehand: not a byte is fetched.
	p, _ := open("before", func(string) {})
	d.fill(size)
	if _, err := p.Image(t.Context(), ask(image, "IfNotPresent"), nil); reason(err) != ReasonPull || !contains(err, "not enough space") {
		t.Error(err)
	}
	d.empty()
	steps := []string{}
	p, _ = open("steps", func(n string) { steps = append(steps, n) })
	if _, err := p.Image(t.Context(), ask(image, "IfNotPresent"), nil); err != nil || len(steps) < 25 {
		t.Fatalf("%v, steps %v", err, steps)
	}
	if err := os.RemoveAll(filepath.Join(d.dir, "steps")); err != nil {
		t.Fatal(err)
	}
	failed := 0
	for at, name := range steps {
		t.Run(strconv.Itoa(at)+" "+name, func(t *testing.T) {
			n := 0
			var once sync.Once
			p, store := open("s"+strconv.Itoa(at), func(string) {
				if n++; n > at {
					once.Do(func() { d.fill(0) })
				}
			})
			img, err := p.Image(t.Context(), ask(image, "IfNotPresent"), nil)
			switch {
			case err == nil:
				// What was left to do needed no room, or a run had a step less.
				if n > at && !whole(img) {
					t.Error("it is not whole")
				}
			case reason(err) != ReasonPull || !contains(err, "not enough space", "no space left"):
				t.Error(err)
			default:
				failed++
			}
			if img, err := openStore(t, store).Lookup(t.Context(), image, ""); err == nil && !whole(img) {
				t.Error("what it looks like on the full disk is not whole")
			}
			if n > at {
				d.empty()
			}
			p.s.step = func(string) {}
			if img, err = p.Image(t.Context(), ask(image, "IfNotPresent"), nil); err != nil || !whole(img) {
				t.Errorf("once there was room: %v", err)
			}
			for _, dir := range []string{"partial", "tmp"} {
				if left, err := os.ReadDir(filepath.Join(store, dir)); err != nil || len(left) > 0 {
					t.Errorf("%s: %v, %v", dir, left, err)
				}
			}
			if err := os.RemoveAll(store); err != nil {
				t.Error(err)
			}
		})
	}
	if failed < len(steps)/2 {
		t.Errorf("only %d of %d steps failed on a full disk", failed, len(steps))
	}
}

// TestFullDiskInEveryStepOfAnImport: the same for an archive.
func TestFullDiskInEveryStepOfAnImport(t *testing.T) {
	d := newDisk(t)
	const size = 2 << 20
	layer := tarOf(t, dir("bin"), file("bin/one", noise(size, 9)))
	archive := ociLayout(t, "r.example/app:1", makeImage(t, amd64(), plain, layer))
	whole := func(img *Image) bool { return content(t, img, "bin/one") == noise(size, 9) }
	open := func(name string, step func(string)) *Store {
		s := openStore(t, filepath.Join(d.dir, name))
		s.step = step
		return s
	}
	steps := []string{}
	if _, err := open("steps", func(n string) { steps = append(steps, n) }).Import(t.Context(), "", bytes.NewReader(archive), nil); err != nil || len(steps) < 10 {
		t.Fatalf("%v, steps %v", err, steps)
	}
	if err := os.RemoveAll(filepath.Join(d.dir, "steps")); err != nil {
		t.Fatal(err)
	}
	failed := 0
	for at := range len(steps) + 1 {
		n := 0
		var once sync.Once
		full := false
		fill := func() { once.Do(func() { full = true; d.fill(0) }) }
		s := open("s"+strconv.Itoa(at), func(string) {
			if n++; n == at {
				fill()
			}
		})
		if at == 0 {
			fill()
		}
		_, err := s.Import(t.Context(), "", bytes.NewReader(archive), nil)
		if err != nil {
			failed++
			if !contains(err, "not enough space", "no space left") || strings.Contains(err.Error(), "\n") {
				t.Errorf("step %d: %v", at, err)
			}
		}
		if img, lerr := openStore(t, s.cfg.Dir).Lookup(t.Context(), "r.example/app:1", ""); lerr == nil && !whole(img) || (lerr != nil) != (err != nil) {
			t.Errorf("step %d: imported: %v, looked up: %v", at, err, lerr)
		}
		if full {
			d.empty()
		}
		s.step = func(string) {}
		if _, err := s.Import(t.Context(), "", bytes.NewReader(archive), nil); err != nil {
			t.Errorf("step %d, once there was room: %v", at, err)
		}
		if img, err := s.Lookup(t.Context(), "r.example/app:1", ""); err != nil || !whole(img) {
			t.Errorf("step %d, once there was room: %v", at, err)
		}
		if left, err := os.ReadDir(s.path("tmp")); err != nil || len(left) > 0 {
			t.Errorf("step %d: %v, %v", at, left, err)
		}
		if err := os.RemoveAll(s.cfg.Dir); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d of %d steps failed", failed, len(steps)+1)
	if failed < len(steps)/2 {
		t.Errorf("only %d of %d steps failed on a full disk", failed, len(steps))
	}
}
