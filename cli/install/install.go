// Package install puts Dunlin on a host and takes it off again, leaving the
// host as it was: a binary, one systemd unit, two folders. Every step is
// idempotent and goes through one list, so that what is installed and what
// is removed cannot drift apart.
package install

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

//go:embed dunlin.service
var unitTemplate string

// UnitName of the systemd unit.
const UnitName = "dunlin.service"

// Paths on the host, all below Root ("" is the real host).
type Paths struct {
	Root string
}

func (p Paths) at(s string) string { return filepath.Join("/", p.Root, s) }

// Binary is where the program is put.
func (p Paths) Binary() string { return p.at("usr/local/bin/dunlin") }

// HostBinary is where the slim Wasm host program is put.
func (p Paths) HostBinary() string { return p.at("usr/local/bin/dunlin-wasm") }

// Unit is the systemd unit file.
func (p Paths) Unit() string { return p.at("etc/systemd/system/" + UnitName) }

// Config is the configuration folder.
func (p Paths) Config() string { return p.at("etc/dunlin") }

// State is the state folder.
func (p Paths) State() string { return p.at("var/lib/dunlin") }

// Run is the run-time folder.
func (p Paths) Run() string { return p.at("run/dunlin") }

// Options of an installation.
type Options struct {
	Role     string // "server" or "agent"
	JoinLine string // agent: kept in a 0600 file until it was used
	Self     string // path of the running binary
	Paths    Paths
}

// Unit renders the systemd unit for a role.
func Unit(role, binary string) ([]byte, error) {
	t, err := template.New("unit").Parse(unitTemplate)
	if err != nil {
		return nil, fmt.Errorf("unit template: %w", err)
	}
	var b bytes.Buffer
	if err := t.Execute(&b, map[string]string{"Role": role, "Binary": binary}); err != nil {
		return nil, fmt.Errorf("unit template: %w", err)
	}
	return b.Bytes(), nil
}

// Install copies the binaries, writes the unit and makes the folders. It
// returns what it did, a line each.
func Install(o Options) ([]string, error) {
	var did []string
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{{o.Paths.Config(), 0o755}, {o.Paths.State(), 0o700}, {filepath.Join(o.Paths.Config(), "manifests"), 0o700}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return did, fmt.Errorf("make folder: %w", err)
		}
	}
	if err := copyProgram(o.Self, o.Paths.Binary()); err != nil {
		return did, err
	}
	did = append(did, "program  "+o.Paths.Binary())
	if beside := filepath.Join(filepath.Dir(o.Self), "dunlin-wasm"); isFile(beside) {
		if err := copyProgram(beside, o.Paths.HostBinary()); err != nil {
			return did, err
		}
		did = append(did, "program  "+o.Paths.HostBinary())
	}
	if o.JoinLine != "" {
		p := filepath.Join(o.Paths.Config(), "join")
		if err := atomicfile.WriteRaw(p, []byte(o.JoinLine+"\n"), 0o600); err != nil {
			return did, err
		}
		did = append(did, "join     "+p+" (removed once it was used)")
	}
	unit, err := Unit(o.Role, "/usr/local/bin/dunlin")
	if err != nil {
		return did, err
	}
	if err := os.MkdirAll(filepath.Dir(o.Paths.Unit()), 0o755); err != nil {
		return did, fmt.Errorf("make folder: %w", err)
	}
	if err := atomicfile.WriteRaw(o.Paths.Unit(), unit, 0o644); err != nil {
		return did, err
	}
	return append(did, "unit     "+o.Paths.Unit(), "state    "+o.Paths.State()), nil
}

// Remove deletes everything that Install and the running software made in
// files. Missing things are fine. keepState leaves the state and the
// configuration.
func Remove(p Paths, keepState bool) ([]string, error) {
	list := []string{p.Unit(), p.Run(), p.HostBinary(), p.Binary()}
	if !keepState {
		list = append(list, p.State(), p.Config())
	}
	var did []string
	var errs []error
	for _, f := range list {
		if _, err := os.Lstat(f); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if mounted(f) {
			errs = append(errs, fmt.Errorf("remove %s: something is still mounted below it", f))
			continue
		}
		if err := os.RemoveAll(f); err != nil {
			errs = append(errs, fmt.Errorf("remove: %w", err))
			continue
		}
		did = append(did, "removed  "+f)
	}
	return did, errors.Join(errs...)
}

// mounted says whether a file system is mounted at or below the path:
// RemoveAll must never walk into somebody's data.
func mounted(path string) bool {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 4 && (f[4] == path || strings.HasPrefix(f[4], path+"/")) {
			return true
		}
	}
	return false
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
