package wasm

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

func TestMain(m *testing.M) {
	host.MaybeRun() // the test binary is its own host program for `dunlin run`
	code := m.Run()
	if hostDir != "" {
		_ = os.RemoveAll(hostDir)
	}
	os.Exit(code)
}

// hostDir is the folder that shippedHost made, if it made one.
var hostDir string

// shippedHost builds the host program as it is shipped. The test binary will
// not do for everything: under the race detector it needs many times the
// memory that a guest's limits leave it. DUNLIN_TEST_WASM_HOST names one that
// is built already, for machines without Go.
var shippedHost = sync.OnceValues(func() (string, error) {
	if p := os.Getenv("DUNLIN_TEST_WASM_HOST"); p != "" {
		return p, nil
	}
	dir, err := os.MkdirTemp("", "dunlin-host")
	if err != nil {
		return "", err
	}
	hostDir = dir
	if err := os.Chmod(dir, 0o755); err != nil {
		return "", err
	}
	out := filepath.Join(dir, "dunlin-wasm")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "../../cmd/dunlin-wasm")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build dunlin-wasm: %w: %s", err, b)
	}
	return out, nil
})

func slimHost(t testing.TB) string {
	t.Helper()
	p, err := shippedHost()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// bench is one runtime with its folders.
type bench struct {
	*Runtime
	t      testing.TB
	cfg    Config
	logs   string
	ticker time.Duration
}

func newBench(t testing.TB, change ...func(*Config)) *bench {
	t.Helper()
	dir := t.TempDir()
	b := &bench{t: t, logs: filepath.Join(dir, "logs"), ticker: 2 * time.Millisecond}
	b.cfg = Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"),
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil)), HostBinary: slimHost(t),
	}
	for _, c := range change {
		c(&b.cfg)
	}
	b.open()
	t.Cleanup(func() {
		ctx := context.Background()
		states, err := b.List(ctx)
		if err != nil {
			t.Errorf("list at the end: %v", err)
		}
		for _, s := range states {
			if err := b.Remove(ctx, s.ID); err != nil {
				t.Errorf("remove %v: %v", s.ID, err)
			}
		}
		if err := b.Runtime.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", strings.TrimSpace(string(p)))
	return len(p), nil
}

func (b *bench) open() {
	b.t.Helper()
	r, err := New(b.cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.Runtime = r
}

// reopen is what a killed agent leaves to the next one: nothing is closed in
// an orderly way that the processes could see.
func (b *bench) reopen() {
	b.t.Helper()
	if err := b.Runtime.Close(); err != nil {
		b.t.Fatal(err)
	}
	b.open()
}

// spec prepares a module from testdata.
func (b *bench) spec(module, container string) workload.Spec {
	b.t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", module+".wasm"))
	if err != nil {
		b.t.Fatal(err)
	}
	return b.specFile(path, container)
}

func (b *bench) specFile(path, container string) workload.Spec {
	b.t.Helper()
	image := "file://" + path
	st, err := b.Prepare(b.t.Context(), workload.ImageRequest{Image: image, Policy: "IfNotPresent"}, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return workload.Spec{
		ID: workload.ID{PodUID: "3f1c-" + container, Container: container}, PodNamespace: "default", PodName: "pod-" + container,
		Image: image, Digest: st.Digest,
		LogPath: filepath.Join(b.logs, container, "0.log"), LogMaxBytes: 1 << 20, LogMaxFiles: 3,
	}
}

func (b *bench) start(s workload.Spec) workload.State {
	b.t.Helper()
	st, err := b.Start(b.t.Context(), s)
	if err != nil {
		b.t.Fatalf("start %s: %v", s.Image, err)
	}
	return st
}

// until polls cond with a deadline.
func (b *bench) until(what string, cond func() bool) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	t := time.NewTicker(b.ticker)
	defer t.Stop()
	for !cond() {
		select {
		case <-ctx.Done():
			b.t.Fatalf("never happened: %s", what)
		case <-t.C:
		}
	}
}

func (b *bench) ended(id workload.ID) workload.State {
	b.t.Helper()
	var st workload.State
	b.until(fmt.Sprintf("end of %s", id.Container), func() bool {
		var ok bool
		var err error
		st, ok, err = b.State(context.Background(), id)
		if err != nil || !ok {
			b.t.Fatalf("state of %v: %v %v", id, ok, err)
		}
		return st.Phase == workload.Exited
	})
	return st
}

// log is the text of a container's current log file.
func (b *bench) log(s workload.Spec) string {
	text, err := os.ReadFile(s.LogPath)
	if err != nil {
		return ""
	}
	var out strings.Builder
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(line, " ", 4)
		if len(f) != 4 {
			b.t.Fatalf("log line %q", line)
		}
		out.WriteString(f[3])
	}
	return out.String()
}

func (b *bench) says(s workload.Spec, want string) {
	b.t.Helper()
	b.until(fmt.Sprintf("%q in the log of %s", want, s.ID.Container), func() bool { return strings.Contains(b.log(s), want) })
}

// listener opens a port of 127.0.0.1 as the agent would.
func listener(t testing.TB, name string) (workload.Listener, string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().(*net.TCPAddr)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return workload.Listener{Name: name, Port: 8080, File: f}, addr.String()
}

func TestLifeOfAGuest(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		module, log, reason, message string
		code                         int
	}{
		{"print", "hello\n", "Completed", "", 0},
		{"fail", "no such thing!\n", "Error", "last output: no such thing!", 3},
		{"trap", "", "Trap", "out of bounds memory access in read_sample <- handle_request <- _start", 134},
		{"recurse", "", "Trap", "stack overflow", 134},
	} {
		t.Run(c.module, func(t *testing.T) {
			s := b.spec(c.module, c.module)
			b.start(s)
			st := b.ended(s.ID)
			if st.ExitCode != c.code || st.Reason != c.reason || !strings.Contains(st.Message, c.message) {
				t.Errorf("ended %+v, want code %d, reason %s, message with %q", st, c.code, c.reason, c.message)
			}
			if got := b.log(s); got != c.log {
				t.Errorf("log %q, want %q", got, c.log)
			}
			if st.StartedAt.IsZero() || st.FinishedAt.Before(st.StartedAt) {
				t.Errorf("times %v %v", st.StartedAt, st.FinishedAt)
			}
			again, err := b.Start(t.Context(), s)
			if err != nil || again.Phase != workload.Exited {
				t.Errorf("start of an ended attempt: %+v, %v", again, err)
			}
		})
	}
}

// TestImageUsage: what is kept is counted once, with the code made of it.
func TestImageUsage(t *testing.T) {
	b := newBench(t)
	usage := func() workload.ImageUsage {
		t.Helper()
		u, err := b.Images()
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	if u := usage(); u != (workload.ImageUsage{}) {
		t.Errorf("an empty store holds %+v", u)
	}
	s := b.spec("print", "print")
	b.start(s)
	b.ended(s.ID)
	st, err := b.Prepare(t.Context(), workload.ImageRequest{Image: s.Image, Policy: "Never"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if u := usage(); u.Images != 1 || u.Bytes != st.Size || !interpreted() && u.CompiledBytes < 100 {
		t.Errorf("one module of %d bytes: %+v", st.Size, u)
	}
}

func TestListener(t *testing.T) {
	b := newBench(t)
	s := b.spec("echo", "echo")
	l, addr := listener(t, "echo")
	s.Listeners = []workload.Listener{l}
	b.start(s)
	for i := range 3 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("message %d", i)
		if _, err := io.WriteString(c, want); err != nil {
			t.Fatal(err)
		}
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		if err != nil || string(got) != want {
			t.Fatalf("echo %q, %v", got, err)
		}
		_ = c.Close()
	}
	if err := b.Stop(t.Context(), s.ID, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	st := b.ended(s.ID)
	if st.ExitCode != 0 || st.Reason != "Completed" {
		t.Errorf("a drained guest ended %+v", st)
	}
	if c, err := net.Dial("tcp", addr); err == nil {
		_ = c.Close()
		t.Error("the port is still open")
	}
}
