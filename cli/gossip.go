package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/node/view"
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
	out := map[string]string{}
	if a, ok := p.gossip.Addr(); ok {
		out[wire.AnnotationGossip] = a.String()
	}
	if dir := p.o.claimsDir(); dir != manifests.DefaultVolumesDir {
		out[manifests.AnnotationVolumesDir] = dir
	}
	return out
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

// hintedServers are where gossip says that servers are: tried after those that
// the servers themselves named.
func (p *nodeProcess) hintedServers() []string {
	var out []string
	all := p.gossip.Servers()
	for _, id := range slices.Sorted(maps.Keys(all)) {
		out = append(out, all[id]...)
	}
	return out
}

// netCheck writes whom this node reaches. While it is connected it knows which
// servers there are, and what gossip remembers of others is of no use.
func (p *nodeProcess) netCheck(ctx context.Context, w io.Writer) error {
	servers := p.agent.Servers()
	for _, a := range p.hintedServers() {
		if !p.link.Connected() && !slices.Contains(servers, a) {
			servers = append(servers, a)
		}
	}
	r := p.gossip.NetCheck(ctx, p.id.Grant().NodeName, servers)
	if err := json.NewEncoder(w).Encode(r); err != nil {
		return fmt.Errorf("net check: %w", err)
	}
	return nil
}

// followAddress moves this node along when its machine gets another address.
// The connection to the servers is made anew by itself.
func (p *nodeProcess) followAddress(ctx context.Context) {
	now, err := netip.ParseAddr(p.o.address)
	if p.o.fixedAddress || err != nil {
		return
	}
	find := func(now netip.Addr) (netip.Addr, bool) { return ownAddress(p.link.Status().Server, p.o.netns, now) }
	if p.o.besideServer {
		find = func(now netip.Addr) (netip.Addr, bool) { return ownAddress("", p.o.netns, now) } // as the server does
	}
	watchAddress(ctx, now, find, func(a netip.Addr) {
		p.log.Info("the address of this node changed", "to", a)
		p.gossip.SetAddress(a)
		if n, ok := p.network.(interface{ SetNodeIPs([]netip.Addr) }); ok {
			n.SetNodeIPs([]netip.Addr{a})
		}
		p.agent.Refresh()
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
func (p *nodeProcess) gossipStatus() view.Gossip {
	a, ok := p.gossip.Addr()
	if !ok {
		return view.Gossip{}
	}
	g := view.Gossip{Running: true, ID: p.gossip.NodeID(), Address: a.String(), Site: p.gossip.Site(), LeasesByUDP: p.link.ByUDP()}
	for _, m := range p.gossip.Members() {
		g.Members = append(g.Members, m.NodeID)
	}
	return g
}
