package consensus

import (
	"context"
	"io"
	"log/slog"
	"slices"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// newRaftLogger routes Raft's own log lines to slog, from WARN on.
func newRaftLogger(log *slog.Logger, name string) hclog.Logger {
	l := hclog.NewInterceptLogger(&hclog.LoggerOptions{Name: name, Level: hclog.Warn, Output: io.Discard})
	l.RegisterSink(slogSink{log.With("part", name)})
	return l
}

// repeated are the lines that Raft writes several times a second while
// another server is away. That one is away is said once, by who connects to
// it.
var repeated = []string{
	"failed to heartbeat to", "failed to appendEntries to", "failed to pipeline appendEntries",
	"failed to make requestVote RPC", "failed to contact", "Election timeout reached, restarting election",
	"failed to get previous log", "appendEntries rejected, sending older logs",
	"rejecting pre-vote request since we have a leader", "rejecting vote request since we have a leader",
}

type slogSink struct{ log *slog.Logger }

// Accept implements hclog.SinkAdapter.
func (s slogSink) Accept(_ string, level hclog.Level, msg string, args ...any) {
	if slices.Contains(args, any(raft.ErrRaftShutdown)) {
		return // we asked for it
	}
	l := slog.LevelWarn
	switch {
	case level < hclog.Warn:
		return
	case slices.Contains(repeated, msg):
		l = slog.LevelDebug
	case level >= hclog.Error:
		l = slog.LevelError
	}
	s.log.Log(context.Background(), l, msg, args...)
}
