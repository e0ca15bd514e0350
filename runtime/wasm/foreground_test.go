package wasm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// foreground runs with standard output in a file.
func foreground(t *testing.T, ctx context.Context, o ForegroundOptions) (int, string, error) {
	t.Helper()
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	stdout := os.Stdout
	os.Stdout = out
	defer func() { os.Stdout = stdout }()
	if o.StateDir == "" {
		o.StateDir = t.TempDir()
	}
	code, rerr := RunForeground(ctx, o)
	text, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	return code, string(text), rerr
}

// TestForegroundSaysThatItCompiles: the first time only.
func TestForegroundSaysThatItCompiles(t *testing.T) {
	if interpreted() {
		t.Skip("nothing is compiled on this processor")
	}
	dir := t.TempDir()
	var said []string
	for range 2 {
		if code, _, err := foreground(t, t.Context(), ForegroundOptions{Path: "testdata/print.wasm", StateDir: dir, Progress: func(s string) { said = append(said, s) }}); code != 0 || err != nil {
			t.Fatal(code, err)
		}
	}
	if len(said) != 1 || said[0] != "compiling" {
		t.Errorf("said %q", said)
	}
}

// TestForegroundMemory: what no limit of the guest's own memory refuses ends
// in one line, not in the stacks of our program.
func TestForegroundMemory(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr := os.Stderr
	os.Stderr = write
	code, _, err := foreground(t, t.Context(), ForegroundOptions{Path: "testdata/table.wasm", MemoryLimit: 32 << 20, HostBinary: slimHost(t)})
	os.Stderr = stderr
	_ = write.Close()
	text, rerr := io.ReadAll(read)
	if rerr != nil {
		t.Fatal(rerr)
	}
	if code != 137 || !errors.Is(err, ErrMemoryLimit) || !strings.Contains(err.Error(), "32 MiB") {
		t.Errorf("%d, %v", code, err)
	}
	if bytes.Count(text, []byte{'\n'}) > 3 || bytes.Contains(text, []byte("goroutine")) {
		t.Errorf("printed %s", text)
	}
}

// TestForegroundWithoutInput: that there is no input (cron, systemd, nohup) is
// for a server no sign to stop, and for a filter the end.
func TestForegroundWithoutInput(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	stdin := os.Stdin
	os.Stdin = null
	defer func() { os.Stdin = stdin; _ = null.Close() }()
	code, out, err := foreground(t, t.Context(), ForegroundOptions{Path: "testdata/drain.wasm"})
	if code != 0 || out != "ready\ngoodbye\n" || err != nil {
		t.Errorf("a filter: %d, %q, %v", code, out, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stop := time.AfterFunc(time.Minute, cancel)
	code, out, err = foreground(t, ctx, ForegroundOptions{Path: "testdata/drain.wasm", Ports: []string{"0"}, Started: func([]string) {
		stop.Reset(500 * time.Millisecond)
	}})
	if ctx.Err() == nil || code != 0 || out != "ready\ngoodbye\n" || err != nil {
		t.Errorf("a server ended by itself (%v): %d, %q, %v", ctx.Err() == nil, code, out, err)
	}
}

func TestForeground(t *testing.T) {
	for _, c := range []struct {
		module, out string
		code        int
	}{{"print", "hello\n", 0}, {"fail", "", 3}, {"trap", "", 134}} {
		code, out, err := foreground(t, t.Context(), ForegroundOptions{Path: filepath.Join("testdata", c.module+".wasm")})
		if code != c.code || out != c.out || err != nil {
			t.Errorf("%s: %d, %q, %v", c.module, code, out, err)
		}
	}
	code, out, err := foreground(t, t.Context(), ForegroundOptions{
		Path: "testdata/environ.wasm", Args: []string{"one", "two"}, Env: []string{"A=1", "B=x=y"},
		Mounts: []workload.Mount{{Source: "testdata", Target: "/data", ReadOnly: true}}, Ports: []string{"0"},
	})
	want := []string{"environ.wasm\x00one\x00two\x00", "A=1\x00", "B=x=y\x00", "LISTEN_FDS=1\x00", "DUNLIN_LISTEN_FD=4\x00"}
	for _, w := range want {
		if !strings.Contains(out, w) {
			t.Errorf("%q misses %q (code %d, %v)", out, w, code, err)
		}
	}
	_, _, err = foreground(t, t.Context(), ForegroundOptions{Path: "testdata/imports.wasm"})
	if err == nil || !strings.Contains(err.Error(), "env.read_sensor, spin.http_send") {
		t.Errorf("missing imports: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	code, _, err = foreground(t, ctx, ForegroundOptions{Path: "testdata/loop.wasm", Started: func([]string) { cancel() }})
	if code != 130 || err != nil {
		t.Errorf("a cancelled guest: %d, %v", code, err)
	}
}
