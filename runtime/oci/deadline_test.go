package oci

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/watchdog"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// The tests' program is its own watchdog.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == watchdog.Command {
		os.Exit(watchdog.Main(os.Args[2:]))
	}
	os.Exit(m.Run())
}

// TestStopDeadline: a container stops by itself, in order where it can, with
// no agent; a renewal moves the deadline and brings back a watchdog that was
// killed.
func TestStopDeadline(t *testing.T) {
	b := newBench(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	_ = b.Runtime.Close()
	b.cfg.Host = self
	b.open()

	in := b.sh("inorder", "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.1; done")
	in.StopDeadline, in.StopGrace = 500*time.Millisecond, time.Hour
	b.start(in)
	deaf := b.sh("deaf", "trap '' TERM; echo up; while :; do sleep 0.1; done")
	deaf.StopDeadline, deaf.StopGrace = 500*time.Millisecond, 100*time.Millisecond
	b.start(deaf)
	if st := b.ended(in.ID); st.Reason != reasonDeadline || st.ExitCode != 3 {
		t.Errorf("%+v", st)
	}
	if st := b.ended(deaf.ID); st.Reason != reasonDeadline || st.ExitCode != 137 {
		t.Errorf("%+v", st)
	}

	s := b.sh("renewed", "echo up; while :; do sleep 0.1; done")
	s.StopDeadline = time.Hour
	b.start(s)
	var w watcher
	file := filepath.Join(b.folder(s.ID), watchdogFile)
	if err := readJSON(file, &w); err != nil || !process.Alive(w.PID, w.Start) {
		t.Fatalf("watchdog %+v, %v", w, err)
	}
	if err := unix.Kill(w.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.until("the watchdog is gone", func() bool { return !process.Alive(w.PID, w.Start) })
	if err := b.Extend(t.Context(), s.ID, time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := readJSON(file, &w); err != nil || !process.Alive(w.PID, w.Start) {
		t.Fatalf("second watchdog %+v, %v", w, err)
	}
	if st, _, err := b.State(t.Context(), s.ID); err != nil || st.Phase != workload.Running {
		t.Errorf("%+v, %v", st, err)
	}
	if err := b.Stop(t.Context(), s.ID, 0); err != nil {
		t.Fatal(err)
	}
	if st := b.ended(s.ID); st.Reason == reasonDeadline {
		t.Errorf("%+v", st)
	}
	b.until("the watchdog ends with the container", func() bool { return !process.Alive(w.PID, w.Start) })
	if err := b.Extend(t.Context(), s.ID, time.Hour); err != nil {
		t.Errorf("after the end: %v", err)
	}
}
