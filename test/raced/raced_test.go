// Package raced tests the wrapper that make test runs test binaries in.
package raced

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Only what the race detector itself died of is run again, and once.
func TestOnlyTheDetectorsOwnDeathIsRunAgain(t *testing.T) {
	const again = "RACE DETECTOR DIED"
	for name, c := range map[string]struct {
		says        string // and fails
		second      string // exit code of a second run
		runs        int
		fails, told bool
	}{
		"check":       {"ThreadSanitizer: CHECK failed: tsan_rtl.cpp:346", "0", 2, false, true},
		"signal":      {"SIGSEGV: segmentation violation\nPC=0x41bce9 m=0 sigcode=1 addr=0x0\nruntime.(*timer).maybeRunChan(0xc0003130b0, 0xc000313030)", "0", 2, false, true},
		"fault":       {"fatal error: fault\nruntime.(*timer).maybeRunChan(0xc0003130b0, 0xc000313030)", "0", 2, false, true},
		"fails twice": {"ThreadSanitizer: CHECK failed: tsan_rtl.cpp:346", "1", 2, true, true},
		"a test":      {"--- FAIL: TestX", "0", 1, true, false},
		"a data race": {"WARNING: DATA RACE\nruntime.(*timer).maybeRunChan()", "0", 1, true, false},
		"nil":         {"panic: runtime error: invalid memory address or nil pointer dereference\n[signal SIGSEGV: segmentation violation code=0x1 addr=0x0]", "0", 1, true, false},
		"a mapping":   {"unexpected fault address 0x7f\nfatal error: fault\ngo.etcd.io/bbolt.(*DB).page()", "0", 1, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			binary, runs := filepath.Join(dir, "binary"), filepath.Join(dir, "runs")
			script := "#!/bin/sh\necho run >>" + runs + "\n[ \"$GOMAXPROCS\" = 1 ] && exit " + c.second + "\ncat " + filepath.Join(dir, "says") + "\nexit 3\n"
			for path, content := range map[string]string{binary: script, filepath.Join(dir, "says"): c.says + "\n"} {
				if err := os.WriteFile(path, []byte(content), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command("./run.sh", binary)
			cmd.Env = append(os.Environ(), "GOMAXPROCS=2")
			out, err := cmd.CombinedOutput()
			if (err != nil) != c.fails || strings.Contains(string(out), again) != c.told || !strings.Contains(string(out), c.says) {
				t.Errorf("%v\n%s", err, out)
			}
			if b, err := os.ReadFile(runs); err != nil || strings.Count(string(b), "run") != c.runs {
				t.Errorf("runs: %q, %v", b, err)
			}
		})
	}
}
