package oci

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// monitorsGroup holds all conmon processes: a service's group would take
// them with it when the agent's service is stopped.
const monitorsGroup = "monitors"

// monitor starts conmon, which creates the container, and returns the
// container's first process. conmon forks once more and goes on alone.
// The protocol over _OCI_STARTPIPE and _OCI_SYNCPIPE is conmon's (conmon(8),
// src/conmon.c): it waits for a byte, then answers {"data": pid} or
// {"data": -1, "message": "..."}.
func (r *Runtime) monitor(ctx context.Context, s workload.Spec, rec record, dir string) (pid int, err error) {
	args := []string{
		"--api-version", "1", "-c", rec.Name, "-u", rec.Name, "-n", rec.Name,
		"-r", rec.Runtime, "--runtime-arg", "--root", "--runtime-arg", r.rootDir(),
		"-b", dir, "-p", filepath.Join(dir, pidFile), "--conmon-pidfile", filepath.Join(dir, monitorPIDFile),
		"-l", "k8s-file:" + s.LogPath, "--exit-dir", filepath.Join(dir, exitDir), "--persist-dir", dir,
		"--socket-dir-path", r.socketDir(), "--log-level", "warning", "--syslog=false",
	}
	if s.LogMaxBytes > 0 {
		args = append(args, "--log-size-max", strconv.FormatInt(s.LogMaxBytes, 10))
	}
	if s.TTY {
		args = append(args, "-t")
	}
	if s.Stdin {
		args = append(args, "-i")
		if !s.StdinOnce {
			args = append(args, "--leave-stdin-open")
		}
	}
	syncR, syncW, err := os.Pipe()
	if err != nil {
		return 0, fmt.Errorf("start conmon: %w", err)
	}
	defer func() { _ = syncR.Close() }()
	startR, startW, err := os.Pipe()
	if err != nil {
		_ = syncW.Close()
		return 0, fmt.Errorf("start conmon: %w", err)
	}
	defer func() { _ = startW.Close() }()
	stderr, err := os.OpenFile(filepath.Join(dir, "conmon.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		_, _ = syncW.Close(), startR.Close()
		return 0, fmt.Errorf("start conmon: %w", err)
	}
	defer func() { _ = stderr.Close() }()
	c := exec.Command(r.cfg.Programs.Conmon, args...) //nolint:noctx // it outlives every context
	c.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TZ=UTC", "_OCI_SYNCPIPE=3", "_OCI_STARTPIPE=4"}
	c.ExtraFiles = []*os.File{syncW, startR}
	c.Stderr, c.Dir, c.SysProcAttr = stderr, dir, sessionOfItsOwn()
	err = c.Start()
	_ = syncW.Close()
	_ = startR.Close()
	if err != nil {
		return 0, fmt.Errorf("start conmon: %w", err)
	}
	if g, err := r.cfg.Cgroups.Create(monitorsGroup, cgroup.Limits{}); err == nil {
		_ = g.Add(c.Process.Pid)
	}
	_, err = startW.Write([]byte{0})
	_ = startW.Close()
	if werr := c.Wait(); err == nil {
		err = werr // the first of two processes; the second has the container
	}
	if err != nil {
		if text := logTail(dir); text != "" {
			err = fmt.Errorf("%w: %s", err, text)
		}
		return 0, fmt.Errorf("start conmon: %w", err)
	}
	return awaitPID(ctx, syncR, dir)
}

func awaitPID(ctx context.Context, sync *os.File, dir string) (int, error) {
	stop := context.AfterFunc(ctx, func() { _ = sync.Close() })
	defer stop()
	line, err := bufio.NewReader(io.LimitReader(sync, 64<<10)).ReadBytes('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return 0, fmt.Errorf("answer of conmon: %w", err)
	}
	var answer struct {
		Data    int    `json:"data"`
		Message string `json:"message"`
	}
	if len(line) == 0 {
		return 0, fmt.Errorf("conmon ended without an answer: %s", logTail(dir))
	}
	if err := json.Unmarshal(line, &answer); err != nil {
		return 0, fmt.Errorf("answer of conmon %q: %w", line, err)
	}
	if answer.Data <= 0 {
		text := lastLine([]byte(answer.Message))
		if text == "" {
			text = logTail(dir)
		}
		return 0, createError(text)
	}
	return answer.Data, nil
}

func logTail(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, "conmon.log"))
	if err != nil {
		return "no log"
	}
	return lastLine(b[max(0, len(b)-2048):])
}

// ofTheNode says whether the node is short of something: that is no fault of
// the container, which is tried again.
func ofTheNode(text string) bool {
	for _, errno := range []unix.Errno{unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EAGAIN, unix.EIO, unix.EROFS} {
		if strings.Contains(text, errno.Error()) {
			return true
		}
	}
	return false
}

// createError words a refusal of runc or crun.
func createError(text string) error {
	e := &workload.StartError{Reason: "RunContainerError", Message: text, Ended: !ofTheNode(text)}
	switch {
	case strings.Contains(text, "executable file") && strings.Contains(text, "not found"), strings.Contains(text, "no such file or directory"):
		e.Hint = "is the command right, and is it in the image?"
	case strings.Contains(text, "exec format error"):
		e.Hint = "the image is for another processor"
	case strings.Contains(text, "memory") && (strings.Contains(text, "OOM") || strings.Contains(text, "oom") || strings.Contains(text, "set memory limit")):
		e.Hint = "the memory limit is too small to start"
	}
	return e
}
