package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Bound is what all groups below one may take together; 0 is "not set".
// Unlike Limits it makes nothing of a container: running out of memory kills
// one of the processes below, the worst by its oom_score_adj, not all.
type Bound struct {
	MemoryBytes int64
	CPUMilli    int64 // weight against what is beside the group
}

// Bound sets what all groups below a path may take together. It is kept when
// the group goes, being empty, and comes again. On a machine without control
// groups it does nothing.
func (t *Tree) Bound(p string, b Bound) error {
	g, err := t.group(p)
	if err != nil || t.facts.Mode == None {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.bounds[p] = b
	if b.CPUMilli > 0 {
		_ = g.weigh(".", shares(b.CPUMilli)) // what is ours has one weight beside the machine's own
	}
	if err := g.make(); err != nil {
		return err
	}
	return t.apply(p, b)
}

// apply writes a bound to a group that exists. Callers hold the lock.
func (t *Tree) apply(p string, b Bound) error {
	g := &group{tree: t, path: p, v2: t.facts.Mode == V2}
	var errs []error
	if b.CPUMilli > 0 {
		errs = append(errs, g.weigh(p, shares(b.CPUMilli)))
	}
	if t.facts.Memory {
		d, _ := g.dir("memory")
		file, value := "memory.limit_in_bytes", "-1"
		if g.v2 {
			file, value = "memory.max", "max"
		}
		if b.MemoryBytes > 0 {
			value = strconv.FormatInt(b.MemoryBytes, 10)
		}
		errs = append(errs, write(d, file, value))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("bound of %s: %w", p, err)
	}
	return nil
}

// weigh sets the CPU weight of a group, given as v1 shares.
func (g *group) weigh(p string, n int64) error {
	root, file := g.tree.roots["cpu"], "cpu.shares"
	n = min(max(n, 2), 262144)
	if g.v2 {
		root, file = g.tree.roots["v2"], "cpu.weight"
		n = weight(n)
	}
	if !g.tree.facts.CPU || !exists(filepath.Join(root, p, file)) {
		return nil
	}
	return write(filepath.Join(root, p), file, strconv.FormatInt(n, 10))
}

// lift makes the groups above this one weigh what is in them, and protect the
// memory that is protected in them: the kernel shares out level by level, so
// a request counts for nothing below groups that all weigh the same. The
// first level is Bound's. Callers hold the lock.
func (g *group) lift() {
	for p := filepath.Dir(g.path); strings.Contains(p, "/"); p = filepath.Dir(p) {
		if g.tree.facts.CPU {
			root, file := g.tree.roots["cpu"], "cpu.shares"
			if g.v2 {
				root, file = g.tree.roots["v2"], "cpu.weight"
			}
			if n := sumBelow(filepath.Join(root, p), file); n > 0 {
				most := uint64(262144)
				if g.v2 {
					most = 10000
				}
				_ = write(filepath.Join(root, p), file, strconv.FormatUint(min(n, most), 10))
			}
		}
		if d := filepath.Join(g.tree.roots["v2"], p); g.v2 && g.tree.facts.Memory && exists(filepath.Join(d, "memory.low")) {
			_ = write(d, "memory.low", strconv.FormatUint(sumBelow(d, "memory.low"), 10))
		}
	}
	if first, _, ok := strings.Cut(g.path, "/"); ok && g.v2 && g.tree.facts.Memory {
		for _, p := range []string{first, "."} {
			d := filepath.Join(g.tree.roots["v2"], p)
			if exists(filepath.Join(d, "memory.low")) {
				_ = write(d, "memory.low", strconv.FormatUint(sumBelow(d, "memory.low"), 10))
			}
		}
	}
}

// sumBelow adds a number up over a group's direct children.
func sumBelow(dir, file string) (sum uint64) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if b, err := os.ReadFile(filepath.Join(dir, e.Name(), file)); err == nil {
			sum += number(b)
		}
	}
	return sum
}
