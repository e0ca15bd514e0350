package oci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/watchdog"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// watchdogFile names the process that stops an attempt at its deadline.
const watchdogFile = "watchdog.json"

type watcher struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

var _ workload.Extender = (*Runtime)(nil)

// Extend implements workload.Extender. A watchdog that was killed is started
// again: the next renewal is never far.
func (r *Runtime) Extend(ctx context.Context, id workload.ID, until time.Duration) error {
	if until <= 0 {
		return fmt.Errorf("extend %s: %s is no deadline", id.Container, until)
	}
	unlock, err := r.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	rec, p, ok := r.alive(id)
	dir := r.folder(id)
	if !ok || !watchdog.Has(dir) || exists(filepath.Join(dir, watchdog.FiredFile)) {
		return nil
	}
	if err := watchdog.Set(dir, until); err != nil {
		return err
	}
	var w watcher
	if err := readJSON(filepath.Join(dir, watchdogFile), &w); err == nil && process.Alive(w.PID, w.Start) {
		return nil
	}
	r.log.Warn("the process that stops a container at its deadline was gone, and is started again", "pod", rec.Namespace+"/"+rec.Pod, "container", id.Container)
	return r.guard(dir, rec, p)
}

// guard starts the process that stops the container at its deadline.
func (r *Runtime) guard(dir string, rec record, p started) error {
	if r.cfg.Host == "" {
		return configError(errors.New("nothing here would end the container at its stop deadline"))
	}
	sig, err := signalNumber(rec.StopSignal)
	if err != nil {
		r.log.Warn("the image's stop signal is unknown: SIGTERM is sent", "container", rec.ID.Container, "signal", rec.StopSignal)
	}
	proc, err := watchdog.Spawn(r.cfg.Host, watchdog.Target{Dir: dir, PID: p.PID, Start: p.Start, Signal: sig, Grace: rec.Grace})
	if err != nil {
		return err
	}
	w := watcher{PID: proc.Pid}
	if w.Start, err = process.StartTime(w.PID); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("watchdog: %w", err)
	}
	_ = r.cfg.Cgroups.Open(monitorsGroup).Add(w.PID) // as conmon: a service's group would take it along
	// It ends with the container; until then this agent, or init, reaps it.
	go func() { _, _ = proc.Wait() }()
	return writeJSON(filepath.Join(dir, watchdogFile), w)
}
