package sim

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestMain gives the collector room: worlds live for seconds and die as a
// whole, and a third of the time of a seed went into collecting them.
func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(1000)
		debug.SetMemoryLimit(1500 << 20)
	}
	os.Exit(m.Run())
}

// job is what is known of many runs. With a file it outlives the process:
// lines of "build HASH", "passed SERVERS-SEED" and "spent SECONDS". What
// another build passed does not count.
type job struct {
	file *os.File // nil: not kept

	mu        sync.Mutex
	passed    map[string]bool
	old       int           // of passed, by earlier processes
	spent     time.Duration // by earlier processes
	began     time.Time
	noted     time.Duration // since began, of what is in the file
	virtual   time.Duration
	converged []time.Duration
	failed    int
}

func openJob(path string) (*job, error) {
	j := &job{passed: map[string]bool{}, began: time.Now()}
	if path == "" {
		return j, nil
	}
	build, err := hashOfBuild()
	if err != nil {
		return nil, err
	}
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read what passed: %w", err)
	}
	whole := old[:bytes.LastIndexByte(old, '\n')+1] // the last line may have been cut off
	if !j.read(string(whole), build) {
		whole = fmt.Appendf(nil, "build %s\n", build)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("keep what passed: %w", err)
	}
	if err := os.WriteFile(path, whole, 0o644); err != nil {
		return nil, fmt.Errorf("keep what passed: %w", err)
	}
	if j.file, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0); err != nil {
		return nil, fmt.Errorf("keep what passed: %w", err)
	}
	if j.old > 0 {
		fmt.Printf("sim: this build passed %d seeds before, in %s\n", j.old, j.spent.Round(time.Second))
	}
	return j, nil
}

// read takes in a job's file; false is another build's, or none.
func (j *job) read(text, build string) bool {
	lines := bufio.NewScanner(strings.NewReader(text))
	if !lines.Scan() || lines.Text() != "build "+build {
		return false
	}
	for lines.Scan() {
		verb, arg, _ := strings.Cut(lines.Text(), " ")
		switch verb {
		case "passed":
			j.passed[arg] = true
		case "spent":
			if d, err := time.ParseDuration(arg); err == nil {
				j.spent += d
			}
		}
	}
	j.old = len(j.passed)
	return true
}

func hashOfBuild() (string, error) {
	exe, err := os.Open("/proc/self/exe")
	if err != nil {
		return "", fmt.Errorf("which build this is: %w", err)
	}
	defer func() { _ = exe.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, exe); err != nil {
		return "", fmt.Errorf("which build this is: %w", err)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:16]), nil
}

func (j *job) has(r run) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.passed[r.String()]
}

// ran notes the end of a run, and now and then says how far the job is.
func (j *job) ran(r run, res result) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.virtual += res.virtual
	j.converged = append(j.converged, res.converged)
	if len(res.violations) > 0 {
		j.failed++
		return
	}
	j.passed[r.String()] = true
	if n := len(j.passed) - j.old; n%100 == 0 {
		fmt.Printf("sim: %s\n", j.figures())
	}
	if j.file != nil {
		now := time.Since(j.began)
		if _, err := fmt.Fprintf(j.file, "passed %s\nspent %s\n", r, now-j.noted); err != nil {
			fmt.Printf("sim: what passed is not kept: %v\n", err)
		}
		j.noted = now
	}
}

func (j *job) figures() string {
	n, d := len(j.passed)-j.old+j.failed, time.Since(j.began)
	s := fmt.Sprintf("%d seeds in %s (%.2f a second), %d failed, %s of virtual time", n, d.Round(time.Second/10), float64(n)/d.Seconds(), j.failed, j.virtual.Round(time.Minute))
	if j.old > 0 {
		s += fmt.Sprintf("; with earlier runs %d passed in %s", len(j.passed), (d + j.spent).Round(time.Second))
	}
	return s
}

// finish prints the figures of the job.
func (j *job) finish() {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := "sim: " + j.figures()
	slices.Sort(j.converged)
	if n := len(j.converged); n > 0 {
		s += fmt.Sprintf("; converged after %s (median), %s (p99), %s (most)", j.converged[n/2], j.converged[n*99/100], j.converged[n-1])
	}
	fmt.Println(s)
	if j.file != nil {
		_ = j.file.Close()
	}
}

// pulse is how far a world's time is, as seen from outside of its bubble: a
// bubble of which a goroutine waits for something that is not of the bubble
// stands still for ever, and so does one in which somebody is always busy.
type pulse struct {
	at    atomic.Int64
	world atomic.Pointer[world]
}

func (p *pulse) beat()       { p.at.Store(time.Now().UnixNano()) }
func (p *pulse) of(w *world) { p.world.Store(w) }

// hung is for how many looks, one a minute, virtual time may stand still.
const hung = 10

// watch ends the process with every goroutine's stack and the world's trace
// when its time stands still. It must be called outside of the bubble; call
// stop at the end.
func (p *pulse) watch(name string) (stop func()) {
	over := make(chan struct{})
	go func() {
		t := time.NewTicker(time.Minute)
		defer t.Stop()
		last, same := int64(0), 0
		for {
			select {
			case <-over:
				return
			case <-t.C:
			}
			if now := p.at.Load(); now != last {
				last, same = now, 0
			} else if same++; same == hung {
				p.dump(name)
			}
		}
	}()
	return func() {
		close(over)
		if e := recover(); e != nil {
			p.stacks() // of goroutines that were left, above all
			panic(e)
		}
	}
}

func (p *pulse) dump(name string) {
	p.stacks()
	panic(fmt.Sprintf("sim: %s hangs: its time has not moved for %d minutes; above are the stacks and the end of its trace", name, hung))
}

// stacks prints every goroutine's stack and the end of the world's trace.
func (p *pulse) stacks() {
	_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 2)
	if w := p.world.Load(); w != nil && w.mu.TryLock() {
		fmt.Fprintln(os.Stderr, strings.Join(w.lines[max(len(w.lines)-1000, 0):], "\n"))
		w.mu.Unlock()
	}
}

// A job's file is read back by the same build, whole or cut off, and by no
// other.
func TestJobGoesOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bin", "job")
	j, err := openJob(path)
	must(t, err)
	for seed := range uint64(3) {
		j.ran(run{1, seed}, result{})
	}
	j.ran(run{3, 9}, result{violations: []string{"no"}})
	j.finish()
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteString("passed 3-1")
	must(t, err)
	must(t, f.Close())
	j, err = openJob(path)
	must(t, err)
	for seed := range uint64(3) {
		if !j.has(run{1, seed}) {
			t.Errorf("seed %d passed and is not known", seed)
		}
	}
	if j.has(run{3, 9}) || j.has(run{3, 1}) {
		t.Error("a seed that did not pass is known as passed")
	}
	b, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, append([]byte("build other"), b[20:]...), 0o644))
	if j, err = openJob(path); err != nil || j.has(run{1, 1}) {
		t.Errorf("what another build passed counts (%v)", err)
	}
}
