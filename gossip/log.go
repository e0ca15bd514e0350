package gossip

import (
	"context"
	"log"
	"log/slog"
	"strings"
	"sync"
	"time"
)

type logWriter = *log.Logger

// newLogger turns memberlist's lines into slog records, one a minute for
// each kind of line, and lets hear have all: on a bad network it repeats itself
// every second. What hear says itself, better, is left out.
func newLogger(l *slog.Logger, hear func(line string) (said bool)) logWriter {
	return log.New(&adapter{log: l, hear: hear, last: map[string]time.Time{}}, "", 0)
}

type adapter struct {
	log  *slog.Logger
	hear func(line string) (said bool) // every line, before it is thinned out
	mu   sync.Mutex
	last map[string]time.Time
}

const (
	logEvery = time.Minute
	logKinds = 256
)

// Write implements io.Writer.
func (a *adapter) Write(b []byte) (int, error) {
	line := strings.TrimSpace(string(b))
	level, rest := slog.LevelInfo, line
	for prefix, l := range map[string]slog.Level{
		"[DEBUG] ": slog.LevelDebug, "[INFO] ": slog.LevelInfo, "[WARN] ": slog.LevelWarn, "[ERR] ": slog.LevelError,
	} {
		if r, ok := strings.CutPrefix(line, prefix); ok {
			level, rest = l, r
		}
	}
	rest = strings.TrimPrefix(rest, "memberlist: ")
	if a.hear(rest) {
		return len(b), nil
	}
	if level == slog.LevelError {
		level = slog.LevelWarn // a peer that cannot be reached is no error of ours
	}
	if a.allow(kindOf(rest)) {
		a.log.Log(context.Background(), level, "gossip", "detail", rest)
	}
	return len(b), nil
}

// kindOf is the line up to its first figure: names and addresses differ.
func kindOf(s string) string {
	if i := strings.IndexAny(s, "0123456789:"); i > 0 {
		return s[:i]
	}
	return s
}

func (a *adapter) allow(kind string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if at, ok := a.last[kind]; ok && now.Sub(at) < logEvery {
		return false
	}
	if len(a.last) >= logKinds {
		clear(a.last)
	}
	a.last[kind] = now
	return true
}
