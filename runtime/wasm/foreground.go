package wasm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/sandbox"
	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// ForegroundOptions of one guest in the foreground.
type ForegroundOptions struct {
	// Path of the module.
	Path string
	// Args after the module's name.
	Args []string
	Env  []string // KEY=VALUE
	// Mounts; a relative Source is taken from the current folder.
	Mounts []workload.Mount
	// Ports are "8080", "127.0.0.1:8080" or "[::1]:8080"; a port alone means
	// 127.0.0.1. The guest gets one listener each, in order.
	Ports []string
	// MemoryLimit in bytes; 0 is none.
	MemoryLimit int64
	// StateDir keeps compiled code between runs; empty is dunlin's folder in
	// the user's cache folder.
	StateDir string
	// HostBinary as in Config.
	HostBinary string
	// Progress gets one word for what takes long before the guest can start,
	// "compiling"; may be nil.
	Progress workload.Progress
	// Warn gets one sentence for each isolation that is missing; may be nil.
	Warn func(string)
	// Started is called with the addresses of the listeners; may be nil.
	Started func(addresses []string)
}

// RunForeground runs one module with this process's standard input and
// output, in the same sandbox as an agent's guests, and returns its exit
// code. When ctx ends the guest is stopped as a pod is: its listeners close
// to new connections, and ten seconds later it is killed. The error says why
// a guest could not start.
func RunForeground(ctx context.Context, o ForegroundOptions) (int, error) {
	log := slog.New(slog.DiscardHandler)
	binary, err := FindHost(o.HostBinary)
	if err != nil {
		return 1, err
	}
	module, digest, err := foregroundModule(ctx, o.Path, log)
	if err != nil {
		return 1, err
	}
	defer func() { _ = module.Close() }()
	spec := host.Spec{
		Name: o.Path, Digest: digest, Args: append([]string{filepath.Base(o.Path)}, o.Args...), Env: o.Env,
		MemoryLimit: o.MemoryLimit, Foreground: true, Sandbox: host.Identity{UID: -1, GID: -1},
	}
	if o.MemoryLimit > 0 {
		spec.Sandbox.Data = uint64(o.MemoryLimit) + dataMargin
	}
	if os.Geteuid() == 0 && o.Warn != nil {
		o.Warn("the guest runs as root, as you do: it can reach what it is given with --mount, and nothing else")
	}
	for _, m := range o.Mounts {
		src, err := filepath.Abs(m.Source)
		if err != nil {
			return 1, fmt.Errorf("mount %s: %w", m.Source, err)
		}
		spec.Mounts = append(spec.Mounts, host.Mount{Source: src, Target: m.Target, ReadOnly: m.ReadOnly})
	}
	sockets, addresses, err := foregroundPorts(ctx, o.Ports, &spec)
	defer func() {
		for _, f := range sockets {
			_ = f.Close()
		}
	}()
	if err != nil {
		return 1, err
	}
	if code, err := foregroundCode(ctx, &o, binary, digest, log); err == nil {
		spec.CacheDir, spec.CacheSum = code.dir, code.sum
	} else if ctx.Err() != nil {
		return 1, err
	} else if se := (*workload.StartError)(nil); errors.As(err, &se) && se.Reason == ReasonInvalidModule {
		return 1, err
	}
	return foregroundRun(ctx, binary, spec, module, sockets, func(missing []string) {
		if o.Warn != nil {
			for _, m := range missing {
				if m != sandbox.AsRoot { // said above
					o.Warn(m)
				}
			}
		}
		if o.Started != nil {
			o.Started(addresses)
		}
	})
}

// foregroundModule opens and checks the module.
func foregroundModule(ctx context.Context, path string, log *slog.Logger) (*os.File, string, error) {
	f, err := openRegular(path)
	if err != nil {
		return nil, "", err
	}
	st, err := f.Stat()
	if err == nil {
		_, err = Inspect(f, st.Size())
	}
	digest := ""
	if err == nil {
		digest, err = digestOf(ctx, f)
	}
	if err != nil {
		_ = f.Close()
		if errors.Is(err, ErrInvalidModule) {
			err = &workload.StartError{Reason: ReasonInvalidModule, Message: path + ": " + err.Error(), Err: err, Fatal: true}
		}
		return nil, "", err
	}
	log.Debug("module", "path", path, "digest", digest)
	return f, digest, nil
}

// foregroundPorts opens the listeners.
func foregroundPorts(ctx context.Context, ports []string, spec *host.Spec) (files []*os.File, addresses []string, err error) {
	for i, p := range ports {
		addr := p
		if _, err := strconv.ParseUint(p, 10, 16); err == nil {
			addr = net.JoinHostPort("127.0.0.1", p)
		}
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		l, err := lc.Listen(ctx, "tcp", addr)
		if err != nil {
			return files, nil, fmt.Errorf("port %s: %w", p, err)
		}
		tcp := l.(*net.TCPListener)
		f, err := tcp.File()
		bound := tcp.Addr().(*net.TCPAddr)
		_ = tcp.Close()
		if err != nil {
			return files, nil, fmt.Errorf("port %s: %w", p, err)
		}
		files = append(files, f)
		addresses = append(addresses, bound.String())
		spec.Listeners = append(spec.Listeners, host.Listener{Name: strconv.Itoa(bound.Port), Port: int32(bound.Port)})
		spec.Sockets = append(spec.Sockets, i)
	}
	return files, addresses, nil
}

// ForegroundDir is where RunForeground keeps compiled code for this user when
// it is given no StateDir.
func ForegroundDir() (string, error) {
	user, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cache folder: %w", err)
	}
	return filepath.Join(user, "dunlin"), nil
}

func foregroundCode(ctx context.Context, o *ForegroundOptions, binary, digest string, log *slog.Logger) (compiled, error) {
	dir := o.StateDir
	if dir == "" {
		var err error
		if dir, err = ForegroundDir(); err != nil {
			return compiled{}, err
		}
	}
	c, err := newCache(filepath.Join(dir, "compiled"), 0, binary, -1, log)
	if err != nil {
		return compiled{}, err
	}
	return c.ensure(ctx, digest, func() (*os.File, error) { return openRegular(o.Path) }, o.Progress)
}

func foregroundRun(ctx context.Context, binary string, spec host.Spec, module *os.File, sockets []*os.File, started func([]string)) (int, error) {
	fd, err := unix.MemfdCreate("stderr", unix.MFD_CLOEXEC)
	if err != nil {
		return 1, fmt.Errorf("start host: %w", err)
	}
	words := os.NewFile(uintptr(fd), "stderr") // of the host program, not of the guest
	defer func() { _ = words.Close() }()
	p, err := spawn(binary, host.CommandRun, module, os.Stderr, words, []*os.File{os.Stdin, os.Stdout}, sockets)
	if err != nil {
		return 1, err
	}
	reply, err := p.send(ctx, spec)
	if err == nil && !reply.Running {
		err = startError(reply)
	}
	if err != nil {
		killChild(p.pid)
		if ctx.Err() != nil { // whatever it looked like, this is why
			err = context.Cause(ctx)
		}
		return 1, err
	}
	started(reply.Missing)
	for _, f := range sockets {
		_ = f.Close() // the guest's alone now: it can close them
	}
	// By descriptor: by number it could hit another process, once this one
	// is reaped.
	pidfd, err := unix.PidfdOpen(p.pid, 0)
	if err == nil {
		defer func() { _ = unix.Close(pidfd) }()
	}
	stop := context.AfterFunc(ctx, func() {
		if err != nil || unix.PidfdSendSignal(pidfd, unix.SIGTERM, nil, 0) == unix.ENOSYS {
			_ = unix.Kill(p.pid, unix.SIGTERM)
		}
	})
	defer stop()
	ws := reap(p.pid)
	if ws.Signaled() {
		return 128 + int(ws.Signal()), nil
	}
	last, lerr := io.ReadAll(io.NewSectionReader(words, 0, 64<<10))
	switch {
	case lerr == nil && spec.MemoryLimit > 0 && outOfMemory(string(last)):
		return 137, fmt.Errorf("%w of %d MiB: its calls nest too deep for it, or its tables are too large", ErrMemoryLimit, spec.MemoryLimit>>20)
	case len(last) > 0:
		_, _ = os.Stderr.Write(last)
	}
	return ws.ExitStatus(), nil
}

// ErrMemoryLimit says that a guest in the foreground needed more memory than
// it may have, beyond the memory that it is refused by itself.
var ErrMemoryLimit = errors.New("it needed more memory than its limit")
