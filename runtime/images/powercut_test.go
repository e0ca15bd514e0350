package images

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
)

// disk is an ext4 of its own whose power can be cut.
type disk struct {
	t          *testing.T
	image, dir string
}

func newDisk(t *testing.T) *disk {
	t.Helper()
	needRoot(t)
	for _, p := range []string{"mkfs.ext4", "mount", "umount"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("SKIPPED, NOTHING TESTED: %s is not installed (test/setup.sh installs it)", p)
		}
	}
	d := &disk{t: t, image: filepath.Join(t.TempDir(), "disk"), dir: t.TempDir()}
	f, err := os.Create(d.image)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(64<<20), f.Close()); err != nil {
		t.Fatal(err)
	}
	d.run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.image)
	d.mount()
	t.Cleanup(func() { _ = unix.Unmount(d.dir, unix.MNT_DETACH) })
	return d
}

func (d *disk) run(name string, args ...string) {
	d.t.Helper()
	if out, err := exec.CommandContext(context.Background(), name, args...).CombinedOutput(); err != nil {
		d.t.Fatalf("%s: %v: %s", name, err, out)
	}
}

func (d *disk) mount() {
	d.t.Helper()
	d.run("mount", "-o", "loop,data=ordered", d.image, d.dir)
}

// cut is EXT4_IOC_SHUTDOWN with NOLOGFLUSH: what was not synced is gone, and
// every access fails from then on.
func (d *disk) cut() {
	const shutdown, noLogFlush = 0x8004587d, 2
	f, err := os.Open(d.dir)
	if err != nil {
		d.t.Error(err)
		return
	}
	defer func() { _ = f.Close() }()
	flag := uint32(noLogFlush)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), shutdown, uintptr(unsafe.Pointer(&flag))); e != 0 {
		d.t.Error("cut:", e)
	}
}

// reboot is the machine's next boot. It goes on with a copy of the disk: a
// container that another test starts at this moment has a copy of the mount,
// and keeps the file system without power alive with it.
func (d *disk) reboot() {
	d.t.Helper()
	d.run("umount", d.dir)
	next := d.image + "+"
	d.run("cp", "--sparse=always", d.image, next)
	d.image = next
	d.mount()
}

// TestPowerCutInEveryStepOfAPull: after it, an image is whole or not there;
// the next pull makes it whole, and fetches no more than a checkpoint again.
func TestPowerCutInEveryStepOfAPull(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	const size = 1 << 20
	m := makeImage(t, amd64(), plain, tarOf(t, dir("bin"), file("bin/one", noise(size, 5))), tarOf(t, dir("bin"), file("bin/two", noise(size, 6))))
	push(t, h.srv.URL, "app", "1", nil, m)
	image := h.host + "/app:1"
	open := func(dir string, step func(string)) *Puller {
		s := openStore(t, dir)
		s.checkpoint, s.step = size/4, step
		return testPuller(t, s, registry.Config{})
	}
	whole := func(img *Image) bool {
		return content(t, img, "bin/one") == noise(size, 5) && content(t, img, "bin/two") == noise(size, 6)
	}
	steps := []string{}
	if _, err := open(t.TempDir(), func(n string) { steps = append(steps, n) }).Image(t.Context(), ask(image, "IfNotPresent"), nil); err != nil {
		t.Fatal(err)
	}
	if len(steps) < 25 {
		t.Fatalf("only %d steps: %v", len(steps), steps)
	}
	late := 0
	for at, name := range steps {
		t.Run(strconv.Itoa(at)+" "+name, func(t *testing.T) {
			d := newDisk(t)
			store := filepath.Join(d.dir, "images")
			n := 0
			var once sync.Once
			ctx, cancel := context.WithCancel(t.Context())
			_, err := open(store, func(string) {
				if n++; n > at {
					once.Do(func() {
						d.cut()
						cancel()
					})
				}
			}).Image(ctx, ask(image, "IfNotPresent"), nil)
			if err == nil {
				// The length of what one read brings decides how many checkpoints
				// a layer has, so that a run may be a step or two shorter.
				if late++; n > at || late > 4 {
					t.Fatalf("the power was not cut: %d steps, %d short runs", n, late)
				}
				d.cut()
			}
			d.reboot()
			if img, err := openStore(t, store).Lookup(t.Context(), image, ""); err == nil && !whole(img) || err != nil && reason(err) != ReasonNeverPull {
				t.Errorf("after the cut: %+v, %v", img, err)
			}
			h.setFault(nil)
			p := open(store, func(string) {})
			img, err := p.Image(t.Context(), ask(image, "IfNotPresent"), nil)
			if err != nil || !whole(img) {
				t.Fatalf("%+v, %v", img, err)
			}
			for _, dir := range []string{"partial", "tmp"} {
				if left, err := os.ReadDir(filepath.Join(store, dir)); err != nil || len(left) > 0 {
					t.Errorf("%s: %v, %v", dir, left, err)
				}
			}
			if left, err := os.ReadDir(filepath.Join(store, "l")); err != nil || len(left) > 4 {
				t.Errorf("%v, %v", left, err)
			}
		})
	}
}
