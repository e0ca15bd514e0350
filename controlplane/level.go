package controlplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/wire"
)

// LevelPath raises the cluster's feature level.
const LevelPath = "/dunlin.dev/v1/feature-level"

// LevelRequest asks for a feature level; 0 is the highest that every server
// understands. DryRun changes nothing.
type LevelRequest struct {
	Level  uint32 `json:"level,omitempty"`
	DryRun bool   `json:"dryRun,omitempty"`
}

// LevelReply says what the level was and is, or would be.
type LevelReply struct {
	From uint32 `json:"from"`
	To   uint32 `json:"to"`
}

// levelReport is what one server says that it understands.
type levelReport struct {
	Name, Version string
	Level         uint32
	Err           error // it did not say
}

// ErrLevel says why the feature level cannot be raised.
var ErrLevel = errors.New("the feature level stays")

// decideLevel is the level to raise a cluster to, of which every server said
// what it understands. want 0 is as high as possible; the level as it is means
// that there is nothing to do: no server understands more.
func decideLevel(now, want uint32, servers []levelReport) (uint32, error) {
	newest := uint32(0)
	for _, s := range servers {
		if s.Err != nil {
			return now, fmt.Errorf("%w at %d: server %s does not say what it understands (%w): start it, or take it out of the cluster with 'dunlin server remove %s'", ErrLevel, now, s.Name, s.Err, s.Name)
		}
		newest = max(newest, s.Level)
	}
	least := want // of every server
	if want == 0 && newest > now {
		least = now + 1
	}
	most := ^uint32(0)
	for _, s := range servers {
		if s.Level < least {
			return now, fmt.Errorf("%w at %d: server %s, %s, understands level %d: upgrade it first", ErrLevel, now, s.Name, feature.Build(s.Version), s.Level)
		}
		most = min(most, s.Level)
	}
	switch {
	case len(servers) == 0:
		return now, fmt.Errorf("%w at %d: no server is known", ErrLevel, now)
	case want == 0:
		return max(now, most), nil
	case want < now:
		return now, fmt.Errorf("%w at %d: it is never lowered; to go back, restore a snapshot from before it was raised", ErrLevel, now)
	}
	return want, nil
}

// levels asks every server what it understands.
func (s *Server) levels(ctx context.Context) ([]levelReport, error) {
	members, _, err := s.raft.Members()
	if err != nil {
		return nil, err
	}
	l := s.servers()
	states := s.ask(ctx, members, &wire.ServerStatusRequest{})
	var out []levelReport
	for _, m := range members {
		r := levelReport{Name: l.entries[m.ID].Name, Version: s.cfg.Version, Level: feature.Level}
		if r.Name == "" {
			r.Name = m.ID
		}
		if m.ID != s.raft.ServerID() {
			st := states[m.ID]
			r.Err = st.err
			if st.err == nil {
				r.Level, r.Version = st.reply.Feature, st.reply.Build
			}
		}
		out = append(out, r)
	}
	return out, nil
}

// raiseLevel raises the feature level, for good. On the leader. A server that
// is replaced by an older build at this very moment stops at the entry that
// raises the level.
func (s *Server) raiseLevel(ctx context.Context, r LevelRequest) (LevelReply, error) {
	now := s.raft.State().Facts().Feature
	list, err := s.levels(ctx)
	if err != nil {
		return LevelReply{}, err
	}
	to, err := decideLevel(now, r.Level, list)
	if err != nil || to == now || r.DryRun {
		return LevelReply{From: now, To: to}, err
	}
	term, leading := s.raft.Leadership()
	if !leading {
		return LevelReply{}, state.ErrNotLeader
	}
	results, err := s.raft.Propose(ctx, []state.Op{{Type: state.OpRaiseFeature, Feature: to, Term: term}})
	if err != nil {
		return LevelReply{}, err
	}
	if results[0].Reason != state.ReasonNone {
		return LevelReply{}, fmt.Errorf("%w at %d: %s", ErrLevel, now, results[0].Detail)
	}
	s.log.Warn("the cluster's feature level was raised: older builds cannot take part any more", "from", now, "to", to)
	return LevelReply{From: now, To: to}, nil
}

func (s *Server) postLevel(w http.ResponseWriter, r *http.Request) {
	var req LevelRequest
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil {
		writeStatus(w, apierrors.NewBadRequest("feature level: "+err.Error()))
		return
	}
	reply, err := s.raiseLevel(r.Context(), req)
	switch {
	case errors.Is(err, ErrLevel):
		writeStatus(w, apierrors.NewBadRequest(err.Error()))
		return
	case errors.Is(err, state.ErrNotLeader), errors.Is(err, state.ErrNoQuorum):
		writeStatus(w, unavailable(err.Error()+": try again"))
		return
	case err != nil:
		writeStatus(w, apierrors.NewInternalError(err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(reply)
}
