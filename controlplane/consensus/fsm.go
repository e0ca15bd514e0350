package consensus

import (
	"errors"
	"fmt"
	"io"

	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// fsm feeds committed entries to the state machine; Raft calls it from one
// goroutine.
type fsm struct {
	machine *state.Machine
	halt    func(error)
	grown   func() // tells the keeper that the log has grown
}

var _ raft.FSM = (*fsm)(nil)

// applied is what Raft hands back for an entry.
type applied struct {
	results []state.Result
	err     error
}

// Apply implements raft.FSM. An entry that cannot be applied stops this
// server: skipping it would make its state another one.
func (f *fsm) Apply(e *raft.Log) any {
	results, err := f.machine.Apply(e.Term, e.Data)
	if err != nil {
		err = fmt.Errorf("log entry %d: %w", e.Index, err)
		f.halt(err)
		return applied{err: err}
	}
	f.grown()
	return applied{results: results}
}

var errNoSnapshot = errors.New("consensus: halted, no snapshot")

// Snapshot implements raft.FSM: a pointer, written off this goroutine.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	if f.machine.Halted() != nil {
		return nil, errNoSnapshot
	}
	return imageSnapshot{f.machine.Image()}, nil
}

// Restore implements raft.FSM.
func (f *fsm) Restore(rc io.ReadCloser) error {
	r := rc
	for {
		w, ok := r.(interface{ WrappedReadCloser() io.ReadCloser })
		if !ok {
			break
		}
		r = w.WrappedReadCloser()
	}
	s, ok := r.(*snapshotReader)
	if !ok {
		return fmt.Errorf("restore from a %T", r)
	}
	return f.machine.Restore(s.f.Name())
}

type imageSnapshot struct{ im *state.Image }

func (s imageSnapshot) Persist(sink raft.SnapshotSink) error {
	k, ok := sink.(*snapshotSink)
	if !ok {
		return fmt.Errorf("persist into a %T", sink)
	}
	return k.writeImage(s.im)
}

func (imageSnapshot) Release() {}
