package nodeapi

import (
	"sync"
	"time"
)

// limited lets one line a minute through for each subject, so that a node
// that repeats itself does not fill the log.
type limited struct {
	mu   sync.Mutex
	last map[string]time.Time
}

const (
	warnEvery  = time.Minute
	warnLength = 4096
)

func newLimited() *limited { return &limited{last: map[string]time.Time{}} }

func (l *limited) allow(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if now.Sub(l.last[key]) < warnEvery {
		return false
	}
	if len(l.last) >= warnLength {
		clear(l.last)
	}
	l.last[key] = now
	return true
}

func (s *Server) warn(what, name, msg string, err error) {
	if s.warnings.allow(what + "/" + name + "/" + msg) {
		s.log.Warn(msg, what, name, "error", err)
	}
}
