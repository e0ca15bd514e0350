package main

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// job is what is known of the cycles. Its file has lines of "build HASH",
// "passed TEST CYCLE TIME", "failed TEST CYCLE" and "spent TIME", the wall
// time of the processes that told them. What another build passed does not
// count, and what failed is told again.
type job struct {
	file *os.File

	mu     sync.Mutex
	passed map[cycle]time.Duration
	failed map[cycle]string // now
	once   map[cycle]int    // how often before, by the same build
	began  time.Time
	noted  time.Duration // since began, of what is in the file
	spent  time.Duration // by earlier processes
}

// openJob reads the file at path, and keeps in it what passes from now on;
// without a path nothing is kept.
func openJob(path string, binaries []string) (*job, error) {
	j := &job{passed: map[cycle]time.Duration{}, failed: map[cycle]string{}, once: map[cycle]int{}, began: time.Now()}
	if path == "" {
		return j, nil
	}
	build, err := hash(binaries)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("keep what passed: %w", err)
	}
	if j.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644); err != nil {
		return nil, fmt.Errorf("keep what passed: %w", err)
	}
	if err := unix.Flock(int(j.file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: another process runs these tests: %w", path, err), j.file.Close())
	}
	old, err := io.ReadAll(j.file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errors.Join(fmt.Errorf("read what passed: %w", err), j.file.Close())
	}
	whole := old[:bytes.LastIndexByte(old, '\n')+1] // the last line may have been cut off
	if !j.read(string(whole), build) {
		whole = fmt.Appendf(nil, "build %s\n", build)
	}
	if err := j.file.Truncate(0); err != nil {
		return nil, errors.Join(fmt.Errorf("keep what passed: %w", err), j.file.Close())
	}
	if _, err := j.file.Write(whole); err != nil {
		return nil, errors.Join(fmt.Errorf("keep what passed: %w", err), j.file.Close())
	}
	if n := len(j.passed); n > 0 {
		_, _ = fmt.Fprintf(os.Stdout, "runner: this build passed %d cycles before, in %s\n", n, j.spent.Round(time.Second))
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
		var c cycle
		var d string
		line := lines.Text()
		if n, _ := fmt.Sscanf(line, "passed %s %d %s", &c.test, &c.n, &d); n == 3 {
			j.passed[c], _ = time.ParseDuration(d)
		} else if n, _ := fmt.Sscanf(line, "failed %s %d", &c.test, &c.n); n == 2 {
			j.once[c]++
		} else if n, _ := fmt.Sscanf(line, "spent %s", &d); n == 1 {
			more, _ := time.ParseDuration(d)
			j.spent += more
		}
	}
	return true
}

func hash(binaries []string) (string, error) {
	h := sha256.New()
	for _, p := range binaries {
		f, err := os.Open(p)
		if err != nil {
			return "", fmt.Errorf("which build this is: %w", err)
		}
		_, err = io.Copy(h, f)
		if err := errors.Join(err, f.Close()); err != nil {
			return "", fmt.Errorf("which build this is: %w", err)
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:16]), nil
}

func (j *job) has(c cycle) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	_, ok := j.passed[c]
	return ok
}

// ran notes the end of a cycle, and prints it.
func (j *job) ran(c cycle, verdict string, took time.Duration) {
	j.mu.Lock()
	defer j.mu.Unlock()
	load, _ := os.ReadFile("/proc/loadavg")
	what, line := "passed", fmt.Sprintf("passed %s %s", c, took)
	if verdict == "" {
		j.passed[c] = took
		delete(j.failed, c) // it was run again
	} else {
		j.failed[c] = verdict
		what, line = "FAILED ("+verdict+")", fmt.Sprintf("failed %s", c)
	}
	now := time.Since(j.began)
	defer func() { j.noted = now }()
	_, _ = fmt.Fprintf(os.Stdout, "runner: %s: %s in %.1f s (%d passed and %d failed after %s; load %s)\n", c, what, took.Seconds(), len(j.passed), len(j.failed),
		(j.spent + now).Round(time.Second), strings.Join(strings.Fields(string(load) + " ?")[:1], ""))
	if j.file == nil {
		return
	}
	if _, err := fmt.Fprintf(j.file, "%s\nspent %s\n", line, now-j.noted); err != nil {
		_, _ = fmt.Fprintf(os.Stdout, "runner: what passed is not kept: %v\n", err)
	}
}

// failures is what failed now, in order.
func (j *job) failures() []cycle {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.SortedFunc(maps.Keys(j.failed), func(a, b cycle) int {
		return cmp.Or(strings.Compare(a.test, b.test), a.n-b.n)
	})
}

// table prints what came of every test, and returns how many cycles failed.
func (j *job) table(names []string, cycles int) (bad int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	if len(names) > 0 {
		_, _ = fmt.Fprintln(w, "test\tcycles passed\tfailed\tfailed before\tmedian\tlongest")
	}
	for _, name := range names {
		var took []time.Duration
		failed, before := 0, 0
		for n := 1; n <= cycles; n++ {
			c := cycle{name, n}
			if d, ok := j.passed[c]; ok {
				took = append(took, d)
			} else if _, ok := j.failed[c]; ok {
				failed++
			}
			before += j.once[c]
		}
		slices.Sort(took)
		median, longest := "-", "-"
		if n := len(took); n > 0 {
			median, longest = fmt.Sprintf("%.1f s", took[n/2].Seconds()), fmt.Sprintf("%.1f s", took[n-1].Seconds())
		}
		_, _ = fmt.Fprintf(w, "%s\t%d of %d\t%d\t%d\t%s\t%s\n", name, len(took), cycles, failed, before, median, longest)
		bad += failed
	}
	_ = w.Flush()
	_, _ = fmt.Fprintf(os.Stdout, "wall time: %s\n", (j.spent + time.Since(j.began)).Round(time.Second))
	return bad
}

func (j *job) close() {
	if j.file != nil {
		_ = j.file.Close()
	}
}
