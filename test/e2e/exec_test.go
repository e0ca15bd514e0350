//go:build e2e

package e2e

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

const inside = `apiVersion: v1
kind: Pod
metadata: {name: inside, labels: {app: inside}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: web, image: "busybox:test", imagePullPolicy: Never, command: [sh, -c, "mkdir /www; echo page > /www/index.html; exec httpd -f -p 127.0.0.1:8080 -h /www"]}
  - {name: echo, image: "busybox:test", imagePullPolicy: Never, stdin: true, command: [sh, -c, "while read x; do echo got $x; done; sleep 100000"]}
`

// TestIntoPods: dunlin exec, attach, cp and port-forward, with nothing but the
// program itself.
func TestIntoPods(t *testing.T) {
	cluster.NeedContainers(t)
	c := cluster.New(t)
	c.ImportBusybox("busybox:test", nil)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	c.Apply(inside)
	c.Apply(hello("1", 1))
	c.WaitReady("app=inside", 1)
	c.WaitReady("app=hello", 1)

	_, err := c.Try("exec", "inside", "--", "sh", "-c", "echo oops >&2; exit 3")
	var code *exec.ExitError
	if !errors.As(err, &code) || code.ExitCode() != 3 || !strings.Contains(err.Error(), "oops") || !strings.Contains(err.Error(), `Defaulted container "web" out of: web, echo`) {
		t.Errorf("exit code 3: %v", err)
	}
	text := strings.Repeat("line\n", 100_000)
	if out, err := c.TryIn(text, "exec", "-i", "inside", "-c", "echo", "--", "sh", "-c", "cat; echo end"); err != nil || out != text+"end\n" {
		t.Errorf("input to its end: %d bytes, %v", len(out), err)
	}
	if _, err := c.Try("exec", "deploy/hello", "--", "sh"); err == nil || !strings.Contains(err.Error(), "is a Wasm guest") {
		t.Errorf("a Wasm guest: %v", err)
	}

	page := filepath.Join(t.TempDir(), "page")
	if err := os.WriteFile(page, []byte("copied\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.Run("cp", page, "inside:/www/other.html")
	c.Run("cp", "inside:/www", page+"s")
	if b, err := os.ReadFile(filepath.Join(page+"s", "other.html")); err != nil || string(b) != "copied\n" {
		t.Errorf("there and back: %q, %v", b, err)
	}

	_, lines, stop := beside(t, c, "port-forward", "inside", ":8080", "--address", "127.0.0.1")
	line := <-lines
	address, ok := strings.CutPrefix(strings.TrimSuffix(line, " -> 8080"), "Forwarding from ")
	if !ok {
		t.Fatalf("%q", line)
	}
	for range 3 {
		if got := fetch(t, address); got != "page\n" {
			t.Errorf("%q", got)
		}
	}
	stop(0)

	in, lines, stop := beside(t, c, "attach", "-i", "inside", "-c", "echo")
	if _, err := in.WriteString("hello\n"); err != nil {
		t.Fatal(err)
	}
	if line := <-lines; line != "got hello" {
		t.Errorf("%q", line)
	}
	stop(130)
}

// beside runs a command that goes on until stop, which ends it with SIGINT.
func beside(t *testing.T, c *cluster.Cluster, args ...string) (in *os.File, lines <-chan string, stop func(code int)) {
	t.Helper()
	return besideOf(t, c.Kubeconfig(), args...)
}

func besideOf(t *testing.T, kubeconfig string, args ...string) (in *os.File, lines <-chan string, stop func(code int)) {
	t.Helper()
	r, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(cluster.Binary(t), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	cmd.Stdin, cmd.Stderr = r, os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	late := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() }) // then there are no more lines
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Process.Kill()
	})
	said := make(chan string, 100)
	go func() {
		defer close(said)
		for s := bufio.NewScanner(out); s.Scan(); {
			said <- s.Text()
		}
	}()
	return in, said, func(code int) {
		t.Helper()
		_ = cmd.Process.Signal(syscall.SIGINT)
		for range said { // to the end
		}
		_ = cmd.Wait()
		late.Stop()
		if got := cmd.ProcessState.ExitCode(); got != code {
			t.Errorf("dunlin %s: exit %d, want %d", strings.Join(args, " "), got, code)
		}
	}
}
