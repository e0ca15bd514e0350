package nodeapi

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/ingress"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/wire"
)

// run follows the store and nudges nodes whose assignment changed.
func (a *assigner) run(ctx context.Context) error {
	reader := a.s.cfg.Store.Reader(podGK)
	refresh := time.NewTicker(time.Minute)
	defer refresh.Stop()
	for ctx.Err() == nil {
		after := reader.Snapshot().ResourceVersion()
		w, err := reader.Watch("", "", after)
		a.forgetServing()
		if err == nil {
			a.findDoomed(reader.Snapshot())
			a.rebuild(a.connected()) // whatever the watch missed
			err = a.follow(ctx, w, refresh.C)
		}
		if err != nil && ctx.Err() == nil && !errors.Is(err, state.ErrTooOld) {
			a.s.log.Warn("watch of the store ended", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
	return nil
}

func (a *assigner) connected() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]string, 0, len(a.nodes))
	for n := range a.nodes {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

func (a *assigner) follow(ctx context.Context, w state.Watcher, refresh <-chan time.Time) error {
	for {
		wctx, cancel := context.WithTimeout(ctx, time.Minute)
		batch, _, err := w.Next(wctx)
		waited := wctx.Err() != nil // asked before cancel makes it always so
		cancel()
		if err != nil && (ctx.Err() != nil || !waited || errors.Is(err, state.ErrTooOld)) {
			return err
		}
		dirty := map[string]bool{}
		for i := range batch {
			a.affected(&batch[i], dirty)
		}
		select {
		case <-refresh: // tokens that are due
			for _, n := range a.connected() {
				dirty[n] = true
			}
		default:
		}
		if len(dirty) > 0 {
			names := make([]string, 0, len(dirty))
			for n := range dirty {
				names = append(names, n)
			}
			slices.Sort(names)
			a.rebuild(names)
		}
		for i := range batch {
			a.s.observe(&batch[i])
		}
	}
}

// ServersName is the ConfigMap in kube-system from which Config.Servers takes
// its list: nodes are told when it changes.
const ServersName = "dunlin-servers"

// affected marks the connected nodes to which an event matters.
func (a *assigner) affected(e *state.Event, dirty map[string]bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	mark := func(n string) {
		if a.nodes[n] != nil {
			dirty[n] = true
		}
	}
	k := e.Record.Header.Key
	switch k.Kind {
	case "Pod":
		mark(e.Record.Header.NodeName)
		if e.Prev != nil {
			mark(e.Prev.Header.NodeName)
		}
		return
	case "Node":
		mark(k.Name)
		if ingress.MayChange(e) {
			a.choose(mark)
		}
		return
	case ingress.Kind, ingress.ClassKind:
		for n := range a.servingNodes() {
			mark(n)
		}
		return
	case volumeKind:
		mark(a.doom(e.Record, e.Type == state.Deleted))
	}
	for n := range a.refs[k] {
		mark(n)
	}
	ring := k.Kind == "Secret" && strings.HasPrefix(k.Name, ringPrefix)
	servers := k.Kind == "ConfigMap" && k.Name == ServersName
	if k.Namespace == tokenNamespace && (ring || servers) {
		for n := range a.nodes { // rare: a ring was made or rotated, a server came or went
			dirty[n] = true
		}
	}
}

// rebuild builds the nodes' assignments and nudges those whose generation
// changed.
func (a *assigner) rebuild(nodes []string) {
	for _, name := range nodes {
		n := a.state(name)
		if n == nil {
			continue
		}
		n.mu.Lock()
		before, known := n.gen, n.adopted && !n.again.Load()
		err := a.build(n)
		gen := n.gen
		n.mu.Unlock()
		if err != nil {
			a.s.log.Error("assignment cannot be built", "node", name, "error", err)
			continue
		}
		if gen == before || !known {
			continue // nothing new, or it has not pulled yet and will
		}
		if sess := a.s.sessionOfNode(name); sess != nil {
			a.nudge(sess, wire.Nudge{Generation: gen})
		}
	}
}

// nudge tells the node once for each generation, of the assignment or of the
// service table; 0 is none. A stalled connection holds one goroutine at most,
// until its write timeout ends the session.
func (a *assigner) nudge(sess *session, n wire.Nudge) {
	select {
	case <-sess.up:
	default:
		return // it pulls when it is up
	}
	sess.mu.Lock()
	next := wire.Nudge{Generation: cmp.Or(n.Generation, sess.nudged.Generation), Services: cmp.Or(n.Services, sess.nudged.Services)}
	known, sending := sess.nudged == next, sess.nudging
	sent := sess.nudged
	sess.nudged, sess.nudging = next, sending || !known
	sess.mu.Unlock()
	if known {
		return
	}
	if a.s.cfg.Nudge != nil && n.Generation != 0 {
		if b, err := wire.Marshal(&wire.Nudge{Generation: n.Generation}); err == nil {
			a.s.cfg.Nudge(sess.uid, b)
		}
	}
	if sending {
		return
	}
	a.s.nudges.Go(func() {
		for {
			sess.mu.Lock()
			news := news(sent, sess.nudged)
			if news == nil {
				sess.nudging = false
				sess.mu.Unlock()
				return
			}
			sent = sess.nudged
			sess.mu.Unlock()
			// A hint: the next lease reply carries the assignment's too.
			if err := sess.conn.Send(news); err != nil {
				return
			}
		}
	})
}

// news is what is to be said after sent, with what did not change left out;
// nil if nothing.
func news(sent, want wire.Nudge) *wire.Nudge {
	if sent == want {
		return nil
	}
	out := want
	if sent.Generation == want.Generation {
		out.Generation = 0
	}
	if sent.Services == want.Services {
		out.Services = 0
	}
	return &out
}
