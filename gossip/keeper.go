package gossip

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// Wanted is the pool that a Keeper shall take part in.
type Wanted struct {
	Site    string
	Epoch   uint64
	Keyring [][]byte // first is primary; empty is no pool yet
	Seeds   []string
}

// Self is who takes part.
type Self struct {
	Cluster string
	Key     *ecdsa.PrivateKey
	// Boot must differ on every start.
	Boot uint64
	// Wanted is asked again and again; it must be cheap.
	Wanted func() Wanted
}

// KeeperConfig of a Keeper. Advertise is required.
type KeeperConfig struct {
	// Advertise is the node's address, where it also listens.
	Advertise netip.Addr
	// Port to listen on; 0 lets the kernel pick one.
	Port uint16
	// SeedFile keeps the addresses of members for the next start; "" is none.
	SeedFile string
	// Transport replaces the network, for simulations.
	Transport func() memberlist.Transport
	Log       *slog.Logger
}

// Keeper keeps this process in the pool of its site: it starts once there
// are keys, follows them when they rotate, moves when the site changes, and
// goes on without a pool when the port is taken. There is one for a process,
// also where a server and an agent share it.
//
// Owner and goroutines: the pool, in Run. Send and the others may be called
// at any time.
type Keeper struct {
	c   KeeperConfig
	log *slog.Logger

	handlers map[byte]func([]byte) // set before Run
	servers  ServerBook
	failed   []func(string)
	started  []func()

	mu   sync.Mutex
	addr netip.Addr // where the pool shall be
	pool *Pool
	now  Wanted     // what pool is of ...
	at   netip.Addr // ... and where it listens
	met  []string   // members of the pool before
	told string     // why there is none
	next time.Time
	n    uint64 // pools started in this boot
}

// Timing of a Keeper.
const (
	keeperInterval = 2 * time.Second
	keeperRetry    = time.Minute
)

// NewKeeper prepares; nothing happens before Run.
func NewKeeper(c KeeperConfig) *Keeper {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Keeper{c: c, log: c.Log, addr: c.Advertise, handlers: map[byte]func([]byte){}}
}

// Handle names who takes messages of one kind; before Run only. f must not
// block or keep its argument.
func (k *Keeper) Handle(kind byte, f func(b []byte)) { k.handlers[kind] = f }

// OnFailed adds who hears that no incarnation of a node is alive any more;
// before Run only. f must not block.
func (k *Keeper) OnFailed(f func(nodeID string)) { k.failed = append(k.failed, f) }

// OnStart adds who hears that a pool started; before Run only.
func (k *Keeper) OnStart(f func()) { k.started = append(k.started, f) }

// Run takes part until ctx ends.
func (k *Keeper) Run(ctx context.Context, s Self) error {
	t := time.NewTicker(keeperInterval)
	defer t.Stop()
	defer k.stop()
	for {
		k.step(s)
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// step compares what is with what shall be. Only Run calls it.
func (k *Keeper) step(s Self) {
	w := s.Wanted()
	p, now := k.current()
	if p != nil && (len(w.Keyring) == 0 || w.Site != now.Site || w.Epoch != now.Epoch || k.elsewhere()) {
		k.remember(p)
		k.stop()
		p = nil
	}
	switch {
	case len(w.Keyring) == 0:
	case p == nil:
		k.start(s, w)
	case !slices.EqualFunc(w.Keyring, now.Keyring, bytes.Equal):
		if err := p.SetKeyring(w.Keyring); err != nil {
			k.log.Warn("gossip keys not changed", "error", err)
			return
		}
		k.set(p, w)
		k.log.Info("gossip keys changed", "site", w.Site, "keys", len(w.Keyring))
	}
}

func (k *Keeper) start(s Self, w Wanted) {
	k.mu.Lock()
	wait := time.Now().Before(k.next)
	k.mu.Unlock()
	if wait {
		return
	}
	k.mu.Lock()
	addr, met := k.addr, k.met
	k.mu.Unlock()
	c := Config{
		Cluster: s.Cluster, Epoch: w.Epoch, Site: w.Site, Key: s.Key, Keyring: w.Keyring,
		Boot: s.Boot<<16 | k.n&0xffff, // a pool that is entered again needs a new name
		Bind: netip.AddrPortFrom(addr, k.c.Port), Advertise: netip.AddrPortFrom(addr, k.c.Port), Servers: &k.servers,
		Seeds:     func() []string { return append(append(k.savedSeeds(), met...), s.Wanted().Seeds...) },
		SaveSeeds: k.saveSeeds, Message: k.message, Failed: k.fail, Changed: k.changed, Log: k.log,
	}
	if k.c.Transport != nil {
		c.Transport = k.c.Transport()
	}
	p, err := New(c)
	k.n++
	if err != nil {
		k.mu.Lock()
		k.next = time.Now().Add(keeperRetry)
		again := k.told == err.Error()
		k.told = err.Error()
		k.mu.Unlock()
		if !again {
			hint := "everything works without it, over the connection to the servers"
			if errors.Is(err, syscall.EADDRINUSE) || strings.Contains(err.Error(), "address already in use") {
				hint = "the port is taken: another agent on this machine? --gossip-port chooses another; " + hint
			}
			k.log.Warn("no gossip in this site", "error", err, "hint", hint)
		}
		return
	}
	k.set(p, w)
	k.mu.Lock()
	k.at = addr
	k.mu.Unlock()
	k.log.Info("gossip started", "site", w.Site, "address", p.Addr().String())
	for _, f := range k.started {
		f()
	}
}

func (k *Keeper) stop() {
	p, _ := k.current()
	k.set(nil, Wanted{})
	if p == nil {
		return
	}
	if err := p.Close(); err != nil {
		k.log.Warn("gossip did not stop in order", "error", err)
	}
}

// SetAddress moves this member to another address of the machine: its pool
// starts there under a new name, and finds back through those it had met.
func (k *Keeper) SetAddress(a netip.Addr) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.addr = a
	k.next = time.Time{} // where it could not start before, it may here
}

func (k *Keeper) elsewhere() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.addr != k.at
}

// remember keeps some members as seeds of the next pool.
func (k *Keeper) remember(p *Pool) {
	var met []string
	for _, m := range p.Members() {
		if m.NodeID != p.NodeID() && len(met) < maxSeeds {
			met = append(met, m.Addr.String())
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.met = met
}

// SetServer says where the server of this process is, for the other members.
func (k *Keeper) SetServer(id string, addrs []string) { k.tell(id, k.servers.set(id, addrs)) }

// ForgetServer tells the other members that a server was removed.
func (k *Keeper) ForgetServer(id string) { k.tell(id, k.servers.forget(id)) }

func (k *Keeper) tell(id string, b []byte) {
	if b == nil {
		return
	}
	if p, _ := k.current(); p != nil {
		p.tellServer(id, b)
	}
}

// Servers are the addresses of servers that members told of, by id. They are
// hints: whoever is there must prove to be that server.
func (k *Keeper) Servers() map[string][]string { return k.servers.All() }

func (k *Keeper) current() (*Pool, Wanted) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.pool, k.now
}

func (k *Keeper) set(p *Pool, w Wanted) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pool, k.now, k.told = p, w, ""
}

func (k *Keeper) message(kind byte, b []byte) {
	if kind == kindServer {
		k.servers.merge(b)
		return
	}
	if f := k.handlers[kind]; f != nil {
		f(b)
	}
}

func (k *Keeper) fail(nodeID string) {
	k.log.Info("gossip has lost a member", "id", nodeID)
	for _, f := range k.failed {
		f(nodeID)
	}
}

func (k *Keeper) changed() {
	// Called by the pool's own goroutines, also while it starts.
	k.log.Debug("gossip membership changed", "members", len(k.Members()))
}

// maxSeedFile bounds what is read back.
const maxSeedFile = 4 << 10

func (k *Keeper) savedSeeds() []string {
	if k.c.SeedFile == "" {
		return nil
	}
	b, err := atomicfile.Read(k.c.SeedFile)
	if err != nil || len(b) > maxSeedFile {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			k.log.Debug("kept gossip seeds cannot be read", "error", err)
		}
		return nil // the assignment names others, and the next save replaces it
	}
	return strings.Fields(string(b))
}

func (k *Keeper) saveSeeds(list []string) {
	if k.c.SeedFile == "" {
		return
	}
	b := []byte(strings.Join(list, "\n"))
	if old, err := atomicfile.Read(k.c.SeedFile); err == nil && bytes.Equal(old, b) {
		return
	}
	err := os.MkdirAll(filepath.Dir(k.c.SeedFile), 0o700) // a server without a node has no such folder yet
	if err == nil {
		err = atomicfile.Write(k.c.SeedFile, b, 0o600)
	}
	if err != nil {
		k.log.Warn("gossip seeds not kept", "error", err)
	}
}

// Send gives a small message to one member; ErrNoMember also says that there
// is no pool.
func (k *Keeper) Send(nodeID string, kind byte, b []byte) error {
	p, _ := k.current()
	if p == nil {
		return ErrNoMember
	}
	return p.Send(nodeID, kind, b)
}

// NodeID is this member's id; "" while there is no pool.
func (k *Keeper) NodeID() string {
	if p, _ := k.current(); p != nil {
		return p.NodeID()
	}
	return ""
}

// Addr is where others reach this member; ok is false while there is no
// pool.
func (k *Keeper) Addr() (a netip.AddrPort, ok bool) {
	if p, _ := k.current(); p != nil {
		return p.Addr(), true
	}
	return netip.AddrPort{}, false
}

// Site is the pool's; "" while there is none.
func (k *Keeper) Site() string {
	_, w := k.current()
	return w.Site
}

// Members are the living ones, this one included; nil without a pool.
func (k *Keeper) Members() []Member {
	if p, _ := k.current(); p != nil {
		return p.Members()
	}
	return nil
}
