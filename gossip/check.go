package gossip

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

// Messages of a check. An ask says how it was sent and is answered both ways,
// so that one exchange tells of all four directions.
const (
	kindAnswer = 253 // asked by, answered by, nonce
	kindAsk    = 254 // asked by, nonce, name of who asks

	viaUDP = 'u'
	viaTCP = 't'

	checkTries   = 3 // UDP may lose some
	checkEvery   = 400 * time.Millisecond
	checkWait    = 3 * time.Second
	checkMembers = 256
	checkAnswers = 16 // being sent at once
)

// Path is how one other member of the pool is reached: Out is from here to
// it, In is from it to here.
type Path struct {
	Member  string `json:"member"` // node id
	Address string `json:"address"`
	UDPOut  bool   `json:"udpOut"`
	UDPIn   bool   `json:"udpIn"`
	TCPOut  bool   `json:"tcpOut"`
	TCPIn   bool   `json:"tcpIn"`
}

// Good says whether everything gets through.
func (p *Path) Good() bool { return p.UDPOut && p.UDPIn && p.TCPOut && p.TCPIn }

// checks are those under way.
type checks struct {
	mu      sync.Mutex
	paths   map[uint64]*Path
	answers chan struct{} // slots
}

func newChecks() *checks {
	return &checks{paths: map[uint64]*Path{}, answers: make(chan struct{}, checkAnswers)}
}

// Check asks other members, at the same time, how they are reached; at most
// checkMembers of them.
func (p *Pool) Check(ctx context.Context) []Path {
	return p.check(ctx, func(string) bool { return true })
}

// check asks those whose gossip name is wanted.
func (p *Pool) check(ctx context.Context, which func(name string) bool) []Path {
	asked := map[uint64]Member{}
	var nonces []uint64
	for _, m := range p.Members() {
		if m.NodeID == p.id || !which(m.name()) || len(asked) >= checkMembers {
			continue
		}
		nonce := rand.Uint64()
		asked[nonce] = m
		nonces = append(nonces, nonce)
		p.checks.mu.Lock()
		p.checks.paths[nonce] = &Path{Member: m.NodeID, Address: m.Addr.String()}
		p.checks.mu.Unlock()
	}
	for nonce, m := range asked {
		// What does not arrive is the finding. Nobody waits for the end, which
		// memberlist's time-out sets: a pool that closes has no time for it.
		go func() { _ = p.sendTCP(m, p.ask(viaTCP, nonce)) }()
	}
	deadline := time.Now().Add(checkWait)
	for try := 0; time.Now().Before(deadline) && ctx.Err() == nil && !p.allGood(nonces); try++ {
		for nonce, m := range asked {
			if try < checkTries {
				_ = p.sendUDP(m, p.ask(viaUDP, nonce))
			}
		}
		t := time.NewTimer(checkEvery)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
	}
	var out []Path
	p.checks.mu.Lock()
	for _, nonce := range nonces {
		out = append(out, *p.checks.paths[nonce])
		delete(p.checks.paths, nonce)
	}
	p.checks.mu.Unlock()
	slices.SortFunc(out, func(a, b Path) int { return strings.Compare(a.Address, b.Address) })
	return withoutFormer(out)
}

// withoutFormer leaves out the silent addresses of members that are heard at
// another one: they have moved, and the pool forgets where they were only when
// it thinks that dead.
func withoutFormer(paths []Path) []Path {
	heard := map[string]bool{}
	for _, p := range paths {
		heard[p.Member] = heard[p.Member] || !p.Silent()
	}
	return slices.DeleteFunc(paths, func(p Path) bool { return p.Silent() && heard[p.Member] })
}

func (p *Pool) allGood(nonces []uint64) bool {
	p.checks.mu.Lock()
	defer p.checks.mu.Unlock()
	return !slices.ContainsFunc(nonces, func(n uint64) bool { return !p.checks.paths[n].Good() })
}

func (p *Pool) ask(via byte, nonce uint64) []byte {
	b := binary.BigEndian.AppendUint64([]byte{via}, nonce)
	return encodeDirect(kindAsk, append(b, p.name...))
}

// asked answers a member both ways. It does not wait.
func (p *Pool) asked(b []byte) {
	if len(b) < 9 {
		return
	}
	via, nonce, name := b[0], binary.BigEndian.Uint64(b[1:9]), string(b[9:])
	select {
	case p.checks.answers <- struct{}{}:
	default:
		return // it asks again
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		<-p.checks.answers
		return
	}
	go func() { // as in check
		defer func() { <-p.checks.answers }()
		for _, m := range p.Members() {
			if m.name() == name {
				answer := func(by byte) []byte {
					return encodeDirect(kindAnswer, binary.BigEndian.AppendUint64([]byte{via, by}, nonce))
				}
				_ = p.sendUDP(m, answer(viaUDP))
				_ = p.sendTCP(m, answer(viaTCP))
			}
		}
	}()
}

func (p *Pool) answered(b []byte) {
	if len(b) != 10 {
		return
	}
	p.checks.mu.Lock()
	defer p.checks.mu.Unlock()
	path := p.checks.paths[binary.BigEndian.Uint64(b[2:])]
	if path == nil {
		return // too late
	}
	path.UDPOut = path.UDPOut || b[0] == viaUDP
	path.TCPOut = path.TCPOut || b[0] == viaTCP
	path.UDPIn = path.UDPIn || b[1] == viaUDP
	path.TCPIn = path.TCPIn || b[1] == viaTCP
}

// Silent says that no answer came, by no way. What was asked may have arrived:
// answers go to the address that the asking member told, and one behind a NAT
// is not reached there.
func (p *Path) Silent() bool { return !p.UDPOut && !p.UDPIn && !p.TCPOut && !p.TCPIn }

// Blocked says in words what does not get through; none is nothing. here and
// there name the two ends.
func (p *Path) Blocked(here, there string) []string {
	if p.Silent() {
		if here > there { // the same words from both ends
			here, there = there, here
		}
		return []string{"nothing gets through between " + here + " and " + there + ", by UDP or TCP: a link is cut, all is blocked, or one of the two is behind a NAT"}
	}
	var out []string
	add := func(good bool, proto, from, to string) {
		if !good {
			out = append(out, proto+" from "+from+" to "+to+" is blocked")
		}
	}
	add(p.UDPOut, "UDP", here, there)
	add(p.UDPIn, "UDP", there, here)
	add(p.TCPOut, "TCP", here, there)
	add(p.TCPIn, "TCP", there, here)
	return out
}

// misprobed is what memberlist says of a member that did not answer by UDP,
// before it asks others to try.
const misprobed = "Failed UDP ping: "

// doubt is called with memberlist's lines: one about a member that did not
// answer by UDP makes a check of it, which finds the direction.
func (p *Pool) doubt(line string) {
	_, rest, ok := strings.Cut(line, misprobed)
	if !ok {
		return
	}
	name, _, _ := strings.Cut(rest, " ")
	select {
	case p.doubts <- name:
	default:
	}
}

// How often the same member is named in the log, and checked.
const (
	blockedEvery = 30 * time.Minute
	doubtEvery   = time.Minute
)

// doubted checks members that were doubted, and says what is blocked: one line
// for a member in blockedEvery.
func (p *Pool) doubted(ctx context.Context) {
	next := map[string]time.Time{} // not checked again before
	for {
		var name string
		select {
		case name = <-p.doubts:
		case <-ctx.Done():
			return
		}
		if time.Now().Before(next[name]) {
			continue
		}
		if len(next) > 1024 {
			clear(next)
		}
		next[name] = time.Now().Add(doubtEvery)
		for _, path := range p.check(ctx, func(n string) bool { return n == name }) {
			if blocked := path.Blocked("this node", path.Address); len(blocked) > 0 && (path.TCPOut || path.TCPIn) {
				next[name] = time.Now().Add(blockedEvery)
				p.c.Log.Warn("a member of this site is reached by TCP only: leases and hints to it take longer (see 'dunlin net check')",
					"member", path.Member, "address", path.Address, "blocked", strings.Join(blocked, "; "))
			}
		}
	}
}
