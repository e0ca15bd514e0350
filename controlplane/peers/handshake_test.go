package peers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

func TestJudge(t *testing.T) {
	good := wire.Hello{ClusterID: "c", Epoch: 2, Feature: feature.Level}
	for name, c := range map[string]struct {
		change  func(*wire.Hello)
		removed bool
		level   uint32 // of the cluster
		want    string // part of the reason; "" is welcome
		fence   uint64
	}{
		"welcome":           {},
		"other cluster":     {change: func(h *wire.Hello) { h.ClusterID = "d" }, want: "this is cluster c, not d"},
		"a leftover":        {change: func(h *wire.Hello) { h.Epoch = 1 }, want: "from before a recovery of the cluster (epoch 1, now 2)"},
		"we are one":        {change: func(h *wire.Hello) { h.Epoch = 3 }, want: "this server is from before a recovery", fence: 3},
		"removed":           {removed: true, want: "was removed"},
		"too old":           {change: func(h *wire.Hello) { h.Feature = feature.Oldest - 1 }, want: "too old"},
		"cluster's level":   {level: feature.Level},
		"below the cluster": {level: feature.Level + 1, want: "the cluster is at level"},
		"tells no version":  {level: feature.Level + 1, want: "its unknown version understands feature level"},
		"tells its version": {change: func(h *wire.Hello) { h.Version = "0.1" }, level: feature.Level + 1, want: `its version "0.1" understands feature level`},
		"newer build":       {change: func(h *wire.Hello) { h.Feature = feature.Level + 1 }},
	} {
		h := good
		if c.change != nil {
			c.change(&h)
		}
		refused, fence := judge("c", 2, c.level, &h, c.removed)
		if fence != c.fence || (refused == "") != (c.want == "") || !strings.Contains(refused, c.want) {
			t.Errorf("%s: %q, fence %d", name, refused, fence)
		}
	}
}

func call(s *server, id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return s.mesh.Call(ctx, id, &wire.ServerStatusRequest{}, new(wire.ServerStatusReply))
}

// Who is no server of this cluster is refused, with the name of what it is.
func TestRefusals(t *testing.T) {
	other, err := pki.NewCA("cluster-2", clock.System)
	must(t, err)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a := w.start("a", options{epoch: 2})
		for name, c := range map[string]struct {
			o    options
			id   string
			want string
			// fenced is what the caller is told of itself.
			fenced string
		}{
			"friend":        {id: "b", o: options{epoch: 2}},
			"other cluster": {id: "c", o: options{ca: other, epoch: 2}, want: "cluster-1"},
			"leftover":      {id: "d", o: options{epoch: 1}, want: "from before a recovery", fenced: "a/2"},
			"removed":       {id: "e", o: options{epoch: 2}, want: "removed", fenced: "a/0"},
		} {
			w.mu.Lock()
			w.removed["e"] = true
			w.mu.Unlock()
			c.o.know = []*server{a}
			s := w.start(c.id, c.o)
			err := call(s, "a")
			if (err == nil) != (c.want == "") || (err != nil && !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%s: %v", name, err)
			}
			fenced := ""
			select {
			case fenced = <-s.fenced:
			default:
			}
			if fenced != c.fenced {
				t.Errorf("%s: fenced by %q, want %q", name, fenced, c.fenced)
			}
		}
		select {
		case by := <-a.fenced:
			t.Errorf("the server that is right was fenced by %s", by)
		default:
		}
		// The leftover is the one that is called: it learns it all the same.
		late := w.start("f", options{epoch: 1})
		must(t, a.book.Set("f", []string{late.addr}))
		if err := call(a, "f"); !errors.Is(err, ErrUnreachable) {
			t.Errorf("a leftover was accepted: %v", err)
		}
		if by := <-late.fenced; by != "a/2" {
			t.Errorf("fenced by %s", by)
		}
	})
}

// A server that is older than the cluster's feature level is told so, whoever
// calls whom, and no one else is disturbed.
func TestBehindTheLevel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a := w.start("a", options{level: feature.Level + 1})
		want := fmt.Sprintf("level %d", feature.Level+1)
		calls := w.start("b", options{know: []*server{a}})
		if err := call(calls, "a"); err == nil || !strings.Contains(err.Error(), "upgrade it") {
			t.Errorf("it was let in: %v", err)
		}
		if got := <-calls.fenced; got != want {
			t.Error(got)
		}
		called := w.start("c", options{})
		must(t, a.book.Set("c", []string{called.addr}))
		if err := call(a, "c"); err == nil {
			t.Error("it was let in")
		}
		if got := <-called.fenced; got != want {
			t.Error(got)
		}
		select {
		case got := <-a.fenced:
			t.Errorf("the newer one was stopped: %s", got)
		default:
		}
	})
}

// An address that belongs to another server now is not mistaken for it.
func TestWrongServerAtAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a, b := w.start("a", options{}), w.start("b", options{})
		must(t, a.book.Set("c", []string{b.addr}))
		if err := call(a, "c"); !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), "another server is there: b") {
			t.Errorf("%v", err)
		}
		// Several addresses: the silent and the wrong are passed over.
		c := w.start("c", options{})
		w.net.Cut("dead:1", true)
		must(t, a.book.Set("c", []string{"dead:1", b.addr, "[fd00::7]:6443", c.addr}))
		must(t, call(a, "c"))
		// What it says of itself replaces what was believed.
		if got := a.book.Resolve("c"); len(got) != 1 || got[0] != c.addr {
			t.Errorf("known addresses of c: %v", got)
		}
	})
}

// Two servers that moved have missed each other's news; a third one knows
// both, and that is enough.
func TestToldByAThird(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a := w.start("a", options{})
		b := w.start("b", options{})
		must(t, a.book.Set("b", []string{"b-was-here:6443"}))
		must(t, b.book.Set("a", []string{"a-was-here:6443"}))
		if err := call(a, "b"); !errors.Is(err, ErrUnreachable) {
			t.Fatalf("found at an address where it is not: %v", err)
		}
		c := w.start("c", options{know: []*server{a, b}})
		must(t, call(c, "a"))
		must(t, call(c, "b"))
		// c told b of a while greeting it, or will when it greets it again.
		b.mesh.forget("c")
		must(t, call(b, "c"))
		must(t, call(b, "a"))
		if got := a.book.Resolve("b"); len(got) != 1 || got[0] != b.addr {
			t.Errorf("the first keeps %v for the second", got)
		}
	})
}

// A node's and a user's certificate open no server's protocol.
func TestOnlyServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a := w.start("a", options{})
		user, key, err := w.ca.IssueUser("admin", []string{pki.MastersGroup}, time.Hour)
		must(t, err)
		for _, proto := range []string{wire.ALPNServer, wire.ALPNRaft} {
			h, err := rawHello(t, w, a.addr, proto, user, key)
			if err != nil || !strings.Contains(h.Refused, "no server's certificate") {
				t.Errorf("%s with a user's certificate: %+v, %v", proto, h, err)
			}
			if h != nil && (h.ClusterID != "" || len(h.Peers) > 0) {
				t.Errorf("%s: a stranger was told %+v", proto, h)
			}
			h, err = rawHello(t, w, a.addr, proto, nil, nil)
			if err != nil || !strings.Contains(h.Refused, "no server's certificate") {
				t.Errorf("%s without a certificate: %+v, %v", proto, h, err)
			}
		}
	})
}
