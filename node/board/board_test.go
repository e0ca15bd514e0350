package board

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	"pgregory.net/rapid"
)

func TestNodeNameIsAlwaysValid(t *testing.T) {
	for in, want := range map[string]string{
		"raspberrypi": "raspberrypi", "Rpi_Node1": "rpi-node1", "VM": "vm", "pi.local.": "pi.local",
		"-x-": "x", "a..b": "a.b", strings.Repeat("a", 70): strings.Repeat("a", 63),
	} {
		got, changed, err := NodeName(in)
		if err != nil || got != want || changed != (got != in) {
			t.Errorf("NodeName(%q) = %q, %v, %v", in, got, changed, err)
		}
	}
	for _, in := range []string{"", "---", "___", "."} {
		if got, _, err := NodeName(in); err == nil {
			t.Errorf("NodeName(%q) = %q", in, got)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.String().Draw(t, "hostname")
		name, _, err := NodeName(in)
		if err != nil {
			return
		}
		if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 {
			t.Fatalf("NodeName(%q) = %q: %v", in, name, errs)
		}
		if again, changed, err := NodeName(name); again != name || changed || err != nil {
			t.Fatalf("not stable: %q becomes %q", name, again)
		}
	})
}

func good() Facts {
	return Facts{Machine: "aarch64", UserArch: "arm64", PageSize: 4096, Hostname: "pi-1", MemoryBytes: 1 << 30, Wall: Build.Add(time.Hour), CgroupMemory: true,
		StateDir: "/var/lib/dunlin", DiskTotal: 32 << 30, DiskFree: 20 << 30, Root: true, OCI: "runc and conmon"}
}

func TestCheckNamesTheFaultAndWhatToDo(t *testing.T) {
	for _, f := range Check(good()) {
		if f.Level != OK {
			t.Errorf("a good board: %+v", f)
		}
	}
	for name, c := range map[string]struct {
		change func(*Facts)
		check  string
		level  Level
		words  string
	}{
		"no memory cgroup, Pi": {func(f *Facts) { f.CgroupMemory, f.BootFile = false, "/boot/firmware/cmdline.txt" }, "memory cgroup", Fatal, "/boot/firmware/cmdline.txt"},
		"clock at 1970":        {func(f *Facts) { f.Wall = time.Unix(0, 0) }, "clock", Warning, "1970-01-01"},
		"32-bit user space":    {func(f *Facts) { f.UserArch = "arm" }, "architecture", Note, "arm user space on a aarch64 kernel"},
		"16 KiB pages":         {func(f *Facts) { f.PageSize = 16384 }, "page size", Note, "16 KiB"},
		"swap":                 {func(f *Facts) { f.SwapBytes = 512 << 20 }, "swap", Note, "512 MiB"},
		"small":                {func(f *Facts) { f.MemoryBytes = 128 << 20 }, "memory", Warning, "128 MiB"},
		"full":                 {func(f *Facts) { f.DiskFree = 1 << 20 }, "disk", Fatal, "--state-dir"},
		"read-only":            {func(f *Facts) { f.DiskReadOnly = true }, "disk", Fatal, "read-only"},
		"name":                 {func(f *Facts) { f.Hostname = "Rpi_Node1" }, "hostname", Note, "rpi-node1"},
		"no name":              {func(f *Facts) { f.Hostname = "___" }, "hostname", Fatal, "--node-name"},
		"user":                 {func(f *Facts) { f.Root = false }, "privileges", Note, "root"},
		"runtimes":             {func(f *Facts) { f.OCI = "runc and conmon" }, "runtimes", OK, "OCI containers, by runc and conmon"},
		"no runtimes":          {func(f *Facts) { f.OCI, f.OCIReason = "", "conmon is not installed" }, "runtimes", Note, "no OCI containers: conmon is not installed"},
	} {
		t.Run(name, func(t *testing.T) {
			f := good()
			c.change(&f)
			for _, got := range Check(f) {
				if got.Check == c.check {
					if got.Level != c.level || !strings.Contains(got.Says+" "+got.Do, c.words) {
						t.Fatalf("%+v", got)
					}
					return
				}
			}
			t.Fatal("no such check")
		})
	}
}

func TestReadPicksTheBootFileThatExists(t *testing.T) {
	root := t.TempDir()
	for _, p := range []string{"proc", "boot/firmware"} {
		if err := os.MkdirAll(filepath.Join(root, p), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write := func(p, s string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, p), []byte(s), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("proc/meminfo", "MemTotal:  1000 kB\nSwapTotal: 24 kB\nbroken\n", 0o600)
	write("boot/cmdline.txt", "x", 0o600)
	if f := Read(root, root); f.BootFile != "/boot/cmdline.txt" || f.MemoryBytes != 1000<<10 || f.SwapBytes != 24<<10 || f.DiskTotal == 0 {
		t.Fatalf("%+v", f)
	}
	write("boot/firmware/cmdline.txt", "x", 0o600)
	if f := Read(root, root); f.BootFile != "/boot/firmware/cmdline.txt" {
		t.Fatalf("%+v", f)
	}
}
