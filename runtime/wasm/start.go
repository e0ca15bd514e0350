package wasm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Start implements workload.Runtime.
func (r *Runtime) Start(ctx context.Context, s workload.Spec) (workload.State, error) {
	defer closeListeners(s.Listeners)
	unlock, err := r.lock(ctx, s.ID)
	if err != nil {
		return workload.State{}, err
	}
	defer unlock()
	st, ok, err := r.read(s.ID)
	if err != nil {
		return st, err
	}
	if ok && st.Phase != workload.Created {
		return st, nil // it exists: adopted
	}
	if ok {
		// An agent died between the record and the host.
		if err := r.remove(ctx, s.ID); err != nil {
			return st, err
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("the host program did not start its guest within %s", startTimeout))
	defer cancel()
	if err := r.start(ctx, s); err != nil {
		var se *workload.StartError
		if !errors.As(err, &se) {
			err = &workload.StartError{Reason: "CreateContainerError", Message: err.Error(), Err: err}
		}
		if rerr := r.remove(context.WithoutCancel(ctx), s.ID); rerr != nil {
			r.log.Warn("left over after a failed start", "pod", s.PodName, "container", s.ID.Container, "err", rerr)
		}
		return workload.State{ID: s.ID, Phase: workload.Exited, Reason: host.ReasonStart, Message: err.Error(), Digest: s.Digest}, err
	}
	st, _, err = r.read(s.ID)
	return st, err
}

func closeListeners(ls []workload.Listener) {
	for _, l := range ls {
		if l.File != nil {
			_ = l.File.Close()
		}
	}
}

func (r *Runtime) start(ctx context.Context, s workload.Spec) error {
	module, err := r.store.Open(ctx, s.Digest, s.Image)
	if err != nil {
		return err
	}
	defer func() { _ = module.Close() }()
	code, err := r.cache.ensure(ctx, s.Digest, func() (*os.File, error) { return r.store.Open(ctx, s.Digest, s.Image) }, nil)
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		// The host compiles for itself then, within the container's limits.
		r.log.Warn("no compiled code", "image", s.Image, "err", err)
	}
	id := r.identity(s)
	group, err := r.makeFolders(ctx, s, id)
	if err != nil {
		return err
	}
	spec, sockets := r.hostSpec(s, id, code)
	dir := r.folder(s.ID)
	run, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("run folder: %w", err)
	}
	defer func() { _ = run.Close() }()
	stderr, err := os.OpenFile(filepath.Join(dir, host.StderrFile), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("run folder: %w", err)
	}
	defer func() { _ = stderr.Close() }()
	p, err := spawn(r.binary, host.CommandRun, module, run, stderr, nil, sockets)
	if err != nil {
		return err
	}
	if group != nil {
		if err := group.Add(p.pid); err != nil {
			p.abandon()
			killChild(p.pid)
			return err
		}
	}
	// Below the agent's own only with CAP_SYS_RESOURCE: else it stays what it
	// is, which is not worse than any other's.
	oomScore(p.pid, s.Resources.OOMScoreAdj)
	reply, err := p.send(ctx, spec)
	if err == nil && !reply.Running {
		err = startError(reply)
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		ws := killChild(p.pid)
		if errors.Is(err, errHostDied) {
			err = explainEarlyDeath(group, s.Resources.MemoryLimit, dir, describe(ws), err)
		}
		if reply.CacheBad {
			r.cache.drop(s.Digest)
		}
		return err
	}
	if reply.CacheBad {
		r.log.Warn("compiled code did not verify and was not used", "image", s.Image)
		r.cache.drop(s.Digest)
	}
	if start, err := process.StartTime(p.pid); err == nil {
		r.watch.Add(s.ID, p.pid, start)
	} else {
		reap(p.pid) // it has ended already
	}
	return nil
}

// oomScore says how soon the kernel kills a process when memory runs out
// (proc_pid_oom_score_adj(5)).
func oomScore(pid, adj int) {
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(adj)), 0)
}

// startError words a host's refusal.
func startError(reply host.Reply) error {
	reason := "CreateContainerError"
	if strings.HasPrefix(reply.Message, "load module") {
		reason = ReasonInvalidModule
	}
	return &workload.StartError{Reason: reason, Message: reply.Message}
}

func explainEarlyDeath(group cgroup.Group, limit int64, dir, how string, err error) error {
	if group != nil {
		if st, serr := group.Stats(); serr == nil && st.OOMKills > 0 {
			return &workload.StartError{Reason: reasonOOM, Message: "the container's memory limit is too small to load the module; raise resources.limits.memory, to " + roomier(limit) + " say", Err: err}
		}
	}
	return fmt.Errorf("%w: %s: %s", err, how, firstLines(filepath.Join(dir, host.StderrFile), 512))
}

// roomier is a limit to try next: at least twice the one in force.
func roomier(limit int64) string {
	mebi := int64(32)
	for mebi < 1<<40 && mebi<<20 < 2*limit {
		mebi *= 2
	}
	return strconv.FormatInt(mebi, 10) + "Mi"
}

// makeFolders makes the run folder, the log folder, and the control group.
func (r *Runtime) makeFolders(ctx context.Context, s workload.Spec, id host.Identity) (cgroup.Group, error) {
	rec := record{
		ID: s.ID, Namespace: s.PodNamespace, Pod: s.PodName, Image: s.Image, Digest: s.Digest, LogPath: s.LogPath,
		StopDeadline: s.StopDeadline, CreatedAt: time.Now().UTC(),
	}
	if r.cfg.Cgroups != nil && r.cfg.Cgroups.Facts().Mode != cgroup.None {
		parent := s.CgroupParent
		if parent == "" {
			parent = path.Join("pods", folderName(workload.ID{PodUID: s.ID.PodUID}))
		}
		rec.Cgroup = path.Join(parent, s.ID.Container+"-"+strconv.Itoa(s.ID.Attempt))
		if err := r.cfg.Cgroups.EndAttempts(ctx, rec.Cgroup); err != nil {
			return nil, fmt.Errorf("left of an earlier attempt: %w", err)
		}
	}
	dir := r.folder(s.ID)
	if err := errors.Join(os.MkdirAll(r.cfg.RunDir, 0o711), os.Mkdir(dir, 0o700)); err != nil { // somebody may have removed what New made
		return nil, fmt.Errorf("run folder: %w", err)
	}
	b, err := json.Marshal(rec)
	if err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	if err := atomicfile.Write(filepath.Join(dir, host.RecordFile), b, 0o600); err != nil {
		return nil, err
	}
	logDir := filepath.Dir(s.LogPath)
	if err := os.MkdirAll(logDir, 0o755); err != nil {
		return nil, fmt.Errorf("log folder: %w", err)
	}
	if r.root && id.UID >= 0 {
		for _, d := range []string{dir, logDir, s.LogPath} {
			if err := os.Lchown(d, id.UID, id.GID); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("run folder: %w", err)
			}
		}
	}
	if rec.Cgroup == "" {
		return nil, nil
	}
	g, err := r.cfg.Cgroups.Create(rec.Cgroup, cgroup.Limits{
		CPURequestMilli: s.Resources.CPURequestMilli, CPULimitMilli: s.Resources.CPULimitMilli,
		MemoryRequest: s.Resources.MemoryRequest, MemoryLimit: s.Resources.MemoryLimit, PIDs: cmp.Or(s.Resources.PidsLimit, defaultPIDs),
	})
	if err != nil {
		return nil, fmt.Errorf("control group: %w", err)
	}
	return g, nil
}

// hostSpec translates; the sockets follow in the order of Spec.Sockets.
func (r *Runtime) hostSpec(s workload.Spec, id host.Identity, code compiled) (host.Spec, []*os.File) {
	h := host.Spec{
		Name: s.PodNamespace + "/" + s.PodName + "/" + s.ID.Container, Digest: s.Digest,
		Args: arguments(s), Env: slices.Clone(s.Env), MemoryLimit: s.Resources.MemoryLimit,
		LogPath: s.LogPath, LogMaxBytes: s.LogMaxBytes, LogMaxFiles: s.LogMaxFiles,
		StopDeadline: s.StopDeadline, CacheDir: code.dir, CacheSum: code.sum, Sandbox: id, Stdin: s.Stdin,
		Outbound: host.Outbound{Allow: s.Outbound.Allow, DNS: s.Outbound.DNS, Search: s.Outbound.Search},
	}
	if s.WorkingDir != "" {
		h.Env = append(h.Env, "PWD="+s.WorkingDir)
	}
	for _, m := range s.Mounts {
		h.Mounts = append(h.Mounts, host.Mount{Source: m.Source, Target: m.Target, ReadOnly: m.ReadOnly})
	}
	var sockets []*os.File
	for _, l := range s.Listeners {
		if l.File == nil {
			continue
		}
		want := host.Listener{Name: l.Name, Port: l.Port}
		i := slices.Index(h.Listeners, want)
		if i < 0 {
			i = len(h.Listeners)
			h.Listeners = append(h.Listeners, want)
		}
		h.Sockets = append(h.Sockets, i)
		sockets = append(sockets, l.File)
	}
	return h, sockets
}

// arguments are the guest's argv: the command replaces the module's name.
func arguments(s workload.Spec) []string {
	if len(s.Command) > 0 {
		return append(slices.Clone(s.Command), s.Args...)
	}
	name, _, _ := strings.Cut(s.Image, "@")
	return append([]string{path.Base(strings.TrimPrefix(name, "file://"))}, s.Args...)
}
