package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/outbound"
	"github.com/dunlin-project/dunlin/runtime/sandbox"
	"github.com/dunlin-project/dunlin/runtime/watchdog"
)

// tailBytes of the guest's standard error are kept for its exit message.
const tailBytes = 2 << 10

// nofile is the guest's limit of open descriptors, its own and ours.
const nofile = 4096

// MaybeRun runs the host program if this process was started as one by
// re-executing the main program, and then does not return. Main calls it
// before anything else.
func MaybeRun() {
	if len(os.Args) > 1 && os.Args[0] == argv0 {
		os.Exit(Main(os.Args[1:]))
	}
}

// Main is the host program: "run" or "compile", everything else comes over
// descriptors; or the watchdog of a container. It returns the exit code.
func Main(args []string) int {
	if len(args) > 0 && args[0] == watchdog.Command {
		return watchdog.Main(args[1:])
	}
	if len(args) == 1 {
		switch args[0] {
		case CommandRun:
			return run()
		case CommandCompile:
			return compile()
		}
	}
	fmt.Fprintln(os.Stderr, "dunlin-wasm runs the Wasm guests of a dunlin agent and is started by it; to run a module by hand, use: dunlin run app.wasm")
	return 2
}

// host is one running guest's process.
type host struct {
	spec       Spec
	foreground bool
	log        *criLog
	streams    []*stream
	stderr     *os.File // the guest's; nil where its output goes to a log
	tail       *tail
	stdinW     int
	control    *control
	program    Program
	memory     *memoryRecord // nil in the foreground
	statm      int           // beside memory: /proc/self/statm, or -1

	once sync.Once
}

func run() int {
	spec, err := receive()
	if errors.Is(err, errNoSpec) {
		return 1 // the agent died first: nobody waits for us
	}
	reply := os.NewFile(fdReply, "reply")
	if err != nil {
		answer(reply, Reply{Reason: ReasonStart, Message: err.Error()})
		return 1
	}
	h := &host{spec: spec, foreground: spec.Foreground, stdinW: -1}
	missing, cacheBad, err := h.prepare()
	if err != nil {
		answer(reply, Reply{Reason: ReasonStart, Message: clip(err.Error()), CacheBad: cacheBad})
		return 1
	}
	h.settle()
	if h.memory != nil {
		h.memory.begin(spec.MemoryLimit, h.statm)
		_ = unix.Close(h.statm)
	}
	h.control.start()
	answer(reply, Reply{Running: true, Missing: missing, CacheBad: cacheBad})
	o := h.program.Run(context.Background())
	return h.end(o)
}

func receive() (Spec, error) {
	f := os.NewFile(fdSpec, "spec")
	if f == nil {
		return Spec{}, errNoSpec
	}
	defer func() { _ = f.Close() }()
	return ReadSpec(f)
}

func answer(w *os.File, r Reply) {
	if w == nil {
		return
	}
	if b, err := json.Marshal(r); err == nil {
		_, _ = w.Write(b)
	}
	_ = w.Close()
}

// prepare does all that needs privileges, gives them up, and loads the
// module: nothing of the guest is looked at before.
func (h *host) prepare() (missing []string, cacheBad bool, err error) {
	s := &h.spec
	ctlPath := ""
	if !h.foreground {
		if err := unix.Fchdir(fdRunDir); err != nil {
			return nil, false, fmt.Errorf("run folder: %w", err)
		}
		if err := WriteHostRecord("."); err != nil {
			return nil, false, err
		}
		ctlPath = ControlSocket
		h.memory = newMemoryRecord()
		if h.statm, err = unix.Open("/proc/self/statm", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			h.statm = -1 // no /proc: the record then says nothing
		}
	}
	if h.control, err = newControl(ctlPath, s.StopDeadline); err != nil {
		return nil, false, err
	}
	h.control.drain, h.control.expire = h.drain, h.expire
	if h.foreground {
		h.control.impatient, h.control.stopping = true, len(s.Listeners) == 0
	}
	g := &Guest{
		Args: s.Args, Env: s.Env, Listeners: s.Listeners,
		Outbound: s.Outbound,
		Sockets:  make([][]int, len(s.Listeners)), MemoryLimit: uint64(max(s.MemoryLimit, 0)),
		Record: h.memory,
	}
	for i, l := range s.Sockets {
		fd := fdSockets + i
		unix.CloseOnExec(fd)
		if err := unix.SetNonblock(fd, true); err != nil {
			return nil, false, fmt.Errorf("listener %s: %w", s.Listeners[l].Name, err)
		}
		g.Sockets[l] = append(g.Sockets[l], fd)
	}
	if g.Mounts, err = openMounts(s.Mounts); err != nil {
		return nil, false, err
	}
	if err := h.openStdio(g); err != nil {
		return nil, false, err
	}
	if g.Module, err = mapModule(fdModule); err != nil {
		return nil, false, err
	}
	if s.CacheDir != "" {
		// By descriptor: the folders above it need not be passable for the
		// guest's uid.
		dir, err := unix.Open(s.CacheDir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err == nil {
			g.CacheDir = fmt.Sprintf("/proc/self/fd/%d", dir)
			if sum, err := SumDir(g.CacheDir); err != nil || sum != s.CacheSum {
				g.CacheDir, cacheBad = "", true
			}
		} else {
			cacheBad = true
		}
	}
	facts, err := sandbox.Apply(h.sandbox())
	if err != nil {
		return nil, cacheBad, fmt.Errorf("sandbox: %w", err)
	}
	engine := Wazero{}
	if g.CacheDir == "" || len(g.Module) > largeModule {
		debug.SetGCPercent(100) // until settle: nothing of the guest runs yet
	}
	h.program, err = engine.Load(context.Background(), g)
	if err != nil && g.CacheDir != "" {
		debug.SetGCPercent(100)
		// Compiled code must never be why a guest does not start.
		g.CacheDir, cacheBad = "", true
		h.program, err = engine.Load(context.Background(), g)
	}
	return facts.Missing, cacheBad, err
}

func (h *host) sandbox() sandbox.Config {
	s := &h.spec
	c := sandbox.Config{UID: s.Sandbox.UID, GID: s.Sandbox.GID, Groups: s.Sandbox.Groups, NoFile: nofile, Data: s.Sandbox.Data}
	for _, m := range s.Mounts {
		if m.ReadOnly {
			c.ReadOnly = append(c.ReadOnly, m.Source)
		} else {
			c.ReadWrite = append(c.ReadWrite, m.Source)
		}
	}
	if s.CacheDir != "" {
		c.ReadOnly = append(c.ReadOnly, s.CacheDir)
	}
	if rules, err := outbound.Parse(s.Outbound.Allow); err == nil && len(rules) > 0 {
		ports, all := rules.Ports()
		if c.Connect = true; !all {
			c.Ports = ports
		}
		if len(ports) == 0 && !all {
			c.Ports = []uint16{noPort} // datagrams only
		}
	}
	if !h.foreground {
		c.ReadWrite = append(c.ReadWrite, ".")
	}
	if s.LogPath != "" {
		c.ReadWrite = append(c.ReadWrite, filepath.Dir(s.LogPath))
	}
	return c
}

// noPort stands in a list that would otherwise mean every port. Nothing
// listens there (RFC 6335).
const noPort = 1023

// openStdio gives the guest its output, and an input that ends when it is to
// stop.
func (h *host) openStdio(g *Guest) error {
	h.tail = &tail{max: tailBytes}
	if h.spec.LogPath == "" {
		h.stderr = os.Stderr
		if h.foreground {
			h.stderr = os.NewFile(fdStderr, "stderr")
		}
		g.Stdout, g.Stderr = os.Stdout, io.MultiWriter(h.stderr, tailWriter{h.tail})
	} else {
		l, err := openLog(h.spec.LogPath, h.spec.LogMaxBytes, h.spec.LogMaxFiles)
		if err != nil {
			return err
		}
		h.log = l
		h.streams = []*stream{{log: l, name: "stdout"}, {log: l, name: "stderr", tail: h.tail}}
		g.Stdout, g.Stderr = h.streams[0], h.streams[1]
	}
	if h.foreground && (len(h.spec.Listeners) == 0 || !nothingIn(0)) {
		g.Stdin = os.Stdin
		return nil
	}
	if !h.foreground {
		g.Refused = writeRefused
	}
	var p [2]int
	var err error
	if h.spec.Stdin {
		p, err = namedPipe(StdinPipe)
	} else {
		err = unix.Pipe2(p[:], unix.O_CLOEXEC)
	}
	if err != nil {
		return fmt.Errorf("standard input: %w", err)
	}
	g.Stdin = os.NewFile(uintptr(p[0]), "stdin")
	h.stdinW = p[1]
	return nil
}

// nothingIn says whether a descriptor is /dev/null: what cron, systemd and
// "nohup ... &" give. Its end is no sign for a server to stop; it gets a pipe,
// as in a pod.
func nothingIn(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(1, 3)
}

// StdinPipe is the named pipe in the run folder that is the standard input of
// a guest with Spec.Stdin.
const StdinPipe = "stdin"

// namedPipe makes a pipe with both ends open: it ends only when this process
// closes its own, not when somebody who wrote to it leaves.
func namedPipe(name string) (p [2]int, err error) {
	_ = unix.Unlink(name)
	if err := unix.Mkfifo(name, 0o600); err != nil {
		return p, err
	}
	if p[0], err = unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0); err != nil {
		return p, err
	}
	if p[1], err = unix.Open(name, unix.O_WRONLY|unix.O_CLOEXEC, 0); err != nil {
		return p, err
	}
	return p, unix.SetNonblock(p[0], false)
}

type tailWriter struct{ t *tail }

func (w tailWriter) Write(p []byte) (int, error) {
	w.t.add(p)
	return len(p), nil
}

// mapModule maps the module instead of reading it: its pages are shared by
// all that run it, and given back when memory is short.
func mapModule(fd int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("module: %w", err)
	}
	if st.Size == 0 || st.Size > math.MaxInt32 {
		return nil, fmt.Errorf("module: %d bytes", st.Size)
	}
	b, err := unix.Mmap(fd, 0, int(st.Size), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("module: %w", err)
	}
	_ = unix.Close(fd)
	return b, nil
}

// settle readies the Go runtime for a guest. The collector is off from the
// start of the program (GOGC=off) and runs only where it cannot freeze the
// process (see collector). Loading a small module leaves less garbage than a
// first collection costs in threads and buffers; after a large one it is
// worth it. The second processor is the control thread's, since the guest
// may keep the first for ever; it comes this late because each processor
// has its own allocation caches.
func (h *host) settle() {
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(math.MaxInt64)
	if heapBytes() > worthCollecting {
		debug.FreeOSMemory()
	}
	runtime.GOMAXPROCS(2)
}

// largeModule makes enough garbage while it loads to collect it meanwhile.
const largeModule = 1 << 20

// worthCollecting is the heap from which settle collects.
const worthCollecting = 3 << 20

// drain asks the guest to end: no new connections, and its input ends.
func (h *host) drain() {
	h.program.Drain()
	if h.stdinW >= 0 {
		_ = unix.Close(h.stdinW)
		h.stdinW = -1
	}
}

// expire ends the process from the control thread.
func (h *host) expire(reason, message string) {
	h.finish(ExitRecord{ExitCode: 137, Signal: 9, Reason: reason, Message: message})
	if h.foreground {
		os.Exit(130)
	}
	os.Exit(137)
}

func (h *host) end(o Outcome) int {
	rec := ExitRecord{ExitCode: o.ExitCode, Reason: ReasonCompleted, MemoryPeak: o.MemoryPeak}
	rec.Reason, rec.Message = explain(o, h.spec.MemoryLimit, h.tail.text())
	if h.foreground && o.Trap != "" {
		_, _ = fmt.Fprintln(h.stderr, "dunlin: the guest trapped: "+o.Trap)
	}
	h.finish(rec)
	return o.ExitCode
}

// explain words an outcome for the pod's status.
func explain(o Outcome, limit int64, stderr string) (reason, message string) {
	var parts []string
	reason = ReasonCompleted
	switch {
	case o.Trap != "":
		reason = ReasonTrap
		parts = append(parts, o.Trap)
	case o.ExitCode != 0:
		reason = ReasonError
	}
	if reason == ReasonCompleted {
		return reason, ""
	}
	if o.MemoryRefused && limit > 0 {
		parts = append(parts, fmt.Sprintf("it asked for more than its memory limit of %s (it had %s)", bytesText(uint64(limit)), bytesText(o.MemoryPeak)))
	}
	if stderr != "" {
		parts = append(parts, "last output: "+stderr)
	}
	return reason, clip(strings.Join(parts, "; "))
}

// finish writes what remains, once; a second caller waits for ever, since
// the first one ends the process.
func (h *host) finish(rec ExitRecord) {
	first := false
	h.once.Do(func() { first = true })
	if !first {
		select {}
	}
	for _, s := range h.streams {
		if h.log.mu.TryLock() {
			h.log.mu.Unlock()
			s.finish()
		}
	}
	if h.foreground {
		return
	}
	if h.log != nil {
		rec.LogLost = h.log.lost
	}
	rec.FinishedAt = time.Now().UTC()
	b, err := json.Marshal(rec)
	if err == nil {
		err = atomicfile.Write(ExitFile, b, 0o600)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "exit record:", err)
	}
}

// writeRefused leaves what was refused for the agent; it is in the log, too.
func writeRefused(list []Refusal) {
	b, err := json.Marshal(list)
	if err == nil {
		err = atomicfile.Write(RefusedFile, b, 0o600)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "refusals:", err)
	}
}

func clip(s string) string {
	if len(s) <= MessageLimit {
		return s
	}
	return strings.ToValidUTF8(s[:MessageLimit-3], "") + "..."
}
