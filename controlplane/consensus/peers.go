package consensus

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"

	"github.com/fxamacker/cbor/v2"
)

// Peers says where the servers are. It stands outside Raft, whose addresses
// are server ids: all servers may change their address at once, and still
// find each other. A transport resolves with it. Safe for concurrent use.
type Peers struct {
	mu    sync.Mutex
	slots *slots
	addrs map[string][]string
}

// OpenPeers loads the list of a state folder. A damaged list is moved aside
// and empty: it is made of what others tell (configuration, gossip, nodes).
func OpenPeers(dir string, d *Disk) (*Peers, error) {
	p := &Peers{slots: &slots{disk: d, path: filepath.Join(dir, "peers")}, addrs: map[string][]string{}}
	b, err := p.slots.load()
	if err == nil && b != nil {
		err = cbor.Unmarshal(b, &p.addrs)
		if err != nil {
			err = fmt.Errorf("%w: %w", ErrDamaged, err)
		}
	}
	if errors.Is(err, ErrDamaged) {
		p.addrs = map[string][]string{}
		err = p.slots.quarantine()
	}
	if err != nil {
		return nil, fmt.Errorf("open peer list: %w", err)
	}
	return p, nil
}

// Resolve returns the addresses of a server, best first; none if unknown.
func (p *Peers) Resolve(id string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.addrs[id])
}

// Set records the addresses of a server durably; no addresses forget it. A
// list that does not change is not written.
func (p *Peers) Set(id string, addrs []string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Equal(p.addrs[id], addrs) {
		return nil
	}
	next := maps.Clone(p.addrs)
	next[id] = slices.Clone(addrs)
	if len(addrs) == 0 {
		delete(next, id)
	}
	b, err := cbor.Marshal(next)
	if err != nil {
		return fmt.Errorf("encode peer list: %w", err)
	}
	if err := p.slots.store(b); err != nil {
		return fmt.Errorf("peer list: %w", err)
	}
	p.addrs = next
	return nil
}

// All returns a copy of the list.
func (p *Peers) All() map[string][]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make(map[string][]string, len(p.addrs))
	for id, a := range p.addrs {
		out[id] = slices.Clone(a)
	}
	return out
}

// Close closes the list's files.
func (p *Peers) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.slots.close()
}
