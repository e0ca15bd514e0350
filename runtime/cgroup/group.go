package cgroup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// group is one group on all hierarchies in use.
type group struct {
	tree *Tree
	path string
	v2   bool
}

// Path implements Group.
func (g *group) Path() string { return g.path }

// dir is the group's folder in a controller's hierarchy.
func (g *group) dir(controller string) (string, bool) {
	if g.v2 {
		controller = "v2"
	}
	root, ok := g.tree.roots[controller]
	return filepath.Join(root, g.path), ok
}

// dirs are all folders of the group.
func (g *group) dirs() []string {
	seen := map[string]bool{}
	var out []string
	for c := range g.tree.roots {
		if d, ok := g.dir(c); ok && !seen[d] {
			seen[d] = true
			out = append(out, d)
		}
	}
	return out
}

// make makes what is missing of the group: the root group too, which somebody
// may have removed while nothing was in it.
func (g *group) make() error {
	made, again := map[string]bool{}, false
	for c, root := range g.tree.roots {
		err := os.Mkdir(root, 0o755)
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("control group %s (%s): %w", g.tree.cfg.Name, c, err)
		}
		again = again || err == nil
		if err == nil && g.v2 {
			enable(filepath.Dir(root))
			enable(root)
		}
	}
	for _, b := range g.tree.bounds {
		if again && b.CPUMilli > 0 {
			_ = g.weigh(".", shares(b.CPUMilli)) // as Bound did
		}
	}
	for c, root := range g.tree.roots {
		at, rel := root, ""
		for _, part := range strings.Split(g.path, "/") {
			if g.v2 {
				enable(at)
			}
			at, rel = filepath.Join(at, part), filepath.Join(rel, part)
			err := os.Mkdir(at, 0o755)
			if err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("control group %s (%s): %w", g.path, c, err)
			}
			if err == nil {
				made[rel] = true
			}
		}
	}
	// Only now: a bound needs the group in every hierarchy.
	for rel := range made {
		if b, ok := g.tree.bounds[rel]; ok {
			if err := g.tree.apply(rel, b); err != nil {
				return err
			}
		}
	}
	return nil
}

// Add implements Group.
func (g *group) Add(pid int) error {
	for _, d := range g.dirs() {
		if err := write(d, "cgroup.procs", strconv.Itoa(pid)); err != nil {
			return fmt.Errorf("add process %d to %s: %w", pid, g.path, err)
		}
	}
	return nil
}

// cpuPeriod of quotas, in microseconds.
const cpuPeriod = 100_000

// shares is the v1 weight of a CPU request, as Kubernetes has it: 1024 a
// core, at least 2.
func shares(milli int64) int64 { return min(max(milli*1024/1000, 2), 262144) }

// weight maps v1 shares [2..262144] to v2 weights [1..10000] (KEP-2254).
func weight(shares int64) int64 { return 1 + (shares-2)*9999/262142 }

// Set implements Group.
func (g *group) Set(l Limits) error {
	if l.CPURequestMilli == 0 {
		l.CPURequestMilli = l.CPULimitMilli
	}
	f := g.tree.facts
	var errs []error
	set := func(controller, file, value string) {
		if d, ok := g.dir(controller); ok {
			errs = append(errs, write(d, file, value))
		}
	}
	optional := func(controller, file, value string) {
		if d, ok := g.dir(controller); ok && exists(filepath.Join(d, file)) {
			_ = write(d, file, value)
		}
	}
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	if f.CPU {
		if g.v2 {
			optional("cpu", "cpu.weight", number(weight(shares(l.CPURequestMilli))))
		} else {
			optional("cpu", "cpu.shares", number(shares(l.CPURequestMilli)))
		}
		if l.CPULimitMilli > 0 {
			quota := max(l.CPULimitMilli*cpuPeriod/1000, 1000)
			if g.v2 {
				set("cpu", "cpu.max", fmt.Sprintf("%d %d", quota, cpuPeriod))
			} else {
				optional("cpu", "cpu.cfs_period_us", number(cpuPeriod))
				set("cpu", "cpu.cfs_quota_us", number(quota))
			}
		}
	}
	if f.Memory {
		if g.v2 && l.MemoryRequest > 0 {
			optional("memory", "memory.low", number(l.MemoryRequest))
		}
		if l.MemoryLimit > 0 && g.v2 {
			set("memory", "memory.max", number(l.MemoryLimit))
			optional("memory", "memory.swap.max", "0")
			optional("memory", "memory.oom.group", "1")
		} else if l.MemoryLimit > 0 {
			// Growing: the larger of the two must come first.
			optional("memory", "memory.memsw.limit_in_bytes", number(l.MemoryLimit))
			set("memory", "memory.limit_in_bytes", number(l.MemoryLimit))
			optional("memory", "memory.memsw.limit_in_bytes", number(l.MemoryLimit))
		}
	}
	if f.PIDs && l.PIDs > 0 {
		set("pids", "pids.max", number(l.PIDs))
	}
	return errors.Join(errs...)
}

// Stats implements Group. A figure that this machine does not give is 0.
func (g *group) Stats() (Stats, error) {
	var s Stats
	read := func(controller, file string) []byte {
		d, ok := g.dir(controller)
		if !ok {
			return nil
		}
		b, err := os.ReadFile(filepath.Join(d, file))
		if err != nil {
			return nil
		}
		return b
	}
	if g.v2 {
		s.CPUNanos = 1000 * field(read("cpu", "cpu.stat"), "usage_usec")
		s.MemoryBytes = less(number(read("memory", "memory.current")), field(read("memory", "memory.stat"), "inactive_file"))
		s.OOMKills = field(read("memory", "memory.events"), "oom_kill")
	} else {
		s.CPUNanos = number(read("cpuacct", "cpuacct.usage"))
		s.MemoryBytes = less(number(read("memory", "memory.usage_in_bytes")), field(read("memory", "memory.stat"), "total_inactive_file"))
		s.OOMKills = field(read("memory", "memory.oom_control"), "oom_kill")
	}
	s.PIDs = number(read("pids", "pids.current"))
	for _, d := range g.dirs() {
		if _, err := os.Stat(d); err != nil {
			return s, fmt.Errorf("control group %s: %w", g.path, err)
		}
	}
	return s, nil
}

func less(a, b uint64) uint64 {
	if b > a {
		return 0
	}
	return a - b
}

func number(b []byte) uint64 {
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// field is the number after a name in a flat keyed file.
func field(b []byte, name string) uint64 {
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		if k, v, ok := strings.Cut(sc.Text(), " "); ok && k == name {
			return number([]byte(v))
		}
	}
	return 0
}

// pids are the processes in the group and in those below it.
func (g *group) pids() (out []int, err error) {
	for _, d := range g.dirs() {
		err := filepath.WalkDir(d, func(p string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || !e.IsDir() {
				return err
			}
			b, err := os.ReadFile(filepath.Join(p, "cgroup.procs"))
			if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) {
				return err
			}
			for _, w := range strings.Fields(string(b)) {
				if pid, err := strconv.Atoi(w); err == nil && pid > 1 && pid != os.Getpid() {
					out = append(out, pid)
				}
			}
			return nil
		})
		if err != nil {
			return out, fmt.Errorf("control group %s: %w", g.path, err)
		}
	}
	return out, nil
}

// Kill implements Group.
func (g *group) Kill(ctx context.Context) error {
	t := time.NewTicker(2 * time.Millisecond)
	defer t.Stop()
	for {
		pids, err := g.pids()
		if err != nil || len(pids) == 0 {
			return err
		}
		d, _ := g.dir("v2")
		if !g.v2 || write(d, "cgroup.kill", "1") != nil {
			for _, pid := range pids {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("control group %s: %d processes do not end: %w", g.path, len(pids), context.Cause(ctx))
		case <-t.C:
		}
	}
}

// Remove implements Group: then also the groups above that are empty, up to
// the root one.
func (g *group) Remove() error {
	g.tree.mu.Lock()
	defer g.tree.mu.Unlock()
	var errs []error
	for _, d := range g.dirs() {
		errs = append(errs, removeTree(d))
	}
	for _, root := range g.tree.roots {
		for p := filepath.Dir(g.path); p != "."; p = filepath.Dir(p) {
			if unix.Rmdir(filepath.Join(root, p)) != nil {
				break
			}
		}
	}
	g.lift()
	return errors.Join(errs...)
}

// removeTree removes a group and those below it. The kernel says EBUSY for
// a moment after the last process has gone.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove control group: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	for wait := time.Millisecond; ; wait *= 2 {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || wait > 300*time.Millisecond {
			return fmt.Errorf("remove control group %s: %w", dir, err)
		}
		time.Sleep(wait) //nolint:forbidigo // the kernel gives no event for it; at most 0.6 s in all
	}
}

// gone is a group with an impossible path.
type gone struct {
	path string
	err  error
}

func (g gone) Path() string               { return g.path }
func (g gone) Add(int) error              { return g.err }
func (g gone) Set(Limits) error           { return g.err }
func (g gone) Stats() (Stats, error)      { return Stats{}, g.err }
func (g gone) OOM() OOM                   { return OOM{} }
func (g gone) Kill(context.Context) error { return nil }
func (g gone) Remove() error              { return nil }
