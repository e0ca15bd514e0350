package controlplane

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"fmt"
	"net"
	"strconv"
	"sync"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/wire"
)

// zone is the site of this server.
func (s *Server) zone() string {
	if s.cfg.Zone == "" {
		return nodeapi.DefaultZone
	}
	return s.cfg.Zone
}

// gossips connects the nodes' API with the pool: leases by UDP, nudges,
// suspicions and seeds.
func (s *Server) gossips(c *nodeapi.Config) {
	k := s.cfg.Gossip
	if k == nil {
		return
	}
	ours := func() bool { return k.Site() == s.zone() }
	c.GossipID = func() string {
		if !ours() {
			return ""
		}
		return k.NodeID()
	}
	c.Nudge = func(uid string, b []byte) { _ = k.Send(uid, wire.GossipNudge, b) } // a hint: the connection carries it too
	c.Members = func() (string, []string) {
		var out []string
		if a, ok := k.Addr(); ok {
			out = append(out, a.String())
		}
		return k.Site(), out
	}
	k.Handle(wire.GossipLease, func(b []byte) {
		if uid, ack, ok := s.nodes.HandleDatagram(b); ok {
			_ = k.Send(uid, wire.GossipLeaseAck, ack) // the node asks again, over TCP
		}
	})
	k.OnFailed(func(uid string) { s.nodes.Suspect(uid) })
}

// RunGossip takes part in the pool of the server's own site, for a process
// without a node. The key is new on every start: nothing refers to it for
// longer than a connection.
func (s *Server) RunGossip(ctx context.Context) error {
	if s.cfg.Gossip == nil {
		return nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make gossip key: %w", err)
	}
	return s.cfg.Gossip.Run(ctx, gossip.Self{
		Cluster: s.ca.ClusterID(), Key: key, Boot: 1,
		Wanted: func() gossip.Wanted {
			w := gossip.Wanted{Site: s.zone(), Epoch: s.raft.Epoch()}
			// No quorum, or no kube-system yet: asked again.
			if ring, err := s.nodes.Keyring(ctx, w.Site); err == nil {
				w.Keyring, w.Seeds = ring, append(s.nodes.Seeds(w.Site), s.serverSeeds()...)
			}
			return w
		},
	})
}

// serverSeeds are where the other servers gossip, if they do at the usual
// port: before there is a node, nobody else could tell.
func (s *Server) serverSeeds() []string {
	var out []string
	for id, addrs := range s.book.All() {
		if id == s.raft.ServerID() {
			continue
		}
		for _, h := range hosts(addrs) {
			out = append(out, net.JoinHostPort(h, strconv.Itoa(gossip.Port)))
		}
	}
	return out
}

// fence counts who has seen a higher recovery epoch.
type fence struct {
	mu   sync.Mutex
	said map[string]bool
}

// fenceVoices is how many nodes must say so: a single one may lie.
const fenceVoices = 2

// claims notes a node's word and says whether that is enough, in a cluster of
// that many nodes.
func (f *fence) claims(node string, nodes int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.said == nil {
		f.said = map[string]bool{}
	}
	if len(f.said) < fenceVoices {
		f.said[node] = true
	}
	return len(f.said) >= min(fenceVoices, max(nodes, 1))
}

// higherEpoch stops this server's writing: the cluster was recovered without
// it.
func (s *Server) higherEpoch(node string, seen uint64) {
	enough := s.fence.claims(node, s.nodes.Count())
	s.log.Error("a node has seen a later recovery of this cluster", "node", node, "epoch", seen, "ours", s.raft.Epoch(), "stopping", enough)
	if enough {
		s.raft.Halt(fmt.Errorf("this server is from before a recovery of the cluster (epoch %d, nodes have seen %d): remove its state and join it to the recovered servers", s.raft.Epoch(), seen))
	}
}
