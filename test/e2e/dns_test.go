//go:build e2e

package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// zone is a DNS server with one name, whose address moves.
type zone struct{ addr atomic.Pointer[netip.Addr] }

func serveZone(t *testing.T, at, name string) *zone {
	t.Helper()
	z := &zone{}
	c, err := net.ListenPacket("udp", net.JoinHostPort(at, "53"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		b := make([]byte, 1500)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			if out, err := z.answer(b[:n], name+"."); err == nil {
				_, _ = c.WriteTo(out, from)
			}
		}
	}()
	return z
}

func (z *zone) answer(b []byte, name string) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(b); err != nil || len(m.Questions) != 1 {
		return nil, errors.Join(err, errors.New("not one question"))
	}
	q := m.Questions[0]
	m.Response, m.Authoritative, m.Additionals = true, true, nil
	if !strings.EqualFold(q.Name.String(), name) {
		m.RCode = dnsmessage.RCodeNameError
	} else if a := z.addr.Load(); a != nil && q.Type == dnsmessage.TypeA {
		h := dnsmessage.ResourceHeader{Name: q.Name, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET, TTL: 1}
		var r dnsmessage.AResource
		binary.BigEndian.PutUint32(r.A[:], binary.BigEndian.Uint32(a.AsSlice()))
		m.Answers = []dnsmessage.Resource{{Header: h, Body: &r}}
	}
	return m.Pack()
}

// TestAServersNameMoves: the servers say of themselves one name and nothing
// else. It comes to stand for another address, with the machine: node, guest
// and server go on, and the node that was started again meanwhile finds the
// server by the name that it kept.
func TestAServersNameMoves(t *testing.T) {
	site := cluster.NewSite(t)
	const name = "pi.lan"
	z := serveZone(t, site.Host(), name)
	resolv := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(resolv, []byte("nameserver "+site.Host()+"\noptions timeout:1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	on, at := site.NewMachine(), site.NewMachine()
	on.Resolver(resolv)
	at.Resolver(resolv)
	move := func(last int) {
		on.Address(last)
		a := netip.MustParseAddr(on.IP)
		z.addr.Store(&a)
	}
	move(41)
	c := cluster.NewServersNamed(t, name, on)
	line := strings.TrimSpace(c.Run(0, "token", "create"))
	if !strings.HasSuffix(line, "@"+name+":6443") {
		t.Fatalf("the line tells something else than the name: %s", line)
	}
	a := cluster.NewAgent(t, "n1", at)
	a.Import("sleep.wasm", cluster.Module(t, "sleep"))
	a.Start("--join", line)
	c.Eventually(time.Minute, "Ready", func() error { return c.NodeReady(0, "n1") })
	n := 0
	well := func(what string) {
		t.Helper()
		n++ // news reach it: what it said before it lost the server does not count
		app := fmt.Sprint("app", n)
		d := strings.Replace(deployment(app, "sleep.wasm", 1, ""), "    spec:\n", "    spec:\n      nodeName: n1\n", 1)
		c.Eventually(time.Minute, what+": the server answers", func() error {
			_, err := c.TryIn(0, d, "apply", "-f", "-")
			return err
		})
		c.Eventually(2*time.Minute, what+": a new guest runs", func() error {
			if len(a.HostPIDs()) != n {
				return fmt.Errorf("%v", a.HostPIDs())
			}
			return nil
		})
		c.Eventually(2*time.Minute, what+": connected", func() error {
			s, err := a.Status()
			if err != nil || !s.Connected {
				return fmt.Errorf("%+v, %w", s, err)
			}
			return c.NodeReady(0, "n1")
		})
	}
	well("at first")
	move(42)
	well("the name moved")
	a.Stop(os.Kill)
	move(43)
	a.Start()
	well("it moved while the node was off")
}
