package controlplane

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/leader"
	"github.com/dunlin-project/dunlin/controlplane/peers"
	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/wire"
)

// Timing of the voters' loop. It looks at the servers often only while one
// waits for a vote.
const (
	votersSoon   = time.Second
	votersRarely = 10 * time.Second
	statusWait   = 2 * time.Second
	// evenFor is how long a voter too many is seen before it loses its vote: in
	// the middle of two promotions one server may be busy for a moment.
	evenFor = 15 * time.Second
)

// voters is what the leader keeps of the other servers: how long each has
// been well. It lasts for one term.
type voters struct {
	s     *Server
	since map[string]time.Time // well since
	seen  map[string]string    // why it had no vote at the last look
	told  map[string]string    // what was logged of that
	// want is the version that the leader had at the last look: what a server
	// must have by now to be up with it.
	want uint64
	// others is the slow fsync of the slowest other server at the last look.
	others time.Duration
	// even is since when a voter too many is seen; zero is not.
	even time.Time
}

// votersComponent gives and takes votes while this server leads.
func (s *Server) votersComponent() leader.Component {
	return leader.Component{Name: "voters", Run: func(ctx context.Context, _ uint64) error {
		defer s.clocks.set(0, nil) // only a leader compares
		v := &voters{s: s, since: map[string]time.Time{}, seen: map[string]string{}, told: map[string]string{}}
		for {
			wait := votersRarely
			if v.step(ctx) {
				wait = votersSoon
			}
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-s.voterWake:
				t.Stop()
			case <-ctx.Done():
				t.Stop()
				return nil
			}
		}
	}}
}

func (s *Server) wakeVoters() {
	select {
	case s.voterWake <- struct{}{}:
	default:
	}
}

// step makes one change, if one is due; soon says that another look shall
// follow shortly.
func (v *voters) step(ctx context.Context) (soon bool) {
	if v.s.raft.Epoch() > 1 {
		if err := v.s.afterRecovery(ctx); err != nil {
			v.s.log.Debug("list of servers not brought up to a recovery yet", "err", err)
			return true
		}
	}
	members, index, err := v.s.raft.Members()
	if err != nil {
		return true
	}
	if len(members) == 1 {
		v.s.clocks.set(0, nil)
		v.s.raft.OtherSync(0)
		return false
	}
	list := v.standings(ctx, members)
	next, why := peers.Decide(list)
	l := v.s.servers()
	for _, st := range list {
		if st.Voter {
			continue
		}
		soon = soon || st.Since < peers.Steady
		reason := why[st.ID]
		passing := reason != v.seen[st.ID] || (st.Well && st.Since < peers.Steady)
		v.seen[st.ID] = reason
		if !passing && reason != v.told[st.ID] {
			v.told[st.ID] = reason
			v.s.log.Info("a server has no vote", "server", l.entries[st.ID].Name, "id", st.ID, "reason", reason)
		}
	}
	if next.Kind != peers.Demote {
		v.even = time.Time{}
	} else if v.even.IsZero() {
		v.even = time.Now()
	}
	switch next.Kind {
	case peers.NoChange:
		return soon
	case peers.Promote:
		err = v.s.raft.Promote(next.ID, index)
		delete(v.told, next.ID)
	case peers.Demote:
		if time.Since(v.even) < evenFor {
			return true
		}
		err = v.s.raft.Demote(next.ID, index)
	case peers.Remove:
		err = v.s.raft.Remove(next.ID, index)
	}
	what := map[peers.ChangeKind]string{peers.Promote: "votes", peers.Demote: "does not vote any more", peers.Remove: "is out of the cluster"}[next.Kind]
	if err != nil {
		v.s.log.Warn("change of a server's vote failed", "server", l.entries[next.ID].Name, "id", next.ID, "change", what, "err", err)
		return true
	}
	v.s.log.Info("change of the servers", "server", l.entries[next.ID].Name, "id", next.ID, "change", what, "reason", next.Why)
	return true
}

func (v *voters) standings(ctx context.Context, members []consensus.Member) []peers.Standing {
	removed := v.s.servers().removed
	want := v.want
	v.want = v.s.raft.State().Snapshot().ResourceVersion()
	known := max(v.others, v.s.raft.Stats().Disk.SyncP99)
	states := v.s.ask(ctx, members, &wire.ServerStatusRequest{SyncMicros: known.Microseconds()})
	v.s.compareClocks(members, states)
	v.others = slowest(states)
	v.s.raft.OtherSync(v.others)
	var out []peers.Standing
	for _, m := range members {
		st := peers.Standing{ID: m.ID, Voter: m.Voter, Self: m.ID == v.s.raft.ServerID(), Removed: removed[m.ID]}
		if !st.Self {
			st.Trouble = states[m.ID].trouble(v.s.raft.ServerID(), want)
			st.Well = st.Trouble == ""
			switch at, ok := v.since[m.ID]; {
			case !st.Well:
				delete(v.since, m.ID)
			case !ok:
				v.since[m.ID] = time.Now()
			default:
				st.Since = time.Since(at)
			}
		}
		out = append(out, st)
	}
	return out
}

// slowest is the slow fsync of the slowest of those that answered.
func slowest(states map[string]serverState) (d time.Duration) {
	for _, st := range states {
		if st.err == nil {
			d = max(d, time.Duration(st.reply.SyncMicros)*time.Microsecond)
		}
	}
	return d
}

// serverState is a server's answer, or why there is none.
type serverState struct {
	reply *wire.ServerStatusReply
	err   error
}

// trouble says why a server cannot be given a vote; "" is nothing. want is
// the version that the leader had when it asked.
func (s serverState) trouble(leader string, want uint64) string {
	switch {
	case s.err != nil:
		return "it does not answer: " + s.err.Error()
	case s.reply == nil:
		return "it was not asked"
	case s.reply.Fault != "":
		return s.reply.Fault
	case s.reply.Leader != leader:
		return "it does not follow the leader yet"
	case s.reply.Version < want:
		return "it is catching up"
	}
	return ""
}

// ask asks all other members how they are, at the same time.
func (s *Server) ask(ctx context.Context, members []consensus.Member, req *wire.ServerStatusRequest) map[string]serverState {
	ctx, cancel := context.WithTimeout(ctx, statusWait)
	defer cancel()
	out := map[string]serverState{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, m := range members {
		if m.ID == s.raft.ServerID() {
			continue
		}
		wg.Go(func() {
			st := serverState{reply: new(wire.ServerStatusReply)}
			st.err = s.mesh.Call(ctx, m.ID, req, st.reply)
			mu.Lock()
			defer mu.Unlock()
			out[m.ID] = st
		})
	}
	wg.Wait()
	return out
}

// status answers how this server is.
func (s *Server) status() *wire.ServerStatusReply {
	leader, _ := s.raft.Leader()
	st := s.raft.Stats()
	out := &wire.ServerStatusReply{
		Version: s.raft.State().Snapshot().ResourceVersion(), Epoch: s.raft.Epoch(), Feature: feature.Level, Build: s.cfg.Version,
		Leader: leader, Addresses: s.advertise(), UnixMilli: s.cfg.Clock.Now().UnixMilli(),
		SyncMicros: st.Disk.SyncP99.Microseconds(),
	}
	if err := s.raft.Err(); err != nil {
		out.Fault = err.Error()
	} else if f := st.Fault; f != nil {
		out.Fault = f.Error()
	}
	return out
}

// ServerInfo describes one server to people.
type ServerInfo struct {
	Name      string   `json:"name"`
	ID        string   `json:"id"`
	Addresses []string `json:"addresses"`
	Version   string   `json:"version,omitempty"`
	// FeatureLevel is the highest that it understands; 0 when it did not say.
	FeatureLevel uint32 `json:"featureLevel,omitempty"`
	Zone         string `json:"zone,omitempty"`
	// Role is leader, voter, non-voter, or "not added" before Raft has it.
	Role  string `json:"role"`
	Ready bool   `json:"ready"`
	// Reason says why it is not ready, or has no vote.
	Reason string `json:"reason,omitempty"`
}

// ServerList is the answer about all servers.
type ServerList struct {
	Items []ServerInfo `json:"items"`
	// Unverified: no server leads; this is what the one that was asked knows.
	Unverified bool   `json:"unverified,omitempty"`
	Epoch      uint64 `json:"epoch"`
	// FeatureLevel is the cluster's.
	FeatureLevel uint32 `json:"featureLevel"`
}

// listLag is how many versions a server may be behind and still be called
// ready: what is on its way to it.
const listLag = 1000

// listServers describes all servers, as this one sees them.
func (s *Server) listServers(ctx context.Context) (ServerList, error) {
	members, _, err := s.raft.Members()
	if err != nil {
		return ServerList{}, err
	}
	l := s.servers()
	leaderID, _ := s.raft.Leader()
	want := s.raft.State().Snapshot().ResourceVersion()
	want -= min(want, listLag)
	states := s.ask(ctx, members, &wire.ServerStatusRequest{})
	out := ServerList{Unverified: leaderID == "", Epoch: s.raft.Epoch(), FeatureLevel: s.raft.State().Facts().Feature}
	var standings []peers.Standing
	for _, m := range members {
		e := l.entries[m.ID]
		info := ServerInfo{Name: e.Name, ID: m.ID, Addresses: e.Addresses, Version: e.Version, Zone: e.Zone, Role: "non-voter"}
		if info.Name == "" {
			info.Name = m.ID
		}
		switch {
		case m.ID == leaderID:
			info.Role = "leader"
		case m.Voter:
			info.Role = "voter"
		}
		self := m.ID == s.raft.ServerID()
		if self {
			info.FeatureLevel, info.Version = feature.Level, s.cfg.Version
		} else if r := states[m.ID].reply; states[m.ID].err == nil && r != nil {
			info.FeatureLevel, info.Version = r.Feature, r.Build
		}
		if !self {
			info.Reason = states[m.ID].trouble(leaderID, want)
		} else if err := cmp.Or(s.raft.Err(), s.raft.Fault()); err != nil {
			info.Reason = err.Error()
		}
		info.Ready = info.Reason == ""
		standings = append(standings, peers.Standing{ID: m.ID, Voter: m.Voter, Self: m.ID == leaderID, Well: info.Ready, Trouble: info.Reason, Since: peers.Steady, Removed: l.removed[m.ID]})
		out.Items = append(out.Items, info)
	}
	_, why := peers.Decide(standings)
	for i := range out.Items {
		item := &out.Items[i]
		if item.Reason == "" {
			item.Reason = why[item.ID]
		}
		c := s.clockProblem(states[item.ID])
		if doubt := s.clockDoubt(); doubt != nil && item.ID == s.raft.ServerID() {
			c = doubt.Error()
		}
		if c != "" {
			item.Reason = strings.TrimPrefix(item.Reason+"; "+c, "; ")
		}
	}
	for _, id := range sortedKeys(l.entries) {
		if !slices.ContainsFunc(members, func(m consensus.Member) bool { return m.ID == id }) {
			e := l.entries[id]
			out.Items = append(out.Items, ServerInfo{Name: e.Name, ID: id, Addresses: e.Addresses, Version: e.Version, Zone: e.Zone, Role: "not added"})
		}
	}
	slices.SortFunc(out.Items, func(a, b ServerInfo) int {
		if a.Name != b.Name && a.Name < b.Name {
			return -1
		} else if a.Name != b.Name {
			return 1
		}
		return 0
	})
	return out, nil
}
