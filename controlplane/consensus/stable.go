package consensus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"
	"github.com/hashicorp/raft"
)

// Keys that Raft uses.
const (
	keyCurrentTerm  = "CurrentTerm"
	keyLastVoteTerm = "LastVoteTerm"
	keyLastVoteCand = "LastVoteCand"
)

// stableRecord is what a server must never forget.
type stableRecord struct {
	Term     uint64 `cbor:"1,keyasint"`
	VoteTerm uint64 `cbor:"2,keyasint"`
	VoteFor  []byte `cbor:"3,keyasint"`
	// LastIndex is a lower bound of the log's durable end when the record was
	// written: a log that ends before it has lost something.
	LastIndex uint64 `cbor:"4,keyasint"`
}

// stableStore is Raft's stable store: term and vote in one record, one fsync.
//
// Raft sets the term and the vote in separate calls. A candidate votes for
// itself right after it raised the term, so raising the term records that
// vote too: the vote then finds itself written, and an election costs one
// fsync. Should another server's request have raised the term, the tentative
// vote only means that after a crash in between this server will not vote in
// that term: safe. In memory, what Raft reads back is what Raft wrote.
//
// Raft panics when the term cannot be saved. So saving it waits until the
// disk takes it again: a server whose disk fails neither votes nor leads.
type stableStore struct {
	slots *slots
	self  []byte        // our own candidate name
	last  func() uint64 // durable end of the log, less what is being truncated
	// gate waits until the log is writable again, so that a server that
	// cannot write its log holds no elections.
	gate  func(context.Context) error
	fault func(error)

	ctx context.Context // ends with the Node

	mu       sync.Mutex
	disk     stableRecord // as written
	term     uint64
	voteTerm uint64
	voteFor  []byte
	pending  uint64 // vote term whose candidate is still to come
}

var _ raft.StableStore = (*stableStore)(nil)

// load reads the record; ok is false if there is none yet.
func (s *stableStore) load() (ok bool, err error) {
	b, err := s.slots.load()
	if err != nil || b == nil {
		return false, err
	}
	if err := cbor.Unmarshal(b, &s.disk); err != nil {
		return false, fmt.Errorf("%s: %w: %w", s.slots.path, ErrDamaged, err)
	}
	s.term, s.voteTerm, s.voteFor = s.disk.Term, s.disk.VoteTerm, s.disk.VoteFor
	return true, nil
}

func (s *stableStore) write(r stableRecord) error {
	r.LastIndex = max(s.disk.LastIndex, s.last())
	b, err := cbor.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode stable record: %w", err)
	}
	if err := s.slots.store(b); err != nil {
		return fmt.Errorf("stable store: %w", err)
	}
	s.disk = r
	return nil
}

// note records the durable end of the log; called at a clean stop.
func (s *stableStore) note() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last() <= s.disk.LastIndex {
		return nil
	}
	return s.write(s.disk)
}

// lower takes back the noted end of the log, durably, before a new leader's
// entries replace what comes after last.
func (s *stableStore) lower(last uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.disk.LastIndex <= last {
		return nil
	}
	noted := s.disk.LastIndex
	s.disk.LastIndex = last
	err := s.write(s.disk)
	if err != nil {
		s.disk.LastIndex = noted
	}
	return err
}

// forget lowers the bound after the operator's data was found to be lost and
// the server goes on from what is left.
func (s *stableStore) forget(last, minTerm uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disk.LastIndex = 0
	s.term = max(s.term, minTerm)
	r := s.disk
	r.Term = s.term
	r.LastIndex = last
	return s.write(r)
}

// SetUint64 implements raft.StableStore.
func (s *stableStore) SetUint64(key []byte, v uint64) error {
	switch string(key) {
	case keyCurrentTerm:
		return s.setTerm(v)
	case keyLastVoteTerm:
		s.mu.Lock()
		s.pending = v
		s.mu.Unlock()
		return nil
	}
	return fmt.Errorf("stable store: unknown key %q", key)
}

// setTerm waits until the disk takes the term. Raft calls it from two
// goroutines, its own and the one that hears heartbeats: neither holds the
// lock while it waits, and who comes late with a lower term changes nothing,
// or a vote in the higher one would be forgotten.
func (s *stableStore) setTerm(term uint64) error {
	wait := 50 * time.Millisecond
	for {
		err := s.gate(s.ctx)
		if err == nil {
			err = s.raise(term)
		}
		if err == nil {
			return nil
		}
		if s.ctx.Err() != nil {
			// Stopping: the vote that would follow is refused, and a term
			// without a vote promises nothing.
			return nil
		}
		s.fault(err)
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
		}
		wait = min(2*wait, 5*time.Second)
	}
}

// raise writes a higher term, with a vote for ourselves in it.
func (s *stableStore) raise(term uint64) error {
	s.slots.disk.delay()
	s.mu.Lock()
	defer s.mu.Unlock()
	if term <= s.term {
		return nil
	}
	if err := s.write(stableRecord{Term: term, VoteTerm: term, VoteFor: s.self}); err != nil {
		return err
	}
	s.term = term
	return nil
}

// Set implements raft.StableStore.
func (s *stableStore) Set(key, v []byte) error {
	if string(key) != keyLastVoteCand {
		return fmt.Errorf("stable store: unknown key %q", key)
	}
	if s.unwritten(v) {
		s.slots.disk.delay()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return ErrClosed
	}
	r := stableRecord{Term: s.term, VoteTerm: s.pending, VoteFor: bytes.Clone(v)}
	if !s.written(r) {
		if err := s.write(r); err != nil {
			s.fault(err)
			return err
		}
	}
	s.voteTerm, s.voteFor = r.VoteTerm, r.VoteFor
	return nil
}

// written says whether the disk has this vote; mu is held.
func (s *stableStore) written(r stableRecord) bool {
	return s.disk.Term == r.Term && s.disk.VoteTerm == r.VoteTerm && bytes.Equal(s.disk.VoteFor, r.VoteFor)
}

func (s *stableStore) unwritten(voteFor []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.written(stableRecord{Term: s.term, VoteTerm: s.pending, VoteFor: voteFor})
}

// GetUint64 implements raft.StableStore.
func (s *stableStore) GetUint64(key []byte) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch string(key) {
	case keyCurrentTerm:
		return s.term, nil
	case keyLastVoteTerm:
		return s.voteTerm, nil
	}
	return 0, fmt.Errorf("stable store: unknown key %q", key)
}

// Get implements raft.StableStore.
func (s *stableStore) Get(key []byte) ([]byte, error) {
	if string(key) != keyLastVoteCand {
		return nil, fmt.Errorf("stable store: unknown key %q", key)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.voteFor, nil
}

func (s *stableStore) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.slots.close())
}
