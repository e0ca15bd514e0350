package wasm

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// withCgroups gives the runtime a root group of its own.
func withCgroups(t testing.TB) func(*Config) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: NEEDS ROOT: only root can make control groups; CI runs this as root")
	}
	tree := cgroup.New(cgroup.Config{Name: fmt.Sprintf("dunlin-test-%d-%d", os.Getpid(), time.Now().UnixNano())})
	if !tree.Facts().Memory {
		t.Skip("SKIPPED: " + tree.Facts().MemoryReason)
	}
	t.Cleanup(func() {
		if err := tree.Destroy(); err != nil {
			t.Error(err)
		}
	})
	return func(c *Config) { c.Cgroups = tree }
}

// neighbour is a healthy guest that must go on through whatever happens
// beside it.
func neighbour(b *bench) (check func()) {
	s := b.spec("counter", "healthy")
	pid := b.start(s).PID
	b.says(s, "tick")
	return func() {
		b.t.Helper()
		before := strings.Count(b.log(s), "tick")
		b.until("the neighbour going on", func() bool { return strings.Count(b.log(s), "tick") > before+3 })
		st, ok, err := b.State(context.Background(), s.ID)
		if err != nil || !ok || st.Phase != workload.Running || st.PID != pid {
			b.t.Errorf("the neighbour is %+v, %v", st, err)
		}
	}
}

func TestGuestsThatMustBeKilled(t *testing.T) {
	limited := func(t testing.TB, b *bench, module string, memory int64) workload.Spec {
		s := b.spec(module, module)
		s.Resources = workload.Resources{MemoryLimit: memory, PidsLimit: 64, CPULimitMilli: 500}
		b.start(s)
		return s
	}
	for name, change := range map[string]func(*testing.T) func(*Config){
		"cgroups": func(t *testing.T) func(*Config) { return withCgroups(t) },
		"none":    func(*testing.T) func(*Config) { return func(*Config) {} },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, change(t))
			check := neighbour(b)

			for _, module := range []string{"loop", "startloop"} {
				t.Run("endless "+module, func(t *testing.T) {
					s := limited(t, b, module, 64<<20)
					b.says(s, "looping")
					if err := b.Stop(t.Context(), s.ID, 100*time.Millisecond); err != nil {
						t.Fatal(err)
					}
					st := b.ended(s.ID)
					if st.ExitCode != 137 || !strings.Contains(st.Message, "did not end within the grace period of 100ms") {
						t.Errorf("ended %+v", st)
					}
					check()
				})
			}
			t.Run("trap before main", func(t *testing.T) {
				s := limited(t, b, "starttrap", 64<<20)
				if st := b.ended(s.ID); st.Reason != "Trap" || st.ExitCode != 134 || !strings.HasPrefix(st.Message, "unreachable in ") {
					t.Errorf("ended %+v", st)
				}
				check()
			})
			// The bound of the stack is met before the limit is: the guest
			// traps, and nobody is killed.
			for _, limit := range []int64{256, 128, 96, 64, 32, 16, 8} {
				t.Run(fmt.Sprintf("recursion in %d MiB", limit), func(t *testing.T) {
					s := limited(t, b, "recurse", limit<<20)
					if st := b.ended(s.ID); st.Reason != "Trap" || st.ExitCode != 134 || !strings.HasPrefix(st.Message, "stack overflow: its calls nest deeper than its stack of ") {
						t.Errorf("ended %+v", st)
					}
					check()
				})
			}
			t.Run("memory to 4 GiB", func(t *testing.T) {
				s := limited(t, b, "grow", 32<<20)
				st := b.ended(s.ID)
				if name == "cgroups" && st.Reason == "OOMKilled" && st.ExitCode == 137 {
					check()
					return
				}
				if st.ExitCode != 9 || !strings.Contains(st.Message, "memory limit of 32Mi") {
					t.Errorf("ended %+v", st)
				}
				check()
			})
			t.Run("table growth", func(t *testing.T) {
				s := limited(t, b, "table", 32<<20)
				st := b.ended(s.ID)
				if st.ExitCode == 0 {
					t.Errorf("ended %+v", st)
				}
				if name == "cgroups" && (st.Reason != "OOMKilled" || !strings.Contains(st.Message, "limit of 32Mi") || !strings.Contains(st.Message, "its tables had the rest")) {
					t.Errorf("ended %s, %d, %.300s", st.Reason, st.ExitCode, st.Message)
				}
				check()
			})
			t.Run("10 MiB without a newline", func(t *testing.T) {
				s := limited(t, b, "flood", 32<<20)
				if st := b.ended(s.ID); st.ExitCode != 0 {
					t.Errorf("ended %+v", st)
				}
				files, err := filepath.Glob(s.LogPath + "*")
				if err != nil || len(files) != 3 {
					t.Errorf("log files %v, %v", files, err)
				}
				for _, f := range files {
					if st, err := os.Stat(f); err != nil || st.Size() > 1<<20 {
						t.Errorf("%s: %v %v", f, st.Size(), err)
					}
				}
				check()
			})
		})
	}
}

// What runs before _start has wazero's own stack, which no bound of ours
// holds: the kernel ends it, and what the host noted of its memory says why.
// What the agent has in memory is no part of that.
func TestRecursionBeforeStart(t *testing.T) {
	module, err := os.ReadFile("testdata/recurse.wasm")
	if err != nil {
		t.Fatal(err)
	}
	code := bytes.Index(module, []byte{0x0a, 0x16, 0x02}) // the code section
	if code < 0 {
		t.Fatal("recurse.wasm has changed")
	}
	path := filepath.Join(t.TempDir(), "startrecurse.wasm")
	if err := os.WriteFile(path, slices.Concat(module[:code], []byte{8, 1, 1}, module[code:]), 0o600); err != nil {
		t.Fatal(err)
	}
	b := newBench(t, withCgroups(t))
	ballast := make([]byte, 96<<20) // the agent's
	for i := 0; i < len(ballast); i += 4096 {
		ballast[i] = 1
	}
	for _, limit := range []int64{96, 64, 16} {
		s := b.specFile(path, fmt.Sprintf("startrecurse%d", limit))
		s.Resources.MemoryLimit = limit << 20
		b.start(s)
		if st := b.ended(s.ID); st.Reason != "Trap" || st.ExitCode != 137 || !strings.HasPrefix(st.Message, "stack overflow: its calls nest deeper, or its tables are larger") {
			t.Errorf("in %d MiB: ended %+v", limit, st)
		}
	}
	runtime.KeepAlive(ballast)
}

func TestStopAtAnyMoment(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		module string
		wait   string // in the log, before the stop
		grace  time.Duration
		code   int
	}{
		{"sleep", "", 100 * time.Millisecond, 137},
		{"sleep", "sleeping", 100 * time.Millisecond, 137},
		{"sleep", "sleeping", 0, 137},
		{"loop", "looping", 0, 137},
		{"drain", "", 20 * time.Second, 0},
		{"drain", "ready", 20 * time.Second, 0},
		{"echo", "", 20 * time.Second, 0},
	} {
		t.Run(fmt.Sprintf("%s after %q grace %s", c.module, c.wait, c.grace), func(t *testing.T) {
			s := b.spec(c.module, c.module)
			if c.module == "echo" {
				l, _ := listener(t, "echo")
				s.Listeners = []workload.Listener{l}
			}
			b.start(s)
			if c.wait != "" {
				b.says(s, c.wait)
			}
			if err := b.Stop(t.Context(), s.ID, c.grace); err != nil {
				t.Fatal(err)
			}
			if st := b.ended(s.ID); st.ExitCode != c.code {
				t.Errorf("ended %+v", st)
			}
			if c.module == "drain" && !strings.Contains(b.log(s), "goodbye") {
				t.Errorf("log %q", b.log(s))
			}
			if err := b.Stop(t.Context(), s.ID, c.grace); err != nil {
				t.Errorf("stop of an ended one: %v", err)
			}
			if err := b.Remove(t.Context(), s.ID); err != nil {
				t.Fatal(err)
			}
			if _, ok, err := b.State(t.Context(), s.ID); ok || err != nil {
				t.Errorf("a removed one is known: %v %v", ok, err)
			}
			if err := os.RemoveAll(filepath.Dir(s.LogPath)); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestKill(t *testing.T) {
	b := newBench(t)
	s := b.spec("loop", "loop")
	b.start(s)
	if err := b.Kill(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if st := b.ended(s.ID); st.ExitCode != 137 || st.Signal != 9 || st.Reason != "Error" {
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
}

// A pod that may run at most once stops itself: also when its guest never
// calls its host, and without any agent.
func TestStopDeadline(t *testing.T) {
	b := newBench(t)
	s := b.spec("loop", "loop")
	s.StopDeadline = 300 * time.Millisecond
	b.start(s)
	if err := b.Extend(t.Context(), s.ID, time.Hour); err != nil {
		t.Fatal(err)
	}
	st, _, err := b.State(t.Context(), s.ID)
	if err != nil || st.Phase != workload.Running {
		t.Fatalf("%+v, %v", st, err)
	}
	if err := b.Extend(t.Context(), s.ID, 200*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	b.reopen()
	if st := b.ended(s.ID); st.Reason != "DeadlineExceeded" || st.ExitCode != 137 {
		t.Errorf("ended %+v", st)
	}
	if err := b.Extend(t.Context(), s.ID, time.Hour); err == nil {
		t.Error("the deadline of an ended guest was extended")
	}
}
