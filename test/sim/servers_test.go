package sim

import (
	"slices"
	"testing"
	"time"
)

// leader is the server that leads, or nil.
func (w *world) leader() *server {
	for _, s := range w.servers {
		if srv := s.now(); srv != nil {
			if _, ok := srv.Consensus().Leadership(); ok {
				return s
			}
		}
	}
	return nil
}

// waitLeader waits for one that is not but.
func (s *story) waitLeader(but *server) *server {
	s.t.Helper()
	for range 600 {
		if l := s.leader(); l != nil && l != but {
			return l
		}
		sleep(100 * time.Millisecond)
	}
	s.violated("no leader within a minute")
	return s.servers[0]
}

// busy is a host that runs pods.
func (s *story) busy() *host {
	s.t.Helper()
	i := slices.IndexFunc(s.hosts, func(h *host) bool { return len(h.m.running()) > 0 })
	if i < 0 {
		s.t.Fatal("no host runs a pod")
	}
	return s.hosts[i]
}

// The leader dies ten times while clients write, is cut off, and hears
// nothing: no write is lost, no pod is moved or started.
func TestLeadersComeAndGo(t *testing.T) {
	for name, fault := range map[string]struct{ on, off func(w *world, l *server) }{
		"killed":  {func(_ *world, l *server) { l.down() }, func(_ *world, l *server) { l.up() }},
		"cut off": {func(w *world, l *server) { w.net.Cut(l.addr, true) }, func(w *world, l *server) { w.net.Cut(l.addr, false) }},
		"deaf":    {func(w *world, l *server) { w.net.Deafen(l.addr, true) }, func(w *world, l *server) { w.net.Deafen(l.addr, false) }},
		"mute":    {func(w *world, l *server) { w.net.Block(l.addr, "", true) }, func(w *world, l *server) { w.net.Block(l.addr, "", false) }},
	} {
		t.Run(name, func(t *testing.T) {
			tell(t, size{3, 5}, func(s *story) {
				before := s.started()
				conf := s.c.newConfig("conf")
				for range 10 {
					old := s.waitLeader(nil)
					must(t, conf.put(s.ctx, want{exists: true}, false))
					fault.on(s.world, old)
					s.waitLeader(old)
					must(t, conf.put(s.ctx, want{exists: true}, false))
					s.after(10 * time.Second)
					fault.off(s.world, old)
					s.after(10 * time.Second)
				}
				s.same(before, "leaders came and went")
			})
		})
	}
}

// Two of three servers are away for ten minutes: nothing changes, everything
// runs, and it goes on when they are back.
func TestQuorumLostAndBack(t *testing.T) {
	tell(t, size{3, 5}, func(s *story) {
		before := s.started()
		gone := s.servers[:2]
		for _, srv := range gone {
			srv.down()
		}
		s.after(10 * time.Second)
		rv := s.servers[2].now().Consensus().State().Snapshot().ResourceVersion()
		s.after(10 * time.Minute)
		if now := s.servers[2].now().Consensus().State().Snapshot().ResourceVersion(); now != rv {
			s.violated("%d changes without a quorum", now-rv)
		}
		s.same(before, "without a quorum")
		for _, srv := range gone {
			srv.up()
		}
		s.rest(time.Minute)
		s.same(before, "the quorum is back")
	})
}

// The machine that leads is also a node, and dies: its pods are thought lost
// soon after another leads, which has never led before.
func TestLeadersMachineDies(t *testing.T) {
	tell(t, size{3, 5}, func(s *story) {
		s.after(time.Minute)
		old, h := s.waitLeader(nil), s.busy()
		s.storm(1)
		old.down()
		h.down()
		h.m.powerCut()
		start, before := time.Now(), s.check.losses()
		s.waitLeader(old)
		led := time.Since(start)
		for s.check.losses() == before && time.Since(start) < time.Minute {
			sleep(50 * time.Millisecond)
		}
		if lost := time.Since(start); lost > 2*led+10*time.Second {
			s.violated("another led after %s, and the pods of the machine were lost after %s", led, lost)
		}
		old.up()
		h.up()
		s.storm(-1)
	})
}

// A machine is dead, its pods run elsewhere, and leaders come and go: what
// stands in for its pods is not touched.
func TestDeadNodeStaysDead(t *testing.T) {
	tell(t, size{3, 5}, func(s *story) {
		h := s.busy()
		s.storm(1)
		h.down()
		h.m.powerCut()
		s.after(time.Minute)
		before := s.started()
		for range 5 {
			old := s.waitLeader(nil)
			old.down()
			s.waitLeader(old)
			s.after(10 * time.Second)
			old.up()
			s.after(10 * time.Second)
		}
		s.after(time.Minute)
		s.same(before, "a machine is dead and leaders come and go")
		h.up()
		s.storm(-1)
	})
}
