package nodelink

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// slowLine delivers what one end writes, and its end, after a while.
type slowLine struct {
	net.Conn
	lag *atomic.Int64
	out chan func()
}

func newSlowLine(c net.Conn, lag *atomic.Int64) *slowLine {
	s := &slowLine{Conn: c, lag: lag, out: make(chan func(), 1000)}
	go func() {
		for f := range s.out {
			f()
		}
	}()
	return s
}

func (s *slowLine) later(f func()) {
	at := time.Now().Add(time.Duration(s.lag.Load()))
	s.out <- func() {
		time.Sleep(time.Until(at))
		f()
	}
}

func (s *slowLine) Write(b []byte) (int, error) {
	b = append([]byte(nil), b...)
	s.later(func() { _, _ = s.Conn.Write(b) })
	return len(b), nil
}

func (s *slowLine) Close() error {
	_ = s.SetReadDeadline(time.Unix(1, 0)) // nobody here reads on
	s.later(func() {
		_ = s.Conn.Close()
		close(s.out)
	})
	return nil
}

// TestVirtualARestartOverASlowLineIsNoCopy: an agent restarts at once, while the
// last renewal of the one before, and the end of its connection, are still on
// their way. It is the same machine, and it keeps its lease.
func TestVirtualARestartOverASlowLineIsNoCopy(t *testing.T) {
	for after := range 20 { // at every moment between two renewals
		synctest.Test(t, func(t *testing.T) {
			n := memnet.New()
			s := startSim(t, n, nil)
			id := s.enroll("n1")
			var lag atomic.Int64
			first := runLink(t, id, func(c *link.Config) {
				c.BootID, c.Dial = "m-1", func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := n.Dialer("n1")(ctx, network, addr)
					if err != nil {
						return nil, err
					}
					return newSlowLine(conn, &lag), nil
				}
			})
			time.Sleep(10*time.Second + time.Duration(after)*100*time.Millisecond)
			if !first.Connected() {
				t.Fatalf("%+v", first.Status())
			}
			lag.Store(int64(800 * time.Millisecond))
			time.Sleep(500 * time.Millisecond)
			first.stop()
			second := runLink(t, id, func(c *link.Config) { c.BootID, c.Dial = "m-2", n.Dialer("n1") })
			kept := true
			for range 100 {
				time.Sleep(100 * time.Millisecond)
				kept = kept && !s.api.Leases().Snapshot()["n1"].Expired
			}
			if !kept || !second.Connected() || s.events.has("DuplicateIdentity") {
				t.Errorf("restarted %d00 ms after: lease kept: %v, counts as a copy: %v; %+v", after, kept, s.events.has("DuplicateIdentity"), second.Status())
			}
			second.stop()
			s.stop()
		})
	}
}
