package oci

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
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Stop implements workload.Runtime.
func (r *Runtime) Stop(ctx context.Context, id workload.ID, grace time.Duration) error {
	unlock, err := r.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	rec, p, ok := r.alive(id)
	if !ok {
		return nil
	}
	if grace > 0 {
		sig, err := signalNumber(rec.StopSignal)
		if err != nil {
			r.log.Warn("the image's stop signal is unknown: SIGTERM is sent", "container", id.Container, "signal", rec.StopSignal)
		}
		if err := signalProcess(p.PID, p.Start, sig); err != nil {
			return fmt.Errorf("stop %s: %w", id.Container, err)
		}
		if ended, err := r.awaitEnd(ctx, id, p, grace); ended || err != nil {
			return err
		}
	}
	return r.kill(ctx, id, p)
}

// Kill implements workload.Runtime.
func (r *Runtime) Kill(ctx context.Context, id workload.ID) error {
	unlock, err := r.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	_, p, ok := r.alive(id)
	if !ok {
		return nil
	}
	return r.kill(ctx, id, p)
}

// alive is the attempt's record while any process of it may live.
func (r *Runtime) alive(id workload.ID) (rec record, p started, ok bool) {
	dir := r.folder(id)
	if readJSON(filepath.Join(dir, recordFile), &rec) != nil || readJSON(filepath.Join(dir, startedFile), &p) != nil {
		return rec, p, false
	}
	if p.BootID != process.BootID() {
		return rec, p, false
	}
	return rec, p, process.Alive(p.PID, p.Start) || process.Alive(p.Monitor, p.MonitorStart)
}

// awaitEnd waits until the attempt's monitor has ended, or d has passed. A
// monitor that was killed leaves the first process to be looked at.
func (r *Runtime) awaitEnd(ctx context.Context, id workload.ID, p started, d time.Duration) (bool, error) {
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	if process.Alive(p.Monitor, p.MonitorStart) {
		r.watch.Add(id, p.Monitor, p.MonitorStart)
	}
	if w := r.watch.Get(id); w != nil {
		select {
		case <-w.Ended():
		case <-deadline.C:
			return false, nil
		case <-ctx.Done():
			return false, fmt.Errorf("stop %s: %w", id.Container, context.Cause(ctx))
		}
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for process.Alive(p.PID, p.Start) {
		select {
		case <-tick.C:
		case <-deadline.C:
			return false, nil
		case <-ctx.Done():
			return false, fmt.Errorf("stop %s: %w", id.Container, context.Cause(ctx))
		}
	}
	return true, nil
}

// kill ends the first process of the container's pid namespace, with which
// the kernel ends all others.
func (r *Runtime) kill(ctx context.Context, id workload.ID, p started) error {
	if err := signalProcess(p.PID, p.Start, unix.SIGKILL); err != nil {
		return fmt.Errorf("kill %s: %w", id.Container, err)
	}
	ended, err := r.awaitEnd(ctx, id, p, killTimeout)
	if err == nil && !ended {
		err = fmt.Errorf("kill %s: process %d does not end (waiting for a disk?)", id.Container, p.PID)
	}
	return err
}

// Remove implements workload.Runtime.
func (r *Runtime) Remove(ctx context.Context, id workload.ID) error {
	unlock, err := r.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if _, p, ok := r.alive(id); ok {
		if err := r.kill(ctx, id, p); err != nil {
			return err
		}
	}
	return r.remove(ctx, id)
}

// remove deletes all that is left of an attempt, from any half-done state.
func (r *Runtime) remove(ctx context.Context, id workload.ID) error {
	dir, folder := r.folder(id), folderName(id)
	if !exists(dir) {
		return os.RemoveAll(r.upperDir(folder))
	}
	fail := func(err error) error { return fmt.Errorf("remove %s: %w", id.Container, err) }
	var rec record
	known := readJSON(filepath.Join(dir, recordFile), &rec) == nil
	if !known {
		rec.Runtime, rec.Name = r.cfg.Programs.Runtime, r.shortName(folder)
	}
	if exists(filepath.Join(r.rootDir(), rec.Name)) {
		program := rec.Runtime
		if !exists(program) {
			program = r.cfg.Programs.Runtime
		}
		if err := r.deleteState(ctx, program, rec.Name, known); err != nil {
			return fail(err)
		}
	}
	if known {
		if err := r.cfg.Cgroups.Open(rec.Cgroup).Kill(ctx); err != nil {
			return fail(err)
		}
		if err := errors.Join(r.cfg.Cgroups.Open(rec.Cgroup).Remove(), r.cfg.Cgroups.Prune(rec.Cgroup)); err != nil {
			return fail(err)
		}
		r.forgetLog(rec)
	}
	if err := unmountRootfs(dir); err != nil {
		return fail(err)
	}
	err := errors.Join(os.RemoveAll(r.upperDir(folder)), os.RemoveAll(filepath.Join(r.socketDir(), rec.Name)))
	// The folder last: while it is there, this is done again.
	if err = errors.Join(err, os.RemoveAll(dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fail(err)
	}
	r.watch.Forget(id)
	return nil
}

// deleteState has the OCI runtime forget a container. One that cannot read its
// own state can neither kill nor delete: then the state is removed here, since
// the first process has ended (Remove), and what is left ends with the control
// group, which only a record names.
func (r *Runtime) deleteState(ctx context.Context, program, name string, recorded bool) error {
	state := filepath.Join(r.rootDir(), name)
	out, err := command(ctx, program, r.rootDir(), "delete", "--force", name).CombinedOutput()
	if err == nil || !exists(state) {
		return nil
	}
	for _, file := range []string{"state.json", "status"} { // runc's, crun's
		if b, rerr := os.ReadFile(filepath.Join(state, file)); rerr == nil && !json.Valid(b) && recorded {
			r.log.Warn("the OCI runtime cannot read its state of a container, which is removed without it", "container", name, "file", filepath.Join(state, file), "err", err)
			return os.RemoveAll(state)
		}
	}
	return fmt.Errorf("%w: %s", err, lastLine(out))
}

// signalNumber reads "SIGTERM", "TERM", "15" or "SIGRTMIN+3"; SIGTERM where
// there is none.
func signalNumber(name string) (unix.Signal, error) {
	if name == "" {
		return unix.SIGTERM, nil
	}
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n < 65 {
		return unix.Signal(n), nil
	}
	name = "SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG")
	if n := unix.SignalNum(name); n != 0 {
		return n, nil
	}
	const rtmin, rtmax = 34, 64 // what C libraries leave to programs (signal(7))
	if rest, ok := strings.CutPrefix(name, "SIGRTMIN"); ok {
		if n, err := strconv.Atoi("0" + strings.TrimPrefix(rest, "+")); err == nil && n <= rtmax-rtmin {
			return unix.Signal(rtmin + n), nil
		}
	}
	if rest, ok := strings.CutPrefix(name, "SIGRTMAX"); ok {
		if n, err := strconv.Atoi("0" + strings.TrimPrefix(rest, "-")); err == nil && n <= rtmax-rtmin {
			return unix.Signal(rtmax - n), nil
		}
	}
	return unix.SIGTERM, fmt.Errorf("signal %q does not exist", name)
}
