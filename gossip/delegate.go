package gossip

import (
	"github.com/hashicorp/memberlist"
)

// delegate is what memberlist calls.
type delegate struct {
	p     *Pool
	label string
	seen  checked
}

var (
	_ memberlist.Delegate         = (*delegate)(nil)
	_ memberlist.EventDelegate    = (*delegate)(nil)
	_ memberlist.AliveDelegate    = (*delegate)(nil)
	_ memberlist.ConflictDelegate = (*delegate)(nil)
)

// NodeMeta implements memberlist.Delegate.
func (d *delegate) NodeMeta(limit int) []byte {
	if len(d.p.meta.encoded) > limit {
		return nil // cannot be: it is under 200 bytes, the limit is 512
	}
	return d.p.meta.encoded
}

// NotifyMsg implements memberlist.Delegate.
func (d *delegate) NotifyMsg(b []byte) { d.p.receive(b) }

// GetBroadcasts implements memberlist.Delegate.
func (d *delegate) GetBroadcasts(overhead, limit int) [][]byte {
	return d.p.queue.GetBroadcasts(overhead, limit)
}

// LocalState implements memberlist.Delegate: it goes along when two members
// compare what they know, at a join and every few minutes.
func (d *delegate) LocalState(bool) []byte {
	if d.p.c.Servers == nil {
		return nil
	}
	return d.p.c.Servers.encode()
}

// MergeRemoteState implements memberlist.Delegate.
func (d *delegate) MergeRemoteState(b []byte, _ bool) {
	if d.p.c.Servers != nil && len(b) > 0 {
		for id, record := range d.p.c.Servers.merge(b) {
			d.p.tellServer(id, record)
		}
	}
}

// NotifyAlive implements memberlist.AliveDelegate: an error keeps the member
// out.
func (d *delegate) NotifyAlive(n *memberlist.Node) error {
	return d.seen.verify(d.label, n.Name, nodeAddr(n.Addr, n.Port), n.Meta)
}

// NotifyConflict implements memberlist.ConflictDelegate: two addresses with
// one name. Names hold the boot counter, so it is a clone, or a replay.
func (d *delegate) NotifyConflict(existing, other *memberlist.Node) {
	d.p.c.Log.Warn("two members with one name", "name", existing.Name,
		"first", addrOf(existing).String(), "second", addrOf(other).String())
}

// NotifyJoin implements memberlist.EventDelegate.
func (d *delegate) NotifyJoin(n *memberlist.Node) { d.p.joined(n) }

// NotifyUpdate implements memberlist.EventDelegate.
func (d *delegate) NotifyUpdate(n *memberlist.Node) { d.p.joined(n) }

// NotifyLeave implements memberlist.EventDelegate.
func (d *delegate) NotifyLeave(n *memberlist.Node) { d.p.left(n) }

func (p *Pool) joined(n *memberlist.Node) {
	id, boot, ok := splitName(n.Name)
	if !ok {
		return
	}
	p.mu.Lock()
	if p.alive[id] == nil {
		p.alive[id] = map[string]Member{}
	}
	p.alive[id][n.Name] = Member{NodeID: id, Boot: boot, Addr: addrOf(n)}
	p.mu.Unlock()
	p.changed()
}

func (p *Pool) left(n *memberlist.Node) {
	id, _, ok := splitName(n.Name)
	if !ok {
		return
	}
	p.mu.Lock()
	delete(p.alive[id], n.Name)
	gone := len(p.alive[id]) == 0
	if gone {
		delete(p.alive, id)
	}
	p.mu.Unlock()
	if gone && p.c.Failed != nil {
		p.c.Failed(id)
	}
	p.changed()
}

func (p *Pool) changed() {
	select {
	case p.dirty <- struct{}{}:
	default:
	}
	if p.c.Changed != nil {
		p.c.Changed()
	}
}
