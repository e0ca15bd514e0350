package wasm

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/process"
	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Stop implements workload.Runtime.
func (r *Runtime) Stop(ctx context.Context, id workload.ID, grace time.Duration) error {
	unlock, err := r.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	p := r.process(id)
	if p == nil {
		return nil
	}
	if err := host.Send(r.folder(id), host.Request{Command: "stop", Grace: grace}, controlTimeout); err != nil {
		r.log.Warn("host did not take the stop request", "container", id.Container, "pid", p.PID, "err", err)
	}
	t := time.NewTimer(grace + stopSlack)
	defer t.Stop()
	select {
	case <-p.Ended():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop %s: %w", id.Container, context.Cause(ctx))
	case <-t.C:
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
	p := r.process(id)
	if p == nil {
		return nil
	}
	return r.kill(ctx, id, p)
}

func (r *Runtime) kill(ctx context.Context, id workload.ID, p *process.Watched) error {
	if err := r.watch.Signal(p, unix.SIGKILL); err != nil {
		return fmt.Errorf("kill %s: %w", id.Container, err)
	}
	select {
	case <-p.Ended():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kill %s: %w", id.Container, context.Cause(ctx))
	case <-time.After(killTimeout):
		return fmt.Errorf("kill %s: process %d does not end (waiting for a disk?)", id.Container, p.PID)
	}
}

// process returns the attempt's live process, adopting it if need be; nil
// when there is none.
func (r *Runtime) process(id workload.ID) *process.Watched {
	if p := r.watch.Get(id); p != nil {
		return p
	}
	h, ok := r.readHost(r.folder(id))
	if !ok || !r.isAlive(h) {
		return nil
	}
	r.watch.Add(id, h.PID, h.StartTime)
	return r.watch.Get(id)
}

// Remove implements workload.Runtime.
func (r *Runtime) Remove(ctx context.Context, id workload.ID) error {
	unlock, err := r.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if p := r.process(id); p != nil {
		if err := r.kill(ctx, id, p); err != nil {
			return err
		}
	}
	return r.remove(ctx, id)
}

func (r *Runtime) remove(ctx context.Context, id workload.ID) error {
	dir := r.folder(id)
	if rec, err := r.readRecord(dir); err == nil && rec.Cgroup != "" && r.cfg.Cgroups != nil {
		g := r.cfg.Cgroups.Open(rec.Cgroup)
		if err := g.Kill(ctx); err != nil {
			return fmt.Errorf("remove %s: %w", id.Container, err)
		}
		if err := g.Remove(); err != nil {
			return fmt.Errorf("remove %s: %w", id.Container, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove %s: %w", id.Container, err)
	}
	r.watch.Forget(id)
	return nil
}
