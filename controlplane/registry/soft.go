package registry

import (
	"context"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// softProposer writes a soft store of this process.
type softProposer struct {
	store  *state.Soft
	leader state.Proposer
}

// LocalSoft is the proposer of a soft store that lives in this process: on
// the leader. leader answers for leadership; ops never reach it.
func LocalSoft(store *state.Soft, leader state.Proposer) state.Proposer {
	return &softProposer{store: store, leader: leader}
}

// Propose implements state.Proposer.
func (s *softProposer) Propose(ctx context.Context, ops []state.Op) ([]state.Result, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	out := make([]state.Result, len(ops))
	for i := range ops {
		out[i] = s.apply(&ops[i])
	}
	return out, nil
}

func (s *softProposer) apply(op *state.Op) state.Result {
	if op.Term != 0 {
		if term, leading := s.leader.Leadership(); !leading || term != op.Term {
			return state.Result{Reason: state.ReasonTerm}
		}
	}
	switch {
	case op.Type == state.OpCreate && op.Record != nil:
		return s.store.PutIf(op.Record, "", 0)
	case op.Type == state.OpUpdate && op.Record != nil && op.UID != "":
		rec := *op.Record
		if op.Keep != 0 {
			old, ok := s.store.Snapshot().Get(rec.Header.Key)
			if !ok {
				return state.Result{Reason: state.ReasonNotFound}
			}
			if op.ResourceVersion == 0 || old.Header.ResourceVersion != op.ResourceVersion {
				return state.Result{Reason: state.ReasonConflict, Record: old}
			}
			if op.Keep&state.KeepMeta != 0 {
				rec.Meta = old.Meta
			}
			if op.Keep&state.KeepSpec != 0 {
				rec.Spec = old.Spec
			}
			if op.Keep&state.KeepStatus != 0 {
				rec.Status = old.Status
			}
		}
		return s.store.PutIf(&rec, op.UID, op.ResourceVersion)
	case op.Type == state.OpDelete && op.Key != nil && op.UID != "":
		if old, ok := s.store.Snapshot().Get(*op.Key); ok && len(old.Header.Finalizers) > 0 {
			return state.Result{Reason: state.ReasonFinalizers, Record: old}
		}
		return s.store.Delete(*op.Key, op.UID, op.ResourceVersion)
	}
	return state.Result{Reason: state.ReasonInvalid, Detail: "a soft store takes creates, updates and deletes only"}
}

// Barrier implements state.Proposer.
func (s *softProposer) Barrier(ctx context.Context) error { return ctx.Err() }

// Leadership implements state.Proposer.
func (s *softProposer) Leadership() (uint64, bool) { return s.leader.Leadership() }
