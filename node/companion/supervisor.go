package companion

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dunlin-project/dunlin/internal/version"
	"github.com/dunlin-project/dunlin/wire"
)

// Feed gives what changed since it was asked; services.Subscription is one.
type Feed interface {
	News() <-chan struct{}
	Take(limit int) (items []wire.ServiceItem, gone []string, more bool)
	Close()
}

// Supervisor is the agent's side: it keeps a process of this build running and
// fed. One that is there already, and its connections, are kept.
type Supervisor[S any] struct {
	// Program is the name of a file beside dunlin, else that one again under
	// this name.
	Program string
	// Dir, in the run-time folder, holds the process's socket and log.
	Dir string
	// Subscribe begins a feed with everything.
	Subscribe func() Feed
	// Known says whether there is anything to feed yet: until then what the
	// process knows is better.
	Known func() bool
	// Better, if set, says whether what a process that is there already knows
	// is better than what there is to feed: it was fed until its agent ended,
	// and the agent has only what it saved some time before.
	Better func() bool
	// Settings of the node; false while there shall be no process yet.
	Settings func() (S, bool)
	Equal    func(a, b *S) bool
	// Tag tells builds of the same file apart, for tests.
	Tag string
	Log *slog.Logger

	look time.Duration // 0: look
}

const (
	feedGather   = 10 * time.Millisecond // what comes together is sent together
	feedPage     = 1 << 20
	look         = 5 * time.Second  // at the settings, and for the socket
	startTimeout = 30 * time.Second // of a busy board
	restartFirst = 100 * time.Millisecond
	restartMost  = 10 * time.Second
)

// Run until ctx ends. The process goes on.
func (s *Supervisor[S]) Run(ctx context.Context) error {
	var told string
	for try := 0; ; try++ {
		began := time.Now()
		err := s.once(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > 10*restartMost {
			try = 0
		}
		if text := err.Error(); text != told || try%64 == 0 {
			s.Log.Warn("process beside the agent is not fed", "program", s.Program, "error", err)
			told = text
		}
		if !sleep(ctx, min(restartFirst<<min(try, 10), restartMost)) {
			return nil
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// once finds or starts a process and feeds it until the connection breaks.
func (s *Supervisor[S]) once(ctx context.Context) error {
	settings, ready := s.Settings()
	for !ready {
		if !sleep(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
		settings, ready = s.Settings()
	}
	if err := os.MkdirAll(s.Dir, 0o700); err != nil { // each time: somebody may have removed it
		return fmt.Errorf("folder of the process: %w", err)
	}
	c, found, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	w := watch(s.Dir, c)
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	sub := s.Subscribe()
	defer sub.Close()
	if found {
		if err := s.leave(ctx, w, sub); err != nil {
			return err
		}
	}
	t := time.NewTicker(cmp.Or(s.look, look))
	defer t.Stop()
	first := true
	for {
		if err := s.send(c, &settings, sub, first); err != nil {
			return fmt.Errorf("feed: %w", err)
		}
		first = false
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-w.ended:
				return errEnded
			case <-sub.News():
				waiting = false
			case <-t.C:
				if err := w.look(); err != nil {
					return err
				}
				if next, ok := s.Settings(); ok && !s.Equal(&next, &settings) {
					settings, waiting = next, false
				}
			}
		}
		if !sleep(ctx, feedGather) {
			return ctx.Err()
		}
	}
}

// leave does nothing while what the process knows is better.
func (s *Supervisor[S]) leave(ctx context.Context, w *watched, sub Feed) error {
	t := time.NewTicker(cmp.Or(s.look, look))
	defer t.Stop()
	for s.Better != nil && s.Better() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.ended:
			return errEnded
		case <-sub.News():
		case <-t.C:
			if err := w.look(); err != nil {
				return err
			}
		}
	}
	return nil
}

var errEnded = errors.New("the process ended")

// watched is a process that is connected to.
type watched struct {
	dir    string
	ended  <-chan struct{} // closed with the process: it says nothing on a feed
	missed int
}

// watch learns of the process's end from the kernel, which closes its side of
// the connection in that moment, whoever started it. It ends with the connection.
func watch(dir string, c *net.UnixConn) *watched {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = c.Read(make([]byte, 1))
	}()
	return &watched{dir: dir, ended: ended}
}

// look says whether the process is not in its place any more. One whose socket
// was removed makes it again, if it can; if it was not seen to, it takes no new
// connections, while it may serve its old ones for long.
func (w *watched) look() error {
	if _, err := os.Stat(Socket(w.dir)); err == nil {
		w.missed = 0
	} else if w.missed++; w.missed > 1 {
		return fmt.Errorf("the socket of the process was removed: %w", err)
	}
	return nil
}

func (s *Supervisor[S]) send(c *net.UnixConn, settings *S, sub Feed, first bool) error {
	_ = c.SetWriteDeadline(time.Now().Add(startTimeout))
	for more, n := true, 0; more; n++ {
		var cmd command[S]
		cmd.Items, cmd.Gone, more = sub.Take(feedPage)
		if n == 0 {
			cmd.Settings = settings
		}
		cmd.Last = !more
		if first && cmd.Last && len(cmd.Items) == 0 && n == 0 && !s.Known() {
			cmd.Last = false // nothing is known yet
		}
		if err := writeFrame(c, &cmd); err != nil {
			return err
		}
	}
	return nil
}

// connect reaches a process of this build, and starts it if there is none;
// found says that it was there.
func (s *Supervisor[S]) connect(ctx context.Context) (c *net.UnixConn, found bool, err error) {
	_, build := program(s.Program)
	var st Head
	err = Ask(s.Dir, &st)
	found = err == nil && st.Build == build+s.Tag
	if err != nil || st.Build != build+s.Tag {
		if err == nil {
			s.Log.Info("the process is of another build: a new one takes over its listeners", "program", s.Program, "pid", st.PID)
		}
		if err := s.Start(ctx); err != nil {
			return nil, false, err
		}
	}
	x, err := net.Dial("unix", Socket(s.Dir))
	if err != nil {
		return nil, false, fmt.Errorf("reach the process: %w", err)
	}
	return x.(*net.UnixConn), found, nil
}

// program is that file beside the running program, else that one again,
// which costs memory; and a name for exactly this build of it: the file, since
// a build may be replaced by another of the same version.
func program(name string) (path, build string) {
	path = "/proc/self/exe" // not by its path, which an upgrade may have replaced
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), name)
		if st, err := os.Stat(beside); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			path = beside
		}
	}
	st, err := os.Stat(path)
	if err != nil {
		return path, version.Version
	}
	return path, fmt.Sprintf("%s-%d-%d", version.Version, st.Size(), st.ModTime().UnixNano())
}

// Start runs the program, which takes the listeners of one that is there, and
// waits until it serves, or is no more: also when ctx ends meanwhile, so that
// who ends the process afterwards (Retire) finds it.
func (s *Supervisor[S]) Start(ctx context.Context) error {
	path, build := program(s.Program)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = null.Close() }()
	last := filepath.Join(s.Dir, "stderr")
	stderr, err := os.OpenFile(last, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start the process: %w", err)
	}
	defer func() { _ = stderr.Close() }()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	p, err := os.StartProcess(path, []string{s.Program, s.Dir, build + s.Tag}, &os.ProcAttr{
		Dir: "/", Env: []string{"PATH=/usr/bin:/bin", "GOTRACEBACK=single", "GOMEMLIMIT=256MiB"},
		Files: []*os.File{null, null, stderr, w}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	_ = w.Close()
	if err != nil {
		return fmt.Errorf("start the process: %w", err)
	}
	go func() { _, _ = p.Wait() }() // else it stays as a zombie while this agent lives
	_ = r.SetReadDeadline(time.Now().Add(startTimeout))
	_, err = r.Read(make([]byte, 1)) // ends when the process closes it, or with its end
	if errors.Is(err, os.ErrDeadlineExceeded) {
		_ = p.Kill() // else it would serve some day, unknown to anyone
		return errors.Join(ctx.Err(), errors.New("the process does not start"))
	}
	if err := Ask(s.Dir, &Head{}); err != nil {
		b, _ := os.ReadFile(last)
		return fmt.Errorf("the process ended at once: %s", strings.TrimSpace(string(b[:min(len(b), 2048)])))
	}
	return nil
}

// Ask fills in what the process in a folder says of itself.
func Ask(dir string, status any) error {
	x, err := net.DialTimeout("unix", Socket(dir), time.Second)
	if err != nil {
		return fmt.Errorf("reach the process: %w", err)
	}
	defer func() { _ = x.Close() }()
	_ = x.SetDeadline(time.Now().Add(5 * time.Second))
	if err := writeFrame(x, &command[struct{}]{Ask: true}); err != nil {
		return fmt.Errorf("ask the process: %w", err)
	}
	if err := readFrame(x, status); err != nil {
		return fmt.Errorf("ask the process: %w", err)
	}
	return nil
}

// Stop ends the process in a folder with all its connections, and waits for
// it; without one it does nothing.
func Stop(ctx context.Context, dir string) error {
	x, err := net.Dial("unix", Socket(dir))
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("stop the process: %w", err)
	}
	defer func() { _ = x.Close() }()
	_ = x.SetDeadline(time.Now().Add(startTimeout))
	if err := writeFrame(x, &command[struct{}]{Stop: true}); err != nil {
		return fmt.Errorf("stop the process: %w", err)
	}
	_, _ = x.Read(make([]byte, 1)) // until it is closed
	_ = os.Remove(Socket(dir))
	return ctx.Err()
}
