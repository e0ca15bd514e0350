package gossip

import (
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"
)

// strangers says who else gossips on this network: a pool of another cluster,
// or another pool of this one. Each is named once in strangerEvery.
type strangers struct {
	log *slog.Logger
	own string // label

	mu   sync.Mutex
	next map[string]time.Time // by label: not named again before
}

const (
	strangerEvery = 30 * time.Minute
	maxStrangers  = 64
)

// mislabelled is what memberlist says of a packet or a stream of another pool,
// before the label and where it came from.
const mislabelled = " with unacceptable label "

// hear is called with memberlist's lines; true: it is about a stranger, and
// was said here as often as it needs to be.
func (s *strangers) hear(line string) bool {
	_, rest, ok := strings.Cut(line, mislabelled)
	if !ok {
		return false
	}
	quoted, err := strconv.QuotedPrefix(rest)
	if err != nil {
		return false
	}
	label, err := strconv.Unquote(quoted)
	if err != nil || label == s.own {
		return false
	}
	_, from, _ := strings.Cut(rest[len(quoted):], "from=")
	s.mu.Lock()
	now := time.Now()
	again := now.Before(s.next[label])
	if !again {
		if len(s.next) >= maxStrangers {
			clear(s.next)
		}
		s.next[label] = now.Add(strangerEvery)
	}
	s.mu.Unlock()
	if again {
		return true
	}
	ours, _, _ := strings.Cut(s.own, ".")
	theirs, _, named := strings.Cut(label, ".")
	switch {
	case !named:
		s.log.Warn("a program that is no part of this cluster gossips on this network: it is not listened to", "address", from)
	case theirs == ours:
		s.log.Warn("a member of another site, or of this cluster before a recovery, gossips with this one: they refuse each other", "cluster", theirs, "address", from)
	default:
		s.log.Warn("another cluster gossips on this network: the two refuse each other", "cluster", theirs, "ours", ours, "address", from)
	}
	return true
}
