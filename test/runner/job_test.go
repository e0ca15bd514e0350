package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func opened(t *testing.T, path string, binaries []string) *job {
	t.Helper()
	j, err := openJob(path, binaries)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// A job's file is read back by the same build, whole or cut off, and by no
// other; one process has it.
func TestJobGoesOn(t *testing.T) {
	dir := t.TempDir()
	path, bin := filepath.Join(dir, "bin", "job"), filepath.Join(dir, "binary")
	if err := os.WriteFile(bin, []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	j := opened(t, path, []string{bin})
	j.ran(cycle{"TestStory01", 1}, "", time.Second)
	j.ran(cycle{"TestStory01", 2}, "it fell", time.Second)
	j.ran(cycle{"TestStory02", 1}, "", 3*time.Second)
	if other, err := openJob(path, []string{bin}); err == nil {
		other.close()
		t.Error("two processes tell the same stories")
	}
	if bad := j.table([]string{"TestStory01", "TestStory02"}, 2); bad != 1 {
		t.Errorf("%d cycles failed, not 1", bad)
	}
	if _, err := j.file.WriteString("passed TestStory02 2 1"); err != nil {
		t.Fatal(err)
	}
	if got := j.failures(); !slices.Equal(got, []cycle{{"TestStory01", 2}}) {
		t.Errorf("failed: %v", got)
	}
	j.close()

	j = opened(t, path, []string{bin})
	for c, want := range map[cycle]bool{{"TestStory01", 1}: true, {"TestStory02", 1}: true, {"TestStory01", 2}: false, {"TestStory02", 2}: false} {
		if j.has(c) != want {
			t.Errorf("%s passed: %v, not %v", c, !want, want)
		}
	}
	if j.once[cycle{"TestStory01", 2}] != 1 {
		t.Error("what failed before is forgotten")
	}
	if j.passed[cycle{"TestStory02", 1}] != 3*time.Second {
		t.Errorf("times %v", j.passed)
	}
	j.close()

	if err := os.WriteFile(bin, []byte("two"), 0o600); err != nil {
		t.Fatal(err)
	}
	j = opened(t, path, []string{bin})
	defer j.close()
	if len(j.passed) > 0 || len(j.once) > 0 {
		t.Errorf("what another build passed counts: %v", j.passed)
	}
}

// Only a story that was told in full has passed.
func TestVerdict(t *testing.T) {
	for text, want := range map[string]string{
		"=== RUN   TestStory01\n--- PASS: TestStory01 (3.1s)\nPASS\n":                 "",
		"--- PASS: TestStory01 (3.1s)\n    --- SKIP: TestStory01/long (0.0s)\nPASS\n": "a part was skipped: TestStory01/long (0.0s)",
		"--- SKIP: TestStory01 (0.0s)\nPASS\n":                                        "a part was skipped: TestStory01 (0.0s)",
		"--- PASS: TestStory01More (3.1s)\nPASS\n":                                    "it was not told",
		"testing: warning: no tests to run\nPASS\n":                                   "it was not told",
	} {
		if got := judge("TestStory01", text, false); got != want {
			t.Errorf("%q: %q, not %q", text, got, want)
		}
	}
}

// In a run that is not a long job, what was left out is no failure.
func TestSkipsOfAShortRun(t *testing.T) {
	for text, want := range map[string]string{
		"--- SKIP: TestStory01 (0.0s)\nPASS\n":      "",
		"testing: warning: no tests to run\nPASS\n": "it was not told",
	} {
		if got := judge("TestStory01", text, true); got != want {
			t.Errorf("%q: %q, not %q", text, got, want)
		}
	}
}

// TestRunAgainAlone: a test that fails, and passes when run again, is no
// failure of a short run; one that fails twice is, and so are more than two.
func TestRunAgainAlone(t *testing.T) {
	for name, c := range map[string]struct {
		tests string
		bad   bool
	}{
		"once":  {"TestOnce TestOther", false},
		"twice": {"TestTwice TestOther", true},
		"many":  {"TestOnce1 TestOnce2 TestOnce3", true},
	} {
		dir := t.TempDir()
		bin := filepath.Join(dir, "tests")
		script := "#!/bin/bash\n[ $1 = -test.list ] && { printf '%s\\n' " + c.tests + `; exit; }
n=${5#^}; n=${n%$}; echo run >>"$MARKS/$n"
case $n in TestTwice|TestOnce*)
  [ "$n" = TestTwice ] || [ "$(wc -l <"$MARKS/$n")" = 1 ] && { echo "--- FAIL: $n (0.0s)"; exit 1; };;
esac
echo "--- PASS: $n (0.0s)"
`
		if err := os.WriteFile(bin, []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv("MARKS", dir)
		o := &options{cycles: 1, parallel: 1, tests: "^Test", outside: "^Test", once: true, logs: filepath.Join(dir, "logs"), timeout: time.Minute, binaries: []string{bin}}
		if err := run(t.Context(), o); (err != nil) != c.bad {
			t.Errorf("%s: %v", name, err)
		}
		if first, err := os.ReadFile(filepath.Join(o.logs, "first-TestOnce-01.log")); name == "once" && (err != nil || !strings.Contains(string(first), "--- FAIL")) {
			t.Errorf("the log of the run that failed: %q, %v", first, err)
		}
	}
}
