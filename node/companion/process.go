// Package companion is a process beside the agent that outlives it: the
// service proxy and the ingress are two. It is fed over a Unix socket with
// deltas of tables, goes on without an agent with what it knows, and hands its
// listeners to a successor of another build, while it serves its connections
// to their end.
//
// Main is the process's side, Supervisor the agent's. Goroutines of the
// process beside the worker's own: one that runs the worker, one that accepts
// control connections and one for each, one that looks whether the socket is
// still in its place. Of the agent: one that runs the Supervisor, and one that
// waits for the process's end.
package companion

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/version"
	"github.com/dunlin-project/dunlin/wire"
)

// Worker is what the process is for; S are its settings.
type Worker[S any] interface {
	// Configure takes the agent's settings.
	Configure(*S) error
	// Retain drops what a full feed did not name.
	Retain(keys map[string]bool)
	// Apply takes a delta; last says that it is complete.
	Apply(items []wire.ServiceItem, gone []string, last bool)
	// Park takes a predecessor's listeners, by place, before all else.
	Park(map[string]*os.File)
	// Listeners are copies of those that are open, by place, to be closed.
	Listeners() (map[string]*os.File, error)
	// LetGo ends this process's part in the listeners: a successor has them, or
	// nobody shall.
	LetGo()
	// Connections that are open.
	Connections() int64
	// Status is what the process tells of itself; its fields 1 and 2 are those
	// of Head.
	Status(Head) any
	// Run does what depends on time, until ctx ends.
	Run(ctx context.Context)
}

// Head begins every status.
type Head struct {
	Build string `cbor:"1,keyasint"`
	PID   int    `cbor:"2,keyasint"`
}

// Main is the program: the folder for its socket and log, and the build that
// its agent knows it by. Descriptor 3 is closed once it serves.
func Main[S any](name, purpose string, args []string, worker func(dir string, log *slog.Logger) Worker[S]) int {
	if len(args) != 2 {
		fmt.Fprintf(os.Stderr, "%s %s for a dunlin agent and is started by it\n", name, purpose)
		return 2
	}
	// What lives is small; what dies is a buffer now and then.
	debug.SetGCPercent(50)
	raiseFiles()
	file := &boundedLog{path: filepath.Join(args[0], "log")}
	log := slog.New(slog.NewTextHandler(file, nil))
	p := &process[S]{dir: args[0], build: args[1], log: log, logFile: file, worker: worker(args[0], log), stop: make(chan struct{})}
	if err := p.run(name); err != nil {
		log.Error("process ends", "error", err)
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// raiseFiles takes all descriptors that there are: each connection is two.
func raiseFiles() {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil && l.Cur < l.Max {
		l.Cur = l.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &l)
	}
}

// Socket is where a proxy in the folder listens.
func Socket(dir string) string { return filepath.Join(dir, "socket") }

type process[S any] struct {
	dir, build string
	log        *slog.Logger
	worker     Worker[S]
	stop       chan struct{}
	once       sync.Once
	feeding    sync.Mutex // one agent at a time
	logFile    *boundedLog
	// agents are the control connections that are no mere questions.
	agents atomic.Int64
	given  atomic.Bool // a successor has the listeners

	mu       sync.Mutex
	listener *net.UnixListener
	inode    uint64
}

func (p *process[S]) run(name string) error {
	parked, err := takeOver(Socket(p.dir))
	if err != nil {
		p.log.Warn("listeners of the predecessor are not taken over", "error", err)
	}
	p.worker.Park(parked)
	if err := p.bind(); err != nil {
		return err
	}
	p.log.Info("process serves", "program", name, "build", p.build, "version", version.Version, "pid", os.Getpid(), "taken_over", len(parked))
	if f := os.NewFile(3, "ready"); f != nil {
		_ = f.Close()
	}
	debug.FreeOSMemory()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go p.worker.Run(ctx)
	go p.watchSocket(ctx)
	<-p.stop
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.listener.Close()
	return nil
}

// bind listens on the control socket, which replaces a predecessor's, or this
// process's own that was removed.
func (p *process[S]) bind() error {
	tmp := filepath.Join(p.dir, fmt.Sprintf(".socket.%d", os.Getpid()))
	_ = os.Remove(tmp)
	old := unix.Umask(0o177)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	unix.Umask(old)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Rename(tmp, Socket(p.dir)); err != nil {
		_ = l.Close()
		return fmt.Errorf("put the control socket in its place: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listener != nil {
		_ = p.listener.Close()
	}
	p.listener, p.inode = l, inodeOf(Socket(p.dir))
	go p.accept(l)
	return nil
}

// bindAgain makes what somebody removed: an agent is there, and wants this
// process. A process that may see nothing but its old folder cannot.
func (p *process[S]) bindAgain() error {
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return fmt.Errorf("folder of the process: %w", err)
	}
	if err := p.bind(); err != nil {
		return err
	}
	p.logFile.reopen()
	p.log.Warn("the folder or the socket of this process was removed, and is there again")
	return nil
}

func inodeOf(path string) uint64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return s.Ino
	}
	return 0
}

// watchSocket ends a process whose socket is not in its place any more, once
// its connections are over: a successor took over, or it was retired, or the
// folder is gone and no agent is there for whom to make it again.
func (p *process[S]) watchSocket(ctx context.Context) {
	t := time.NewTicker(3 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		p.mu.Lock()
		own := p.inode
		p.mu.Unlock()
		now := inodeOf(Socket(p.dir))
		if now == own {
			continue
		}
		if now == 0 && !p.given.Load() && p.agents.Load() > 0 {
			err := p.bindAgain()
			if err == nil {
				continue
			}
			p.log.Warn("the socket of this process was removed; its agent starts another one", "error", err)
		}
		p.given.Store(true)
		p.worker.LetGo()
		if p.worker.Connections() == 0 {
			p.end()
			return
		}
	}
}

func (p *process[S]) end() { p.once.Do(func() { close(p.stop) }) }

func (p *process[S]) accept(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = c.Close() }()
			if err := p.serve(c); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				p.log.Warn("control connection ended", "error", err)
			}
		}()
	}
}

// serve answers one control connection. A feed begins with everything.
func (p *process[S]) serve(c *net.UnixConn) error {
	if err := sameUser(c); err != nil {
		return err
	}
	p.agents.Add(1)
	agent := sync.OnceFunc(func() { p.agents.Add(-1) })
	defer agent()
	var keys map[string]bool // of the first delta of this connection
	first := true
	for {
		var cmd command[S]
		if err := readFrame(c, &cmd); err != nil {
			return err
		}
		switch {
		case cmd.Stop:
			p.end()
			return nil
		case cmd.HandOver:
			agent()
			return p.handOver(c)
		case cmd.Ask:
			agent()
			if err := writeFrame(c, p.worker.Status(Head{Build: p.build, PID: os.Getpid()})); err != nil {
				return err
			}
			continue
		}
		p.feeding.Lock()
		if cmd.Settings != nil {
			if err := p.worker.Configure(cmd.Settings); err != nil {
				p.feeding.Unlock()
				return err
			}
		}
		if first && keys == nil {
			keys = map[string]bool{}
		}
		if first {
			for _, it := range cmd.Items {
				keys[it.Key] = true
			}
			if cmd.Last {
				p.worker.Retain(keys)
				first, keys = false, nil
			}
		}
		p.worker.Apply(cmd.Items, cmd.Gone, cmd.Last)
		p.feeding.Unlock()
	}
}

// handOver gives the listeners away and, once the successor says that it has
// them, stops accepting.
func (p *process[S]) handOver(c *net.UnixConn) error {
	if err := p.sendListeners(c); err != nil {
		return err
	}
	var t taken
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if err := readFrame(c, &t); err != nil {
		return fmt.Errorf("the successor did not take the listeners: %w", err)
	}
	p.given.Store(true)
	p.worker.LetGo()
	p.log.Info("a successor has the listeners; connections go on to their end", "connections", p.worker.Connections())
	return nil
}

// sameUser asks the kernel who is at the other end.
func sameUser(c *net.UnixConn) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var cerr error
	if err := rc.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if cerr != nil {
		return cerr
	}
	if int(cred.Uid) != os.Geteuid() && cred.Uid != 0 {
		return fmt.Errorf("user %d may not control this process", cred.Uid)
	}
	return nil
}

// boundedLog writes up to logMost bytes a file and keeps the one before.
type boundedLog struct {
	path string
	mu   sync.Mutex
	f    *os.File
	size int
}

const logMost = 256 << 10

// reopen has the next line begin a new file: the folder of this one is gone.
func (b *boundedLog) reopen() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.f != nil {
		_ = b.f.Close()
		b.f = nil
	}
}

func (b *boundedLog) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.f == nil || b.size+len(p) > logMost {
		if b.f != nil {
			_ = b.f.Close()
		}
		_ = os.Rename(b.path, b.path+".1")
		f, err := os.OpenFile(b.path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
		if err != nil {
			return 0, err
		}
		b.f, b.size = f, 0
	}
	n, err := b.f.Write(p)
	b.size += n
	return n, err
}
