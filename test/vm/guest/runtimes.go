package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// suiteLimit is for all tests of one runtime.
const suiteLimit = 40 * time.Minute

// modules runs the suite that all runtimes pass with Wasm guests, on control
// groups v2.
func modules(g *guest) error {
	if err := os.Setenv("DUNLIN_TEST_WASM_HOST", "/dunlin-wasm"); err != nil {
		return err
	}
	// A module cannot run a command, and says so.
	return g.suite("wasm", "", "TestConformance", "Exec")
}

// containers runs it with containers, by runc and by crun.
func containers(g *guest) error {
	if err := g.suite("oci", "/runc", "TestConformance|TestOutOfMemoryOfAChild|TestWhatAContainerIs|TestPodShares"); err != nil {
		return err
	}
	return g.suite("oci", "/crun", "TestConformance")
}

// suite runs tests of a runtime, with a folder of programs in PATH. No test
// may be skipped but those named.
func (g *guest) suite(name, programs, pattern string, mayskip ...string) error {
	ctx, cancel := context.WithTimeout(g.ctx, suiteLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, fmt.Sprintf("/tests/%s/%s.test", name, name), "-test.v", "-test.short", "-test.run", pattern, "-test.timeout", "38m")
	cmd.Dir = "/tests/" + name
	cmd.Env = append(os.Environ(), "PATH=/bin:"+programs)
	var out bytes.Buffer
	// On the console at once: it shows how far it came, and where the time went.
	both := io.MultiWriter(&out, &console{began: g.began})
	cmd.Stdout, cmd.Stderr = both, both
	err := cmd.Run()
	for line := range strings.Lines(out.String()) {
		if test, _, ok := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "--- SKIP: "), " "); ok && strings.Contains(line, "--- SKIP: ") {
			allowed := false
			for _, m := range mayskip {
				allowed = allowed || strings.HasSuffix(test, "/"+m)
			}
			if !allowed && err == nil {
				err = fmt.Errorf("%s was skipped", test)
			}
		}
	}
	if err == nil && !strings.Contains(out.String(), "--- PASS: TestConformance/OutOfMemory") {
		err = fmt.Errorf("the suite did not run")
	}
	if err != nil {
		// The stacks of a time-out say less than how far it came.
		said, _, _ := strings.Cut(out.String(), "\ngoroutine ")
		return fmt.Errorf("the tests of runtime/%s: %w:\n%s", name, err, tail(said, 12000))
	}
	g.ok("%d tests of runtime/%s %s", strings.Count(out.String(), "--- PASS"), name, strings.TrimPrefix(programs, "/"))
	return nil
}

// console prints the lines in which tests begin and end, with the guest's time.
type console struct {
	began time.Time
	rest  []byte
}

func (c *console) Write(p []byte) (int, error) {
	c.rest = append(c.rest, p...)
	for {
		line, rest, ok := bytes.Cut(c.rest, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		if c.rest = rest; bytes.Contains(line, []byte("=== RUN")) || bytes.Contains(line, []byte("--- ")) {
			fmt.Printf("  %6.1f %s\n", time.Since(c.began).Seconds(), line)
		}
	}
}

func tail(s string, n int) string {
	if len(s) > n {
		s = s[len(s)-n:]
	}
	return s
}
