package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Config of a Tree.
type Config struct {
	// Mount is where the hierarchies are; empty is "/sys/fs/cgroup".
	Mount string
	// Name of the root group that is ours; empty is "dunlin".
	Name   string
	Logger *slog.Logger
}

// controllers that limits and figures need, by their v1 names.
var controllers = []string{"memory", "cpu", "cpuacct", "pids"}

// Tree is our root group on every hierarchy in use. It is safe for
// concurrent use.
type Tree struct {
	cfg   Config
	facts Facts
	// roots are the folders of our root group: one on v2, one a controller
	// on v1 (several controllers may share one).
	roots map[string]string

	all []string // mount points of every hierarchy

	mu     sync.Mutex // making and pruning folders
	bounds map[string]Bound
}

// New finds out what can be used, by making the root group. It fails on
// nothing: a machine without control groups yields a Tree whose Facts say so.
func New(cfg Config) *Tree {
	if cfg.Mount == "" {
		cfg.Mount = "/sys/fs/cgroup"
	}
	if cfg.Name == "" {
		cfg.Name = "dunlin"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	t := &Tree{cfg: cfg, roots: map[string]string{}, bounds: map[string]Bound{}}
	mounts, err := readMounts(cfg.Mount)
	t.all = mounts.all
	switch {
	case err != nil:
		t.facts = Facts{Mode: None, Reason: err.Error()}
	case mounts.v2 != "" && len(mounts.v1) == 0:
		t.openV2(mounts.v2)
	case len(mounts.v1) > 0:
		t.openV1(mounts)
	default:
		t.facts = Facts{Mode: None, Reason: "no control group hierarchy is mounted at " + cfg.Mount}
	}
	if !t.facts.Memory {
		t.facts.MemoryReason = t.whyNoMemory()
	}
	return t
}

// Facts says what can be enforced here.
func (t *Tree) Facts() Facts { return t.facts }

// mountsFound are the hierarchies of this machine.
type mountsFound struct {
	v1  map[string]string // controller to mount point
	v2  string
	all []string // every hierarchy's mount point, also those without limits
}

func readMounts(below string) (mountsFound, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return mountsFound{}, fmt.Errorf("control groups: %w", err)
	}
	return parseMounts(string(b), below), nil
}

// parseMounts reads proc_pid_mountinfo(5).
func parseMounts(text, below string) mountsFound {
	m := mountsFound{v1: map[string]string{}}
	for line := range strings.Lines(text) {
		left, right, ok := strings.Cut(line, " - ")
		fields, types := strings.Fields(left), strings.Fields(right)
		if !ok || len(fields) < 5 || len(types) < 3 {
			continue
		}
		at := fields[4]
		if at != below && !strings.HasPrefix(at, strings.TrimSuffix(below, "/")+"/") {
			continue
		}
		switch types[0] {
		case "cgroup2":
			m.v2 = at
			m.all = append(m.all, at)
		case "cgroup":
			m.all = append(m.all, at)
			for opt := range strings.SplitSeq(types[2], ",") {
				for _, c := range controllers {
					if opt == c {
						m.v1[c] = at
					}
				}
			}
		}
	}
	return m
}

func (t *Tree) openV1(m mountsFound) {
	t.facts.Mode = V1
	if m.v2 != "" {
		t.facts.Mode = Hybrid
	}
	var errs []error
	for _, c := range controllers {
		mount, ok := m.v1[c]
		if !ok {
			continue
		}
		dir := filepath.Join(mount, t.cfg.Name)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			errs = append(errs, err)
			continue
		}
		if unix.Access(filepath.Join(dir, "cgroup.procs"), unix.W_OK) != nil {
			errs = append(errs, fmt.Errorf("%s: not writable", dir))
			continue
		}
		t.roots[c] = dir
	}
	t.facts.Memory = t.has("memory", "memory.limit_in_bytes")
	t.facts.Swap = t.has("memory", "memory.memsw.limit_in_bytes")
	t.facts.CPU = t.has("cpu", "cpu.cfs_quota_us") || t.has("cpu", "cpu.shares")
	t.facts.PIDs = t.has("pids", "pids.max")
	if len(t.roots) == 0 {
		t.facts = Facts{Mode: None, Reason: fmt.Sprintf("no control group can be made: %v", errors.Join(errs...))}
	}
}

func (t *Tree) openV2(mount string) {
	root := filepath.Join(mount, t.cfg.Name)
	err := os.Mkdir(root, 0o755)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		t.facts = Facts{Mode: None, Reason: fmt.Sprintf("no control group can be made: %v", err)}
		return
	}
	if err := unix.Access(filepath.Join(root, "cgroup.procs"), unix.W_OK); err != nil {
		t.facts = Facts{Mode: None, Reason: fmt.Sprintf("no control group can be made: %s: %v", root, err)}
		return
	}
	t.facts.Mode = V2
	t.roots["v2"] = root
	// Controllers reach our group only when the root hands them down; this is
	// the one write outside a group of ours, and only where it is needed.
	enable(mount)
	enable(root)
	have := words(filepath.Join(root, "cgroup.subtree_control"))
	t.facts.Memory, t.facts.CPU, t.facts.PIDs = have["memory"], have["cpu"], have["pids"]
	t.facts.Swap = t.facts.Memory && exists(filepath.Join(root, "memory.swap.max"))
}

// enable hands the controllers that there are down to dir's children.
func enable(dir string) {
	can, has := words(filepath.Join(dir, "cgroup.controllers")), words(filepath.Join(dir, "cgroup.subtree_control"))
	for _, c := range []string{"memory", "cpu", "pids"} {
		if can[c] && !has[c] {
			_ = write(dir, "cgroup.subtree_control", "+"+c)
		}
	}
}

func words(path string) map[string]bool {
	b, err := os.ReadFile(path)
	m := map[string]bool{}
	if err != nil {
		return m
	}
	for _, w := range strings.Fields(string(b)) {
		m[w] = true
	}
	return m
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func (t *Tree) has(controller, file string) bool {
	root, ok := t.roots[controller]
	return ok && exists(filepath.Join(root, file))
}

func (t *Tree) whyNoMemory() string {
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		cmdline = nil
	}
	return memoryReason(t.facts, string(cmdline), os.Geteuid() == 0, exists)
}

// bootFiles hold the kernel command line of small boards, newest place
// first.
var bootFiles = []string{"/boot/firmware/cmdline.txt", "/boot/cmdline.txt"}

// memoryReason explains a missing memory controller. What counts is the
// controller, not the flag: kernels exist that are told to have it and do
// not.
func memoryReason(f Facts, cmdline string, root bool, exists func(string) bool) string {
	enabled, disabled := false, false
	for _, w := range strings.Fields(cmdline) {
		switch w {
		case "cgroup_enable=memory", "cgroup_memory=1":
			enabled = true
		case "cgroup_disable=memory":
			disabled = true
		}
	}
	if f.Mode == None && !root {
		return "memory limits are not enforced: only root can make control groups"
	}
	file := "the boot loader's kernel command line"
	for _, b := range bootFiles {
		if exists(b) {
			file = "the one line of " + b
			break
		}
	}
	switch {
	case enabled:
		return "memory limits are not enforced: flag present but controller absent: this kernel was built or booted without the memory controller; install the distribution's current kernel"
	case disabled && file == "the boot loader's kernel command line":
		return "memory limits are not enforced: cgroup_disable=memory is on the kernel command line; remove it and reboot"
	case f.Mode == None:
		return "memory limits are not enforced: " + f.Reason
	}
	return "memory limits are not enforced: the memory controller is off; append `cgroup_enable=memory cgroup_memory=1` to " + file + " and reboot"
}

// Create makes a group below the root one, and those above it, and sets its
// limits. One that exists is taken over.
func (t *Tree) Create(p string, l Limits) (Group, error) {
	g, err := t.group(p)
	if err != nil {
		return nil, err
	}
	if t.facts.Mode == None {
		return nil, fmt.Errorf("%w: %s", ErrNone, t.facts.Reason)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err = g.make(); err != nil {
		return nil, err
	}
	err = g.Set(l)
	g.lift()
	return g, err
}

// Open is a group that was made before; its methods treat one that is gone
// as empty.
func (t *Tree) Open(p string) Group {
	g, err := t.group(p)
	if err != nil {
		return gone{path: p, err: err}
	}
	return g
}

func (t *Tree) group(p string) (*group, error) {
	clean := path.Clean("/" + p)[1:]
	if clean == "" || clean != p || strings.ContainsAny(p, "\n\x00") {
		return nil, fmt.Errorf("control group %q: not a clean path below the root group", p)
	}
	return &group{tree: t, path: p, v2: t.facts.Mode == V2}, nil
}

// Name is a group's path from the hierarchies' roots on, as an OCI bundle
// has it ("/dunlin/pods/...").
func (t *Tree) Name(p string) string { return path.Join("/", t.cfg.Name, p) }

// Prune removes an ended group on every hierarchy, those without limits
// too, where an OCI runtime makes groups as well; and the empty ones above it.
func (t *Tree) Prune(p string) error {
	if _, err := t.group(p); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	for _, at := range t.all {
		root := filepath.Join(at, t.cfg.Name)
		errs = append(errs, removeTree(filepath.Join(root, p)))
		for up := filepath.Dir(p); up != "."; up = filepath.Dir(up) {
			if unix.Rmdir(filepath.Join(root, up)) != nil {
				break
			}
		}
	}
	return errors.Join(errs...)
}

// End kills everything in a group and those below it, "" for the whole tree,
// and waits until nothing is left there: what an agent that was killed had
// started and not written down.
func (t *Tree) End(ctx context.Context, p string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		pids := t.processes(p)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL) // it may be gone by now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("processes %v of control group %s/%s do not end: %w", pids, t.cfg.Name, p, ctx.Err())
		}
	}
}

// EndAttempts kills what is left of a container's attempts, before p, a new
// one, is started. Their groups stand beside p and differ in the number at the
// end. An agent that lost its run folder knows nothing of them, and they would
// hold the container's ports for ever.
func (t *Tree) EndAttempts(ctx context.Context, p string) error {
	i := strings.LastIndexByte(p, '-')
	if i < 0 {
		return nil
	}
	stem := path.Base(p[:i+1])
	attempts := map[string]bool{}
	for _, at := range t.all {
		beside, _ := os.ReadDir(filepath.Join(at, t.cfg.Name, path.Dir(p))) // one that is not there has none
		for _, d := range beside {
			number, ok := strings.CutPrefix(d.Name(), stem)
			if _, err := strconv.ParseUint(number, 10, 32); ok && err == nil && d.IsDir() {
				attempts[path.Join(path.Dir(p), d.Name())] = true
			}
		}
	}
	for a := range attempts {
		if err := t.End(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// Busy says whether something runs in a group or below it.
func (t *Tree) Busy(p string) bool { return len(t.processes(p)) > 0 }

// Inside are the groups right below p in which something runs, by name.
func (t *Tree) Inside(p string) []string {
	names := map[string]bool{}
	for _, at := range t.all {
		below, _ := os.ReadDir(filepath.Join(at, t.cfg.Name, p)) // one that is not there has none
		for _, d := range below {
			if d.IsDir() && !names[d.Name()] && t.Busy(path.Join(p, d.Name())) {
				names[d.Name()] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// processes are those of a group and below, on any hierarchy; not this one.
func (t *Tree) processes(p string) []int {
	seen := map[int]bool{os.Getpid(): true}
	var out []int
	for _, at := range t.all {
		_ = filepath.WalkDir(filepath.Join(at, t.cfg.Name, p), func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.Name() != "cgroup.procs" {
				return nil //nolint:nilerr // a group that is gone has no processes
			}
			b, _ := os.ReadFile(file)
			for _, f := range strings.Fields(string(b)) {
				if pid, err := strconv.Atoi(f); err == nil && pid > 0 && !seen[pid] {
					seen[pid] = true
					out = append(out, pid)
				}
			}
			return nil
		})
	}
	return out
}

// Destroy removes the root group if nothing is in it any more.
func (t *Tree) Destroy() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	for _, root := range t.roots {
		errs = append(errs, removeTree(root))
	}
	for _, at := range t.all {
		errs = append(errs, removeTree(filepath.Join(at, t.cfg.Name)))
	}
	return errors.Join(errs...)
}

func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("control group: %w", err)
	}
	_, err = f.WriteString(value)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("control group: write %q: %w", value, err)
	}
	return nil
}
