package proxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	mdns "github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/node/balance"
	"github.com/dunlin-project/dunlin/wire"
)

// place says where a listener is and what comes in there.
type place struct {
	where    where
	protocol string // tcp, udp
	addr     netip.AddrPort
	name     string // without root: the Service's port, whose number is chosen
}

// where is the network namespace, and the kind.
type where uint8

const (
	inside   where = iota // the node's namespace: a Service's own address
	host                  // the host: node ports, external addresses
	loopback              // without root: the host's loopback, instead of inside
	health                // spec.healthCheckNodePort
	dnsPlace              // the address of DNS
)

func (p place) String() string {
	return fmt.Sprintf("%d %s %s %s", p.where, p.protocol, p.addr, p.name)
}

// want is what a listener leads to.
type want struct {
	t        *balance.Target
	external bool
	health   *balance.Target
	service  string // namespace/name, for people; "": DNS
	kind     string // of address or port, one of those in unserved.go
	sources  string // who may connect, ranges with spaces between; "" is everybody
	reserved bool   // one of Settings.Reserved: not opened, and told
}

// allowed are the ranges of sources; nil is everybody. One that cannot be read
// lets nobody in.
func (w want) allowed() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range strings.Fields(w.sources) {
		p, _ := netip.ParsePrefix(s)
		out = append(out, p)
	}
	return out
}

// admits says whether a client is in one of the ranges.
func admits(allowed []netip.Prefix, client netip.Addr) bool {
	return allowed == nil || slices.ContainsFunc(allowed, func(p netip.Prefix) bool { return p.Contains(client.Unmap().WithZone("")) })
}

// listener is an open one.
type listener struct {
	want
	tcp    *net.TCPListener
	udp    *net.UDPConn
	closed chan struct{}
}

func (l *listener) close() {
	select {
	case <-l.closed:
		return
	default:
	}
	close(l.closed)
	if l.tcp != nil {
		_ = l.tcp.Close()
	}
	if l.udp != nil {
		_ = l.udp.Close()
	}
}

// wanted computes the listeners that there shall be. e.mu is held.
func (e *engine) wanted() map[place]want {
	out := map[place]want{}
	e.clashes, e.lost = nil, nil
	for name, svc := range e.pool.Tables.Services {
		for i := range svc.Ports {
			p := &svc.Ports[i]
			proto := strings.ToLower(p.Protocol)
			if proto != "tcp" && proto != "udp" {
				continue
			}
			t := e.pool.Targets[balance.TargetKey{Service: name, Port: p.Name, Protocol: p.Protocol}]
			if t == nil {
				continue
			}
			e.wantPort(out, name, svc, p, proto, t)
		}
		if svc.HealthPort != 0 {
			for i := range svc.Ports {
				if t := e.pool.Targets[balance.TargetKey{Service: name, Port: svc.Ports[i].Name, Protocol: svc.Ports[i].Protocol}]; t != nil {
					at := place{where: health, protocol: "tcp", addr: netip.AddrPortFrom(netip.IPv6Unspecified(), svc.HealthPort)}
					e.claim(out, at, want{health: t, service: name, kind: KindHealthPort})
					break
				}
			}
		}
	}
	for _, l := range e.lost { // who has it is known by now
		e.clashes = append(e.clashes, clash(l.at, l.w, out[l.at]))
	}
	for p, w := range out {
		if w.reserved = (p.where == host || p.where == health) && slices.Contains(e.cfg.Reserved, p.addr.Port()); w.reserved {
			out[p] = w
		}
	}
	if a := e.dnsAddr(); a.IsValid() {
		for _, proto := range []string{"tcp", "udp"} {
			p := place{where: dnsPlace, protocol: proto, addr: netip.AddrPortFrom(a, 53)}
			if e.cfg.NetNS == "" {
				p = place{where: dnsPlace, protocol: proto, name: "kube-system/kube-dns:dns"}
			}
			out[p] = want{}
		}
	}
	return out
}

func (e *engine) wantPort(out map[place]want, name string, svc *wire.Service, p *wire.ServicePort, proto string, t *balance.Target) {
	if t.Reachable(false) {
		for _, ip := range svc.ClusterIPs {
			a, err := netip.ParseAddr(ip)
			if err != nil || a == e.dnsAddr() {
				continue
			}
			pl := place{where: inside, protocol: proto, addr: netip.AddrPortFrom(a, p.Port)}
			if e.cfg.NetNS == "" {
				pl.where, pl.addr, pl.name = loopback, netip.AddrPort{}, name+":"+cmp.Or(p.Name, fmt.Sprint(p.Port))
			}
			out[pl] = want{t: t, service: name, kind: KindClusterIP}
		}
	}
	if !t.Reachable(true) {
		return
	}
	if p.NodePort != 0 {
		at := place{where: host, protocol: proto, addr: netip.AddrPortFrom(netip.IPv6Unspecified(), p.NodePort)}
		e.claim(out, at, want{t: t, external: true, service: name, kind: KindNodePort})
	}
	for _, ip := range svc.ExternalIPs {
		if a, err := netip.ParseAddr(ip); err == nil && slices.Contains(e.cfg.NodeIPs, a) {
			at := place{where: host, protocol: proto, addr: netip.AddrPortFrom(a, p.Port)}
			e.claim(out, at, want{t: t, external: true, service: name, kind: KindExternal, sources: strings.Join(svc.Sources, " ")})
		}
	}
}

// listen brings the listeners to what is wanted. e.mu is held.
func (e *engine) listen() {
	wanted := e.wanted()
	for p, l := range e.listeners {
		w, ok := wanted[p]
		if ok && w == l.want {
			delete(wanted, p)
			continue
		}
		if ok && !w.reserved { // the same place leads elsewhere now: hand it on
			if adopted, err := l.detach(); err == nil {
				e.parked[p.String()] = adopted
			}
		}
		l.close()
		delete(e.listeners, p)
	}
	e.unpark(wanted)
	now := time.Now()
	for p, w := range wanted {
		if at, ok := e.failures[p]; ok && now.Before(at.again) {
			continue
		}
		l, err := e.open(p, w)
		if err != nil {
			text := err.Error()
			if w.service != "" {
				text = w.service + ": " + text
			}
			if e.failures[p].err != text {
				e.log.Warn("service port not served", "place", p.addr, "protocol", p.protocol, "service", w.service, "error", err)
			}
			e.failures[p] = failure{text, now.Add(retryListen), w, err}
			continue
		}
		delete(e.failures, p)
		e.listeners[p] = l
	}
	maps.DeleteFunc(e.failures, func(p place, _ failure) bool { _, ok := wanted[p]; return !ok })
}

// unpark closes what a predecessor had and nobody wants: before anything is
// opened, or it could be in the way. e.mu is held.
func (e *engine) unpark(wanted map[place]want) {
	if !e.fed || len(e.parked) == 0 {
		return
	}
	names := make(map[string]bool, len(wanted))
	for p, w := range wanted {
		names[p.String()] = !w.reserved
	}
	for name, f := range e.parked {
		if !names[name] {
			_ = f.Close()
			delete(e.parked, name)
		}
	}
}

// errReserved says that a port is the cluster's own.
var errReserved = errors.New("dunlin has it: it is a port of the servers, of gossip, or of the Ingresses that this node serves")

// retryListen is how long a port that was taken is left alone.
const retryListen = 10 * time.Second

type failure struct {
	err   string
	again time.Time
	want  want
	cause error
}

// detach is a copy of the listener's descriptor.
func (l *listener) detach() (*os.File, error) {
	if l.tcp != nil {
		return l.tcp.File()
	}
	return l.udp.File()
}

// open makes a listener, of a predecessor's descriptor if there is one.
func (e *engine) open(p place, w want) (*listener, error) {
	if w.reserved {
		return nil, errReserved
	}
	l := &listener{want: w, closed: make(chan struct{})}
	if f := e.parked[p.String()]; f != nil {
		delete(e.parked, p.String())
		err := l.adopt(p, f)
		_ = f.Close()
		if err == nil {
			e.serve(p, l)
			return l, nil
		}
		e.log.Warn("a predecessor's listener cannot be used", "place", p.addr, "error", err)
	}
	listen := func() error { return l.listen(p) }
	var err error
	if p.where == inside || (p.where == dnsPlace && e.cfg.NetNS != "") {
		err = e.inside.do(listen)
	} else {
		err = listen()
	}
	if err != nil {
		return nil, err
	}
	e.serve(p, l)
	return l, nil
}

func (l *listener) adopt(p place, f *os.File) error {
	if p.protocol == "tcp" {
		x, err := net.FileListener(f)
		if err != nil {
			return err
		}
		tl, ok := x.(*net.TCPListener)
		if !ok {
			_ = x.Close()
			return errors.New("not a TCP listener")
		}
		l.tcp = tl
		return nil
	}
	x, err := net.FilePacketConn(f)
	if err != nil {
		return err
	}
	uc, ok := x.(*net.UDPConn)
	if !ok {
		_ = x.Close()
		return errors.New("not a UDP socket")
	}
	l.udp = uc
	return nil
}

func (l *listener) listen(p place) error {
	var err error
	for _, addr := range p.attempts() {
		lc := net.ListenConfig{Control: p.control}
		if p.protocol == "tcp" {
			var x net.Listener
			if x, err = lc.Listen(context.Background(), "tcp", addr); err == nil {
				l.tcp = x.(*net.TCPListener)
				return nil
			}
			continue
		}
		var x net.PacketConn
		if x, err = lc.ListenPacket(context.Background(), "udp", addr); err == nil {
			l.udp = x.(*net.UDPConn)
			return nil
		}
	}
	return err
}

// control lets a socket have an address that only a route makes local: IPv4's
// bind asks the routes, IPv6's the interfaces' addresses alone.
func (p place) control(network, _ string, c syscall.RawConn) (err error) {
	if p.protocol == "udp" && p.where == host && p.addr.Addr().IsUnspecified() {
		return tellAddresses(network, c)
	}
	if !p.addr.Addr().Is6() || (p.where != inside && p.where != dnsPlace) {
		return nil
	}
	if cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1) }); cerr != nil {
		return cerr
	}
	return err
}

// attempts are the addresses to listen on, one after the other. Without root
// a port is chosen, the same one as before if those that come first are free
// or taken as they were then.
func (p place) attempts() []string {
	if p.name != "" {
		h := fnv.New32a()
		_, _ = h.Write([]byte(p.name))
		var out []string
		for i := range uint32(4) {
			out = append(out, fmt.Sprintf("127.0.0.1:%d", 20000+(h.Sum32()+i*2477)%10000))
		}
		return append(out, "127.0.0.1:0")
	}
	if p.addr.Addr().IsUnspecified() {
		return []string{fmt.Sprintf(":%d", p.addr.Port())}
	}
	return []string{p.addr.String()}
}

// serve starts what accepts.
func (e *engine) serve(p place, l *listener) {
	switch {
	case p.where == dnsPlace:
		s := &mdns.Server{Handler: e.dns, ReadTimeout: 3 * time.Second, MaxTCPQueries: 128, UDPSize: mdns.DefaultMsgSize}
		if l.tcp != nil {
			s.Listener = &sharing{l.tcp, e.conns}
		} else {
			s.PacketConn = l.udp
		}
		go func() { _ = s.ActivateAndServe() }() // ends with the listener
	case p.where == health:
		go serveHealth(l)
	case l.udp != nil:
		go (&udpServer{e: e, t: l.t, external: l.external, allowed: l.allowed(), conn: l.udp, flows: map[flowKey]*udpFlow{}}).run()
	default:
		go e.accept(l)
	}
	if p.name != "" {
		e.log.Info("service port without root", "service", p.name, "protocol", p.protocol, "address", l.address())
	}
}

func (l *listener) address() string {
	if l.tcp != nil {
		return l.tcp.Addr().String()
	}
	return l.udp.LocalAddr().String()
}

func (e *engine) accept(l *listener) {
	allowed := l.allowed()
	for {
		c, err := l.tcp.AcceptTCP()
		if err != nil {
			select {
			case <-l.closed:
				return
			case <-time.After(50 * time.Millisecond): // out of descriptors, most likely
			}
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		if !admits(allowed, addrOf(c.RemoteAddr())) {
			reset(c)
			continue
		}
		from := sourceOf(addrOf(c.RemoteAddr()))
		if !e.conns.take(from) {
			reset(c)
			continue
		}
		go func() {
			defer e.conns.give(from)
			e.serveTCP(l.t, l.external, c)
		}()
	}
}
