package cli

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/wire"
)

// keeper prepares this process's part in the pool of its site.
func (o *nodeOptions) keeper(log *slog.Logger) *gossip.Keeper {
	return gossip.NewKeeper(gossip.KeeperConfig{
		Advertise: netip.MustParseAddr(o.address), Port: o.gossip, // complete checked the address
		SeedFile: filepath.Join(o.state, "node", "gossip-seeds"), Log: log.With("part", "gossip"),
	})
}

// gossips connects the link with the pool.
func (p *nodeProcess) gossips() {
	p.gossip.Handle(wire.GossipLeaseAck, p.link.HandleDatagram)
	p.gossip.Handle(wire.GossipNudge, p.link.HandleNudge)
	p.gossip.OnStart(p.agent.Refresh)
}

// datagram sends a lease to the server by gossip. One in this very process
// is reached over the loopback connection anyway.
func (p *nodeProcess) datagram(server string, b []byte) error {
	if server == p.gossip.NodeID() {
		return gossip.ErrNoMember
	}
	return p.gossip.Send(server, wire.GossipLease, b)
}

// annotations tell where this node gossips, for the seeds of others.
func (p *nodeProcess) annotations() map[string]string {
	a, ok := p.gossip.Addr()
	if !ok {
		return nil
	}
	return map[string]string{wire.AnnotationGossip: a.String()}
}

// runGossip takes part in the pool that the assignment names.
func (p *nodeProcess) runGossip(ctx context.Context) error {
	return p.gossip.Run(ctx, gossip.Self{
		Cluster: p.id.Grant().ClusterID, Key: p.id.Key(), Boot: p.db.Boots(),
		Wanted: func() gossip.Wanted {
			var w gossip.Wanted
			w.Keyring, w.Site, w.Seeds = p.agent.Gossip()
			w.Epoch = p.agent.Epoch()
			return w
		},
	})
}

// timeHint takes a server's word for the time.
func (p *nodeProcess) timeHint(h link.TimeHint) {
	if err := p.floor.Observe(h.Server, h.Error); err != nil {
		p.log.Warn("the time is not kept for the next start", "error", err)
	}
}

// keepFloor writes the time once a day: to a node that stays connected,
// nobody tells it.
func (p *nodeProcess) keepFloor(ctx context.Context) error {
	t := time.NewTicker(time.Hour)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		if err := p.floor.Keep(); err != nil {
			p.log.Warn("the time is not kept for the next start", "error", err)
		}
	}
}

// gossipStatus is for people: where, with whom.
func (p *nodeProcess) gossipStatus() map[string]any {
	a, ok := p.gossip.Addr()
	if !ok {
		return map[string]any{"running": false}
	}
	members := []string{}
	for _, m := range p.gossip.Members() {
		members = append(members, m.NodeID)
	}
	return map[string]any{"running": true, "address": a.String(), "site": p.gossip.Site(), "members": members, "leasesByUDP": p.link.ByUDP()}
}
