package wasm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

const (
	reasonOOM      = "OOMKilled"
	reasonHostLost = "HostLost"
)

// State implements workload.Runtime. It reads what the run folder says, so
// it is the same before and after an agent's death.
func (r *Runtime) State(_ context.Context, id workload.ID) (workload.State, bool, error) {
	st, ok, err := r.read(id)
	if ok && err == nil {
		st.Refused = readRefused(r.folder(id))
	}
	return st, ok, err
}

// readRefused is what the guest was refused so far.
func readRefused(dir string) (out []workload.Refusal) {
	b, err := atomicfile.Read(filepath.Join(dir, host.RefusedFile))
	var list []host.Refusal
	if err != nil || json.Unmarshal(b, &list) != nil {
		return nil
	}
	for _, x := range list {
		out = append(out, workload.Refusal(x))
	}
	return out
}

func (r *Runtime) readRecord(dir string) (record, error) {
	var rec record
	b, err := atomicfile.Read(filepath.Join(dir, host.RecordFile))
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err == nil && folderName(rec.ID) != filepath.Base(dir) {
		err = fmt.Errorf("record of %s in %s", folderName(rec.ID), dir)
	}
	return rec, err
}

func (r *Runtime) readHost(dir string) (h host.HostRecord, ok bool) {
	b, err := atomicfile.Read(filepath.Join(dir, host.HostFile))
	return h, err == nil && json.Unmarshal(b, &h) == nil && h.PID > 1
}

func (r *Runtime) isAlive(h host.HostRecord) bool {
	return h.BootID == process.BootID() && process.Alive(h.PID, h.StartTime)
}

func (r *Runtime) read(id workload.ID) (workload.State, bool, error) {
	dir := r.folder(id)
	st := workload.State{ID: id}
	rec, err := r.readRecord(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if _, serr := os.Stat(dir); errors.Is(serr, fs.ErrNotExist) {
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
	h, ok := r.readHost(dir)
	if !ok {
		st.Phase = workload.Created
		return st, true, nil
	}
	st.PID, st.StartedAt = h.PID, h.StartedAt
	if r.isAlive(h) {
		st.Phase = workload.Running
		r.watch.Add(id, h.PID, h.StartTime)
		return st, true, nil
	}
	if p := r.watch.Get(id); p != nil {
		p.WaitEnd(time.Second) // how it ended is known once it is reaped
	}
	end, err := r.exit(dir, rec, h)
	if err != nil {
		return st, true, err
	}
	st.Phase, st.PID = workload.Exited, 0
	st.ExitCode, st.Signal, st.Reason, st.Message, st.FinishedAt = end.ExitCode, end.Signal, end.Reason, end.Message, end.FinishedAt
	return st, true, nil
}

// exit is how an ended host ended: by its own record, or by what can be
// concluded without one, which is then recorded.
func (r *Runtime) exit(dir string, rec record, h host.HostRecord) (host.ExitRecord, error) {
	path := filepath.Join(dir, host.ExitFile)
	var e host.ExitRecord
	b, err := atomicfile.Read(path)
	if err == nil {
		err = json.Unmarshal(b, &e)
	}
	if err == nil {
		return e, nil
	}
	e = r.conclude(dir, rec, h)
	if b, err = json.Marshal(e); err != nil {
		return e, fmt.Errorf("exit record: %w", err)
	}
	if err := atomicfile.Write(path, b, 0o600); err != nil && !errors.Is(err, fs.ErrNotExist) {
		// On a full disk, say: the agent keeps what it is told now.
		r.log.Warn("the end of a container cannot be noted in its folder", "container", rec.ID.Container, "uid", rec.ID.PodUID, "err", err)
	}
	return e, nil
}

// conclude words the end of a host that left no record of its own.
func (r *Runtime) conclude(dir string, rec record, h host.HostRecord) host.ExitRecord {
	e := host.ExitRecord{ExitCode: 137, Signal: int(syscall.SIGKILL), Reason: host.ReasonError, FinishedAt: time.Now().UTC()}
	if h.BootID != process.BootID() {
		e.Reason, e.Message = reasonHostLost, "the machine was restarted while it ran"
		return e
	}
	if rec.Cgroup != "" && r.cfg.Cgroups != nil {
		if oom := r.cfg.Cgroups.Open(rec.Cgroup).OOM(); oom.Kills > 0 {
			e.Reason, e.Message = reasonOOM, oom.String()
			if !oom.Own {
				return e
			}
			return explained(dir, e)
		}
	}
	ws, known := r.watch.WaitStatus(rec.ID)
	if known && ws.Exited() {
		e.ExitCode, e.Signal = ws.ExitStatus(), 0
	} else if known && ws.Signaled() {
		e.ExitCode, e.Signal = 128+int(ws.Signal()), int(ws.Signal())
	}
	text := firstLines(filepath.Join(dir, host.StderrFile), 1024)
	switch {
	case outOfMemory(text):
		e.Reason, e.Message = reasonOOM, "its host program could get no more memory: "+text
		e = explained(dir, e)
	case text != "":
		e.Reason, e.Message = reasonHostLost, "its host program failed: "+text
	case known:
		e.Message = "it was killed (" + describe(ws) + ")"
	default:
		e.Message = "it was killed, and left no record of its end"
	}
	return e
}

// outOfMemory says whether a program's last words are that it could get no
// more memory.
func outOfMemory(text string) bool {
	return strings.Contains(text, "out of memory") || strings.Contains(text, "cannot allocate memory")
}

// explained says where the memory of a guest was that had too much, and names
// an endless recursion that ended so.
func explained(dir string, e host.ExitRecord) host.ExitRecord {
	use, ok := host.ReadMemoryUse(dir)
	if !ok {
		return e
	}
	if message, ok := use.Overflowed(); ok {
		e.Reason, e.Message = host.ReasonTrap, message
		return e
	}
	e.Message += " (" + use.String() + ")"
	return e
}

// describe words a wait status.
func describe(ws syscall.WaitStatus) string {
	switch {
	case ws.Signaled():
		return "signal " + ws.Signal().String()
	case ws.Exited():
		return "exit code " + strconv.Itoa(ws.ExitStatus())
	}
	return "unknown end"
}

// processStats reads one process's usage from /proc.
func processStats(pid int) (workload.Stats, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return workload.Stats{}, fmt.Errorf("stats: %w", err)
	}
	s := string(b)
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(f) < 22 {
		return workload.Stats{}, fmt.Errorf("stats: %q", s)
	}
	user, _ := strconv.ParseUint(f[11], 10, 64)
	system, _ := strconv.ParseUint(f[12], 10, 64)
	pages, _ := strconv.ParseUint(f[21], 10, 64)
	const tick = uint64(time.Second / 100) // USER_HZ
	return workload.Stats{CPUNanos: (user + system) * tick, MemoryBytes: pages * uint64(os.Getpagesize()), PIDs: 1}, nil
}
