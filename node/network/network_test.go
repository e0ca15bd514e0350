package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestAllocatorNeverGivesAnAddressTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := newAllocator(netip.MustParsePrefix("10.42.3.0/28"))
		have := map[string]netip.Addr{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			uid := fmt.Sprint(rapid.IntRange(0, 19).Draw(t, "pod"))
			if rapid.Bool().Draw(t, "release") {
				a.release(uid)
				delete(have, uid)
				continue
			}
			ip, err := a.allocate(uid)
			if err != nil {
				if len(have) < 13 || !errors.Is(err, ErrExhausted) {
					t.Fatalf("%d of 13 in use: %v", len(have), err)
				}
				continue
			}
			if old, ok := have[uid]; ok && old != ip {
				t.Fatalf("pod %s had %s, now %s", uid, old, ip)
			}
			for other, used := range have {
				if used == ip && other != uid {
					t.Fatalf("%s given to %s and %s", ip, other, uid)
				}
			}
			if ip == netip.MustParseAddr("10.42.3.0") || ip == a.gateway() || ip == netip.MustParseAddr("10.42.3.15") || !a.prefix.Contains(ip) {
				t.Fatalf("reserved address %s given out", ip)
			}
			have[uid] = ip
		}
	})
}

func TestNodeAddressKeepsItsPort(t *testing.T) {
	ctx := t.Context()
	n := &NodeAddress{IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}
	a, err := n.Setup(ctx, "u1", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	f, err := n.Listen(ctx, &a, 8080, 0, "TCP")
	if err != nil {
		t.Fatal(err)
	}
	port := a.Reached(8080)
	if port == 0 || port == 8080 {
		t.Fatalf("port %d", port)
	}
	closeAll(f)
	b, err := n.Setup(ctx, "u1", false, &a)
	if err != nil {
		t.Fatal(err)
	}
	f, err = n.Listen(ctx, &b, 8080, 0, "TCP")
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(f)
	if b.Reached(8080) != port {
		t.Fatalf("port changed from %d to %d", port, b.Reached(8080))
	}
	c := Allocation{IP: a.IP, HostNetwork: true}
	if _, err := n.Listen(ctx, &c, port, 0, "TCP"); err == nil {
		t.Fatal("second listener on a taken port")
	} else if in := (*PortInUseError)(nil); !errors.As(err, &in) {
		t.Fatalf("want PortInUseError, got %v", err)
	}
	if _, err := n.Listen(ctx, &c, 53, 0, "UDP"); !errors.Is(err, ErrUDP) {
		t.Fatalf("UDP: %v", err)
	}
}

func TestNamespacedServesFromItsOwnAddress(t *testing.T) {
	if err := Usable(); err != nil {
		t.Skipf("SKIPPED, needs root and network namespaces (CI runs it as root): %v", err)
	}
	name := fmt.Sprintf("dnt%d", os.Getpid()%1e6)
	n, err := NewNamespaced(name, []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Destroy(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(n.Path()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("namespace left behind: %v", err)
		}
	})
	ctx := t.Context()
	if _, err := n.Setup(ctx, "u", false, nil); !errors.Is(err, ErrNoRange) {
		t.Fatalf("without a range: %v", err)
	}
	cidrs := []string{"10.242.9.0/24", "fd42:9::/64"}
	if err := n.SetCIDRs(cidrs); err != nil {
		t.Fatal(err)
	}
	a, err := n.Setup(ctx, "u", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, n, &a, "first")
	// A second agent finds everything in place, does not give the address
	// to another pod, and gives it back to its own.
	again, err := NewNamespaced(name, n.NodeIPs())
	if err != nil {
		t.Fatal(err)
	}
	if err := again.SetCIDRs(cidrs); err != nil {
		t.Fatal(err)
	}
	b, err := again.Setup(ctx, "other", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b.IP == a.IP {
		t.Fatalf("address %s given to a second pod after a restart", a.IP)
	}
	c, err := again.Setup(ctx, "u", false, &a)
	if err != nil || c.IP != a.IP {
		t.Fatalf("got %v, had %v: %v", c, a, err)
	}
	third, err := NewNamespaced(name+"x", n.NodeIPs())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = third.Destroy() })
	if err := third.SetCIDRs(cidrs[:1]); err == nil || !strings.Contains(err.Error(), "already routed to "+name+"0") {
		t.Fatalf("a range that another namespace has: %v", err)
	}
	if err := again.Teardown(ctx, "other"); err != nil {
		t.Fatal(err)
	}
	if err := again.Teardown(ctx, "other"); err != nil {
		t.Fatalf("second teardown: %v", err)
	}
	// The kernel drops a link's routes with its last address.
	if err := again.Teardown(ctx, "u"); err != nil {
		t.Fatal(err)
	}
	d, err := again.Setup(ctx, "later", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, again, &d, "after none")
}

func serve(t *testing.T, n *Namespaced, a *Allocation, want string) {
	t.Helper()
	ctx := t.Context()
	files, err := n.Listen(ctx, a, 80, 0, "TCP")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != len(a.IPs) {
		t.Fatalf("%d listeners for %v", len(files), a.IPs)
	}
	var listeners []net.Listener
	for _, f := range files {
		l, err := net.FileListener(f)
		if err != nil {
			t.Fatal(err)
		}
		listeners = append(listeners, l)
	}
	closeAll(files)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, want) })}
	var done sync.WaitGroup
	for _, l := range listeners {
		done.Go(func() { _ = srv.Serve(l) })
	}
	defer func() { _ = srv.Shutdown(context.Background()); done.Wait() }()
	dctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for _, ip := range a.IPs { // by each of the pod's addresses
		conn, err := n.Dial(dctx, Allocation{IP: ip}, "tcp", 80)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.Close()
	}
}
