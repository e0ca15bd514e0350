package balance

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// Backend is one endpoint's address and port, shared by all Services that
// lead there. It lives as long as a Service names it or a connection uses it.
type Backend struct {
	Addr   netip.AddrPort
	Active atomic.Int64 // connections or requests
	health

	mu       sync.Mutex
	conns    map[*Flow]struct{}
	draining bool // it ends: new connections go there only when there is nothing else
	passed   bool // no Service sends new connections: others are better
	ready    bool // some Service does, since it is ready
}

// Add counts a connection.
func (b *Backend) Add(f *Flow) {
	b.Active.Add(1)
	b.mu.Lock()
	b.conns[f] = struct{}{}
	b.mu.Unlock()
}

// Remove is the end of one that was added.
func (b *Backend) Remove(f *Flow) {
	b.Active.Add(-1)
	b.mu.Lock()
	delete(b.conns, f)
	b.mu.Unlock()
}

// Passed says whether no Service sends new connections there, for whatever
// reason.
func (b *Backend) Passed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.passed
}

// Silent takes the connections that shall end since nobody is there any more:
// a side acknowledged nothing for the first time where no Service counts on the
// backend any more, for the second where one still does.
func (b *Backend) Silent(gone, counted time.Duration) (out []*Flow) {
	b.mu.Lock()
	after := gone
	if b.ready {
		after = counted
	}
	for f := range b.conns {
		if f.Silent != nil {
			out = append(out, f)
		}
	}
	b.mu.Unlock()
	return slices.DeleteFunc(out, func(f *Flow) bool { return !f.Silent(after) })
}

// choice is a backend as one Service's port sees it.
type choice struct {
	b      *Backend
	tier   tier
	weight float64
	state  uint8
	pass   float64 // see candidate
	// outside: no pod's, but what somebody wrote down; loop: it leads back here.
	outside, loop bool
	silent        bool // on a node that does not renew its lease, and not this one
}

// Target is one port of a Service: what a listener leads to.
type Target struct {
	mu       sync.Mutex
	svc      *wire.Service
	choices  []choice
	shared   bool    // weights differ among the choices
	turn     float64 // highest pass that was chosen: see Pick
	affinity map[netip.Addr]sticky
}

// sticky is a client that stays with a backend.
type sticky struct {
	b     *Backend
	until time.Time
}

// maxSticky bounds the clients that one port of a Service remembers.
const maxSticky = 16384

// set replaces what the target leads to.
func (t *Target) set(svc *wire.Service, choices []choice) {
	t.mu.Lock()
	defer t.mu.Unlock()
	// A newcomer starts where the others are, or it would get all until then; so
	// does one that was passed over.
	old, least, known := make(map[*Backend]float64, len(t.choices)), 0.0, false
	wanted := t.wanted()
	for i := range t.choices {
		if c := &t.choices[i]; wanted(c) {
			old[c.b] = c.pass
		}
	}
	for i := range choices {
		if p, ok := old[choices[i].b]; ok && (!known || p < least) {
			least, known = p, true
		}
	}
	for i := range choices {
		p, ok := old[choices[i].b]
		if !ok {
			p = least
		}
		choices[i].pass = p
	}
	t.svc, t.choices = svc, choices
	t.shared = slices.ContainsFunc(choices, func(c choice) bool { return c.weight != choices[0].weight })
	if svc.AffinitySeconds == 0 {
		t.affinity = nil
	}
}

// local says whether only endpoints of this node may be used.
func (t *Target) local(external bool) bool {
	if external {
		return t.svc.ExternalLocal
	}
	return t.svc.InternalLocal
}

// candidate is what choose has to know of a choice.
func (c *choice) candidate(now int64, tried map[*Backend]bool) candidate {
	// now 0 asks for what it is good for, whatever failed a moment ago.
	return candidate{tier: c.tier, weight: c.weight, state: c.state, active: int(c.b.Active.Load()),
		pass: c.pass, loop: c.loop, silent: c.silent, failed: now > 0 && c.b.until.Load() > now, tried: len(tried) > 0 && tried[c.b]}
}

// best is the class of the endpoints that new connections go to; t.mu is held.
func (t *Target) best(local bool) int {
	class := classUnusable
	for i := range t.choices {
		c := t.choices[i].candidate(0, nil)
		class = min(class, c.class(local))
	}
	return class
}

// wanted tells to which choices new connections go, be they from inside or
// outside; t.mu is held.
func (t *Target) wanted() func(*choice) bool {
	if t.svc == nil {
		return func(*choice) bool { return false }
	}
	internal, external := t.best(t.svc.InternalLocal), t.best(t.svc.ExternalLocal)
	return func(c *choice) bool {
		k := c.candidate(0, nil)
		return k.preferred(t.svc.InternalLocal, internal) || k.preferred(t.svc.ExternalLocal, external)
	}
}

// Reachable says whether there is anything to connect to; where there is not,
// nobody listens, and clients are refused at once.
func (t *Target) Reachable(external bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.best(t.local(external)) != classUnusable
}

// Pick chooses the backend of a client's new connection; nil is none.
func (t *Target) Pick(client netip.Addr, external bool, tried map[*Backend]bool) *Backend {
	now := time.Now()
	nanos := now.UnixNano()
	t.mu.Lock()
	defer t.mu.Unlock()
	local := t.local(external)
	if t.svc.AffinitySeconds > 0 {
		if s, ok := t.affinity[client]; ok && now.Before(s.until) {
			for i := range t.choices {
				if t.choices[i].b != s.b {
					continue
				}
				if c := t.choices[i].candidate(nanos, tried); c.class(local) <= classReadyFailed {
					t.stick(client, s.b, now)
					return s.b
				}
			}
		}
	}
	i := choose(len(t.choices), func(i int) candidate {
		c := t.choices[i].candidate(nanos, tried)
		c.shared, c.pass = t.shared, t.pass(&t.choices[i])
		return c
	}, t.svc.Traffic, local)
	if i < 0 {
		return nil
	}
	b := t.choices[i].b
	b.picked(now)
	p := t.pass(&t.choices[i])
	t.turn = max(t.turn, p)
	t.choices[i].pass = p + 1/t.choices[i].weight
	if t.svc.AffinitySeconds > 0 {
		t.stick(client, b, now)
	}
	return b
}

// pass of a choice: one that could not be chosen for a while is owed one
// connection then, and not all that it missed; t.mu is held.
func (t *Target) pass(c *choice) float64 { return max(c.pass, t.turn-1/c.weight) }

// stick remembers a client's backend; t.mu is held.
func (t *Target) stick(client netip.Addr, b *Backend, now time.Time) {
	if t.affinity == nil {
		t.affinity = map[netip.Addr]sticky{}
	}
	if len(t.affinity) >= maxSticky {
		for k, s := range t.affinity {
			if now.After(s.until) || len(t.affinity) >= maxSticky {
				delete(t.affinity, k)
			}
		}
	}
	t.affinity[client] = sticky{b, now.Add(time.Duration(t.svc.AffinitySeconds) * time.Second)}
}

// Tables is the service table, decoded.
type Tables struct {
	Network  wire.ClusterNetwork
	Services map[string]*wire.Service          // by namespace/name
	Slices   map[string]map[string]*wire.Slice // by namespace/name of the Service, then of the slice
	Nodes    map[string][]netip.Addr           // their addresses, by name
	owner    map[string]string                 // slice: namespace/name of its Service
	silent   map[string]bool                   // nodes that do not renew their leases
	turned   map[string]bool                   // nodes of which that changed; see Turned
}

func newTables() *Tables {
	return &Tables{Services: map[string]*wire.Service{}, Slices: map[string]map[string]*wire.Slice{}, Nodes: map[string][]netip.Addr{}, owner: map[string]string{},
		silent: map[string]bool{}, turned: map[string]bool{}}
}

// Put takes an item and names the Service that it is about; "" is none.
func (t *Tables) Put(key string, data []byte) (service string, err error) {
	switch {
	case key == wire.ItemNetwork:
		var n wire.ClusterNetwork
		if err := wire.DecodeItem(data, &n); err != nil {
			return "", err
		}
		t.Network = n
		return "", nil
	case strings.HasPrefix(key, wire.ItemService):
		s := new(wire.Service)
		if err := wire.DecodeItem(data, s); err != nil {
			return "", fmt.Errorf("%s: %w", key, err)
		}
		name := key[len(wire.ItemService):]
		t.Services[name] = s
		return name, nil
	case strings.HasPrefix(key, wire.ItemSlice):
		s := new(wire.Slice)
		if err := wire.DecodeItem(data, s); err != nil {
			return "", fmt.Errorf("%s: %w", key, err)
		}
		slice := key[len(wire.ItemSlice):]
		namespace, _, _ := strings.Cut(slice, "/")
		t.removeSlice(slice)
		name := namespace + "/" + s.Service
		if t.Slices[name] == nil {
			t.Slices[name] = map[string]*wire.Slice{}
		}
		t.Slices[name][slice], t.owner[slice] = s, name
		return name, nil
	case strings.HasPrefix(key, wire.ItemNodeInfo):
		var n wire.NodeInfo
		if err := wire.DecodeItem(data, &n); err != nil {
			return "", fmt.Errorf("%s: %w", key, err)
		}
		var list []netip.Addr
		for _, s := range n.Addresses {
			if a, err := netip.ParseAddr(s); err == nil {
				list = append(list, a.Unmap())
			}
		}
		name := key[len(wire.ItemNodeInfo):]
		t.Nodes[name] = list
		t.setSilent(name, n.Silent)
	}
	return "", nil // what is left is what newer servers send
}

// Remove drops an item and names the Service that it was about; "" is none.
func (t *Tables) Remove(key string) (service string) {
	if name, ok := strings.CutPrefix(key, wire.ItemService); ok {
		delete(t.Services, name)
		return name
	}
	if slice, ok := strings.CutPrefix(key, wire.ItemSlice); ok {
		return t.removeSlice(slice)
	}
	if name, ok := strings.CutPrefix(key, wire.ItemNodeInfo); ok {
		t.removeNode(name)
	}
	return ""
}

func (t *Tables) removeNode(name string) {
	delete(t.Nodes, name)
	t.setSilent(name, false)
}

func (t *Tables) setSilent(node string, silent bool) {
	if t.silent[node] == silent {
		return
	}
	t.turned[node] = true
	if silent {
		t.silent[node] = true
	} else {
		delete(t.silent, node)
	}
}

// Turned names the Services with endpoints on nodes that fell silent, or are
// heard of again, since it was asked last.
func (t *Tables) Turned() (services []string) {
	if len(t.turned) == 0 {
		return nil
	}
	for name, list := range t.Slices {
		if slices.ContainsFunc(slices.Collect(maps.Values(list)), func(sl *wire.Slice) bool {
			return slices.ContainsFunc(sl.Endpoints, func(e wire.Endpoint) bool { return t.turned[e.Node] })
		}) {
			services = append(services, name)
		}
	}
	clear(t.turned)
	return services
}

func (t *Tables) removeSlice(slice string) string {
	name := t.owner[slice]
	delete(t.owner, slice)
	if m := t.Slices[name]; m != nil {
		if delete(m, slice); len(m) == 0 {
			delete(t.Slices, name)
		}
	}
	return name
}
