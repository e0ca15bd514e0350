package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/watchdog"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// ending is how an attempt ended, as it is kept in its folder.
type ending struct {
	ExitCode   int       `json:"exitCode"`
	Reason     string    `json:"reason"`
	Message    string    `json:"message,omitempty"`
	FinishedAt time.Time `json:"finishedAt"`
}

// State implements workload.Runtime.
func (r *Runtime) State(_ context.Context, id workload.ID) (workload.State, bool, error) {
	return r.read(id)
}

func (r *Runtime) read(id workload.ID) (workload.State, bool, error) {
	dir := r.folder(id)
	st := workload.State{ID: id}
	var rec record
	err := readJSON(filepath.Join(dir, recordFile), &rec)
	if errors.Is(err, fs.ErrNotExist) {
		if !exists(dir) {
			return st, false, nil
		}
		st.Phase = workload.Created // died between the folder and its record
		return st, true, nil
	}
	if err != nil {
		st.Phase, st.Message = workload.Unknown, err.Error()
		return st, true, nil
	}
	st.Digest, st.LogPath = rec.Digest, rec.LogPath
	var p started
	if err := readJSON(filepath.Join(dir, startedFile), &p); err != nil || p.PID <= 1 {
		st.Phase = workload.Created
		return st, true, nil
	}
	st.PID, st.StartedAt = p.PID, p.StartedAt
	sameBoot := p.BootID == process.BootID()
	if sameBoot && process.Alive(p.PID, p.Start) && exists(filepath.Join(r.rootDir(), rec.Name, "exec.fifo")) {
		st.Phase = workload.Created // it waits for a start that was lost
		return st, true, nil
	}
	if sameBoot && process.Alive(p.Monitor, p.MonitorStart) {
		r.watch.Add(id, p.Monitor, p.MonitorStart)
		if process.Alive(p.PID, p.Start) {
			st.Phase = workload.Running
			r.followLog(rec)
			return st, true, nil
		}
		// The first process is gone: its code is there in a moment.
		if w := r.watch.Get(id); w != nil && !w.WaitEnd(drainTimeout) && !exists(filepath.Join(dir, exitDir, rec.Name)) {
			return st, true, fmt.Errorf("container %s: its monitor (conmon, pid %d) has not told its exit code", id.Container, p.Monitor)
		}
	}
	end := r.end(dir, rec, p, sameBoot)
	st.Phase, st.PID = workload.Exited, 0
	st.ExitCode, st.Reason, st.Message, st.FinishedAt = end.ExitCode, end.Reason, end.Message, end.FinishedAt
	return st, true, nil
}

// end is how an attempt ended: as it was noted, or by what conmon left, or
// by what can be concluded without; then it is noted.
func (r *Runtime) end(dir string, rec record, p started, sameBoot bool) ending {
	path := filepath.Join(dir, endFile)
	var e ending
	if readJSON(path, &e) == nil {
		return e
	}
	e = r.conclude(dir, rec, p, sameBoot)
	if err := writeJSON(path, e); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Warn("the end of a container cannot be noted in its folder", "container", rec.ID.Container, "uid", rec.ID.PodUID, "err", err)
	}
	r.forgetLog(rec)
	return e
}

func (r *Runtime) conclude(dir string, rec record, p started, sameBoot bool) ending {
	e := ending{ExitCode: 137, FinishedAt: time.Now().UTC()}
	if !sameBoot {
		e.Reason, e.Message = reasonHostLost, "the machine was restarted while it ran"
		return e
	}
	file := filepath.Join(dir, exitDir, rec.Name)
	b, err := os.ReadFile(file)
	code, cerr := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || cerr != nil {
		// Without its monitor nobody reads its output or learns its exit
		// code: what still runs is ended, so that it can be started anew.
		if process.Alive(p.PID, p.Start) {
			r.log.Warn("a container's monitor (conmon) was killed: the container is ended, and started again as its pod says",
				"pod", rec.Namespace+"/"+rec.Pod, "container", rec.ID.Container, "conmon", p.Monitor)
			if err := signalProcess(p.PID, p.Start, unix.SIGKILL); err != nil {
				r.log.Warn("a container without its monitor cannot be ended", "container", rec.ID.Container, "err", err)
			}
		}
		e.Reason = reasonMonitor
		e.Message = fmt.Sprintf("its monitor (conmon, pid %d) was killed, so its output and exit code are lost", p.Monitor)
		if hint := r.noSpace("", rec.LogPath); hint != "" {
			e.Message += " (" + hint + ")"
		}
		return e
	}
	if info, err := os.Stat(file); err == nil {
		e.FinishedAt = info.ModTime().UTC()
	}
	e.ExitCode, e.Reason = code, reasonError
	switch {
	case exists(filepath.Join(dir, watchdog.FiredFile)):
		e.Reason, e.Message = reasonDeadline, "stopped by itself: no word from the control plane until its stop deadline"
		return e
	case code == 0:
		e.Reason = reasonCompleted
	case code == 128+int(unix.SIGKILL) && r.sawOOM(dir, rec):
		// The file alone is not its death, nor is the code its cause.
		e.Reason = reasonOOM
	}
	e.Message = r.lastWords(dir, rec, code)
	if e.Reason == reasonOOM {
		why := r.cfg.Cgroups.Open(rec.Cgroup).OOM().String()
		if e.Message != "" {
			why += "; last words: " + e.Message
		}
		e.Message = why
	}
	return e
}

func (r *Runtime) sawOOM(dir string, rec record) bool {
	if exists(filepath.Join(dir, oomFile)) {
		return true
	}
	st, err := r.cfg.Cgroups.Open(rec.Cgroup).Stats()
	return err == nil && st.OOMKills > 0
}

// Bounds of termination messages (upstream's: 4 KiB; from logs 2 KiB).
const (
	maxTermination = 4096
	maxFallback    = 2048
)

// lastWords is the termination message.
func (r *Runtime) lastWords(dir string, rec record, code int) string {
	if f, err := os.Open(filepath.Join(dir, terminationFile)); err == nil {
		defer func() { _ = f.Close() }()
		b, err := io.ReadAll(io.LimitReader(f, maxTermination))
		if err == nil && len(b) > 0 {
			return strings.ToValidUTF8(string(b), "?")
		}
	}
	if !rec.Fallback || code == 0 {
		return ""
	}
	return logEnd(rec.LogPath)
}

// logEnd is the text of the last lines of a log in the CRI format.
func logEnd(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	const window = 16 << 10
	b, err := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-window), window))
	if err != nil {
		return ""
	}
	lines := bytes.SplitAfter(b, []byte("\n"))
	if info.Size() > window {
		lines = lines[1:]
	}
	var text []byte
	const maxLines = 80
	for _, l := range lines[max(0, len(lines)-maxLines):] {
		if f := bytes.SplitN(l, []byte(" "), 4); len(f) == 4 {
			if f[2][0] == 'P' {
				f[3] = bytes.TrimSuffix(f[3], []byte("\n"))
			}
			text = append(text, f[3]...)
		}
	}
	return strings.ToValidUTF8(string(text[max(0, len(text)-maxFallback):]), "?")
}
