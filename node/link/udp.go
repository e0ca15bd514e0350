package link

import (
	"context"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// Leases over UDP, inside the servers' own site: a renewal does not wait
// behind an assignment or for a lost segment. TCP is the fallback within the
// same interval, and carries every udpKeep-th renewal anyway, which keeps
// the connection known to be alive at both ends.
const (
	udpWait  = 400 * time.Millisecond
	udpKeep  = 5
	udpFails = 3           // in a row, then none for udpPause
	udpPause = time.Minute // UDP is blocked, most likely
)

// udpLeases is one session's.
type udpLeases struct {
	mu     sync.Mutex
	key    []byte
	server string
	fails  int
	until  time.Time // not before
	n      uint64
	acks   chan wire.LeaseDatagram
}

func (u *udpLeases) begin(key []byte, server string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.key, u.server, u.fails, u.until, u.n = key, server, 0, time.Time{}, 0
}

// at names the server's member, when that became known later.
func (u *udpLeases) at(server string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.server, u.fails, u.until = server, 0, time.Time{}
}

// next says whether the next renewal goes by UDP.
func (u *udpLeases) next() (key []byte, server string, ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.n++
	if u.key == nil || u.server == "" || u.n%udpKeep == 1 || time.Now().Before(u.until) {
		return nil, "", false
	}
	return u.key, u.server, true
}

func (u *udpLeases) result(ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if ok {
		u.fails = 0
		return
	}
	if u.fails++; u.fails >= udpFails {
		u.fails, u.until = 0, time.Now().Add(udpPause)
	}
}

// leaseByUDP renews by UDP if it can; false is "not acknowledged": TCP then.
func (l *Link) leaseByUDP(ctx context.Context) bool {
	if l.c.Datagram == nil {
		return false
	}
	key, server, ok := l.udp.next()
	if !ok {
		return false
	}
	d := wire.LeaseDatagram{UID: l.c.Identity.Grant().NodeUID, Boot: l.c.BootID, Counter: l.counter.Add(1)}
	if l.c.Generation != nil {
		d.Generation = l.c.Generation()
	}
	b, err := d.Seal(key)
	if err != nil {
		return false
	}
	if err := l.c.Datagram(server, b); err != nil {
		return false // no such member yet: no verdict on UDP
	}
	t := time.NewTimer(udpWait)
	defer t.Stop()
	for {
		select {
		case a := <-l.udp.acks:
			if a.Counter != d.Counter {
				continue // a late one
			}
			l.udp.result(true)
			l.byUDP.Add(1)
			l.acknowledged(a.Term, a.Generation)
			return true
		case <-t.C:
			l.udp.result(false)
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// HandleDatagram takes an acknowledgement that came by gossip. It never
// blocks.
func (l *Link) HandleDatagram(b []byte) {
	l.udp.mu.Lock()
	key := l.udp.key
	l.udp.mu.Unlock()
	if key == nil {
		return
	}
	d, err := wire.OpenLeaseDatagram(key, b, l.c.BootID)
	if err != nil || !d.Ack {
		return
	}
	select {
	case l.udp.acks <- d:
	default: // nobody waits for the one before: replace it
		select {
		case <-l.udp.acks:
		default:
		}
		select {
		case l.udp.acks <- d:
		default:
		}
	}
}

// nudgeEvery bounds the pulls that members of the site can cause: a nudge by
// gossip proves no more than that its sender holds the site's keys.
const nudgeEvery = time.Second

// HandleNudge takes a hint that came by gossip (kind wire.GossipNudge). It
// never blocks.
func (l *Link) HandleNudge(b []byte) {
	n := new(wire.Nudge)
	if err := wire.Unmarshal(b, n); err != nil {
		return
	}
	if l.c.Generation != nil && n.Generation != 0 && n.Generation == l.c.Generation() {
		return
	}
	now, last := int64(time.Since(l.start)), l.nudged.Load()
	if (last != 0 && now-last < int64(nudgeEvery)) || !l.nudged.CompareAndSwap(last, max(now, 1)) {
		return // the lease's answer tells it too
	}
	l.hint()
}
