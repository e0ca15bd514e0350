package consensus

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// fsm feeds committed entries to the state machine; Raft calls it from one
// goroutine.
type fsm struct {
	machine *state.Machine
	halt    func(error)
	index   atomic.Uint64 // of the last entry applied
	grown   func()        // tells the keeper that the log has grown
	// advanced tells those who wait for a version; may be nil.
	advanced func()
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
	f.index.Store(e.Index)
	f.grown()
	f.tell()
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
	if err := f.machine.Restore(s.f.Name()); err != nil {
		return err
	}
	f.tell()
	return nil
}

func (f *fsm) tell() {
	if f.advanced != nil {
		f.advanced()
	}
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
