package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// shelf is an image store of folders that a test unpacked.
type shelf map[string]*images.Image

func (s shelf) Lookup(_ context.Context, name, _ string) (*images.Image, error) {
	if img := s[name]; img != nil {
		return img, nil
	}
	return nil, &workload.StartError{Reason: "ErrImageNeverPull", Message: "no image " + name}
}

func (s shelf) Image(ctx context.Context, q workload.ImageRequest, _ workload.Progress) (*images.Image, error) {
	return s.Lookup(ctx, q.Image, "")
}

// busybox makes a layer of the machine's static busybox.
func busybox(t testing.TB) string {
	t.Helper()
	bin, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("SKIPPED: busybox-static is not installed (test/setup.sh does)")
	}
	dir := t.TempDir()
	for _, d := range []string{"bin", "etc", "tmp", "home/app"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for d := dir; d != filepath.Dir(os.TempDir()) && len(d) > len(os.TempDir()); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	copyFile(t, bin, filepath.Join(dir, "bin/busybox"), 0o755)
	out, err := exec.Command(bin, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.Lines(string(out)) {
		if name = strings.TrimSpace(name); name != "busybox" {
			if err := os.Symlink("busybox", filepath.Join(dir, "bin", name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	copyFile(t, "testdata/guest.sh", filepath.Join(dir, "bin/guest"), 0o755)
	for name, text := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\napp:x:1234:1234:app:/home/app:/bin/sh\n",
		"etc/group":  "root:x:0:\napp:x:1234:\nextra:x:77:app\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func copyFile(t testing.TB, from, to string, mode os.FileMode) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, mode)
	if err == nil {
		_, err = io.Copy(out, in)
	}
	if err == nil {
		err = out.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", strings.TrimSpace(string(p)))
	return len(p), nil
}

// bench is one runtime with its folders and the image "busybox".
type bench struct {
	*Runtime
	t     testing.TB
	cfg   Config
	shelf shelf
	logs  string
}

func config(t testing.TB, name string) (Config, shelf) {
	t.Helper()
	layer := busybox(t)
	dir, err := os.MkdirTemp("/run", "dunlin-oci-test-")
	if err != nil {
		t.Skipf("SKIPPED: OCI containers need root: %v", err)
	}
	tree := cgroup.New(cgroup.Config{Name: fmt.Sprintf("%s-%d", name, os.Getpid())})
	t.Cleanup(func() {
		if err := errors.Join(tree.Destroy(), (&Runtime{cfg: Config{RunDir: filepath.Join(dir, "run")}}).RemovePods(), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	programs, err := Find(t.Context(), filepath.Join(dir, "run"), tree)
	if err != nil {
		t.Skipf("SKIPPED: no OCI containers here: %v (test/setup.sh installs runc and conmon)", err)
	}
	t.Logf("%s (%s), conmon %s", programs.Runtime, programs.Version, programs.Conmon)
	s := shelf{"busybox": {
		Name: "busybox", Digest: "sha256:b0", LayerDir: filepath.Dir(layer), Layers: []string{filepath.Base(layer)},
		Config: images.RunConfig{Entrypoint: []string{"guest"}, Cmd: []string{"print", "default"}, Env: []string{"FROM=image"}},
	}}
	return Config{
		StateDir: filepath.Join(t.TempDir(), "state"), RunDir: filepath.Join(dir, "run"), Images: s, Cgroups: tree, Programs: programs,
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
	}, s
}

func newBench(t testing.TB) *bench {
	t.Helper()
	b := &bench{t: t, logs: t.TempDir()}
	b.cfg, b.shelf = config(t, "dunlin-test-oci")
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

func (b *bench) open() {
	b.t.Helper()
	r, err := New(b.cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.Runtime = r
}

// sh is a container that runs a shell script.
func (b *bench) sh(name, script string) workload.Spec {
	return workload.Spec{
		ID: workload.ID{PodUID: "0c1-" + name, Container: name}, PodNamespace: "default", PodName: name, Image: "busybox", Digest: "sha256:b0",
		Command: []string{"sh", "-c", script}, Hostname: name, LogPath: filepath.Join(b.logs, name, "0.log"), LogMaxBytes: 1 << 20, LogMaxFiles: 2,
	}
}

func (b *bench) start(s workload.Spec) workload.State {
	b.t.Helper()
	st, err := b.Start(b.t.Context(), s)
	if err != nil {
		b.t.Fatalf("start %s: %v", s.ID.Container, err)
	}
	return st
}

func (b *bench) until(what string, cond func() bool) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for !cond() {
		select {
		case <-ctx.Done():
			b.t.Fatalf("never happened: %s", what)
		case <-t.C:
		}
	}
}

func (b *bench) ended(id workload.ID) (st workload.State) {
	b.t.Helper()
	b.until("end of "+id.Container, func() bool {
		var ok bool
		var err error
		if st, ok, err = b.State(context.Background(), id); err != nil || !ok {
			b.t.Fatalf("state of %v: %v %v", id, ok, err)
		}
		return st.Phase == workload.Exited
	})
	return st
}

// out is what a script printed.
func (b *bench) out(s workload.Spec) string {
	text, err := os.ReadFile(s.LogPath)
	if err != nil {
		return ""
	}
	var out strings.Builder
	for line := range strings.Lines(string(text)) {
		if f := strings.SplitN(line, " ", 4); len(f) == 4 {
			out.WriteString(f[3])
		}
	}
	return out.String()
}

func (b *bench) says(s workload.Spec, want string) {
	b.t.Helper()
	b.until(fmt.Sprintf("%q in the log of %s", want, s.ID.Container), func() bool { return strings.Contains(b.out(s), want) })
}

func writeRaw(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

// syncBuffer is a buffer that is written and read at once.
type syncBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
