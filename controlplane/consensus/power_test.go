package consensus

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// ext4Shutdown is EXT4_IOC_SHUTDOWN; with ext4NoLogFlush what is not on the
// disk stays lost, as in a power cut.
const (
	ext4Shutdown   = 0x8004587d
	ext4NoLogFlush = 2
)

// loopDisk is an ext4 in a file.
type loopDisk struct{ image, mount string }

func newLoopDisk(t *testing.T) *loopDisk {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a loop-mounted ext4 needs root")
	}
	dir := t.TempDir()
	d := &loopDisk{image: filepath.Join(dir, "image"), mount: filepath.Join(dir, "mnt")}
	if err := os.Mkdir(d.mount, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(d.image, 64<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", d.image).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: mkfs.ext4: %v %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", d.image, d.mount).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: no loop mounts here: %v %s", err, out)
	}
	t.Cleanup(func() { d.run(t, "umount", d.mount) })
	return d
}

func (d *loopDisk) run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v %s", name, args, err, out)
	}
}

func (d *loopDisk) powerCut(t *testing.T) {
	t.Helper()
	f, err := os.Open(d.mount)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := unix.IoctlSetPointerInt(int(f.Fd()), ext4Shutdown, ext4NoLogFlush); err != nil {
		t.Skipf("SKIPPED: EXT4_IOC_SHUTDOWN: %v", err)
	}
}

// powerOn goes on with a copy of the disk: a container that another test
// starts at this moment has a copy of the mount, and keeps the file system
// without power alive with it.
func (d *loopDisk) powerOn(t *testing.T) {
	t.Helper()
	d.run(t, "umount", d.mount)
	next := d.image + "+"
	d.run(t, "cp", "--sparse=always", d.image, next)
	d.image = next
	d.run(t, "mount", "-o", "loop", d.image, d.mount)
}

// TestPowerLoss cuts the power of a child that commits, at different moments,
// and checks that every acknowledged change survived.
func TestPowerLoss(t *testing.T) {
	d := newLoopDisk(t)
	for round, cut := range []int{0, 1, 2, 7, 23, 40} {
		dir := filepath.Join(d.mount, strconv.Itoa(round))
		cmd := exec.CommandContext(testContext(t), os.Args[0])
		cmd.Env = append(os.Environ(), envCrashDir+"="+dir, envCrashAt+"=0", envCrashOps+"=1000000")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		acked, before, off := 0, 0, false
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "ack") {
				acked++
			}
			// The child goes on, and fails; what it acknowledged before it
			// noticed must be there.
			if acked > cut && !off {
				before = acked
				d.powerCut(t)
				off = true
				_ = cmd.Process.Kill()
			}
		}
		_ = cmd.Wait()
		if !off {
			t.Fatalf("round %d: the child ended by itself", round)
		}
		d.powerOn(t)
		// A machine without power acknowledges nothing, but this one has it: an
		// fsync that runs while ext4 is shut down can return success for what
		// is then thrown away. The child has one at a time, so that can be its
		// last change only, and none that was acknowledged before.
		checkCrash(t, dir, -cut, max(before, acked-1), acked)
		// Again from what the cut left.
		again := openTest(t, crashConfig(dir))
		if err := again.Close(); err != nil {
			t.Fatal(err)
		}
		t.Logf("round %d: power cut after %d acknowledged changes", round, acked)
	}
}
