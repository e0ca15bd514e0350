package oci

import (
	"context"
	"os"
	"strconv"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// logInterval is how often running containers' logs are looked at. Looking
// is two stats a container and writes nothing.
const logInterval = time.Second

// conmon keeps to --log-size-max by itself, agent or not, by replacing the
// log by an empty one. A second name for the file (".keep") holds what it
// replaced, which then becomes PATH.1, as the Wasm host names it. While the
// agent is away only the newest file is kept.
const keepSuffix = ".keep"

// logFile is the log of a running attempt.
type logFile struct {
	path  string
	files int
}

// followLog has a running attempt's log looked after.
func (r *Runtime) followLog(rec record) {
	if rec.LogFiles < 2 || rec.LogBytes <= 0 {
		return
	}
	l := logFile{rec.LogPath, rec.LogFiles}
	r.mu.Lock()
	_, known := r.logs[rec.ID]
	r.logs[rec.ID] = l
	r.mu.Unlock()
	if !known {
		l.rotated()
	}
}

// forgetLog looks a last time.
func (r *Runtime) forgetLog(rec record) {
	r.mu.Lock()
	l, known := r.logs[rec.ID]
	delete(r.logs, rec.ID)
	r.mu.Unlock()
	if known {
		l.rotated()
	}
	_ = os.Remove(rec.LogPath + keepSuffix)
}

func (r *Runtime) keepLogs(ctx context.Context) {
	t := time.NewTicker(logInterval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		r.mu.Lock()
		all := make(map[workload.ID]logFile, len(r.logs))
		for id, l := range r.logs {
			all[id] = l
		}
		r.mu.Unlock()
		for _, l := range all {
			l.rotated()
		}
	}
}

// rotated names the file that conmon replaced, if it did.
func (l logFile) rotated() {
	keep := l.path + keepSuffix
	now, err := os.Stat(l.path)
	if err != nil {
		return
	}
	if old, err := os.Stat(keep); err == nil {
		if os.SameFile(now, old) {
			return
		}
		for i := l.files - 2; i >= 1; i-- {
			_ = os.Rename(l.path+"."+strconv.Itoa(i), l.path+"."+strconv.Itoa(i+1))
		}
		_ = os.Rename(keep, l.path+".1")
	}
	_ = os.Link(l.path, keep)
}
