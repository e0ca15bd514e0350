package wasm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dunlin-project/dunlin/runtime/wasm/host"
)

// hostArgv0 marks a re-executed main program; host.MaybeRun looks for it.
const hostArgv0 = "dunlin-wasm"

// FindHost returns the program that runs guests: dunlin-wasm beside the
// running one, else the running one again, which costs memory per guest.
func FindHost(configured string) (string, error) {
	if configured != "" {
		if _, err := exec.LookPath(configured); err != nil {
			return "", fmt.Errorf("host program: %w", err)
		}
		return configured, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "/proc/self/exe", nil
	}
	beside := filepath.Join(filepath.Dir(self), hostArgv0)
	if st, err := os.Stat(beside); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
		return beside, nil
	}
	// Not by its path, which an upgrade may have replaced.
	return "/proc/self/exe", nil
}

// child is a started host program.
type child struct {
	pid   int
	spec  *os.File // write end
	reply *os.File // read end
}

// spawn starts the host program with a command. It waits for its Spec. dir
// is an open folder: the run folder, or the cache folder to fill.
func spawn(binary, command string, module, dir, stderr *os.File, stdio []*os.File, sockets []*os.File) (*child, error) {
	specR, specW, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start host: %w", err)
	}
	replyR, replyW, err := os.Pipe()
	if err != nil {
		_ = specR.Close()
		_ = specW.Close()
		return nil, fmt.Errorf("start host: %w", err)
	}
	env := []string{"GOTRACEBACK=single", "PATH=/usr/bin:/bin"}
	if command == host.CommandRun {
		env = append(env, "GOMAXPROCS=1", "GOGC=off") // see host.settle
	}
	files := []*os.File{nil, nil, stderr, specR, replyW, module, dir}
	copy(files, stdio)
	files = append(files, sockets...)
	p, err := os.StartProcess(binary, []string{hostArgv0, command}, &os.ProcAttr{
		Dir:   "/",
		Env:   env,
		Files: files,
		Sys:   &syscall.SysProcAttr{Setsid: len(stdio) == 0},
	})
	_ = specR.Close()
	_ = replyW.Close()
	if err != nil {
		_ = specW.Close()
		_ = replyR.Close()
		return nil, fmt.Errorf("start host: %w", err)
	}
	c := &child{pid: p.Pid, spec: specW, reply: replyR}
	_ = p.Release()
	return c, nil
}

// send gives the child its Spec and waits for its answer.
func (c *child) send(ctx context.Context, s host.Spec) (host.Reply, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return host.Reply{}, fmt.Errorf("host spec: %w", err)
	}
	stop := context.AfterFunc(ctx, func() {
		_ = c.spec.SetWriteDeadline(time.Unix(1, 0))
		_ = c.reply.SetReadDeadline(time.Unix(1, 0))
	})
	defer stop()
	defer func() { _ = c.reply.Close() }()
	_, err = c.spec.Write(b)
	if cerr := c.spec.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return host.Reply{}, errors.Join(ctx.Err(), fmt.Errorf("send spec to host: %w", err))
	}
	got, err := io.ReadAll(io.LimitReader(c.reply, 1<<20))
	if err != nil {
		return host.Reply{}, errors.Join(ctx.Err(), fmt.Errorf("answer of host: %w", err))
	}
	var r host.Reply
	if len(bytes.TrimSpace(got)) == 0 {
		return r, errHostDied
	}
	if err := json.Unmarshal(got, &r); err != nil {
		return r, fmt.Errorf("answer of host: %w", err)
	}
	return r, nil
}

// abandon closes what send would use.
func (c *child) abandon() {
	_ = c.spec.Close()
	_ = c.reply.Close()
}

var errHostDied = errors.New("the host program ended before it answered")

// kill ends a direct child and reaps it.
func killChild(pid int) syscall.WaitStatus {
	_ = syscall.Kill(pid, syscall.SIGKILL)
	return reap(pid)
}

func reap(pid int) syscall.WaitStatus {
	var ws syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(pid, &ws, 0, nil); !errors.Is(err, syscall.EINTR) {
			return ws
		}
	}
}

// firstLines is the beginning of a text file: where a Go program says what
// killed it.
func firstLines(path string, limit int) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, int64(limit)))
	if err != nil {
		return ""
	}
	head, _, _ := strings.Cut(string(b), "\n\n")
	return strings.TrimSpace(strings.ToValidUTF8(head, "?"))
}
