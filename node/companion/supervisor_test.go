package companion

import (
	"context"
	"log/slog"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

const testProgram = "dunlin-companion-test"

type settings struct{}

// worker does nothing.
type worker struct{}

func (worker) Configure(*settings) error                { return nil }
func (worker) Retain(map[string]bool)                   {}
func (worker) Apply([]wire.ServiceItem, []string, bool) {}
func (worker) Park(map[string]*os.File)                 {}
func (worker) Listeners() (map[string]*os.File, error)  { return nil, nil }
func (worker) LetGo()                                   {}
func (worker) Connections() int64                       { return 0 }
func (worker) Status(h Head) any                        { return &h }
func (worker) Run(ctx context.Context)                  { <-ctx.Done() }

func TestMain(m *testing.M) {
	if os.Args[0] == testProgram {
		os.Exit(Main(testProgram, "does nothing", os.Args[1:], func(string, *slog.Logger) Worker[settings] { return worker{} }))
	}
	os.Exit(m.Run())
}

// quiet is a feed without news.
type quiet struct{}

func (quiet) News() <-chan struct{}                         { return nil }
func (quiet) Take(int) ([]wire.ServiceItem, []string, bool) { return nil, nil, false }
func (quiet) Close()                                        {}

// A process that is killed is there again at once, not when it is looked at,
// whether this agent started it or one before; with each time that it dies
// after a short life that takes longer.
func TestAKilledProcessIsThereAgainAtOnce(t *testing.T) {
	dir, err := os.MkdirTemp("", "dnlc") // short: sun_path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = Stop(context.Background(), dir)
		_ = os.RemoveAll(dir)
	})
	better, fed := false, make(chan struct{}, 1)
	supervise := func() (stop func()) {
		s := &Supervisor[settings]{Program: testProgram, Dir: dir, Log: slog.New(slog.DiscardHandler), look: time.Hour,
			Subscribe: func() Feed { fed <- struct{}{}; return quiet{} }, Known: func() bool { return true }, Equal: func(_, _ *settings) bool { return true },
			Settings: func() (settings, bool) { return settings{}, true }}
		if better {
			s.Better = func() bool { return true }
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		return func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	// connected is the process that the agent has just connected to.
	connected := func() int {
		t.Helper()
		select {
		case <-fed:
		case <-time.After(20 * time.Second):
			t.Fatal("the agent has no process")
		}
		var h Head
		if err := Ask(dir, &h); err != nil {
			t.Fatal(err)
		}
		return h.PID
	}
	kill := func(pid int) {
		t.Helper()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	stop := supervise()
	pid := connected()
	for range 2 {
		kill(pid)
		began := time.Now()
		now := connected()
		if now == pid {
			t.Fatal("it lives")
		}
		pid = now
		t.Logf("there again after %s", time.Since(began))
	}
	for _, better = range []bool{false, true} { // the latter leaves it what it knows
		stop()
		stop = supervise()
		if now := connected(); now != pid {
			t.Fatalf("process %d was replaced by %d", pid, now)
		}
		kill(pid)
		pid = connected()
	}
	stop()
}
