package wasm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Times that Start and Stop wait.
const (
	startTimeout = 90 * time.Second
	// stopSlack is how much longer than the grace period Stop waits for the
	// host to end its guest before it does so itself.
	stopSlack      = time.Second
	controlTimeout = 2 * time.Second
	killTimeout    = 10 * time.Second
)

// dataMargin is what a host needs beside its guest's memory, where only
// RLIMIT_DATA limits it.
const dataMargin = 256 << 20

// defaultPIDs bounds the threads of a host where nobody asked for a limit; an
// idle one has about ten, and a guest cannot make any.
const defaultPIDs = 256

// uidRange is how many uids pods are spread over.
const uidRange = 1_000_000

// Runtime runs Wasm containers; it implements workload.Runtime,
// workload.StatsReader and workload.Extender.
type Runtime struct {
	cfg    Config
	log    *slog.Logger
	binary string
	root   bool
	store  *Store
	cache  *cache
	watch  *watcher

	mu    sync.Mutex
	locks map[workload.ID]*attemptLock
}

// attemptLock serialises what changes one attempt.
type attemptLock struct {
	ch    chan struct{}
	users int
}

var (
	_ workload.Runtime     = (*Runtime)(nil)
	_ workload.StatsReader = (*Runtime)(nil)
	_ workload.Extender    = (*Runtime)(nil)
)

// record is what the agent knows of an attempt before it starts its host.
type record struct {
	ID           workload.ID   `json:"id"`
	Namespace    string        `json:"namespace"`
	Pod          string        `json:"pod"`
	Image        string        `json:"image"`
	Digest       string        `json:"digest"`
	LogPath      string        `json:"logPath"`
	Cgroup       string        `json:"cgroup,omitempty"`
	StopDeadline time.Duration `json:"stopDeadline,omitempty"`
	CreatedAt    time.Time     `json:"createdAt"`
}

// New opens the runtime: what survived an earlier agent is watched again.
// Close ends the watching and nothing else.
func New(cfg Config) (*Runtime, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.BaseUID == 0 {
		cfg.BaseUID = 1_000_000_000
	}
	binary, err := findHost(cfg.HostBinary)
	if err != nil {
		return nil, err
	}
	r := &Runtime{cfg: cfg, log: cfg.Logger, binary: binary, root: os.Geteuid() == 0, locks: map[workload.ID]*attemptLock{}}
	if r.store, err = NewStore(filepath.Join(cfg.StateDir, "modules"), cfg.MaxModuleBytes, cfg.Fetcher, cfg.Logger); err != nil {
		return nil, err
	}
	uid := -1
	if r.root {
		uid = cfg.BaseUID + uidRange
	}
	if r.cache, err = newCache(filepath.Join(cfg.StateDir, "compiled"), cfg.CacheBytes, binary, uid, cfg.Logger); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.RunDir, 0o711); err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	if r.watch, err = newWatcher(); err != nil {
		return nil, err
	}
	return r, nil
}

// Name implements workload.Runtime.
func (r *Runtime) Name() string { return Handler }

// Store is where `dunlin import` puts modules.
func (r *Runtime) Store() *Store { return r.store }

// HostBinary is the program that runs guests; "/proc/self/exe" when it is
// this program itself, which costs more memory per guest.
func (r *Runtime) HostBinary() string { return r.binary }

// PodUID is the uid that a pod's guests have when the agent is root and the
// pod asks for none; -1 otherwise. Volumes that they write must allow it.
func (r *Runtime) PodUID(podUID string) int {
	if !r.root {
		return -1
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(podUID))
	return r.cfg.BaseUID + int(h.Sum32()%uidRange)
}

// Close implements workload.Runtime.
func (r *Runtime) Close() error {
	r.watch.close()
	return nil
}

// Exits implements workload.Runtime.
func (r *Runtime) Exits() <-chan workload.ID { return r.watch.exits }

// Prepare implements workload.Runtime.
func (r *Runtime) Prepare(ctx context.Context, image, policy string, progress workload.Progress) (workload.ImageState, error) {
	st, err := r.store.Resolve(ctx, image, policy)
	if err != nil {
		return st, err
	}
	_, err = r.cache.ensure(ctx, st.Digest, func() (*os.File, error) { return r.store.Open(ctx, st.Digest, image) }, progress)
	return st, err
}

// lock gives the caller an attempt for itself.
func (r *Runtime) lock(ctx context.Context, id workload.ID) (unlock func(), err error) {
	r.mu.Lock()
	l := r.locks[id]
	if l == nil {
		l = &attemptLock{ch: make(chan struct{}, 1)}
		r.locks[id] = l
	}
	l.users++
	r.mu.Unlock()
	release := func() {
		r.mu.Lock()
		if l.users--; l.users == 0 {
			delete(r.locks, id)
		}
		r.mu.Unlock()
	}
	select {
	case l.ch <- struct{}{}:
		return func() {
			<-l.ch
			release()
		}, nil
	case <-ctx.Done():
		release()
		return nil, fmt.Errorf("container %s: %w", id.Container, context.Cause(ctx))
	}
}

// folder is the attempt's run folder.
func (r *Runtime) folder(id workload.ID) string {
	return filepath.Join(r.cfg.RunDir, folderName(id))
}

// folderName is short and safe whatever the uid is; the record holds the
// real ID.
func folderName(id workload.ID) string {
	clean := strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-':
			return c
		}
		return '_'
	}, id.PodUID)
	if clean != id.PodUID || len(clean) > 64 || clean == "" {
		h := fnv.New64a()
		_, _ = h.Write([]byte(id.PodUID))
		clean = fmt.Sprintf("%.40s-%016x", clean, h.Sum64())
	}
	return clean + "_" + id.Container + "_" + strconv.Itoa(id.Attempt)
}

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
	group, err := r.makeFolders(s, id)
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
	if s.Resources.OOMScoreAdj > 0 {
		_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.pid), []byte(strconv.Itoa(s.Resources.OOMScoreAdj)), 0)
	}
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
			err = r.explainEarlyDeath(group, dir, describe(ws), err)
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
	if start, err := host.StartTime(p.pid); err == nil {
		r.watch.add(s.ID, p.pid, start)
	} else {
		reap(p.pid) // it has ended already
	}
	return nil
}

// startError words a host's refusal.
func startError(reply host.Reply) error {
	reason := "CreateContainerError"
	if strings.HasPrefix(reply.Message, "load module") {
		reason = ReasonInvalidModule
	}
	return &workload.StartError{Reason: reason, Message: reply.Message}
}

func (r *Runtime) explainEarlyDeath(group cgroup.Group, dir, how string, err error) error {
	if group != nil {
		if st, serr := group.Stats(); serr == nil && st.OOMKills > 0 {
			return &workload.StartError{Reason: reasonOOM, Message: "the container's memory limit is too small to load the module", Err: err}
		}
	}
	return fmt.Errorf("%w: %s: %s", err, how, firstLines(filepath.Join(dir, host.StderrFile), 512))
}

// identity is the uid and gid that the host takes, -1 for its own.
func (r *Runtime) identity(s workload.Spec) host.Identity {
	id := host.Identity{UID: r.PodUID(s.ID.PodUID), GID: -1}
	if r.root && s.Identity.UID != nil {
		id.UID = int(*s.Identity.UID)
	}
	id.GID = id.UID
	if r.root && s.Identity.GID != nil {
		id.GID = int(*s.Identity.GID)
	}
	if r.root {
		for _, g := range s.Identity.Groups {
			id.Groups = append(id.Groups, int(g))
		}
	}
	if limit := s.Resources.MemoryLimit; limit > 0 && (r.cfg.Cgroups == nil || !r.cfg.Cgroups.Facts().Memory) {
		id.Data = uint64(limit) + dataMargin
	}
	return id
}

// makeFolders makes the run folder, the log folder, and the control group.
func (r *Runtime) makeFolders(s workload.Spec, id host.Identity) (cgroup.Group, error) {
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
	}
	dir := r.folder(s.ID)
	if err := os.Mkdir(dir, 0o700); err != nil {
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
		StopDeadline: s.StopDeadline, CacheDir: code.dir, CacheSum: code.sum, Sandbox: id,
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

// List implements workload.Runtime: every attempt, and all that live are
// watched from then on.
func (r *Runtime) List(ctx context.Context) ([]workload.State, error) {
	entries, err := os.ReadDir(r.cfg.RunDir)
	if err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	var out []workload.State
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("list: %w", err)
		}
		if !e.IsDir() {
			continue
		}
		dir := filepath.Join(r.cfg.RunDir, e.Name())
		rec, err := r.readRecord(dir)
		if err != nil {
			r.reclaim(dir, err)
			continue
		}
		st, ok, err := r.State(ctx, rec.ID)
		if err != nil {
			return nil, err
		}
		if ok {
			out = append(out, st)
		}
	}
	return out, nil
}

// reclaim ends and deletes an attempt that nobody can name any more.
func (r *Runtime) reclaim(dir string, why error) {
	if h, ok := r.readHost(dir); ok && r.isAlive(h) {
		_ = unix.Kill(h.PID, unix.SIGKILL)
	}
	r.log.Warn("run folder without a readable record removed", "folder", dir, "err", why)
	_ = os.RemoveAll(dir)
}

// Stats implements workload.StatsReader. Without control groups it is the
// host process's own usage.
func (r *Runtime) Stats(_ context.Context, id workload.ID) (workload.Stats, error) {
	dir := r.folder(id)
	rec, err := r.readRecord(dir)
	if err != nil {
		return workload.Stats{}, err
	}
	if rec.Cgroup != "" && r.cfg.Cgroups != nil {
		st, err := r.cfg.Cgroups.Open(rec.Cgroup).Stats()
		if err != nil {
			return workload.Stats{}, fmt.Errorf("stats of %s: %w", id.Container, err)
		}
		return workload.Stats{CPUNanos: st.CPUNanos, MemoryBytes: st.MemoryBytes, PIDs: st.PIDs}, nil
	}
	h, ok := r.readHost(dir)
	if !ok || !r.isAlive(h) {
		return workload.Stats{}, fmt.Errorf("stats of %s: %w", id.Container, fs.ErrNotExist)
	}
	return processStats(h.PID)
}

// Extend implements workload.Extender.
func (r *Runtime) Extend(_ context.Context, id workload.ID, until time.Duration) error {
	if until <= 0 || until > math.MaxInt64/2 {
		return fmt.Errorf("extend %s: %s is no deadline", id.Container, until)
	}
	return host.Send(r.folder(id), host.Request{Command: "extend", Until: until}, controlTimeout)
}
