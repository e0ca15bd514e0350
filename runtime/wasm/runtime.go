package wasm

import (
	"context"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/process"
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
	watch  *process.Watcher

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
	binary, err := FindHost(cfg.HostBinary)
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
	if r.watch, err = process.NewWatcher(); err != nil {
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
	r.watch.Close()
	return nil
}

// Exits implements workload.Runtime.
func (r *Runtime) Exits() <-chan workload.ID { return r.watch.Exits() }

// Prepare implements workload.Runtime.
func (r *Runtime) Prepare(ctx context.Context, req workload.ImageRequest, progress workload.Progress) (workload.ImageState, error) {
	st, err := r.store.Resolve(ctx, req, r.compiles(ctx, progress), progress)
	if err != nil {
		return st, err
	}
	_, err = r.cache.ensure(ctx, st.Digest, func() (*os.File, error) { return r.store.Open(ctx, st.Digest, req.Image) }, progress)
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

// compilerScore is a compiler's: it is tried again, and the agent must not die
// for it.
const compilerScore = 800

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
