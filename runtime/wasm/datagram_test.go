package wasm

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// A guest asks the node's DNS for a name, sends a datagram there and gets the
// answer, all by the second form of the calls; a datagram to another address
// is refused, and the agent hears of it.
func TestDatagramsAndNames(t *testing.T) {
	if _, err := exec.LookPath("clang"); err != nil {
		t.Skip("SKIPPED: clang is not installed (test/setup.sh installs it as root)")
	}
	module := filepath.Join(t.TempDir(), "udp.wasm")
	if out, err := exec.Command("clang", "--target=wasm32-wasi", "-Os", "-s", "-o", module, "testdata/udp_v2.c").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: clang cannot build for wasm32-wasi: %s", out)
	}
	own := ownAddress(t)
	names := serveUDP(t, "127.0.0.1", func(b []byte) []byte { return answerA(b, own) })
	echo := serveUDP(t, own.String(), func(b []byte) []byte { return append([]byte("pong to "), b...) })
	_, port, _ := net.SplitHostPort(echo)
	b := newBench(t)
	s := b.specFile(module, "udp")
	s.Args = []string{"echo.test", port}
	// The node's own address opens only by an entry for just that.
	s.Outbound = workload.Outbound{Allow: "echo.test:" + port + "/udp " + net.JoinHostPort(own.String(), port) + "/udp", DNS: []string{names}}
	b.start(s)
	st := b.ended(s.ID)
	want := fmt.Sprintf("pong to ping from family 1 %s port %s, own family 1 port set", own, port)
	if log := b.log(s); st.ExitCode != 0 || !strings.Contains(log, want) || !strings.Contains(log, "elsewhere: 2") {
		t.Fatalf("%+v: %s\nwant %s", st, log, want)
	}
	if len(st.Refused) != 1 || st.Refused[0].Entry != "192.0.2.1:53/udp" {
		t.Errorf("the agent hears of %+v", st.Refused)
	}
}

// ownAddress is one of this machine's that is not its loopback.
func ownAddress(t *testing.T) netip.Addr {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
			return p.Addr()
		}
	}
	t.Skip("SKIPPED: this machine has no address but its loopback's, which no name opens")
	return netip.Addr{}
}

func serveUDP(t *testing.T, host string, answer func([]byte) []byte) string {
	t.Helper()
	c, err := net.ListenPacket("udp4", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			if out := answer(b[:n]); out != nil {
				_, _ = c.WriteTo(out, from)
			}
		}
	}()
	return c.LocalAddr().String()
}

// answerA knows one address of every name.
func answerA(b []byte, a netip.Addr) []byte {
	var m dnsmessage.Message
	if m.Unpack(b) != nil || len(m.Questions) != 1 {
		return nil
	}
	m.Response = true
	if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
		m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 1}, Body: &dnsmessage.AResource{A: a.As4()}}}
	}
	out, err := m.Pack()
	if err != nil {
		return nil
	}
	return out
}
