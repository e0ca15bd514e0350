package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/proxy"
	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/wire"
)

// traffic is the node's part in Services: it keeps the service table, the
// routes that follow from it, and the proxy.
type traffic struct {
	o          nodeOptions
	log        *slog.Logger
	table      *services.Table
	puller     *services.Puller
	namespaced *network.Namespaced // nil without root
	zone       func() string
	servers    func() []string // addresses of servers, with their ports
	node       string

	// moved says that the node's addresses are others; tell makes an event of
	// the node, or takes it back.
	moved  func()
	tell   func(reason, message string, over bool)
	lonely string // what was told of missing addresses
	noNAT  string // and of containers' ways out of the node

	mu     sync.Mutex
	routed bool // the service range is routed into the namespace
}

// proxyDir holds the proxy's socket and log.
func proxyDir(runDir string) string { return filepath.Join(runDir, "proxy") }

func (p *nodeProcess) newTraffic(net network.Network) *traffic {
	t := &traffic{o: p.o, log: p.log.With("part", "traffic"), table: services.NewTable(), node: p.id.Grant().NodeName}
	t.puller = &services.Puller{Table: t.table, Link: p.link, Path: filepath.Join(p.o.state, "node", "services"), Log: t.log}
	t.namespaced, _ = net.(*network.Namespaced)
	t.moved, t.tell = p.agent.Refresh, p.agent.NodeEvent
	t.zone = func() string {
		_, site, _ := p.agent.Gossip()
		return site
	}
	t.servers = func() []string { return append(slices.Clone(p.agent.Servers()), p.hintedServers()...) }
	t.puller.Load()
	return t
}

// settings are what the proxy needs to know of the node.
func (t *traffic) settings() (proxy.Settings, bool) {
	s := proxy.Settings{Node: t.node, Zone: t.zone(), Resolv: "/etc/resolv.conf", Reserved: reservedPorts(append(t.servers(), t.ingressAddresses()...), t.o.gossip)}
	if ip, err := netip.ParseAddr(t.o.address); err == nil {
		s.NodeIPs = []netip.Addr{ip}
	}
	if t.namespaced == nil {
		return s, true
	}
	s.NetNS, s.NodeIPs = t.o.netns, t.namespaced.NodeIPs()
	t.mu.Lock()
	defer t.mu.Unlock()
	return s, t.routed
}

// reservedPorts are those that no Service may have on a node: of the servers,
// wherever they are, since any machine may become one, of Ingresses, and of
// gossip. Sorted.
func reservedPorts(addresses []string, gossipPort uint16) []uint16 {
	set := map[uint16]bool{gossipPort: true}
	for _, s := range addresses {
		if _, port, err := net.SplitHostPort(s); err == nil {
			if n, err := strconv.ParseUint(port, 10, 16); err == nil {
				set[uint16(n)] = true
			}
		}
	}
	delete(set, 0)
	return slices.Sorted(maps.Keys(set))
}

// ingressAddresses are where this node serves Ingresses, if there are any.
// While their process is started anew nobody has those ports, and a Service
// that got them then would keep them.
func (t *traffic) ingressAddresses() []string {
	var n wire.IngressNodes
	data := t.table.Get(wire.ItemIngressNodes)
	if data == nil || wire.DecodeItem(data, &n) != nil || !slices.Contains(n.Nodes, t.node) || !t.table.Any(wire.ItemIngress) {
		return nil
	}
	return []string{t.o.ingress.http, t.o.ingress.https}
}

func (t *traffic) supervisor() *proxy.Supervisor {
	return &proxy.Supervisor{Dir: proxyDir(t.o.run), Table: t.table, Settings: t.settings, Log: t.log}
}

const (
	routesRetry  = time.Second
	routesGather = 200 * time.Millisecond
	routesLook   = time.Minute
)

// runRoutes keeps what the kernel must know: that the service range is the
// namespace's, and where the pods of other nodes are.
func (t *traffic) runRoutes(ctx context.Context) error {
	if t.namespaced == nil {
		return nil
	}
	sub := t.table.Subscribe()
	defer sub.Close()
	var told, toldPeers string
	for {
		wait := routesLook // somebody may have removed them
		err := t.routeServices()
		switch {
		case errors.Is(err, network.ErrNoRange):
			wait = routesRetry
		case err != nil && err.Error() != told:
			t.log.Warn("Services are reached from pods only", "error", err)
			told = err.Error()
		case err == nil:
			told = ""
		}
		if !errors.Is(err, network.ErrNoRange) {
			t.mu.Lock()
			t.routed = true
			t.mu.Unlock()
			t.lookForSecond()
			t.lookAtNAT(t.namespaced.NATError())
			t.routePeers(&toldPeers)
		}
		if !t.routesMayHaveChanged(ctx, sub, wait) {
			return nil
		}
	}
}

// routesMayHaveChanged waits for news that routes depend on, for wait at most;
// false is the end of ctx.
func (t *traffic) routesMayHaveChanged(ctx context.Context, sub *services.Subscription, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return true
		case <-sub.News():
			if !t.concerned(sub) {
				continue // endpoints come and go all the time
			}
			select {
			case <-ctx.Done():
				return false
			case <-time.After(routesGather):
				return true
			}
		}
	}
}

// concerned takes the news and says whether routes may depend on them.
func (t *traffic) concerned(sub *services.Subscription) bool {
	found := false
	for more := true; more; {
		var items []wire.ServiceItem
		var gone []string
		items, gone, more = sub.Take(1 << 20)
		for _, it := range items {
			found = found || it.Key[:1] == wire.ItemNetwork || it.Key[:1] == wire.ItemNodeInfo[:1]
		}
		for _, k := range gone {
			found = found || k[:1] == wire.ItemNodeInfo[:1]
		}
	}
	return found
}

// dns are the addresses at which containers reach the cluster's DNS.
func (t *traffic) dns() (out []netip.Addr) {
	var n wire.ClusterNetwork
	if t == nil || t.namespaced == nil || wire.DecodeItem(t.table.Get(wire.ItemNetwork), &n) != nil {
		return nil
	}
	for _, s := range n.DNS {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, a)
		}
	}
	return out
}

func (t *traffic) routeServices() error {
	var n wire.ClusterNetwork
	if data := t.table.Get(wire.ItemNetwork); data == nil || wire.DecodeItem(data, &n) != nil {
		return network.ErrNoRange
	}
	var ranges []netip.Prefix
	for _, c := range n.ServiceCIDRs {
		if p, err := netip.ParsePrefix(c); err == nil {
			ranges = append(ranges, p)
		}
	}
	return t.namespaced.SetServiceCIDRs(ranges)
}

// lookForSecond finds the node's address of the other family that its pods
// have, and tells where there is none: other nodes do not reach them by it.
func (t *traffic) lookForSecond() {
	changed, missing, err := t.namespaced.SecondIP()
	if err != nil {
		t.log.Warn("addresses of this machine are not known", "error", err)
		return
	}
	if changed {
		t.log.Info("the addresses of this node changed", "addresses", t.namespaced.NodeIPs())
		t.moved()
	}
	text := ""
	if missing.IsValid() {
		family, like := "IPv6", "one of fd00::/8"
		if missing.Addr().Is4() {
			family, like = "IPv4", "one of 10.0.0.0/8"
		}
		text = fmt.Sprintf("the pods of this node have %s addresses (%s) and the machine has none that others could reach: other nodes do not reach these pods by %s, and Services of %s alone do not from there; give a network interface one, such as %s",
			family, missing, family, family, like)
	}
	t.note(&t.lonely, reasonLonely, text)
}

// lookAtNAT tells what the kernel refused of the rules for containers. Pods
// start all the same where they can do without, so nothing else says it.
func (t *traffic) lookAtNAT(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != t.noNAT {
		t.log.Warn("the rules for containers cannot be made", "error", err)
	}
	t.note(&t.noNAT, reasonNoNAT, text)
}

// note tells of the node what is so, once, and takes back what was told before;
// "" is nothing.
func (t *traffic) note(told *string, reason, text string) {
	if text == *told {
		return
	}
	if *told != "" {
		t.tell(reason, *told, true)
	}
	if text != "" {
		t.tell(reason, text, false)
	}
	*told = text
}

const (
	// reasonLonely: the node's pods have addresses of a family that it has not.
	reasonLonely = "NoAddressOfFamily"
	// reasonNoNAT: what containers need of the kernel's address translation.
	reasonNoNAT = "NoAddressTranslation"
)

func (t *traffic) routePeers(told *string) {
	var peers []network.Peer
	unknown := map[netip.Prefix]error{}
	t.table.Range(wire.ItemNodeInfo, func(key string, data []byte) {
		var n wire.NodeInfo
		if key == wire.ItemNodeInfo+t.node || wire.DecodeItem(data, &n) != nil {
			return
		}
		for _, c := range n.PodCIDRs {
			p, err := netip.ParsePrefix(c)
			if err != nil {
				continue
			}
			found := false
			for _, a := range n.Addresses {
				if via, err := netip.ParseAddr(a); err == nil && via.Is4() == p.Addr().Is4() {
					peers, found = append(peers, network.Peer{CIDR: p, Via: via}), true
					break
				}
			}
			if !found && len(n.Addresses) > 0 {
				unknown[p] = fmt.Errorf("node %s tells no address of that family", key[len(wire.ItemNodeInfo):])
			}
		}
	})
	skipped, err := t.namespaced.SetPeers(peers, t.table.Fresh())
	text := ""
	if err != nil {
		text = err.Error()
	}
	if skipped == nil {
		skipped = map[netip.Prefix]error{}
	}
	maps.Copy(skipped, unknown)
	for dst, e := range skipped {
		text += dst.String() + ": " + e.Error() + "; "
		if len(text) > 512 {
			break
		}
	}
	if text != "" && len(text) != len(*told) {
		t.log.Warn("pods of some nodes are not reached from here", "nodes", len(skipped), "reasons", text)
	}
	*told = text
}
