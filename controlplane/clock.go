package controlplane

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// clockState is what a leader knows of its clock beside what the guard sees:
// how it compares with the other servers that vote.
type clockState struct {
	mu   sync.Mutex
	off  time.Duration
	skew error
}

func (c *clockState) set(off time.Duration, skew error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off, c.skew = off, skew
}

func (c *clockState) get() (time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.off, c.skew
}

// clockTrusted returns an error while nothing may start, end, expire or be
// issued by this server's wall clock: it jumped, or is far from what most
// voters show.
func (s *Server) clockTrusted() error {
	if err := s.guard.Check(); err != nil {
		return err
	}
	_, err := s.clocks.get()
	return err
}

// compareClocks takes the other voters' times, which they told just now.
func (s *Server) compareClocks(members []consensus.Member, states map[string]serverState) {
	var others []time.Time
	for _, m := range members {
		if st := states[m.ID]; m.Voter && st.err == nil && st.reply != nil && st.reply.UnixMilli > 0 {
			others = append(others, time.UnixMilli(st.reply.UnixMilli))
		}
	}
	now := s.cfg.Clock.Now()
	s.clocks.set(clock.Offset(now, others), clock.Skew(now, others))
}

// clockProblem says of another server that its clock is far from this one's.
func (s *Server) clockProblem(st serverState) string {
	if st.err != nil || st.reply == nil || st.reply.UnixMilli == 0 {
		return ""
	}
	off := time.UnixMilli(st.reply.UnixMilli).Sub(s.cfg.Clock.Now().Round(0))
	if off.Abs() <= clock.SkewLimit {
		return ""
	}
	way := "ahead of"
	if off < 0 {
		way = "behind"
	}
	return fmt.Sprintf("its clock is %s %s that of the server that was asked", off.Abs().Round(time.Second), way)
}

// clockDoubt is clockTrusted, or what is wrong with the machine's clock though
// nothing has to wait for that: it is behind what is known, which is gone by
// then, or was never set.
func (s *Server) clockDoubt() error {
	if err := s.clockTrusted(); err != nil {
		return err
	}
	return s.floor.Doubt()
}

// watchClock says when the clock cannot be trusted, and when it is believed
// again, and keeps it, once a day.
func (s *Server) watchClock(ctx context.Context) error {
	t := time.NewTicker(10 * time.Second)
	defer t.Stop()
	var w clockWatch
	for {
		s.lookAtClock(&w)
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// clockWatch is what was said of the clock.
type clockWatch struct {
	logged, waits bool // that it is in doubt, that things wait for it
	told          bool // the same, in an event
	warned        bool // that what goes with the clock fails
	started       bool // there was a look before, so namespaces for events may be there
}

func (s *Server) lookAtClock(w *clockWatch) {
	trusted, doubt := s.clockTrusted(), s.clockDoubt()
	const waits = "; CronJobs, TTLs, deadlines and certificates wait"
	if doubt != nil && (!w.logged || w.waits != (trusted != nil)) {
		w.logged, w.waits, w.told = true, trusted != nil, false
		if trusted != nil {
			s.log.Error("the clock is not trusted: CronJobs, TTLs, deadlines and certificates wait", "error", doubt)
		} else {
			s.log.Error("the clock is wrong", "error", doubt)
		}
	}
	if doubt == nil && w.logged {
		*w = clockWatch{warned: w.warned, started: true}
		s.log.Info("the clock is believed again", "now", s.cfg.Clock.Now())
		s.clockEvent(corev1.EventTypeNormal, "ClockTrusted", "server "+s.name(s.raft.ServerID())+": the clock is believed again")
	}
	if _, leading := s.raft.Leadership(); doubt != nil && !w.told && leading && w.started { // else the event is not kept
		w.told = true
		text := "server " + s.name(s.raft.ServerID()) + ": " + doubt.Error()
		if trusted != nil {
			text += waits
		}
		s.clockEvent(corev1.EventTypeWarning, "ClockNotTrusted", text)
	}
	w.started = true
	if trusted != nil {
		return
	}
	if err := s.floor.Believe(); err != nil && !w.warned {
		w.warned = true
		s.log.Warn("the time is not kept for the next start", "error", err)
	}
	if err := s.writeAdmin(); err != nil && !w.warned {
		w.warned = true
		s.log.Warn("the administrator's kubeconfig is not renewed", "error", err)
	}
}

// clockEvent is about the list of servers: a server is no object of its own.
// Only the leader's is kept.
func (s *Server) clockEvent(typ, reason, message string) {
	s.sink.Add(events.Entry{
		About: corev1.ObjectReference{Kind: "ConfigMap", APIVersion: "v1", Namespace: serversNamespace, Name: serversName},
		Type:  typ, Reason: reason, Message: message, Component: "dunlin-server", Time: s.guard.Now(), Count: 1,
	})
}
