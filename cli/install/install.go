// Package install puts Dunlin on a host and takes it off again, leaving the
// host as it was: a binary, one systemd unit, two folders. Every step is
// idempotent and goes through one list, so that what is installed and what
// is removed cannot drift apart.
package install

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/claim"
)

//go:embed dunlin.service
var unitTemplate string

// UnitName of the systemd unit.
const UnitName = "dunlin.service"

// Paths on the host, all below Root ("" is the real host).
type Paths struct {
	Root string
	// StateDir, RunDir and ConfigDir are the folders that the configuration
	// file names instead of the usual ones; "" is the usual one.
	StateDir, RunDir, ConfigDir string
	// Service is set for a server or an agent that was started by hand, with a
	// state folder of its own: the paths of this machine's service, of whose
	// nothing is taken away.
	Service *Paths
}

// The usual folders.
const (
	usualState  = "var/lib/dunlin"
	usualRun    = "run/dunlin"
	usualConfig = "etc/dunlin"
)

func (p Paths) at(s string) string { return filepath.Join("/", p.Root, s) }

// Binary is where the program is put.
func (p Paths) Binary() string { return p.at("usr/local/bin/dunlin") }

// HostBinary is where the slim Wasm host program is put.
func (p Paths) HostBinary() string { return p.at("usr/local/bin/dunlin-wasm") }

// ProxyBinary is where the slim service proxy is put.
func (p Paths) ProxyBinary() string { return p.at("usr/local/bin/dunlin-proxy") }

// IngressBinary is where the program that serves Ingresses is put.
func (p Paths) IngressBinary() string { return p.at("usr/local/bin/dunlin-ingress") }

// Unit is the systemd unit file.
func (p Paths) Unit() string { return p.at("etc/systemd/system/" + UnitName) }

// ConfigFile is the configuration file, which names the folders.
func (p Paths) ConfigFile() string { return filepath.Join(p.at(usualConfig), "config.yaml") }

// Config is the configuration folder.
func (p Paths) Config() string { return p.at(cmp.Or(p.ConfigDir, usualConfig)) }

// State is the state folder.
func (p Paths) State() string { return p.at(cmp.Or(p.StateDir, usualState)) }

// States are the state folder and, where it is another one, the usual one,
// which the unit makes all the same.
func (p Paths) States() []string {
	if p.Service != nil {
		return []string{p.State()}
	}
	return slices.Compact([]string{p.State(), p.at(usualState)})
}

// Run is the run-time folder.
func (p Paths) Run() string { return p.at(cmp.Or(p.RunDir, usualRun)) }

// Options of an installation.
type Options struct {
	Role     string // "server" or "agent"
	JoinLine string // agent: kept in a 0600 file until it was used
	Self     string // path of the running binary
	Paths    Paths
}

// Unit renders the systemd unit for a role. It is no text/template: one that
// is executed anywhere in the program makes the linker keep every exported
// method of every type (docs/RATIONALE.md).
func Unit(role, binary string) []byte {
	return []byte(strings.NewReplacer("@ROLE@", role, "@BINARY@", binary).Replace(unitTemplate))
}

// Install copies the binaries, writes the unit and makes the folders. It
// returns what it did, a line each.
func Install(o Options) ([]string, error) {
	var did []string
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{{filepath.Dir(o.Paths.ConfigFile()), 0o755}, {o.Paths.Config(), 0o755}, {o.Paths.State(), 0o700}, {filepath.Join(o.Paths.Config(), "manifests"), 0o700}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return did, fmt.Errorf("make folder: %w", err)
		}
	}
	if err := copyProgram(o.Self, o.Paths.Binary()); err != nil {
		return did, err
	}
	did = append(did, "program  "+o.Paths.Binary())
	for _, to := range []string{o.Paths.HostBinary(), o.Paths.ProxyBinary(), o.Paths.IngressBinary()} {
		beside := filepath.Join(filepath.Dir(o.Self), filepath.Base(to))
		if !isFile(beside) {
			continue
		}
		if err := copyProgram(beside, to); err != nil {
			return did, err
		}
		did = append(did, "program  "+to)
	}
	if o.JoinLine != "" {
		p := filepath.Join(o.Paths.Config(), "join")
		if err := atomicfile.WriteRaw(p, []byte(o.JoinLine+"\n"), 0o600); err != nil {
			return did, err
		}
		did = append(did, "join     "+p+" (removed once it was used)")
	}
	unit := Unit(o.Role, "/usr/local/bin/dunlin")
	if err := os.MkdirAll(filepath.Dir(o.Paths.Unit()), 0o755); err != nil {
		return did, fmt.Errorf("make folder: %w", err)
	}
	if err := atomicfile.WriteRaw(o.Paths.Unit(), unit, 0o644); err != nil {
		return did, err
	}
	return append(did, "unit     "+o.Paths.Unit(), "state    "+o.Paths.State()), nil
}

// Role is what the installed unit runs, "server" or "agent"; "" is none.
func Role(p Paths) string {
	b, err := os.ReadFile(p.Unit())
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[0], "ExecStart=") {
			return f[1]
		}
	}
	return ""
}

// What Dunlin makes in folders that the configuration names: those may hold
// what others put there, so that only this is taken away.
var (
	StateParts  = []string{"server", "node", "node.forgotten*", "wasm", "oci", "images", "volumes", "claims", "cni"}
	RunParts    = []string{"addresses", "agent.sock", "wasm", "oci", "volumes", "proxy", "ingress", ".new", "lock"}
	ConfigParts = []string{"join", "manifests", "admin.kubeconfig", "registries.yaml", "cni"}
)

// removable is what Remove takes away, without the folder of the configuration
// file, and the folders that it removes if they are empty then.
func removable(p Paths, keepState bool) (list, empty []string) {
	parts := func(dir string, parts []string) {
		for _, part := range parts {
			found, _ := filepath.Glob(filepath.Join(dir, part)) // the pattern is a good one
			list = append(list, found...)
		}
		empty = append(empty, dir)
	}
	if s := p.Service; s != nil {
		if p.Run() != s.Run() {
			parts(p.Run(), RunParts)
		}
		if !keepState && p.Config() != s.Config() {
			parts(p.Config(), ConfigParts)
		}
		if !keepState {
			parts(p.State(), StateParts)
		}
		return list, empty
	}
	named := func(dir, usual string, list []string) {
		if dir != p.at(usual) {
			parts(dir, list)
		}
	}
	list = append(list, p.Unit())
	list = append(list, runParts(p)...)
	named(p.Run(), usualRun, RunParts)
	list = append(list, p.HostBinary(), p.ProxyBinary(), p.IngressBinary(), p.Binary())
	if !keepState {
		list = append(list, p.at(usualState))
		named(p.State(), usualState, StateParts)
		named(p.Config(), usualConfig, ConfigParts)
	}
	return list, empty
}

// runParts is what of the usual run folder is this installation's: all of it,
// unless another agent of this machine holds a claim in there (its network
// namespace, or a run folder of its own below this one), or its pods still need
// what is written down for the last one to put back.
func runParts(p Paths) []string {
	usual := p.at(usualRun)
	if p.Run() != usual && claim.Held(filepath.Join(usual, "lock")) {
		return nil // another agent's
	}
	entries, err := os.ReadDir(usual)
	if err != nil {
		return []string{usual}
	}
	var own []string
	others := false
	for _, e := range entries {
		part := filepath.Join(usual, e.Name())
		locks, _ := filepath.Glob(filepath.Join(part, "*.lock"))
		kept, _ := filepath.Glob(filepath.Join(part, "switched-*.json"))
		if len(kept) > 0 || slices.ContainsFunc(append(locks, filepath.Join(part, "lock")), claim.Held) {
			others = true
			continue
		}
		own = append(own, part)
	}
	if others {
		return own
	}
	return []string{usual}
}

// Present says whether Remove would find anything.
func Present(p Paths, keepState bool) bool {
	list, _ := removable(p, keepState)
	if !keepState && p.Service == nil {
		list = append(list, p.at(usualConfig))
	}
	return slices.ContainsFunc(list, func(f string) bool {
		if !there(f) {
			return false
		}
		self, below := mounts(f)
		return !self || below != "" || len(contents(f)) > 0 // an empty mount point is not ours
	})
}

func there(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// Remove deletes everything that Install and the running software made in
// files. Missing things are fine. keepState leaves the state and the
// configuration. The configuration file, which names the folders, goes last,
// and stays while something else could not be removed: then Remove can be
// called again.
func Remove(p Paths, keepState bool) (did []string, err error) {
	list, empty := removable(p, keepState)
	var errs []error
	remove := func(f string) {
		if !there(f) {
			return
		}
		line, err := removeWhole(f)
		if err != nil {
			errs = append(errs, err)
			return
		}
		did = append(did, line)
	}
	for _, f := range list {
		remove(f)
	}
	for _, dir := range empty {
		if os.Remove(dir) == nil { // else it is somebody else's, too
			did = append(did, "removed  "+dir)
		}
	}
	switch etc := p.at(usualConfig); {
	case keepState, p.Service != nil:
	case len(errs) == 0:
		remove(etc)
	case there(etc):
		did = append(did, "kept     "+etc+" until the rest is gone: run it again")
	}
	return did, errors.Join(errs...)
}

func isFile(p string) bool {
	info, err := os.Stat(p)
	return err == nil && info.Mode().IsRegular()
}

// copyProgram replaces the target atomically, so that a running program of
// that name is not disturbed.
func copyProgram(from, to string) (err error) {
	if a, e1 := os.Stat(from); e1 == nil {
		if b, e2 := os.Stat(to); e2 == nil && os.SameFile(a, b) {
			return nil
		}
	}
	src, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("install program: %w", err)
	}
	defer func() { _ = src.Close() }()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return fmt.Errorf("install program: %w", err)
	}
	dst, err := os.CreateTemp(filepath.Dir(to), ".dunlin*")
	if err != nil {
		return fmt.Errorf("install program: %w", err)
	}
	defer func() {
		if err != nil {
			_ = dst.Close()
			_ = os.Remove(dst.Name())
			err = fmt.Errorf("install program: %w", err)
		}
	}()
	if _, err = io.Copy(dst, src); err != nil {
		return err
	}
	if err = dst.Chmod(0o755); err != nil {
		return err
	}
	if err = dst.Sync(); err != nil {
		return err
	}
	if err = dst.Close(); err != nil {
		return err
	}
	return os.Rename(dst.Name(), to)
}
