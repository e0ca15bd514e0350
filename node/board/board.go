// Package board reads facts of the machine (not flags and hopes) and says
// which of them will hurt, in the operator's words, naming the file to edit.
package board

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Facts are what was read.
type Facts struct {
	Kernel        string // uname -r
	Machine       string // uname -m: the kernel's
	UserArch      string // GOARCH of this binary: the user space's
	PageSize      int
	Hostname      string
	MemoryBytes   uint64
	SwapBytes     uint64
	Wall          time.Time
	BootFile      string // kernel command line file of this image, if one is known
	CgroupMemory  bool
	CgroupReason  string // why not
	StateDir      string
	DiskTotal     uint64
	DiskFree      uint64
	DiskReadOnly  bool
	Root          bool
	NetworkReason string // why no network namespaces; "" is fine
	OCI           string // the programs that run containers, as "runc and conmon"; "" is none
	OCIReason     string // why not
}

// Level of a finding.
type Level int

// Levels.
const (
	OK Level = iota
	Note
	Warning
	Fatal
)

// String is the word printed.
func (l Level) String() string { return [...]string{"ok", "note", "warning", "FAILED"}[l] }

// Finding is one line of preflight.
type Finding struct {
	Level Level
	Check string
	Says  string
	Do    string // what to do; may be empty
}

// Build is when the software was made: a clock before it is wrong.
var Build = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

const meminfoFile = "proc/meminfo"

// Memory is how much the machine has, in bytes; 0 where that cannot be read.
func Memory() uint64 { return meminfo("/" + meminfoFile)["MemTotal"] }

// Read gathers the facts below root ("/" but in tests).
func Read(root, stateDir string) Facts {
	f := Facts{UserArch: runtime.GOARCH, PageSize: os.Getpagesize(), Wall: time.Now(), StateDir: stateDir, Root: os.Geteuid() == 0}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		f.Kernel, f.Machine = cString(u.Release[:]), cString(u.Machine[:])
	}
	f.Hostname, _ = os.Hostname()
	mem := meminfo(filepath.Join(root, meminfoFile))
	f.MemoryBytes, f.SwapBytes = mem["MemTotal"], mem["SwapTotal"]
	for _, p := range []string{"boot/firmware/cmdline.txt", "boot/cmdline.txt"} {
		if _, err := os.Stat(filepath.Join(root, p)); err == nil {
			f.BootFile = "/" + p
			break
		}
	}
	dir := stateDir
	for dir != "/" && dir != "." {
		if _, err := os.Stat(dir); err == nil {
			break
		}
		dir = filepath.Dir(dir)
	}
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) == nil {
		f.DiskTotal = s.Blocks * uint64(s.Bsize)
		f.DiskFree = s.Bavail * uint64(s.Bsize)
		f.DiskReadOnly = s.Flags&unix.ST_RDONLY != 0
	}
	return f
}

func cString(b []byte) string {
	s, _, _ := bytes.Cut(b, []byte{0})
	return string(s)
}

func meminfo(path string) map[string]uint64 {
	out := map[string]uint64{}
	b, err := os.ReadFile(path)
	if err != nil {
		return out
	}
	for line := range strings.Lines(string(b)) {
		k, v, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		fields := strings.Fields(v)
		if len(fields) == 0 {
			continue
		}
		if n, err := strconv.ParseUint(fields[0], 10, 64); err == nil {
			out[k] = n << 10
		}
	}
	return out
}

// ELF machine numbers and instruction sets that matter for armv6 boards are
// told by the kernel's name for the machine.
var kernelArch = map[string]string{
	"x86_64": "amd64", "aarch64": "arm64", "armv6l": "arm", "armv7l": "arm", "riscv64": "riscv64", "i686": "386",
}

// Check judges the facts. It is pure; the order is the order of printing.
func Check(f Facts) []Finding {
	return []Finding{
		checkCgroup(f), checkClock(f), checkArch(f), checkPage(f), checkSwap(f), checkMemory(f), checkDisk(f), checkHostname(f), checkRoot(f), checkNetwork(f), checkRuntimes(f),
	}
}

func checkCgroup(f Facts) Finding {
	if f.CgroupMemory {
		return Finding{OK, "memory cgroup", "memory limits are enforced", ""}
	}
	if !f.Root {
		return Finding{Warning, "memory cgroup", "memory limits are not enforced: " + f.CgroupReason, "run as root to have them"}
	}
	do := ""
	if f.BootFile != "" {
		do = "append 'cgroup_enable=memory cgroup_memory=1' to the one line of " + f.BootFile + ", then reboot"
	}
	return Finding{Fatal, "memory cgroup", "memory limits cannot be enforced: " + f.CgroupReason, do}
}

func checkClock(f Facts) Finding {
	if f.Wall.Before(Build) {
		return Finding{Warning, "clock", fmt.Sprintf("the clock says %s, before this software was made", f.Wall.UTC().Format(time.DateOnly)), "set it (date -s, or time synchronisation); what is known here starts all the same"}
	}
	return Finding{OK, "clock", f.Wall.UTC().Format(time.RFC3339), ""}
}

func checkArch(f Facts) Finding {
	k, known := kernelArch[f.Machine]
	if !known || k == f.UserArch {
		return Finding{OK, "architecture", fmt.Sprintf("%s (kernel %s)", f.UserArch, f.Machine), ""}
	}
	return Finding{Note, "architecture", fmt.Sprintf("%s user space on a %s kernel: modules are interpreted, not compiled, on 32 bits", f.UserArch, f.Machine), "install the 64-bit system, or the 64-bit binary"}
}

func checkPage(f Facts) Finding {
	if f.PageSize == 4096 {
		return Finding{OK, "page size", "4 KiB", ""}
	}
	return Finding{Note, "page size", fmt.Sprintf("%d KiB: Wasm modules do not care", f.PageSize>>10), ""}
}

func checkSwap(f Facts) Finding {
	if f.SwapBytes == 0 {
		return Finding{OK, "swap", "none", ""}
	}
	return Finding{Note, "swap", fmt.Sprintf("%s: workloads get a swap limit where the kernel can; on an SD card it wears the card", size(f.SwapBytes)), ""}
}

func checkMemory(f Facts) Finding {
	if f.MemoryBytes == 0 {
		return Finding{Warning, "memory", "cannot be read from /proc/meminfo", ""}
	}
	if f.MemoryBytes < 200<<20 {
		return Finding{Warning, "memory", size(f.MemoryBytes) + ": less than is tested (256 MiB)", "run 'dunlin agent' here, and the server elsewhere"}
	}
	return Finding{OK, "memory", size(f.MemoryBytes), ""}
}

func checkDisk(f Facts) Finding {
	says := fmt.Sprintf("%s free of %s under %s", size(f.DiskFree), size(f.DiskTotal), f.StateDir)
	switch {
	case f.DiskReadOnly:
		return Finding{Fatal, "disk", f.StateDir + " lies on a read-only file system", "remount it read-write, or move the state with --state-dir"}
	case f.DiskTotal == 0:
		return Finding{Warning, "disk", "cannot read the free space of " + f.StateDir, ""}
	case f.DiskFree < 64<<20:
		return Finding{Fatal, "disk", says, "free some space, or move the state with --state-dir"}
	case f.DiskFree < 512<<20:
		return Finding{Warning, "disk", says, "modules and images need room"}
	}
	return Finding{OK, "disk", says, ""}
}

func checkHostname(f Facts) Finding {
	name, changed, err := NodeName(f.Hostname)
	switch {
	case err != nil:
		return Finding{Fatal, "hostname", fmt.Sprintf("%q: %v", f.Hostname, err), "set a hostname, or give --node-name"}
	case changed:
		return Finding{Note, "hostname", fmt.Sprintf("%q is no valid node name; the node will be called %q", f.Hostname, name), "give --node-name to choose another"}
	}
	return Finding{OK, "hostname", name, ""}
}

func checkRoot(f Facts) Finding {
	if f.Root {
		return Finding{OK, "privileges", "root", ""}
	}
	return Finding{Note, "privileges", "not root: guests run as this user, without limits and with the node's address", "run as root for full isolation"}
}

func checkNetwork(f Facts) Finding {
	if f.NetworkReason == "" {
		return Finding{OK, "pod network", "network namespaces can be made", ""}
	}
	return Finding{Note, "pod network", "pods share the node's address: " + f.NetworkReason, ""}
}

// checkRuntimes says what workloads can be. Modules always run; containers need
// programs of the distribution's.
func checkRuntimes(f Facts) Finding {
	const modules = "WebAssembly modules, by the runtime built in"
	if f.OCI != "" {
		return Finding{OK, "runtimes", modules + "; OCI containers, by " + f.OCI, ""}
	}
	return Finding{Note, "runtimes", modules + "; no OCI containers: " + f.OCIReason, "if you want them: apt install runc conmon (or crun), and run as root"}
}

func size(n uint64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}
