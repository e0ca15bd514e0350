package controlplane

import (
	"net/netip"
	"slices"
	"sync"
)

// place is where this server is reached. It changes while the server runs
// when the machine gets another address.
type place struct {
	mu        sync.Mutex
	advertise []string
	fallback  string
	changed   chan struct{} // closed and replaced at each change
}

func newPlace(advertise []string, fallback string) *place {
	return &place{advertise: slices.Clone(advertise), fallback: fallback, changed: make(chan struct{})}
}

func (p *place) get() (advertise []string, fallback string, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.advertise), p.fallback, p.changed
}

func (p *place) set(advertise []string, fallback string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Equal(p.advertise, advertise) && p.fallback == fallback {
		return false
	}
	p.advertise, p.fallback = slices.Clone(advertise), fallback
	close(p.changed)
	p.changed = make(chan struct{})
	return true
}

// advertise lists the addresses at which nodes and clients reach this server.
func (s *Server) advertise() []string {
	a, _, _ := s.place.get()
	return a
}

// names are those of the server's certificate: pods reach it at the first
// address of the service range (the Service default/kubernetes).
func (s *Server) names(advertise []string) []string {
	list := append(hosts(advertise), s.cfg.Names...)
	for _, p := range s.serviceRanges() {
		list = append(list, p.Masked().Addr().Next().String())
	}
	return list
}

// serviceRanges are the ranges of Services' addresses, the first one's family
// before the other.
func (s *Server) serviceRanges() []netip.Prefix {
	if len(s.cfg.ServiceCIDRs) > 0 {
		return s.cfg.ServiceCIDRs
	}
	return []netip.Prefix{netip.MustParsePrefix("10.43.0.0/16")}
}

// Moved tells the server its new addresses, as in Config.Advertise and
// Config.Fallback: the certificate has them from the next handshake on, the
// connections from the old ones are made anew, and the other servers and the
// nodes are told.
func (s *Server) Moved(advertise []string, fallback string) {
	old := s.advertise()
	if !s.place.set(advertise, fallback) {
		return
	}
	s.log.Warn("this machine has another address: telling the other servers and the nodes", "from", old, "to", advertise)
	s.cert.SetNames(append(s.names(advertise), fallback))
	s.mesh.Moved()
	s.tellSite()
	s.adminMu.Lock()
	s.adminAt = s.adminAt.AddDate(-100, 0, 0) // due
	s.adminMu.Unlock()
	if err := s.writeAdmin(); err != nil {
		s.log.Warn("the administrator's kubeconfig still has the old address", "err", err)
	}
}

// tellSite lets the members of the site's pool know where this server is: the
// way back to it when every server moves at once.
func (s *Server) tellSite() {
	if s.cfg.Gossip != nil {
		s.cfg.Gossip.SetServer(s.raft.ServerID(), s.advertise())
	}
}

// hinted are addresses of another server of which gossip heard. They are
// tried after those that are known; its certificate says who is there.
func (s *Server) hinted(id string) []string {
	if s.cfg.Gossip == nil {
		return nil
	}
	return s.cfg.Gossip.Servers()[id]
}
