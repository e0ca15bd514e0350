// Package gossip is membership inside one site: who is there, who seems to
// be gone, and small hints that travel fast. It wraps hashicorp/memberlist.
//
// Gossip informs, leases decide: whatever is heard here only makes somebody
// look sooner. With all of it lost, everything still works over the nodes'
// connections.
//
// Owner and goroutines: memberlist's own, and one loop that rejoins. Close
// ends them and waits.
package gossip

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// Port is where gossip listens, UDP and TCP.
const Port = 7946

// Config of a Pool. Cluster, Key, Keyring and Advertise are required.
type Config struct {
	Cluster string
	Epoch   uint64
	// Site is the pool's name; nodes of another site are not of this pool.
	Site string
	// Key is the node's key: its id comes from it, and it signs the name and
	// address in the metadata.
	Key *ecdsa.PrivateKey
	// Boot must differ on every start and on every change of the address: a
	// new name instead of a reclaimed one.
	Boot uint64
	// Keyring holds 16, 24 or 32 byte keys, the first is primary.
	Keyring [][]byte
	// Bind is where to listen, by default every address on Port. Advertise is
	// what others dial; a port of 0 is the one listened on.
	Bind, Advertise netip.AddrPort
	// Transport replaces the network, for simulations; Advertise is then its
	// address.
	Transport memberlist.Transport
	// Seeds are addresses of other members, from the assignment and from an
	// earlier run; asked again at every rejoin. Names of hosts are looked up
	// again each time.
	Seeds func() []string
	// Resolve looks a host up; nil asks the machine's resolver.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
	// SaveSeeds receives the addresses of living members to keep for the next
	// start; at most every SaveInterval (10 min), and only when they changed.
	SaveSeeds    func([]string)
	SaveInterval time.Duration
	// Changed is called, without locks held, when membership changed; Failed
	// when no incarnation of a node is alive any more. They must not block.
	Changed func()
	Failed  func(nodeID string)
	// Servers is what is known of where the cluster's servers are; members tell
	// each other. nil takes no part in it.
	Servers *ServerBook
	// Message receives what Send and Broadcast carry. from is the sender's
	// address on the network, for answers. It must not block or keep b.
	Message func(kind byte, b []byte)
	Log     *slog.Logger
}

// Member is one incarnation of a node.
type Member struct {
	NodeID string
	Boot   uint64
	Addr   netip.AddrPort
}

// name is what the member is called in the pool (see splitName).
func (m Member) name() string { return m.NodeID + "." + strconv.FormatUint(m.Boot, 10) }

// Pool is the membership of one site.
type Pool struct {
	c    Config
	id   string
	name string
	ring *memberlist.Keyring
	ml   *memberlist.Memberlist
	meta *identity

	cancel context.CancelFunc
	wg     sync.WaitGroup
	dirty  chan struct{}

	mu     sync.Mutex
	alive  map[string]map[string]Member // node id -> name -> member
	saved  []string
	closed bool

	queue  memberlist.TransmitLimitedQueue
	seen   seenMessages
	checks *checks
	doubts chan string
}

// Label is what keeps pools apart: packets of another cluster, site or
// recovery epoch are dropped before they are decrypted.
//
// It travels in every packet in clear, so it is short: how the cluster's id
// begins, for whoever wonders what is on his network, and a hash of all. It
// need not be secret or hard to forge, the keyring is what protects a pool.
func Label(cluster, site string, epoch uint64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%s/%d", cluster, site, epoch))
	return cluster[:min(len(cluster), labelCluster)] + "." + base64.RawURLEncoding.EncodeToString(sum[:4])
}

// labelCluster is how much of a cluster's id stands in labels.
const labelCluster = 6

// New starts listening and joins in the background.
func New(c Config) (*Pool, error) {
	if c.Cluster == "" || c.Key == nil || len(c.Keyring) == 0 || !c.Advertise.Addr().IsValid() {
		return nil, errors.New("gossip: a cluster, a key, a keyring and an address to advertise are required")
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Seeds == nil {
		c.Seeds = func() []string { return nil }
	}
	if c.Resolve == nil {
		c.Resolve = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	if c.SaveInterval <= 0 {
		c.SaveInterval = 10 * time.Minute
	}
	ring, err := memberlist.NewKeyring(c.Keyring, c.Keyring[0])
	if err != nil {
		return nil, fmt.Errorf("gossip: keyring: %w", err)
	}
	id, err := NodeID(&c.Key.PublicKey)
	if err != nil {
		return nil, err
	}
	p := &Pool{c: c, id: id, name: Member{NodeID: id, Boot: c.Boot}.name(), ring: ring,
		alive: map[string]map[string]Member{}, dirty: make(chan struct{}, 1), checks: newChecks(), doubts: make(chan string, 16)}
	own := Label(c.Cluster, c.Site, c.Epoch)
	strange := &strangers{log: c.Log, own: own, next: map[string]time.Time{}}
	logger := newLogger(c.Log, func(line string) bool { p.doubt(line); return strange.hear(line) })
	transport := c.Transport
	if transport == nil {
		if transport, err = listen(c, logger); err != nil {
			return nil, err
		}
	}
	want := int(c.Advertise.Port())
	if nt, ok := transport.(*memberlist.NetTransport); ok && want == 0 {
		want = nt.GetAutoBindPort()
	}
	transport = ending(transport)
	mc := config(c, p.name)
	mc.Keyring, mc.Transport, mc.Logger = ring, transport, logger
	ip, port, err := transport.FinalAdvertiseAddr(c.Advertise.Addr().String(), want)
	if err != nil {
		_ = transport.Shutdown()
		return nil, fmt.Errorf("gossip: %w", err)
	}
	mc.AdvertiseAddr, mc.AdvertisePort = ip.String(), port
	if p.meta, err = newIdentity(c.Key, mc.Label, p.name, ip, uint16(port)); err != nil {
		_ = transport.Shutdown()
		return nil, err
	}
	d := &delegate{p: p, label: mc.Label}
	mc.Delegate, mc.Events, mc.Alive, mc.Conflict = d, d, d, d
	p.queue.RetransmitMult = mc.RetransmitMult
	p.queue.NumNodes = func() int { return p.size() }
	if p.ml, err = memberlist.Create(mc); err != nil {
		_ = transport.Shutdown()
		return nil, fmt.Errorf("gossip: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	p.wg.Go(func() { p.loop(ctx) })
	p.wg.Go(func() { p.doubted(ctx) })
	return p, nil
}

// gossipToTheDead is how long members that are thought dead are told so.
const gossipToTheDead = 24 * time.Hour

// config is memberlist's LAN configuration with what bites overridden.
func config(c Config, name string) *memberlist.Config {
	m := memberlist.DefaultLANConfig()
	m.Name = name
	m.Label = Label(c.Cluster, c.Site, c.Epoch)
	// Dead members are still told so, and can refute, for a day instead of 30
	// s; after that the seeds bring them back.
	m.GossipToTheDeadTime = gossipToTheDead
	// IPv6 guarantees 1280 bytes with its headers; 1400 is lost on tunnels.
	// Memberlist itself leaves room for label and encryption.
	m.UDPBufferSize = 1280 - 48
	m.HandoffQueueDepth = 4096
	m.DeadNodeReclaimTime = 0 // names are never reclaimed: every start has its own
	m.ProbeTimeout = time.Second
	// Leases decide; this only informs, and an idle node has 200 bytes/s for
	// everything. A probe and its answer are some 300 bytes.
	m.ProbeInterval = 15 * time.Second
	m.SuspicionMult = 1
	m.PushPullInterval = 5 * time.Minute
	m.GossipInterval = 500 * time.Millisecond // only while there is something to say
	m.EnableCompression = false               // costs more CPU than it saves in packets this small
	m.DNSConfigPath = "/dev/null"             // seeds are addresses
	return m
}

func listen(c Config, logger logWriter) (*memberlist.NetTransport, error) {
	bind := c.Bind
	if !bind.IsValid() {
		bind = netip.AddrPortFrom(netip.IPv4Unspecified(), Port)
	}
	t, err := memberlist.NewNetTransport(&memberlist.NetTransportConfig{
		BindAddrs: []string{bind.Addr().String()}, BindPort: int(bind.Port()), Logger: logger,
	})
	if err != nil {
		return nil, fmt.Errorf("gossip: listen on %s: %w", bind, err)
	}
	return t, nil
}

// NodeID is this node's id.
func (p *Pool) NodeID() string { return p.id }

// Addr is what others dial.
func (p *Pool) Addr() netip.AddrPort { return addrOf(p.ml.LocalNode()) }

func addrOf(n *memberlist.Node) netip.AddrPort {
	a, _ := netip.AddrFromSlice(n.Addr)
	return netip.AddrPortFrom(a.Unmap(), n.Port)
}

// Members are the living ones, this node included, sorted by id.
func (p *Pool) Members() []Member {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []Member
	for _, names := range p.alive {
		for _, m := range names {
			out = append(out, m)
		}
	}
	slices.SortFunc(out, func(a, b Member) int {
		if c := strings.Compare(a.NodeID, b.NodeID); c != 0 {
			return c
		}
		return int(min(max(int64(a.Boot)-int64(b.Boot), -1), 1))
	})
	return out
}

func (p *Pool) size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, names := range p.alive {
		n += len(names)
	}
	return n
}

// member finds the newest incarnation of a node.
func (p *Pool) member(nodeID string) (Member, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var best Member
	found := false
	for _, m := range p.alive[nodeID] {
		if !found || m.Boot > best.Boot {
			best, found = m, true
		}
	}
	return best, found
}

// ErrNoMember says that gossip knows no living member with that id.
var ErrNoMember = errors.New("gossip: no such member")

// MaxMessage is the largest message in bytes.
const MaxMessage = 512

// Send gives a small message to one node, by UDP, without any promise.
func (p *Pool) Send(nodeID string, kind byte, b []byte) error {
	m, ok := p.member(nodeID)
	if !ok {
		return ErrNoMember
	}
	if len(b) > MaxMessage {
		return fmt.Errorf("gossip: message of %d bytes, limit %d", len(b), MaxMessage)
	}
	return p.sendUDP(m, encodeDirect(kind, b))
}

// sendUDP and sendTCP go by what we noted of a member: memberlist changes its
// own records at any time.
func (p *Pool) sendUDP(m Member, b []byte) error {
	return p.ml.SendToAddress(memberlist.Address{Addr: m.Addr.String(), Name: m.name()}, b)
}

func (p *Pool) sendTCP(m Member, b []byte) error {
	return p.ml.SendReliable(&memberlist.Node{Name: m.name(), Addr: m.Addr.Addr().AsSlice(), Port: m.Addr.Port()}, b)
}

// Broadcast spreads a small message to every other member: each passes it on
// once. A newer one with the same subject replaces an older one that is
// still on its way.
func (p *Pool) Broadcast(subject string, kind byte, b []byte) error {
	if len(b) > MaxMessage || len(subject) > maxSubject {
		return fmt.Errorf("gossip: message of %d bytes, limit %d", len(b), MaxMessage)
	}
	msg := encodeSpread(rand.Uint64(), subject, kind, b)
	p.seen.first(msg)
	p.spread(subject, msg)
	return nil
}

// tellServer spreads one record of the ServerBook. Who misses it hears it when
// members next compare what they know.
func (p *Pool) tellServer(id string, record []byte) {
	if err := p.Broadcast("server/"+id[:min(len(id), maxSubject-7)], kindServer, record); err != nil {
		p.c.Log.Debug("where a server is was not spread", "server", id, "error", err)
	}
}

// SetKeyring replaces the keys: new ones are added, the first becomes
// primary, the rest removed. Two members understand each other while each
// holds the other's primary key.
func (p *Pool) SetKeyring(keys [][]byte) error {
	if len(keys) == 0 {
		return errors.New("gossip: an empty keyring")
	}
	for _, k := range keys {
		if err := p.ring.AddKey(k); err != nil {
			return fmt.Errorf("gossip: keyring: %w", err)
		}
	}
	if err := p.ring.UseKey(keys[0]); err != nil {
		return fmt.Errorf("gossip: keyring: %w", err)
	}
	for _, old := range p.ring.GetKeys() {
		if !slices.ContainsFunc(keys, func(k []byte) bool { return string(k) == string(old) }) {
			if err := p.ring.RemoveKey(old); err != nil {
				return fmt.Errorf("gossip: keyring: %w", err)
			}
		}
	}
	return nil
}

// Leave says goodbye, so that others need not find out; then Close.
func (p *Pool) Leave(timeout time.Duration) error {
	if err := p.ml.Leave(timeout); err != nil {
		return fmt.Errorf("gossip: leave: %w", err)
	}
	return nil
}

// Close stops without a word, as a crash would, and waits.
func (p *Pool) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	err := p.ml.Shutdown()
	p.wg.Wait()
	if err != nil {
		return fmt.Errorf("gossip: close: %w", err)
	}
	return nil
}

func nodeAddr(ip net.IP, port uint16) string {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port).String()
}
