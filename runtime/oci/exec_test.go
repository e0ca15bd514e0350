package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// TestTerminal: the command's terminal has its size from the beginning, and
// what was typed before the command ran is input to it alone: shown once, the
// end of it an end.
func TestTerminal(t *testing.T) {
	b := newBench(t)
	s := b.sh("tty", "sleep 1000")
	b.start(s)
	var out bytes.Buffer
	size := make(chan workload.Size, 1)
	size <- workload.Size{Width: 91, Height: 33}
	close(size)
	code, err := b.Exec(t.Context(), s.ID, []string{"sh", "-c", "tty; stty size; read x; echo got $x; cat; exit 6"},
		workload.Streams{TTY: true, Stdin: strings.NewReader("typed\n"), Stdout: &out, Resize: size})
	if err != nil || code != 6 {
		t.Errorf("code %d, %v", code, err)
	}
	for _, want := range []string{"/dev/pts/", "33 91", "got typed"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in %q", want, out.String())
		}
	}
	if n := strings.Count(out.String(), "typed"); n != 2 {
		t.Errorf("shown %d times: %q", n-1, out.String())
	}
}

// TestExecOfNothing: a command that is not there, or is no program, ends as in a
// shell, and one line says why; one that ends with 255 by itself says nothing.
func TestExecOfNothing(t *testing.T) {
	b := newBench(t)
	s := b.sh("nothing", "sleep 1000")
	b.start(s)
	for _, c := range []struct {
		argv []string
		code int
		says string
	}{
		{[]string{"/no/such"}, 127, "/no/such"},
		{[]string{"nosuch"}, 127, "nosuch"},
		{[]string{"/etc"}, 126, "/etc"},
		{[]string{"sh", "-c", "exit 255"}, 255, ""},
	} {
		for _, tty := range []bool{false, true} {
			var out, errs bytes.Buffer
			code, err := b.Exec(t.Context(), s.ID, c.argv, workload.Streams{TTY: tty, Stdout: &out, Stderr: &errs})
			text := errs.String() + out.String()
			if err != nil || code != c.code || !strings.Contains(text, c.says) || strings.Contains(text, "level=") || (c.says == "") != (text == "") || strings.Count(text, "\n") > 1 {
				t.Errorf("%v, terminal %v: code %d, %v, %q", c.argv, tty, code, err, text)
			}
		}
	}
}

// slowWriter takes nothing until it may.
type slowWriter struct {
	may chan struct{}
	n   atomic.Int64
}

func (w *slowWriter) Write(p []byte) (int, error) {
	<-w.may
	w.n.Add(int64(len(p)))
	return len(p), nil
}

// TestExecForSlowReader: what a command printed arrives, however long after
// its end it is read.
func TestExecForSlowReader(t *testing.T) {
	b := newBench(t)
	s := b.sh("slow", "sleep 1000")
	b.start(s)
	w := &slowWriter{may: make(chan struct{})}
	done := make(chan error, 1)
	go func() {
		// 60 kB wait in the pipe when it ends.
		code, err := b.Exec(t.Context(), s.ID, []string{"sh", "-c", "head -c 60000 /dev/zero; exit 4"}, workload.Streams{Stdout: w})
		if err == nil && code != 4 {
			err = fmt.Errorf("code %d", code)
		}
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("it did not wait for its reader: %v", err)
	case <-time.After(2*outletIdle + time.Second):
	}
	close(w.may)
	if err := <-done; err != nil || w.n.Load() != 60000 {
		t.Errorf("%d bytes, %v", w.n.Load(), err)
	}
}

// lateWriter is still writing when whoever reads for it has given up.
type lateWriter struct {
	outs   outlets
	cancel func()
	wrote  atomic.Bool
}

func (w *lateWriter) Write(p []byte) (int, error) {
	w.cancel()
	t := time.NewTicker(time.Millisecond)
	defer t.Stop()
	for w.outs.all[0].r.SetReadDeadline(time.Time{}) == nil {
		<-t.C
	}
	w.wrote.Store(true)
	return len(p), nil
}

// TestExecWritesNothingAfterItsEnd: a probe that takes too long reads what its
// command printed while nobody writes any more.
func TestExecWritesNothingAfterItsEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	w := &lateWriter{cancel: cancel}
	in, err := w.outs.pipe(w)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.WriteString("said\n"); err != nil {
		t.Fatal(err)
	}
	w.outs.end(ctx)
	if !w.wrote.Load() {
		t.Error("it ended before what was being written")
	}
	_ = in.Close()
}

// endingWriter ends a context once anything is written and over says so.
type endingWriter struct {
	bytes.Buffer
	over   func() bool
	cancel func()
}

func (w *endingWriter) Write(p []byte) (int, error) {
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for !w.over() {
		<-t.C
	}
	w.cancel()
	return w.Buffer.Write(p)
}

// TestExecLeavesSomethingBehind: when its time is over a command ends, and
// what it started; also where it has ended before, and what it left behind
// holds its output: runc waits for that.
func TestExecLeavesSomethingBehind(t *testing.T) {
	b := newBench(t)
	s := b.sh("behind", "sleep 1000")
	b.start(s)
	exec := func(ctx context.Context, script string, out io.Writer) (int, error) {
		return b.Exec(ctx, s.ID, []string{"sh", "-c", script}, workload.Streams{Stdout: out, Stderr: out})
	}
	pidfiles := filepath.Join(b.folder(s.ID), "exec-*", "pid")
	gone := func() bool { // the command, of which runc tells
		all, _ := filepath.Glob(pidfiles)
		return len(all) == 1 && !slices.ContainsFunc(all, func(f string) bool {
			pid, err := os.ReadFile(f)
			return err != nil || exists("/proc/"+string(pid))
		})
	}
	for script, over := range map[string]func() bool{
		"sleep 4321 & echo begun; exit 0":               gone,
		"sh -c 'echo begun; sleep 5432; true'; echo no": func() bool { return true },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		w := &endingWriter{over: over, cancel: cancel}
		if code, err := exec(ctx, script, w); !errors.Is(err, context.Canceled) || w.String() != "begun\n" {
			t.Errorf("%s: code %d, %q, %v", script, code, w.String(), err)
		}
	}
	b.until("nothing is left of it", func() bool {
		code, err := exec(t.Context(), "ps | grep -q '[s]leep 5432'", io.Discard)
		return err == nil && code == 1
	})
}

// TestExecOfKilledAgent: the next agent ends what an earlier one had started,
// and nothing else.
func TestExecOfKilledAgent(t *testing.T) {
	b := newBench(t)
	s := b.sh("orphan", "sleep 1000")
	b.start(s)
	var rec record
	if err := readJSON(filepath.Join(b.folder(s.ID), recordFile), &rec); err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp(b.folder(s.ID), "exec-")
	if err != nil {
		t.Fatal(err)
	}
	pidfile := filepath.Join(tmp, "pid")
	c := command(context.Background(), rec.Runtime, b.rootDir(), "exec", "--pid-file", pidfile, rec.Name, "sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	b.until("the command runs", func() bool { b, err := os.ReadFile(pidfile); return err == nil && len(b) > 0 })
	// One that is over, and whose number another process has.
	other := exec.Command("sleep", "1000")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	stale, err := os.MkdirTemp(b.folder(s.ID), "exec-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(stale, "pid"), []byte(strconv.Itoa(other.Process.Pid)), 0o600); err != nil {
		t.Fatal(err)
	}
	next, err := New(b.cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if err := c.Wait(); err == nil {
		t.Error("the command went on")
	}
	if exists(tmp) || exists(stale) {
		t.Error("folders are left")
	}
	if err := other.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("an innocent process: %v", err)
	}
	_ = other.Process.Kill()
	_ = other.Wait()
}

func TestAttach(t *testing.T) {
	for _, tty := range []bool{false, true} {
		b := newBench(t)
		s := b.sh("attach", "while read x; do echo got $x; echo err $x >&2; [ $x = end ] && exit 8; done")
		s.Stdin, s.TTY = true, tty
		b.start(s)
		in, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		var out, errs syncBuffer
		done := make(chan error, 1)
		go func() {
			done <- b.Attach(t.Context(), s.ID, workload.Streams{Stdin: in, Stdout: &out, Stderr: &errs, TTY: tty})
		}()
		if _, err := w.WriteString("one\n"); err != nil {
			t.Fatal(err)
		}
		b.until("an answer", func() bool { return strings.Contains(out.String(), "got one") })
		if !tty {
			b.until("an error", func() bool { return strings.Contains(errs.String(), "err one") })
		}
		if _, err := w.WriteString("end\n"); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Errorf("attach: %v", err)
		}
		if st := b.ended(s.ID); st.ExitCode != 8 {
			t.Errorf("ended %+v", st)
		}
		b.says(s, "got one") // it is in the log as well
		_, _ = w.Close(), in.Close()
		if err := b.Remove(context.Background(), s.ID); err != nil {
			t.Error(err)
		}
	}
}
