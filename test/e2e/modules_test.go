//go:build e2e

package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestModulesOfOthers: Python, a compiler of TypeScript and a speech
// synthesizer, as npm has them, run in the sandbox and do their work.
func TestModulesOfOthers(t *testing.T) {
	run := func(t *testing.T, module string, args ...string) (string, error) {
		t.Helper()
		path := filepath.Join(cluster.Root(t), "bin", "modules", module+".wasm")
		if _, err := os.Stat(path); err != nil {
			t.Skipf("SKIPPED: %v (test/modules.sh fetches it, where npm has a network)", err)
		}
		cmd := exec.Command("timeout", append([]string{"300", cluster.Binary(t), "run", path}, args...)...)
		cmd.Env = append(os.Environ(), "DUNLIN_CONFIG=/dev/null")
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		err := cmd.Run()
		if err != nil {
			t.Logf("%s: %v: %s", module, err, errs.String())
		}
		return out.String(), err
	}
	folder := func(t *testing.T) string {
		dir, err := os.MkdirTemp("", "dunlin-modules-")
		if err == nil {
			err = os.Chmod(dir, 0o777) // guests are nobody
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		return dir
	}
	t.Run("flite", func(t *testing.T) {
		dir := folder(t)
		if _, err := run(t, "flite", "--mount", dir+":/out", "--", "-t", "hello", "-o", "/out/hello.wav"); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(dir, "hello.wav")); err != nil || len(b) < 10_000 || !bytes.HasPrefix(b, []byte("RIFF")) {
			t.Errorf("%d bytes, %v", len(b), err)
		}
	})
	t.Run("python", func(t *testing.T) {
		if out, err := run(t, "python", "--", "-c", `import json; print(json.dumps({"sum": sum(range(101))}))`); err != nil || out != "{\"sum\": 5050}\n" {
			t.Errorf("%q, %v", out, err)
		}
	})
	t.Run("esbuild", func(t *testing.T) {
		dir := folder(t)
		for name, text := range map[string]string{"a.ts": "import {b} from './b'\nconsole.log(b as number)\n", "b.ts": "export const b: number = 42\n"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if out, err := run(t, "esbuild", "--mount", dir+":/", "--", "/a.ts", "--bundle", "--minify"); err != nil || !strings.Contains(out, "42") || strings.Contains(out, "number") {
			t.Errorf("%q, %v", out, err)
		}
	})
}
