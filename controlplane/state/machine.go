package state

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
)

// Machine is the replicated state machine. Apply belongs to one goroutine,
// everything else may be called by any.
type Machine struct {
	mu   sync.Mutex // Apply and Restore
	t    *tables
	ring *ring
	cur  atomic.Pointer[view]
	// halted is set by an entry that this binary does not understand: from
	// then on nothing is applied, since a skipped entry would diverge.
	halted error
	size   atomic.Int64
}

var _ Reader = (*Machine)(nil)

// Options of a Machine; zero values are the defaults.
type Options struct {
	RingBytes int64 // of the watch ring; DefaultRingBytes
}

// NewMachine returns an empty state.
func NewMachine(o Options) *Machine {
	if o.RingBytes == 0 {
		o.RingBytes = DefaultRingBytes
	}
	m := &Machine{t: newTables(), ring: newRing(o.RingBytes, 0)}
	m.cur.Store(newView(m.t))
	return m
}

// Snapshot implements Reader.
func (m *Machine) Snapshot() Snapshot { return m.cur.Load() }

// Facts returns what the state knows about the cluster as a whole.
func (m *Machine) Facts() Facts { return m.cur.Load().facts }

// Bytes estimates the size of the state, as a snapshot would hold it.
func (m *Machine) Bytes() int64 { return m.size.Load() }

// Watch implements Reader.
func (m *Machine) Watch(kind, namespace string, after uint64) (Watcher, error) {
	w, err := m.ring.watch(kind, namespace, after)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Apply applies one committed entry. term is the entry's Raft term. One
// Result an op, in order. An error (ErrUnknownOp, ErrMalformed) says that
// nothing of the entry was applied and that this replica must stop: every
// later call returns it too.
func (m *Machine) Apply(term uint64, data []byte) ([]Result, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.halted != nil {
		return nil, m.halted
	}
	ops, err := DecodeEntry(data)
	if err != nil {
		m.halted = err
		return nil, err
	}
	a := application{t: m.t, term: term, view: m.cur.Load()}
	a.rv, a.facts = a.view.rv, a.view.facts
	results := make([]Result, len(ops))
	for i := range ops {
		results[i] = a.op(&ops[i])
	}
	if a.rv == a.view.rv {
		return results, nil // every op was refused or without effect
	}
	m.publish(&a)
	return results, nil
}

func (m *Machine) publish(a *application) {
	v := m.t.publish(a.view)
	v.rv, v.facts = a.rv, a.facts
	m.size.Store(m.t.bytes)
	// The view first: who sees an event finds its record in the snapshot.
	m.cur.Store(v)
	if a.reset {
		m.ring.reset(a.resetAt)
	}
	m.ring.append(a.events, a.rv)
}

// Hash digests the whole state: equal on replicas that applied the same
// entries, whatever their version and architecture.
func (m *Machine) Hash() ([sha256.Size]byte, error) {
	v := m.cur.Load()
	h := sha256.New()
	head, err := codec.enc.Marshal(v.facts)
	if err != nil {
		return [sha256.Size]byte{}, fmt.Errorf("hash state: %w", err)
	}
	_, _ = h.Write(head)
	_, _ = h.Write(binary.BigEndian.AppendUint64(nil, v.rv))
	err = v.each(func(r *Record) error {
		b, err := EncodeRecord(r)
		if err == nil {
			_, _ = h.Write(b)
		}
		return err
	})
	if err != nil {
		return [sha256.Size]byte{}, fmt.Errorf("hash state: %w", err)
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}

// each calls f for every record in key order until it fails.
func (v *view) each(f func(*Record) error) error {
	for _, k := range v.kinds {
		var err error
		k.tree.Scan(func(e item) bool {
			err = f(e.rec)
			return err == nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Halted returns the error that stopped this replica, if any.
func (m *Machine) Halted() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.halted
}
