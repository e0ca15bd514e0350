//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// disk is an ext4 of its own, in a file. Unlike a tmpfs it keeps 5 % for root
// and some for itself, it can be full, and its power can be cut.
type disk struct {
	t          *testing.T
	image, dir string
}

func newDisk(t *testing.T, size int64) *disk {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root to mount a small file system")
	}
	dir, err := os.MkdirTemp("", "d") // short: sockets are below
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	d := &disk{t: t, image: filepath.Join(dir, "image"), dir: filepath.Join(dir, "m")}
	if err := errors.Join(os.Chmod(dir, 0o711), os.Mkdir(d.dir, 0o711), os.WriteFile(d.image, nil, 0o600), os.Truncate(d.image, size)); err != nil {
		t.Fatal(err)
	}
	for _, cmd := range [][]string{{"mkfs.ext4", "-q", "-F", d.image}, {"mount", "-o", "loop", d.image, d.dir}} {
		if out, err := exec.Command(cmd[0], cmd[1:]...).CombinedOutput(); err != nil {
			t.Skipf("SKIPPED: %v: %v %s", cmd, err, out)
		}
	}
	t.Cleanup(d.unmount)
	if err := os.Chmod(d.dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *disk) run(name string, args ...string) {
	d.t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		d.t.Fatalf("%s %v: %v %s", name, args, err, out)
	}
}

// unmount waits for what killed processes still hold.
func (d *disk) unmount() {
	d.t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); <-time.After(100 * time.Millisecond) {
		if exec.Command("umount", d.dir).Run() == nil {
			return
		}
	}
	d.run("umount", d.dir)
}

// fill leaves no byte of the disk; free gives it all back.
func (d *disk) fill() (free func()) {
	d.t.Helper()
	path := filepath.Join(d.dir, "ballast")
	f, err := os.Create(path)
	if err != nil {
		d.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	block := make([]byte, 1<<20)
	for len(block) > 0 {
		if _, err := f.Write(block); err != nil {
			block = block[:len(block)/2]
		}
	}
	return func() {
		if err := os.Remove(path); err != nil {
			d.t.Fatal(err)
		}
	}
}

// cut is EXT4_IOC_SHUTDOWN with NOLOGFLUSH: what is not on the disk is lost,
// and every access fails from then on.
func (d *disk) cut() {
	d.t.Helper()
	const shutdown, noLogFlush = 0x8004587d, 2
	f, err := os.Open(d.dir)
	if err != nil {
		d.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := unix.IoctlSetPointerInt(int(f.Fd()), shutdown, noLogFlush); err != nil {
		d.t.Fatal("cut the power:", err)
	}
}

// die kills every process that has to do with the disk.
func (d *disk) die() {
	d.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for users := d.users(); len(users) > 0; users = d.users() {
		if time.Now().After(deadline) {
			d.t.Fatalf("processes %v do not die", users)
		}
		for _, pid := range users {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		pause(d.t, 50*time.Millisecond)
	}
}

// users are the processes that have files of the disk open or named.
func (d *disk) users() (pids []int) {
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		pid, _ := strconv.Atoi(filepath.Base(p))
		if pid == os.Getpid() || pid == 1 {
			continue
		}
		line, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		links, _ := filepath.Glob(p + "/fd/*")
		uses := strings.Contains(string(line), d.dir+"/")
		for _, l := range append(links, p+"/cwd", p+"/root") {
			to, _ := os.Readlink(l)
			uses = uses || strings.HasPrefix(to, d.dir+"/")
		}
		if uses {
			pids = append(pids, pid)
		}
	}
	return pids
}

// powerOn mounts what the cut left. It goes on with a copy of the disk: a
// container that another test starts at this moment has a copy of the mount,
// and keeps the file system without power alive with it.
func (d *disk) powerOn() {
	d.t.Helper()
	d.unmount()
	next := fmt.Sprintf("%s.%d", strings.SplitN(d.image, ".", 2)[0], time.Now().UnixNano())
	d.run("cp", "--sparse=always", d.image, next)
	if err := os.Remove(d.image); err != nil {
		d.t.Fatal(err)
	}
	d.image = next
	d.run("mount", "-o", "loop", d.image, d.dir)
}

// under puts the folder onto the disk, with what is in it.
func (d *disk) under(dir string) {
	d.t.Helper()
	d.run("cp", "-a", dir+"/.", d.dir)
	d.run("mount", "--bind", d.dir, dir)
	d.t.Cleanup(func() { d.run("umount", "--lazy", dir) })
}
