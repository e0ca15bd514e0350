package network

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// answer accepts connections on a port inside a namespace and says its name.
func answer(t *testing.T, namespace, name string, port int) {
	t.Helper()
	var l net.Listener
	err := within(namespace, func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf(":%d", port))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprintf(c, "%s to %s", name, c.RemoteAddr())
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
}

// ask connects from inside a namespace; "" is the host.
func ask(t *testing.T, namespace, address string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	text := ""
	f := func() error {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		b, err := io.ReadAll(c)
		text = string(b)
		return err
	}
	var err error
	if namespace == "" {
		err = f()
	} else {
		err = within(namespace, f)
	}
	if err != nil {
		t.Errorf("%s from %q: %v", address, namespace, err)
	}
	return text
}

// TestPodNamespaces: containers, Wasm pods and the node reach each other, a
// host port leads to its pod, and nothing is left behind.
func TestPodNamespaces(t *testing.T) {
	if err := Usable(); err != nil {
		t.Skipf("SKIPPED: no network namespaces here: %v", err)
	}
	name := fmt.Sprintf("dlp%d", os.Getpid()%100000)
	n, err := NewNamespaced(name, []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Destroy(); err != nil {
			t.Error(err)
		}
		for _, show := range [][]string{{"ip", "netns"}, {"ip", "link"}, {"ip", "route"}, {"nft", "list", "tables"}} {
			out, err := exec.Command(show[0], show[1:]...).CombinedOutput()
			if err != nil && show[0] == "ip" || strings.Contains(string(out), name) || strings.Contains(string(out), "10.242.10.") {
				t.Errorf("%v: %v: left behind in %s", show, err, out)
			}
		}
	})
	ctx := t.Context()
	if err := n.SetCIDRs([]string{"10.242.10.0/24", "fd42:10::/64"}); err != nil {
		t.Fatal(err)
	}
	wasm, err := n.Setup(ctx, "wasm", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	one, err := n.SetupNamespace(ctx, Pod{UID: "one", Ports: []HostPort{{Host: 32080, Container: 80, Protocol: "TCP"}, {Host: 32081, Container: 80, Protocol: "TCP", IP: netip.MustParseAddr("127.0.0.1")}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	second := Pod{UID: "two", Ports: []HostPort{{Host: 32081, Container: 80, Protocol: "TCP", IP: netip.MustParseAddr("127.0.0.2")}}}
	two, err := n.SetupNamespace(ctx, second, nil)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := n.SetupNamespace(ctx, second, &two); err != nil || again.IP != two.IP || again.Namespace != two.Namespace {
		t.Errorf("a second set-up: %+v, %v", again, err)
	}
	answer(t, one.Namespace, "one", 80)
	answer(t, n.Path(), "wasm", 80)
	answer(t, two.Namespace, "two", 80)
	for to, want := range map[string]string{"127.0.0.1": "one to ", "127.0.0.2": "two to "} { // one port, two addresses
		if got := ask(t, "", to+":32081"); !strings.HasPrefix(got, want) {
			t.Errorf("host port of %s: %q", to, got)
		}
	}
	if c, err := net.DialTimeout("tcp", "127.0.0.3:32081", time.Second); err == nil {
		_ = c.Close()
		t.Error("a host port of one address is reached by another")
	}
	for _, c := range []struct{ from, to, want string }{
		{"", one.IPs[0].String(), "one to 10.242.10.1:"},
		{"", one.IPs[1].String(), "one to [fd42:10::1]:"},
		{two.Namespace, one.IPs[0].String(), "one to " + two.IPs[0].String() + ":"},
		{two.Namespace, one.IPs[1].String(), "one to [" + two.IPs[1].String() + "]:"},
		{two.Namespace, wasm.IPs[0].String(), "wasm to " + two.IPs[0].String() + ":"},
		{two.Namespace, wasm.IPs[1].String(), "wasm to [" + two.IPs[1].String() + "]:"},
		{n.Path(), one.IPs[0].String(), "one to " + wasm.IPs[0].String() + ":"},
		{one.Namespace, "127.0.0.1", "one to 127.0.0.1:"},
	} {
		if got := ask(t, c.from, net.JoinHostPort(c.to, "80")); !strings.HasPrefix(got, c.want) {
			t.Errorf("%s from %q: %q, want %q", c.to, c.from, got, c.want)
		}
	}
	if err := n.NATError(); err != nil {
		t.Errorf("NAT: %v", err)
	}
	for _, from := range []string{"", two.Namespace, one.Namespace} {
		for _, to := range []string{"127.0.0.1", "10.242.10.1", "[fd42:10::1]"} {
			if from != "" && to == "127.0.0.1" {
				continue
			}
			if got := ask(t, from, to+":32080"); !strings.HasPrefix(got, "one to ") {
				t.Errorf("host port on %s from %q: %q", to, from, got)
			}
		}
	}
	// Services answer containers, whether or not a Wasm pod is there.
	if err := n.SetServiceCIDRs([]netip.Prefix{netip.MustParsePrefix("10.242.11.0/24"), netip.MustParsePrefix("fd42:11::/112")}); err != nil {
		t.Fatal(err)
	}
	for _, when := range []string{"with a Wasm pod", "after the last Wasm pod"} {
		for i, to := range []string{"10.242.11.7", "fd42:11::7"} {
			if got, want := ask(t, two.Namespace, net.JoinHostPort(to, "80")), "wasm to "; !strings.HasPrefix(got, want) || !strings.Contains(got, two.IPs[i].String()) {
				t.Errorf("%s: %s: %q", when, to, got)
			}
		}
		if err := n.Teardown(ctx, "wasm"); err != nil {
			t.Fatal(err)
		}
	}
	// A second agent takes all of it over and gives no address twice.
	next, err := NewNamespaced(name, n.NodeIPs())
	if err != nil {
		t.Fatal(err)
	}
	if err := next.SetCIDRs([]string{"10.242.10.0/24", "fd42:10::/64"}); err != nil {
		t.Fatal(err)
	}
	other, err := next.Setup(ctx, "other", false, nil)
	if err != nil || other.IP == one.IP || other.IP == two.IP {
		t.Errorf("another pod got %v, %v", other.IP, err)
	}
	if err := next.Retake(ctx, "one", one); err != nil {
		t.Errorf("taken over: %v", err)
	}
	if got := ask(t, "", "127.0.0.1:32080"); !strings.HasPrefix(got, "one to ") {
		t.Errorf("host port after a restart: %q", got)
	}
	for range 2 {
		if err := next.Teardown(ctx, "one"); err != nil {
			t.Errorf("teardown: %v", err)
		}
	}
	if c, err := net.DialTimeout("tcp", "127.0.0.1:32080", time.Second); err == nil {
		_ = c.Close()
		t.Error("the host port of a pod that is gone is still there")
	}
}
