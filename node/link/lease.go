package link

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// leaseLoop renews the lease until the session ends, and ends the session
// when nothing is acknowledged.
func (l *Link) leaseLoop(ctx context.Context, wc *wire.Conn) {
	lastAck := time.Now()
	var mute time.Time // since when the connection itself does not answer
	for {
		next := time.Now().Add(leaseInterval)
		var wait time.Duration
		sent, since := time.Now(), l.c.Elapsed()
		ok, err := l.leaseByUDP(ctx), error(nil)
		if !ok || !mute.IsZero() {
			asked, at := time.Now(), l.c.Elapsed()
			answered, failed := l.lease(ctx, wc)
			switch {
			case answered, errors.Is(failed, ErrRefused):
				mute = time.Time{}
			case mute.IsZero():
				mute = asked
			}
			if !ok {
				sent, since, ok, err = asked, at, answered, failed
			}
		}
		switch {
		case ctx.Err() != nil:
			return
		case ok && !mute.IsZero() && time.Since(mute) > leaseDead:
			// The server moved, or only UDP gets through: leases alone are not enough.
			wc.Close(fmt.Errorf("link: the connection was silent for %s, while leases by UDP were answered", leaseDead))
			return
		case ok:
			lastAck = time.Now()
			l.acked.Store(int64(sent.Sub(l.start)))
			l.contact.Store(int64(since))
			wait = time.Until(next)
		case time.Since(lastAck) > leaseDead:
			wc.Close(fmt.Errorf("%w for %s: %w", errSilent, leaseDead, err))
			return
		default:
			wait = max(leaseRetry-time.Since(sent), 0)
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-wc.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

func (l *Link) lease(ctx context.Context, wc *wire.Conn) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, leaseRetry)
	defer cancel()
	reply := new(wire.LeaseReply)
	err := wc.Call(ctx, &wire.LeaseRequest{Counter: l.counter.Add(1)}, reply)
	if err != nil {
		return false, err
	}
	if reply.Refused != "" {
		l.unled.Store(true)
		return false, fmt.Errorf("%w: %s", ErrRefused, reply.Refused)
	}
	if reply.GossipID != "" {
		l.udp.at(reply.GossipID)
	}
	l.noteTwin(reply.Twin)
	l.byTCP.Add(1)
	l.acknowledged(reply.Term, reply.Generation)
	return true, nil
}

// noteTwin says once that there is a copy of this node, and that it is gone.
func (l *Link) noteTwin(at string) {
	l.mu.Lock()
	was := l.twin
	l.twin = at
	l.mu.Unlock()
	switch {
	case at != "" && was == "":
		l.log.Warn("another machine has this node's key (a copied disk?); it is refused, and this one is not disturbed", "other", at, "hint", "on the other machine: dunlin agent reset")
	case at == "" && was != "":
		l.log.Info("the other machine with this node's key did not come again", "other", was)
	}
}

func (l *Link) acknowledged(term, generation uint64) {
	l.term.Store(max(l.term.Load(), term))
	if l.unled.Swap(false) {
		l.hint() // what was refused meanwhile waits for a later try
	}
	if l.c.Generation != nil && generation != 0 && generation != l.c.Generation() {
		l.hint()
	}
}
