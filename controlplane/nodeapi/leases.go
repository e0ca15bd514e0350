package nodeapi

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/controllers/nodelifecycle"
	"github.com/dunlin-project/dunlin/wire"
)

// Timing of leases (design: Leases).
const (
	LeaseInterval = 2 * time.Second
	LeaseTTL      = 6500 * time.Millisecond
	SweepInterval = 250 * time.Millisecond
	// staleMost: a node that came back reports whatever is not acknowledged at
	// once; one that said nothing for so long has nothing new to say.
	staleMost = 10 * time.Second
	// handshake is what a small server may need for each node that comes to it
	// after a change of leaders, when all of them come.
	handshake = 10 * time.Millisecond
)

// Leases are the node leases of one leadership, in memory only. Time is
// monotonic. Safe for concurrent use.
type Leases struct {
	mu      sync.Mutex
	term    uint64
	leading bool
	m       map[string]*lease
	swept   time.Time // when it was last looked at which leases ran out
	alive   time.Time // when renewals were taken last; zero: never since this process began
	settled time.Time // by then who could not renew before alive has tried again
	changed chan struct{}
	back    map[string]bool // came back since the last call of returned
}

type lease struct {
	deadline time.Time
	ttl      time.Duration // of the deadline
	renewed  time.Time     // zero: not in this term
	expired  bool
	stale    bool // renews again, has not reported since
	back     time.Time
	boot     string
	counter  uint64
}

var _ nodelifecycle.Leases = (*Leases)(nil)

func newLeases() *Leases {
	return &Leases{m: map[string]*lease{}, back: map[string]bool{}, changed: make(chan struct{}, 1)}
}

// Changed fires (coalesced) when a lease ran out or came back.
func (l *Leases) Changed() <-chan struct{} { return l.changed }

func (l *Leases) hint() {
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

// lead begins or ends a leadership. A new term gives every known node a full
// fresh TTL: the silence before it was the old leader's, not theirs. While
// nobody took renewals nodes wait longer and longer before they try again;
// until one was heard in this term, it has that long more, and what is left
// of an earlier such time, and as long as it takes to let all of them in.
func (l *Leases) lead(term uint64, leading bool, nodes []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.term == term && l.leading == leading {
		return
	}
	now := time.Now()
	l.term, l.leading, l.swept = term, leading, now
	l.m = make(map[string]*lease, len(nodes))
	if leading {
		ttl := LeaseTTL + wire.ReconnectMost
		if !l.alive.IsZero() {
			crowd := time.Duration(len(nodes)) * handshake
			ttl = LeaseTTL + min(max(now.Sub(l.alive), l.settled.Sub(now))+crowd, wire.ReconnectMost)
		}
		for _, n := range nodes {
			l.m[n] = &lease{deadline: now.Add(ttl), ttl: ttl}
		}
	}
}

// taken notes that renewals were taken at that time: here, or by the leader
// that this server follows.
func (l *Leases) taken(at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.takenAt(at)
}

func (l *Leases) takenAt(at time.Time) {
	gap := wire.ReconnectMost
	if !l.alive.IsZero() {
		gap = min(at.Sub(l.alive), gap)
	}
	if gap <= 0 {
		return
	}
	if tried := at.Add(gap); tried.After(l.settled) {
		l.settled = tried
	}
	l.alive = at
}

// ensure gives a node that appeared its first TTL.
func (l *Leases) ensure(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.leading && l.m[node] == nil {
		l.m[node] = &lease{deadline: time.Now().Add(LeaseTTL), ttl: LeaseTTL}
	}
}

func (l *Leases) forget(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.m, node)
}

// renew takes a renewal that was received now. ok is false when this server
// does not lead, or when the counter is not newer than one seen in the same
// boot (a replayed packet).
func (l *Leases) renew(node, boot string, counter uint64) (term uint64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.leading {
		return l.term, false
	}
	now := time.Now()
	if now.Sub(l.swept) > SweepInterval {
		l.sweep(now) // it is late, and must know so before this renewal hides it
	}
	e := l.m[node]
	if e == nil {
		e = &lease{}
		l.m[node] = e
	}
	if e.boot == boot && counter <= e.counter {
		return l.term, false
	}
	e.boot, e.counter = boot, counter
	e.renewed, e.deadline, e.ttl = now, now.Add(LeaseTTL), LeaseTTL
	l.takenAt(now)
	if e.expired {
		e.expired, e.stale, e.back = false, true, now
		l.back[node] = true
		l.hint()
	}
	return l.term, true
}

// reported notes that the node told the state of its pods.
func (l *Leases) reported(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.m[node]; e != nil && e.stale && !e.expired {
		e.stale = false
		l.hint()
	}
}

// lastRenewal is when the node renewed last; zero if not in this term.
func (l *Leases) lastRenewal(node string) (at time.Time, expired bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.m[node]; e != nil {
		return e.renewed, e.expired
	}
	return time.Time{}, false
}

// sweep marks what ran out. If it comes late by d, then this process was
// stopped or starved for d and may have renewals waiting that it did not
// read: every deadline moves by d.
func (l *Leases) sweep(now time.Time) {
	if late := now.Sub(l.swept) - SweepInterval; late > 0 {
		for _, e := range l.m {
			e.deadline = e.deadline.Add(late)
		}
	}
	l.swept = now
	for _, e := range l.m {
		if !e.expired && now.After(e.deadline) {
			e.expired = true
			l.hint()
		}
		if e.stale && !e.expired && now.Sub(e.back) > staleMost {
			e.stale = false
			l.hint()
		}
	}
}

// returned lists the nodes that came back since the last call.
func (l *Leases) returned() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.back) == 0 {
		return nil
	}
	out := slices.Sorted(maps.Keys(l.back))
	clear(l.back)
	return out
}

func (l *Leases) sweepNow() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sweep(time.Now())
}

// Snapshot implements nodelifecycle.Leases.
func (l *Leases) Snapshot() map[string]nodelifecycle.LeaseInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.sweep(now)
	out := make(map[string]nodelifecycle.LeaseInfo, len(l.m))
	for n, e := range l.m {
		out[n] = nodelifecycle.LeaseInfo{
			Age:     max(now.Sub(e.deadline.Add(-e.ttl)), 0),
			Renewed: !e.renewed.IsZero(),
			Expired: e.expired,
			Stale:   e.stale,
		}
	}
	return out
}

// InTerm implements nodelifecycle.Leases.
func (l *Leases) InTerm(term uint64) (map[string]nodelifecycle.LeaseInfo, bool) {
	l.mu.Lock()
	kept := l.leading && l.term == term
	l.mu.Unlock()
	if !kept {
		return nil, false
	}
	return l.Snapshot(), true
}

// Expired implements nodelifecycle.Leases.
func (l *Leases) Expired(node string) bool {
	_, expired := l.lastRenewal(node)
	return expired
}

// renewedSince copies the nodes that renewed after t, for the Lease objects.
func (l *Leases) renewedSince(seen map[string]time.Time) map[string]time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]time.Time{}
	for n, e := range l.m {
		if !e.renewed.IsZero() && e.renewed.After(seen[n]) {
			out[n] = e.renewed
		}
	}
	maps.DeleteFunc(seen, func(n string, _ time.Time) bool { return l.m[n] == nil })
	return out
}
