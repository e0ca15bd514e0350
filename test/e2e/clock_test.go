//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// wrongClock is one server whose clock is wrong from its first start on, which
// clients whose clock is right do not get through to.
type wrongClock struct {
	t    *testing.T
	dir  string
	args []string
	cmd  *exec.Cmd
}

func newWrongClock(t *testing.T, off time.Duration) *wrongClock {
	t.Helper()
	cluster.TestClock(t)
	w := &wrongClock{t: t, dir: t.TempDir()}
	t.Setenv(cluster.ClockVariable, filepath.Join(w.dir, "clock"))
	w.args = []string{
		"server", "--no-node", "--listen", fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(10000)), "--gossip-port", "0",
		"--state-dir", filepath.Join(w.dir, "state"), "--run-dir", filepath.Join(w.dir, "run"), "--config-dir", filepath.Join(w.dir, "config"),
	}
	w.move(off)
	w.start()
	return w
}

func (w *wrongClock) move(off time.Duration) {
	w.t.Helper()
	p := filepath.Join(w.dir, "clock")
	if err := errors.Join(os.WriteFile(p+".new", []byte(off.String()), 0o600), os.Rename(p+".new", p)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *wrongClock) start() {
	w.t.Helper()
	log, err := os.OpenFile(filepath.Join(w.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		w.t.Fatal(err)
	}
	w.cmd = exec.Command(cluster.Binary(w.t), w.args...)
	w.cmd.Stdout, w.cmd.Stderr = log, log
	if err := errors.Join(w.cmd.Start(), log.Close()); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(w.stop)
}

func (w *wrongClock) stop() {
	_ = w.cmd.Process.Signal(syscall.SIGTERM)
	_ = w.cmd.Wait()
}

func (w *wrongClock) log() string {
	b, err := os.ReadFile(filepath.Join(w.dir, "log"))
	if err != nil {
		w.t.Fatal(err)
	}
	return string(b)
}

// run is a command of an administrator; a blind one judges no dates.
func (w *wrongClock) run(blind bool, args ...string) (string, error) {
	config, err := os.ReadFile(filepath.Join(w.dir, "config", "admin.kubeconfig"))
	if err != nil {
		return "", err
	}
	if blind {
		config = regexp.MustCompile(`certificate-authority-data:.*`).ReplaceAll(config, []byte("insecure-skip-tls-verify: true"))
	}
	p := filepath.Join(w.dir, "kubeconfig")
	if err := os.WriteFile(p, config, 0o600); err != nil {
		return "", err
	}
	out, err := exec.Command(cluster.Binary(w.t), append(args, "--kubeconfig", p)...).CombinedOutput()
	return string(out), err
}

func (w *wrongClock) eventually(what string, f func() error) {
	w.t.Helper()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(2 * far)
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			w.t.Fatalf("%s: %v; log: %s", what, err, w.log())
		case <-tick.C:
		}
	}
}

// trusted wants the figure, and where it is 0 the event.
func (w *wrongClock) trusted(figure string) error {
	out, err := w.run(true, "get", "--raw", "/metrics")
	if err != nil || !strings.Contains(out, "\ndunlin_clock_trusted "+figure) {
		return fmt.Errorf("dunlin_clock_trusted is not %s: %w", figure, err)
	}
	if out, err = w.run(true, "events", "-A"); figure == "0" && !strings.Contains(out, "ClockNotTrusted") {
		return fmt.Errorf("no event: %s, %w", out, err)
	}
	return nil
}

// TestClockOf1970IsSaid: a server whose clock was never set works and says so,
// at its first start and at a later one; and says when it is right.
func TestClockOf1970IsSaid(t *testing.T) {
	never := -time.Since(time.Unix(0, 0))
	w := newWrongClock(t, never)
	w.eventually("it is said", func() error { return w.trusted("0") })
	if n := strings.Count(w.log(), "the clock is wrong"); n != 1 {
		t.Errorf("logged %d times: %s", n, w.log())
	}
	if out, err := w.run(false, "get", "namespaces"); err == nil || !strings.Contains(out, "clock or the server's is wrong") {
		t.Errorf("a client with the right time: %s", out)
	}
	w.move(0)
	w.eventually("clients with the right time get through", func() error { _, err := w.run(false, "get", "namespaces"); return err })
	w.eventually("it is said", func() error { return w.trusted("1") })
	w.stop()
	w.move(never)
	w.start() // goes by what it knew
	w.eventually("clients get through", func() error { _, err := w.run(false, "get", "namespaces"); return err })
	w.eventually("it is said", func() error { return w.trusted("0") })
	if out, err := w.run(false, "server", "list"); err != nil || !strings.Contains(out, "clock") {
		t.Errorf("the list of servers: %s, %v", out, err)
	}
	if n := strings.Count(w.log(), "the clock is wrong"); n != 2 {
		t.Errorf("logged %d times: %s", n, w.log())
	}
}

// TestClockAheadIsPutRight: a first start two years ahead, then corrected, locks
// nobody out: neither the running server nor the next start does.
func TestClockAheadIsPutRight(t *testing.T) {
	w := newWrongClock(t, 2*365*24*time.Hour)
	w.eventually("it answers", func() error { return w.trusted("1") })
	if out, err := w.run(false, "get", "namespaces"); err == nil || !strings.Contains(out, "clock or the server's is wrong") {
		t.Errorf("a client with the right time: %s", out)
	}
	w.move(0)
	w.eventually("clients with the right time get through", func() error { _, err := w.run(false, "get", "namespaces"); return err })
	w.eventually("it is said", func() error { return w.trusted("0") })
	w.stop()
	w.start()
	w.eventually("clients with the right time get through", func() error { _, err := w.run(false, "get", "namespaces"); return err })
	w.eventually("it is said", func() error { return w.trusted("0") })
}
