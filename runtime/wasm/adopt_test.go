package wasm

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// What an agent started, the next one finds: same process, no restart, and
// it can stop it and learns of its end.
func TestAdoption(t *testing.T) {
	b := newBench(t)
	s := b.spec("drain", "drain")
	pid := b.start(s).PID
	b.says(s, "ready")
	b.reopen()
	states, err := b.List(t.Context())
	if err != nil || len(states) != 1 || states[0].ID != s.ID || states[0].PID != pid || states[0].Phase != workload.Running {
		t.Fatalf("found %+v, %v", states, err)
	}
	st, err := b.Start(t.Context(), s)
	if err != nil || st.PID != pid {
		t.Fatalf("start of one that runs: %+v, %v", st, err)
	}
	if err := b.Stop(t.Context(), s.ID, 20*time.Second); err != nil {
		t.Fatal(err)
	}
	if st := b.ended(s.ID); st.ExitCode != 0 || st.Reason != "Completed" {
		t.Errorf("ended %+v", st)
	}
	b.until("a hint", func() bool {
		select {
		case id := <-b.Exits():
			return id == s.ID
		default:
			return false
		}
	})
	// It ended while nobody watched: known from its record alone.
	b.reopen()
	if st := b.ended(s.ID); st.ExitCode != 0 || st.Reason != "Completed" {
		t.Errorf("after another restart: %+v", st)
	}
}

// The run folder is lost while a guest runs: it is not adopted, since nobody
// knows of it, and does not stand in the way of the next attempt.
func TestLostRunFolder(t *testing.T) {
	for _, next := range []int{0, 1} {
		b := newBench(t, withCgroups(t))
		s := b.spec("drain", "drain")
		pid := b.start(s).PID
		b.says(s, "ready")
		born, err := process.StartTime(pid)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(b.cfg.RunDir); err != nil {
			t.Fatal(err)
		}
		s.ID.Attempt = next
		if st := b.start(s); st.PID == pid || process.Alive(pid, born) {
			t.Errorf("attempt %d: pid %d, before %d, which lives: %v", next, st.PID, pid, process.Alive(pid, born))
		}
	}
}

// A pid that another process has by now is never taken for the host's.
func TestRecycledPIDIsNotAdopted(t *testing.T) {
	b := newBench(t)
	s := b.spec("sleep", "sleep")
	b.start(s)
	if err := b.Kill(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(b.folder(s.ID), host.HostFile)
	text, err := atomicfile.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	var rec host.HostRecord
	if err := json.Unmarshal(text, &rec); err != nil {
		t.Fatal(err)
	}
	rec.PID = os.Getpid() // alive, and not the host
	if text, err = json.Marshal(rec); err != nil {
		t.Fatal(err)
	}
	if err := atomicfile.Write(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	b.reopen()
	st, ok, err := b.State(t.Context(), s.ID)
	if err != nil || !ok || st.Phase != workload.Exited || st.ExitCode != 137 {
		t.Errorf("state %+v %v %v", st, ok, err)
	}
	if err := b.Kill(t.Context(), s.ID); err != nil {
		t.Error(err)
	}
}

// A run folder that a power cut damaged ends in one clear line, not in a
// loop, and its process does not go on unseen.
func TestDamagedRunFolder(t *testing.T) {
	b := newBench(t)
	s := b.spec("sleep", "sleep")
	pid := b.start(s).PID
	start, err := process.StartTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b.folder(s.ID), host.RecordFile), make([]byte, 200), 0o600); err != nil {
		t.Fatal(err)
	}
	b.reopen()
	states, err := b.List(t.Context())
	if err != nil || len(states) != 0 {
		t.Errorf("found %+v, %v", states, err)
	}
	b.until("the end of the process", func() bool { return !process.Alive(pid, start) })
	_ = reap(pid)
	if _, ok, err := b.State(t.Context(), s.ID); ok || err != nil {
		t.Errorf("%v %v", ok, err)
	}
}

func TestModuleStore(t *testing.T) {
	b := newBench(t)
	ctx := context.Background()
	reason := func(err error) string {
		var se *workload.StartError
		if !errors.As(err, &se) {
			return "none"
		}
		return se.Reason
	}
	_, err := b.Prepare(ctx, workload.ImageRequest{Image: "team/app:1", Policy: "IfNotPresent"}, nil)
	if reason(err) != "ErrImagePull" || !strings.Contains(err.Error(), "dunlin import") {
		t.Errorf("an unknown name: %v", err)
	}
	if _, err = b.Prepare(ctx, workload.ImageRequest{Image: "team/app:1", Policy: "Never"}, nil); reason(err) != "ErrImageNeverPull" {
		t.Errorf("an unknown name with Never: %v", err)
	}
	src := filepath.Join(t.TempDir(), "app.wasm")
	copyFile(t, "testdata/print.wasm", src)
	imported, err := b.ImportFile(ctx, "team/app:1", src, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, image := range []string{"team/app:1", "team/app@" + imported.Digest, "file://" + src} {
		if got, err := b.Prepare(ctx, workload.ImageRequest{Image: image, Policy: "IfNotPresent"}, nil); err != nil || got.Digest != imported.Digest {
			t.Errorf("%s: %+v, %v", image, got, err)
		}
	}
	if err := os.WriteFile(b.Store().BlobPath(imported.Digest), []byte("\x00asm damaged"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Prepare(ctx, workload.ImageRequest{Image: "team/app:1", Policy: "Never"}, nil); err != nil {
		t.Errorf("a damaged module whose source is there: %v", err)
	}
	if err := os.Remove(src); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Prepare(ctx, workload.ImageRequest{Image: "file://" + src, Policy: "IfNotPresent"}, nil); err != nil {
		t.Errorf("known work without its file: %v", err)
	}
	if _, err := b.Prepare(ctx, workload.ImageRequest{Image: "file://" + src, Policy: "Always"}, nil); reason(err) != "ErrImagePull" {
		t.Errorf("Always without the file: %v", err)
	}
	if err := os.WriteFile(b.Store().BlobPath(imported.Digest), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for range 3 { // and the next attempts say the same
		if _, err := b.Prepare(ctx, workload.ImageRequest{Image: "team/app:1", Policy: "Never"}, nil); reason(err) != ReasonDamaged {
			t.Errorf("a damaged module without a source: %v", err)
		}
	}
	copyFile(t, "testdata/print.wasm", src)
	if _, err := b.ImportFile(ctx, "team/app:1", src, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Prepare(ctx, workload.ImageRequest{Image: "team/app:1", Policy: "Never"}, nil); err != nil {
		t.Errorf("imported again: %v", err)
	}
	if left, err := filepath.Glob(b.Store().BlobPath(imported.Digest) + ".*"); err != nil || len(left) > 0 {
		t.Errorf("%v, %v is left", err, left)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// Damaged compiled code is made again and never why a guest does not start.
func TestDamagedCompiledCode(t *testing.T) {
	if interpreted() {
		t.Skip("no compiled code on this architecture")
	}
	b := newBench(t)
	s := b.spec("print", "print")
	code, ok := b.cache.lookup(s.Digest)
	if !ok {
		t.Fatal("no compiled code")
	}
	files, err := filepath.Glob(filepath.Join(code.dir, "*", "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%v %v", files, err)
	}
	if err := os.WriteFile(files[0], make([]byte, 4096), 0o644); err != nil {
		t.Fatal(err)
	}
	b.start(s)
	if st := b.ended(s.ID); st.Reason != "Completed" {
		t.Errorf("ended %+v", st)
	}
	if _, ok := b.cache.lookup(s.Digest); ok {
		t.Error("the damaged code is still there")
	}
	s.ID.Attempt = 1
	b.start(s)
	if st := b.ended(s.ID); st.Reason != "Completed" {
		t.Errorf("ended %+v", st)
	}
	if _, ok := b.cache.lookup(s.Digest); !ok {
		t.Error("it was not compiled again")
	}
}
