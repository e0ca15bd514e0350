// Package conformance is one set of tests that every runtime passes: what
// the agent relies on, whatever runs a container.
package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Subject is a runtime under test.
type Subject struct {
	// Open opens the runtime on the same folders again and again, as agents
	// do after each other. The suite closes it.
	Open func(t *testing.T) workload.Runtime
	// Image holds a program that obeys the commands of testdata/guest.*.
	Image string
	// Program starts the command in the container: it comes before the
	// command's words.
	Program []string
	// MemoryLimited and CPULimited say that this machine enforces limits.
	MemoryLimited, CPULimited bool
	// Execs says that the runtime can run commands in containers.
	Execs bool
}

type suite struct {
	Subject
	workload.Runtime
	t    *testing.T
	logs string
}

// Run runs all tests.
func Run(t *testing.T, s Subject) {
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"Lifecycle", lifecycle}, {"ExitCodes", exitCodes}, {"Stop", stop}, {"StopOfStubborn", stopStubborn}, {"Kill", kill},
		{"OutOfMemory", outOfMemory}, {"CPULimit", cpuLimit}, {"Logs", logs}, {"LogsAreBounded", boundedLogs}, {"Environment", env},
		{"Mounts", mounts}, {"Adoption", adoption}, {"EndWhileAway", endWhileAway}, {"Idempotent", idempotent}, {"Exec", execs},
		{"ImageMissing", imageMissing}, {"HundredStarts", hundredStarts},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := &suite{Subject: s, t: t, logs: t.TempDir()}
			x.open()
			t.Cleanup(x.clean)
			c.test(x)
		})
	}
}

func (x *suite) open() { x.Runtime = x.Subject.Open(x.t) }

// reopen is what a killed agent leaves to the next one.
func (x *suite) reopen() {
	x.t.Helper()
	if err := x.Close(); err != nil {
		x.t.Fatal(err)
	}
	x.open()
}

func (x *suite) clean() {
	ctx := context.Background()
	list, err := x.List(ctx)
	if err != nil {
		x.t.Errorf("list at the end: %v", err)
	}
	for _, st := range list {
		if err := x.Remove(ctx, st.ID); err != nil {
			x.t.Errorf("remove at the end: %v", err)
		}
	}
	if list, err = x.List(ctx); err != nil || len(list) > 0 {
		x.t.Errorf("left at the end: %v, %v", list, err)
	}
	if err := x.Close(); err != nil {
		x.t.Error(err)
	}
}

func (x *suite) spec(container string, words ...string) workload.Spec {
	x.t.Helper()
	st, err := x.Prepare(x.t.Context(), workload.ImageRequest{Image: x.Image, Policy: "IfNotPresent"}, nil)
	if err != nil {
		x.t.Fatal(err)
	}
	return workload.Spec{
		ID: workload.ID{PodUID: "c0ffee-" + container, Container: container}, PodNamespace: "default", PodName: "pod-" + container,
		Image: x.Image, Digest: st.Digest, Command: slices.Concat(x.Program, words), Hostname: "pod-" + container,
		LogPath: filepath.Join(x.logs, container, "0.log"), LogMaxBytes: 1 << 20, LogMaxFiles: 2,
	}
}

func (x *suite) start(s workload.Spec) workload.State {
	x.t.Helper()
	st, err := x.Start(x.t.Context(), s)
	if err != nil {
		x.t.Fatalf("start %s: %v", s.ID.Container, err)
	}
	return st
}

// until polls cond; what never happens fails the test.
func (x *suite) until(what string, cond func() bool) {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for !cond() {
		select {
		case <-ctx.Done():
			x.t.Fatalf("never happened: %s", what)
		case <-t.C:
		}
	}
}

func (x *suite) state(id workload.ID) workload.State {
	x.t.Helper()
	st, ok, err := x.State(context.Background(), id)
	if err != nil || !ok {
		x.t.Fatalf("state of %v: %v %v", id, ok, err)
	}
	return st
}

func (x *suite) ended(id workload.ID) (st workload.State) {
	x.t.Helper()
	x.until("end of "+id.Container, func() bool {
		st = x.state(id)
		return st.Phase == workload.Exited
	})
	return st
}

// log is what is in the log's files, oldest first, as "stream text" lines.
func (x *suite) log(s workload.Spec) string {
	var out strings.Builder
	for _, p := range []string{s.LogPath + ".1", s.LogPath} {
		b, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			f := strings.SplitN(line, " ", 4)
			if len(f) != 4 {
				x.t.Fatalf("log line %q", line)
			}
			if _, err := time.Parse(time.RFC3339Nano, f[0]); err != nil {
				x.t.Fatalf("log line %q: %v", line, err)
			}
			out.WriteString(f[1] + " " + f[3])
		}
	}
	return out.String()
}

func (x *suite) says(s workload.Spec, want string) {
	x.t.Helper()
	x.until(fmt.Sprintf("%q in the log of %s", want, s.ID.Container), func() bool { return strings.Contains(x.log(s), want) })
}

func lifecycle(x *suite) {
	s := x.spec("life", "print", "hello")
	if _, ok, err := x.State(x.t.Context(), s.ID); ok || err != nil {
		x.t.Fatalf("before its start: %v %v", ok, err)
	}
	x.start(s)
	st := x.ended(s.ID)
	if st.ExitCode != 0 || st.Reason != "Completed" || st.Digest != s.Digest || st.LogPath != s.LogPath {
		x.t.Errorf("ended %+v", st)
	}
	if st.StartedAt.IsZero() || st.FinishedAt.Before(st.StartedAt) {
		x.t.Errorf("times %v %v", st.StartedAt, st.FinishedAt)
	}
	if again := x.start(s); again.Phase != workload.Exited {
		x.t.Errorf("the start of an ended attempt: %+v", again)
	}
	if err := x.Remove(x.t.Context(), s.ID); err != nil {
		x.t.Fatal(err)
	}
	if _, ok, err := x.State(x.t.Context(), s.ID); ok || err != nil {
		x.t.Errorf("after its removal: %v %v", ok, err)
	}
	if got := x.log(s); !strings.Contains(got, "stdout hello\n") {
		x.t.Errorf("a removed attempt's log is %q", got)
	}
	s.ID.Attempt, s.LogPath = 1, filepath.Join(x.logs, "life", "1.log")
	x.start(s)
	if st := x.ended(s.ID); st.ID.Attempt != 1 || st.ExitCode != 0 {
		x.t.Errorf("second attempt %+v", st)
	}
}

func exitCodes(x *suite) {
	for code, want := range map[int]string{0: "Completed", 1: "Error", 42: "Error"} {
		s := x.spec(fmt.Sprint("exit-", code), "exit", fmt.Sprint(code))
		x.start(s)
		if st := x.ended(s.ID); st.ExitCode != code || st.Reason != want {
			x.t.Errorf("exit code %d: %+v", code, st)
		}
	}
}

func stop(x *suite) {
	s := x.spec("stop", "wait")
	x.start(s)
	x.says(s, "waiting")
	if st := x.state(s.ID); st.Phase != workload.Running || st.PID < 2 {
		x.t.Errorf("running: %+v", st)
	}
	if err := x.Stop(x.t.Context(), s.ID, time.Minute); err != nil {
		x.t.Fatal(err)
	}
	if st := x.state(s.ID); st.Phase != workload.Exited || st.ExitCode != 0 || st.Reason != "Completed" {
		x.t.Errorf("a graceful stop: %+v", st)
	}
	if got := x.log(s); !strings.Contains(got, "bye") {
		x.t.Errorf("last words are missing: %q", got)
	}
}

func stopStubborn(x *suite) {
	s := x.spec("stubborn", "stubborn")
	x.start(s)
	x.says(s, "waiting")
	if err := x.Stop(x.t.Context(), s.ID, 200*time.Millisecond); err != nil {
		x.t.Fatal(err)
	}
	if st := x.state(s.ID); st.Phase != workload.Exited || st.ExitCode != 137 {
		x.t.Errorf("one that does not listen: %+v", st)
	}
}

func kill(x *suite) {
	s := x.spec("kill", "wait")
	x.start(s)
	x.says(s, "waiting")
	if err := x.Kill(x.t.Context(), s.ID); err != nil {
		x.t.Fatal(err)
	}
	if st := x.ended(s.ID); st.ExitCode != 137 || st.Reason != "Error" {
		x.t.Errorf("killed: %+v", st)
	}
}

func outOfMemory(x *suite) {
	if !x.MemoryLimited {
		x.t.Skip("SKIPPED: this machine has no memory controller")
	}
	s := x.spec("oom", "eat")
	s.Resources.MemoryLimit = 64 << 20
	neighbour := x.spec("neighbour", "wait")
	x.start(neighbour)
	x.start(s)
	st := x.ended(s.ID)
	// A Wasm guest sees an allocation fail before the kernel has to act.
	if killed := st.ExitCode == 137 && st.Reason == "OOMKilled"; !killed && st.ExitCode != 99 {
		x.t.Errorf("out of memory: %+v", st)
	}
	if st := x.state(neighbour.ID); st.Phase != workload.Running {
		x.t.Errorf("its neighbour: %+v", st)
	}
}

func cpuLimit(x *suite) {
	stats, ok := x.Runtime.(workload.StatsReader)
	if !ok || !x.CPULimited {
		x.t.Skip("SKIPPED: this machine has no CPU controller")
	}
	// Two that spin for the same time: what matters is what they got.
	used := func(milli int64) time.Duration {
		s := x.spec(fmt.Sprint("spin-", milli), "spin")
		s.Resources.CPULimitMilli = milli
		x.start(s)
		x.says(s, "spinning")
		read := func() time.Duration {
			u, err := stats.Stats(x.t.Context(), s.ID)
			if err != nil {
				x.t.Fatal(err)
			}
			return time.Duration(u.CPUNanos)
		}
		from, began := read(), time.Now()
		x.until("two seconds", func() bool { return time.Since(began) > 2*time.Second })
		n := read() - from
		if err := x.Kill(x.t.Context(), s.ID); err != nil {
			x.t.Fatal(err)
		}
		return n
	}
	if n := used(100); n > time.Second {
		x.t.Errorf("with a tenth of a CPU it used %v in two seconds", n)
	}
}

func logs(x *suite) {
	s := x.spec("logs", "print", "one", "two with  spaces", "ümlaut")
	x.start(s)
	x.ended(s.ID)
	got := x.log(s)
	for _, want := range []string{"stdout one\n", "stdout two with  spaces\n", "stdout ümlaut\n", "stderr to stderr\n"} {
		if !strings.Contains(got, want) {
			x.t.Errorf("log %q misses %q", got, want)
		}
	}
}

func boundedLogs(x *suite) {
	s := x.spec("flood", "lines", "3000")
	s.LogMaxBytes, s.LogMaxFiles = 32<<10, 2
	x.start(s)
	x.ended(s.ID)
	var size int64
	entries, err := os.ReadDir(filepath.Dir(s.LogPath))
	if err != nil {
		x.t.Fatal(err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			size += info.Size()
		}
	}
	if size > 2*(s.LogMaxBytes+4<<10) || len(entries) > 2 {
		x.t.Errorf("%d bytes in %d files", size, len(entries))
	}
	if !strings.Contains(x.log(s), "line 2999 ") {
		x.t.Error("the last line is missing")
	}
}

func env(x *suite) {
	s := x.spec("env", "env")
	s.Env = []string{"A=1", "B=two words", "EMPTY="}
	x.start(s)
	x.ended(s.ID)
	got := x.log(s)
	for _, want := range []string{"stdout A=1\n", "stdout B=two words\n", "stdout EMPTY=\n"} {
		if !strings.Contains(got, want) {
			x.t.Errorf("environment %q misses %q", got, want)
		}
	}
	if home, ok := os.LookupEnv("GOFLAGS"); ok && strings.Contains(got, home) {
		x.t.Error("the agent's own environment is in it")
	}
}

func mounts(x *suite) {
	dir := x.t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o777); err != nil { // guests are nobody
			x.t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "hello")
	if err := os.WriteFile(file, []byte("from the host\n"), 0o644); err != nil {
		x.t.Fatal(err)
	}
	read := x.spec("read", "cat", "/data/hello")
	read.Mounts = []workload.Mount{{Source: dir, Target: "/data", ReadOnly: true}}
	x.start(read)
	if st := x.ended(read.ID); st.ExitCode != 0 || !strings.Contains(x.log(read), "from the host") {
		x.t.Errorf("read: %+v, %q", st, x.log(read))
	}
	write := x.spec("write", "write", "/data/new", "text")
	write.Mounts = []workload.Mount{{Source: dir, Target: "/data"}}
	x.start(write)
	b, err := os.ReadFile(filepath.Join(dir, "new"))
	if st := x.ended(write.ID); st.ExitCode == 0 {
		b, err = os.ReadFile(filepath.Join(dir, "new"))
	}
	if err != nil || string(b) != "text" {
		x.t.Errorf("written: %q, %v; %q", b, err, x.log(write))
	}
	refused := x.spec("refused", "write", "/data/other", "text")
	refused.Mounts = []workload.Mount{{Source: dir, Target: "/data", ReadOnly: true}}
	x.start(refused)
	if st := x.ended(refused.ID); st.ExitCode == 0 {
		x.t.Error("a read-only volume was written to")
	}
	single := x.spec("single", "cat", "/etc/one")
	single.Mounts = []workload.Mount{{Source: file, Target: "/etc/one", ReadOnly: true}}
	x.start(single)
	if st := x.ended(single.ID); st.ExitCode != 0 || !strings.Contains(x.log(single), "from the host") {
		x.t.Errorf("a single file: %+v, %q", st, x.log(single))
	}
}

func adoption(x *suite) {
	s := x.spec("adopt", "wait")
	x.start(s)
	x.says(s, "waiting")
	before := x.state(s.ID)
	x.reopen()
	list, err := x.List(x.t.Context())
	if err != nil || len(list) != 1 || list[0].ID != s.ID {
		x.t.Fatalf("found %+v, %v", list, err)
	}
	after := x.start(s) // adopts
	if after.PID != before.PID || !after.StartedAt.Equal(before.StartedAt) || after.Phase != workload.Running {
		x.t.Errorf("adopted %+v, was %+v", after, before)
	}
	if err := x.Stop(x.t.Context(), s.ID, time.Minute); err != nil {
		x.t.Fatal(err)
	}
	if st := x.state(s.ID); st.ExitCode != 0 || !strings.Contains(x.log(s), "bye") {
		x.t.Errorf("an adopted one ended %+v, %q", st, x.log(s))
	}
	select {
	case id := <-x.Exits():
		if id != s.ID {
			x.t.Errorf("hint of %v", id)
		}
	case <-x.t.Context().Done():
		x.t.Error("no hint of an adopted one's end")
	}
}

// endWhileAway: nobody was there when it ended, and all is known.
func endWhileAway(x *suite) {
	s := x.spec("away", "exit", "7")
	if err := os.MkdirAll(filepath.Dir(s.LogPath), 0o755); err != nil {
		x.t.Fatal(err)
	}
	x.start(s)
	if err := x.Close(); err != nil {
		x.t.Fatal(err)
	}
	x.open()
	if st := x.ended(s.ID); st.ExitCode != 7 || st.Reason != "Error" {
		x.t.Errorf("ended while the agent was away: %+v", st)
	}
}

func idempotent(x *suite) {
	ctx := x.t.Context()
	none := workload.ID{PodUID: "nobody", Container: "none"}
	for what, err := range map[string]error{"stop": x.Stop(ctx, none, time.Second), "kill": x.Kill(ctx, none), "remove": x.Remove(ctx, none)} {
		if err != nil {
			x.t.Errorf("%s of nothing: %v", what, err)
		}
	}
	s := x.spec("twice", "wait")
	first := x.start(s)
	if second := x.start(s); second.PID != first.PID {
		x.t.Errorf("a second start: %+v, first %+v", second, first)
	}
	for range 2 {
		if err := x.Kill(ctx, s.ID); err != nil {
			x.t.Error(err)
		}
		if err := x.Remove(ctx, s.ID); err != nil {
			x.t.Error(err)
		}
	}
}

func execs(x *suite) {
	e, ok := x.Runtime.(workload.Execer)
	if !ok {
		if x.Execs {
			x.t.Fatal("it does not implement workload.Execer")
		}
		x.t.Skip("SKIPPED: nothing can be run in such a container")
	}
	s := x.spec("exec", "wait")
	s.Env = []string{"COLOUR=blue"}
	x.start(s)
	x.says(s, "waiting")
	for _, c := range []struct {
		words    []string
		in, out  string
		exitCode int
	}{
		{words: []string{"env"}, out: "COLOUR=blue\n"},
		{words: []string{"exit", "9"}, exitCode: 9},
		{words: []string{"cat", "/dev/stdin"}, in: "through", out: "through"},
	} {
		var out, errs bytes.Buffer
		code, err := e.Exec(x.t.Context(), s.ID, slices.Concat(x.Program, c.words),
			workload.Streams{Stdin: strings.NewReader(c.in), Stdout: &out, Stderr: &errs})
		if err != nil || code != c.exitCode || !strings.Contains(out.String(), c.out) {
			x.t.Errorf("%v: code %d, %v, output %q %q", c.words, code, err, out.String(), errs.String())
		}
	}
	ctx, cancel := context.WithTimeout(x.t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := e.Exec(ctx, s.ID, slices.Concat(x.Program, []string{"stubborn"}), workload.Streams{}); err == nil {
		x.t.Error("an exec that does not end outlived its time")
	}
}

func imageMissing(x *suite) {
	_, err := x.Prepare(x.t.Context(), workload.ImageRequest{Image: "example.invalid/nothing:1", Policy: "Never"}, nil)
	if se := (*workload.StartError)(nil); !asStartError(err, &se) || se.Reason == "" || se.Error() == "" {
		x.t.Errorf("a missing image: %v", err)
	}
}

// hundredStarts are ten in short, for machines that are emulated.
func hundredStarts(x *suite) {
	n, at := 100, 4
	if testing.Short() {
		n = 10
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, at)
	specs := make([]workload.Spec, n)
	for i := range specs {
		specs[i] = x.spec(fmt.Sprint("many-", i), "print", fmt.Sprint("number ", i))
	}
	errs := make([]error, n)
	for i, s := range specs {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			_, errs[i] = x.Start(x.t.Context(), s)
		})
	}
	wg.Wait()
	for i, s := range specs {
		if errs[i] != nil {
			x.t.Fatalf("start %d: %v", i, errs[i])
		}
		if st := x.ended(s.ID); st.ExitCode != 0 || !strings.Contains(x.log(s), fmt.Sprintf("number %d\n", i)) {
			x.t.Errorf("container %d: %+v, %q", i, st, x.log(s))
		}
	}
	for _, s := range specs {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if err := x.Remove(context.Background(), s.ID); err != nil {
				x.t.Errorf("remove: %v", err)
			}
		})
	}
	wg.Wait()
}

func asStartError(err error, se **workload.StartError) bool { return errors.As(err, se) }
