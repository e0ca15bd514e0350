package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
)

// Programs are the node's own programs that containers need.
type Programs struct {
	Runtime string // path of crun or runc
	Version string // "runc 1.1.5"
	Conmon  string // path
}

// Kind is "crun" or "runc".
func (p Programs) Kind() string { return filepath.Base(p.Runtime) }

// MissingError says why a node cannot run OCI containers.
type MissingError struct{ Reasons []string }

// Error implements error.
func (e *MissingError) Error() string { return strings.Join(e.Reasons, "; ") }

// Find looks for the programs and chooses the OCI runtime by making a
// container with it, not by its being there: crun refuses hybrid control
// groups, for one. crun is tried first, since it needs less memory. dir is a
// folder to work in. The error is a *MissingError.
func Find(ctx context.Context, dir string, tree *cgroup.Tree) (Programs, error) {
	var p Programs
	missing := &MissingError{}
	if os.Geteuid() != 0 {
		missing.Reasons = append(missing.Reasons, "the agent does not run as root")
		return p, missing
	}
	if f := tree.Facts(); f.Mode == cgroup.None {
		missing.Reasons = append(missing.Reasons, "no control groups: "+f.Reason)
		return p, missing
	}
	conmon, err := exec.LookPath("conmon")
	if err != nil {
		missing.Reasons = append(missing.Reasons, "conmon is not installed")
	}
	var tried []string
	for _, name := range []string{"crun", "runc"} {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		if err := try(ctx, path, dir, tree); err != nil {
			tried = append(tried, fmt.Sprintf("%s does not work here: %v", name, err))
			continue
		}
		p = Programs{Runtime: path, Version: version(ctx, path), Conmon: conmon}
		break
	}
	switch {
	case p.Runtime == "" && len(tried) == 0:
		missing.Reasons = append(missing.Reasons, "neither crun nor runc is installed")
	case p.Runtime == "":
		missing.Reasons = append(missing.Reasons, tried...)
	}
	if len(missing.Reasons) > 0 {
		return Programs{}, missing
	}
	return p, nil
}

func version(ctx context.Context, path string) string {
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	first, _, _ := strings.Cut(string(out), "\n")
	if err != nil || first == "" {
		return filepath.Base(path)
	}
	return strings.Replace(first, " version ", " ", 1)
}

// tryTimeout is generous: emulated machines need seconds, busy ones more.
const tryTimeout = startTimeout

// try creates a container and deletes it. Nothing in it is ever run: it
// waits for a start that does not come.
func try(ctx context.Context, runtime, dir string, tree *cgroup.Tree) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, tryTimeout, fmt.Errorf("it made no container within %s: is this machine very busy?", tryTimeout))
	defer cancel()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := endTries(ctx, dir, tree); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(dir, ".try-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	for _, d := range []string{"rootfs/proc", "rootfs/dev"} {
		if err := os.MkdirAll(filepath.Join(tmp, d), 0o755); err != nil {
			return err
		}
	}
	// It is looked for, and not run.
	if err := os.WriteFile(filepath.Join(tmp, "rootfs", "init"), []byte("#!\n"), 0o755); err != nil {
		return err
	}
	id := filepath.Base(tmp)[1:]
	s := specs.Spec{
		Version: specVersion,
		Root:    &specs.Root{Path: "rootfs"},
		Process: &specs.Process{Args: []string{"/init"}, Cwd: "/"},
		Mounts:  []specs.Mount{{Destination: "/proc", Type: "proc", Source: "proc"}, {Destination: "/dev", Type: "tmpfs", Source: "tmpfs"}},
		Linux: &specs.Linux{
			CgroupsPath: tree.Name(id),
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}},
		},
	}
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tmp, "config.json"), b, 0o600); err != nil {
		return err
	}
	root := filepath.Join(tmp, "root")
	create := command(ctx, runtime, root, "create", "--bundle", tmp, id)
	// Not a pipe of ours: the waiting container holds its end.
	stderr, err := os.OpenFile(filepath.Join(tmp, "stderr"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = stderr.Close() }()
	create.Stdout, create.Stderr = stderr, stderr
	err = create.Run()
	if err != nil {
		if text, rerr := os.ReadFile(stderr.Name()); rerr == nil && len(text) > 0 {
			err = fmt.Errorf("%w: %s", err, lastLine(text))
		}
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}
	// Also when the time is over: what was made must go.
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), tryTimeout)
	defer cancel()
	_ = command(ctx, runtime, root, "delete", "--force", id).Run()
	return errors.Join(err, tree.End(ctx, id), tree.Prune(id))
}

// endTries removes what an agent that was killed meanwhile has left.
func endTries(ctx context.Context, dir string, tree *cgroup.Tree) error {
	old, err := filepath.Glob(filepath.Join(dir, ".try-*"))
	if err != nil {
		return err
	}
	for _, tmp := range old {
		id := filepath.Base(tmp)[1:]
		if err := errors.Join(tree.End(ctx, id), tree.Prune(id), os.RemoveAll(tmp)); err != nil {
			return fmt.Errorf("an earlier try of the OCI runtime: %w", err)
		}
	}
	return nil
}

// command is one call of the OCI runtime. It must not be tied to the agent's
// terminal or process group: a Ctrl-C is for the agent alone.
func command(ctx context.Context, runtime, root string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, runtime, append([]string{"--root", root}, args...)...)
	c.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	c.SysProcAttr = sessionOfItsOwn()
	return c
}

func lastLine(b []byte) string {
	b = bytes.TrimSpace(b)
	if i := bytes.LastIndexByte(b, '\n'); i >= 0 {
		b = b[i+1:]
	}
	s := string(b)
	// runc logs as key=value pairs where it has no log file.
	if _, msg, ok := strings.Cut(s, `msg="`); ok {
		s = strings.ReplaceAll(strings.TrimSuffix(msg, `"`), `\"`, `"`)
	}
	return strings.ToValidUTF8(s, "?")
}
