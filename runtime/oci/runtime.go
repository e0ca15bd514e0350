package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/watchdog"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Times that calls wait for other programs.
const (
	startTimeout = 90 * time.Second
	killTimeout  = 10 * time.Second
	// drainTimeout is how long conmon may take to write an exit code after
	// its container's first process ended.
	drainTimeout = 5 * time.Second
)

// Names in an attempt's run folder.
const (
	recordFile      = "record.json"
	startedFile     = "started.json"
	endFile         = "end.json"
	bundleFile      = "config.json"
	rootfsDir       = "rootfs"
	pidFile         = "pid"
	monitorPIDFile  = "conmon.pid"
	exitDir         = "exits"
	oomFile         = "oom" // written by conmon
	terminationFile = "termination-log"
)

// Runtime runs OCI containers; it implements workload.Runtime,
// workload.StatsReader, workload.Execer and workload.Attacher.
type Runtime struct {
	cfg                 Config
	log                 *slog.Logger
	watch               *process.Watcher
	bounding, effective []string // capabilities of the agent
	stop                context.CancelFunc
	done                sync.WaitGroup

	mu    sync.Mutex
	locks map[workload.ID]*attemptLock
	logs  map[workload.ID]logFile // of running attempts
}

type attemptLock struct {
	ch    chan struct{}
	users int
}

var (
	_ workload.Runtime     = (*Runtime)(nil)
	_ workload.StatsReader = (*Runtime)(nil)
	_ workload.Execer      = (*Runtime)(nil)
	_ workload.Attacher    = (*Runtime)(nil)
)

// record is what the agent knows of an attempt before it is created.
type record struct {
	ID         workload.ID `json:"id"`
	Namespace  string      `json:"namespace"`
	Pod        string      `json:"pod"`
	Image      string      `json:"image"`
	Digest     string      `json:"digest"`
	LogPath    string      `json:"logPath"`
	LogFiles   int         `json:"logFiles"`
	LogBytes   int64       `json:"logBytes"`
	Cgroup     string      `json:"cgroup"`
	StopSignal string      `json:"stopSignal,omitempty"`
	Fallback   bool        `json:"fallback,omitempty"` // terminationMessagePolicy
	TTY        bool        `json:"tty,omitempty"`
	Runtime    string      `json:"runtime"` // path of the program that made it
	Name       string      `json:"name"`    // the container's for the program
	// Grace is how long it gets when it is stopped at its deadline.
	Grace time.Duration `json:"grace,omitempty"`
}

// started is what is known once the container was created.
type started struct {
	PID          int       `json:"pid"`
	Start        uint64    `json:"start"`
	Monitor      int       `json:"monitor"`
	MonitorStart uint64    `json:"monitorStart"`
	BootID       string    `json:"bootID"`
	StartedAt    time.Time `json:"startedAt"`
}

// New opens the runtime: what survived an earlier agent is watched again.
// Close ends the watching and nothing else.
func New(cfg Config) (*Runtime, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r := &Runtime{cfg: cfg, log: cfg.Logger, locks: map[workload.ID]*attemptLock{}, logs: map[workload.ID]logFile{}}
	r.bounding, r.effective = ownCapabilities()
	for _, d := range []string{r.containers(), r.podsDir(), r.rootDir(), r.socketDir(), r.upperDir("")} {
		if err := os.MkdirAll(d, 0o711); err != nil {
			return nil, fmt.Errorf("run folder: %w", err)
		}
	}
	var err error
	if r.watch, err = process.NewWatcher(); err != nil {
		return nil, err
	}
	r.endExecs()
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	r.done.Go(func() { r.keepLogs(ctx) })
	return r, nil
}

func (r *Runtime) containers() string { return filepath.Join(r.cfg.RunDir, "c") }
func (r *Runtime) rootDir() string    { return filepath.Join(r.cfg.RunDir, "r") }
func (r *Runtime) socketDir() string  { return filepath.Join(r.cfg.RunDir, "s") }
func (r *Runtime) upperDir(folder string) string {
	return filepath.Join(r.cfg.StateDir, "containers", folder)
}
func (r *Runtime) folder(id workload.ID) string { return filepath.Join(r.containers(), folderName(id)) }

// Name implements workload.Runtime.
func (r *Runtime) Name() string { return Handler }

// Programs are what this runtime uses.
func (r *Runtime) Programs() Programs { return r.cfg.Programs }

// Close implements workload.Runtime.
func (r *Runtime) Close() error {
	r.stop()
	r.done.Wait()
	r.watch.Close()
	return nil
}

// Exits implements workload.Runtime.
func (r *Runtime) Exits() <-chan workload.ID { return r.watch.Exits() }

// Prepare implements workload.Runtime.
func (r *Runtime) Prepare(ctx context.Context, q workload.ImageRequest, progress workload.Progress) (workload.ImageState, error) {
	img, err := r.cfg.Images.Image(ctx, q, progress)
	if err != nil {
		return workload.ImageState{}, err
	}
	return workload.ImageState{Digest: img.Digest, Size: img.Size}, nil
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
	if id.Container == "" {
		return clean
	}
	return clean + "_" + id.Container + "_" + strconv.Itoa(id.Attempt)
}

// shortName is the container's name for runc and conmon, which use it in the
// paths of sockets, of at most 107 bytes (unix(7)).
func (r *Runtime) shortName(folder string) string {
	h := fnv.New128a()
	_, _ = h.Write([]byte(folder))
	return fmt.Sprintf("%x", h.Sum(nil)[:10])
}

// Start implements workload.Runtime.
func (r *Runtime) Start(ctx context.Context, s workload.Spec) (workload.State, error) {
	for _, l := range s.Listeners {
		if l.File != nil {
			_ = l.File.Close() // a container opens its own
		}
	}
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
		// An agent died while it was created.
		if err := r.remove(ctx, s.ID); err != nil {
			return st, err
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("%s did not start the container within %s", r.cfg.Programs.Kind(), startTimeout))
	defer cancel()
	if err := r.start(ctx, s); err != nil {
		var se *workload.StartError
		if !errors.As(err, &se) {
			se = &workload.StartError{Reason: "CreateContainerError", Message: err.Error(), Err: err}
		}
		if hint := r.noSpace(se.Error(), s.LogPath); hint != "" && se.Hint == "" {
			c := *se
			c.Hint = hint
			se = &c
		}
		err = se
		if rerr := r.remove(context.WithoutCancel(ctx), s.ID); rerr != nil {
			r.log.Warn("left over after a failed start", "pod", s.PodName, "container", s.ID.Container, "err", rerr)
		}
		return workload.State{ID: s.ID, Phase: workload.Exited, Reason: reasonStart, Message: err.Error(), Digest: s.Digest}, err
	}
	st, _, err = r.read(s.ID)
	return st, err
}

func (r *Runtime) start(ctx context.Context, s workload.Spec) error {
	folder := folderName(s.ID)
	dir := r.folder(s.ID)
	rec := record{
		ID: s.ID, Namespace: s.PodNamespace, Pod: s.PodName, Image: s.Image, Digest: s.Digest, LogPath: s.LogPath,
		LogFiles: s.LogMaxFiles, LogBytes: s.LogMaxBytes, Cgroup: cgroupOf(s), StopSignal: s.StopSignal,
		Fallback: s.TerminationFallback, TTY: s.TTY, Runtime: r.cfg.Programs.Runtime, Name: r.shortName(folder), Grace: s.StopGrace,
	}
	if err := r.cfg.Cgroups.EndAttempts(ctx, rec.Cgroup); err != nil {
		return fmt.Errorf("left of an earlier attempt: %w", err)
	}
	if err := os.MkdirAll(r.containers(), 0o711); err != nil { // somebody may have removed what New made
		return fmt.Errorf("run folder: %w", err)
	}
	for _, d := range []string{dir, filepath.Join(dir, exitDir)} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return fmt.Errorf("run folder: %w", err)
		}
	}
	if err := writeJSON(filepath.Join(dir, recordFile), rec); err != nil {
		return err
	}
	img, err := r.cfg.Images.Lookup(ctx, s.Image, s.Digest)
	if err != nil {
		return err
	}
	if rec.StopSignal == "" && img.Config.StopSignal != "" {
		rec.StopSignal = img.Config.StopSignal
		if err := writeJSON(filepath.Join(dir, recordFile), rec); err != nil {
			return err
		}
	}
	if err := mountRootfs(dir, r.upperDir(folder), img); err != nil {
		return err
	}
	if s.TerminationPath != "" {
		if err := worldWritable(filepath.Join(dir, terminationFile)); err != nil {
			return err
		}
	}
	pod, err := r.shared(ctx, s.ID.PodUID)
	if err != nil {
		return err
	}
	b, err := r.bundle(s, img, dir, pod)
	if err != nil {
		return err
	}
	text, err := json.Marshal(b)
	if err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, bundleFile), text, 0o600); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(s.LogPath), 0o755); err != nil {
		return fmt.Errorf("log folder: %w", err)
	}
	// The OCI runtime takes a group that is there: made here, what it weighs
	// counts in the groups above.
	if _, err := r.cfg.Cgroups.Create(rec.Cgroup, cgroup.Limits{
		CPURequestMilli: s.Resources.CPURequestMilli, CPULimitMilli: s.Resources.CPULimitMilli, MemoryRequest: s.Resources.MemoryRequest,
	}); err != nil {
		return fmt.Errorf("control group: %w", err)
	}
	pid, err := r.monitor(ctx, s, rec, dir)
	if err != nil {
		return err
	}
	st, err := r.created(dir, pid)
	if errors.Is(err, fs.ErrNotExist) && r.sawOOM(dir, rec) {
		return createError("the container's first process was killed before it was started: out of memory (OOM)")
	}
	if err != nil {
		return err
	}
	if s.StopDeadline > 0 {
		if err := watchdog.Set(dir, s.StopDeadline); err != nil {
			return err
		}
		if err := r.guard(dir, rec, st); err != nil {
			return err
		}
	}
	out, err := command(ctx, rec.Runtime, r.rootDir(), "start", rec.Name).CombinedOutput()
	if err != nil {
		return createError(lastLine(out) + " (" + err.Error() + ")")
	}
	r.watch.Add(s.ID, st.Monitor, st.MonitorStart)
	r.followLog(rec)
	return nil
}

// created notes the processes of a container that waits to be started.
func (r *Runtime) created(dir string, pid int) (started, error) {
	st := started{PID: pid, BootID: process.BootID(), StartedAt: time.Now().UTC()}
	var err error
	if st.Start, err = process.StartTime(pid); err != nil {
		return st, fmt.Errorf("created container: %w", err)
	}
	b, err := os.ReadFile(filepath.Join(dir, monitorPIDFile))
	if err == nil {
		st.Monitor, err = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	if err != nil {
		return st, fmt.Errorf("pid of conmon: %w", err)
	}
	if st.MonitorStart, err = process.StartTime(st.Monitor); err != nil {
		return st, fmt.Errorf("conmon: %w", err)
	}
	return st, writeJSON(filepath.Join(dir, startedFile), st)
}

func worldWritable(p string) error {
	f, err := os.OpenFile(p, os.O_CREATE|os.O_WRONLY, 0o666)
	if err != nil {
		return fmt.Errorf("termination message: %w", err)
	}
	defer func() { _ = f.Close() }()
	return f.Chmod(0o666) // the container's user is anybody
}

func writeJSON(p string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(p), err)
	}
	return atomicfile.Write(p, b, 0o600)
}

func readJSON(p string, v any) error {
	b, err := atomicfile.Read(p)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}

// List implements workload.Runtime: every attempt, and all that live are
// watched from then on. What belongs to none is removed.
func (r *Runtime) List(ctx context.Context) ([]workload.State, error) {
	entries, err := os.ReadDir(r.containers())
	if err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	known := map[string]bool{}
	var out []workload.State
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("list: %w", err)
		}
		if !e.IsDir() {
			continue
		}
		dir := filepath.Join(r.containers(), e.Name())
		var rec record
		err := readJSON(filepath.Join(dir, recordFile), &rec)
		if err == nil && folderName(rec.ID) != e.Name() {
			err = fmt.Errorf("record of %s", folderName(rec.ID))
		}
		if err != nil {
			r.reclaim(ctx, e.Name(), err)
			continue
		}
		known[e.Name()] = true
		st, ok, err := r.State(ctx, rec.ID)
		if err != nil {
			return nil, err
		}
		if ok {
			out = append(out, st)
		}
	}
	r.sweepUpper(known)
	return out, nil
}

// sweepUpper removes what containers of an earlier boot wrote: the run
// folders that knew of them are gone.
func (r *Runtime) sweepUpper(known map[string]bool) {
	entries, err := os.ReadDir(r.upperDir(""))
	if err != nil {
		r.log.Warn("folder of containers cannot be read", "err", err)
		return
	}
	for _, e := range entries {
		if known[e.Name()] {
			continue
		}
		if err := os.RemoveAll(r.upperDir(e.Name())); err != nil {
			r.log.Warn("what a container of an earlier boot wrote cannot be removed", "folder", e.Name(), "err", err)
		}
	}
}

// reclaim ends and deletes an attempt that nobody can name any more.
func (r *Runtime) reclaim(ctx context.Context, folder string, why error) {
	dir := filepath.Join(r.containers(), folder)
	r.log.Warn("run folder without a readable record removed", "folder", dir, "err", why)
	_ = command(ctx, r.cfg.Programs.Runtime, r.rootDir(), "delete", "--force", r.shortName(folder)).Run()
	if err := unmountRootfs(dir); err != nil {
		r.log.Warn("run folder cannot be removed", "folder", dir, "err", err)
		return
	}
	_ = os.RemoveAll(dir)
}

// Stats implements workload.StatsReader.
func (r *Runtime) Stats(_ context.Context, id workload.ID) (workload.Stats, error) {
	var rec record
	if err := readJSON(filepath.Join(r.folder(id), recordFile), &rec); err != nil {
		return workload.Stats{}, fmt.Errorf("stats: %w", err)
	}
	g, err := r.cfg.Cgroups.Open(rec.Cgroup).Stats()
	if err != nil {
		return workload.Stats{}, fmt.Errorf("stats: %w", err)
	}
	return workload.Stats{CPUNanos: g.CPUNanos, MemoryBytes: g.MemoryBytes, PIDs: g.PIDs}, nil
}

// signalProcess sends a signal to exactly that process; one that is gone is no error.
func signalProcess(pid int, start uint64, sig unix.Signal) error {
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil
	case err != nil:
		// No pidfds before Linux 5.3.
		if process.Alive(pid, start) {
			err = unix.Kill(pid, sig)
		} else {
			err = nil
		}
	default:
		defer func() { _ = unix.Close(fd) }()
		if process.Alive(pid, start) {
			err = unix.PidfdSendSignal(fd, sig, nil, 0)
		}
	}
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

func exists(p string) bool {
	_, err := os.Stat(p)
	return !errors.Is(err, fs.ErrNotExist)
}
