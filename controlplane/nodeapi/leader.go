package nodeapi

import (
	"context"
	"errors"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// leaderWait is how long a node that comes while nobody leads is kept
// waiting: an election takes a second or two, and thousands of nodes that
// come again and again would only make it longer.
const leaderWait = 4 * time.Second

const notLeading = wire.RefusedNotLeading

// whereTo says where a node shall go that came here; "" is here. Before it
// leads a server may hold an old view, or none: it would not know the node,
// nor that it was banned.
func (s *Server) whereTo(ctx context.Context) (refused string, leader []string) {
	t := time.NewTimer(leaderWait)
	defer t.Stop()
	poll := time.NewTicker(100 * time.Millisecond) // where nothing tells of changes
	defer poll.Stop()
	for {
		var changed <-chan struct{}
		if s.cfg.Leader != nil {
			leader, changed = s.cfg.Leader()
		}
		if _, leading := s.cfg.Leadership.Leadership(); leading {
			return "", nil
		}
		if len(leader) > 0 {
			return notLeading, leader
		}
		select {
		case <-changed:
		case <-poll.C:
		case <-t.C:
			return notLeading, nil
		case <-ctx.Done():
			return notLeading, nil
		}
	}
}

var errNotLeading = errors.New(notLeading + " any more")

// dismiss ends all sessions: their nodes find the leader.
func (s *Server) dismiss() {
	s.mu.Lock()
	list := make([]*session, 0, len(s.sessions))
	for _, sess := range s.sessions {
		list = append(list, sess)
	}
	s.mu.Unlock()
	for _, sess := range list {
		sess.conn.Close(errNotLeading)
	}
}
