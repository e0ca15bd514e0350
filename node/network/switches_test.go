package network

import (
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// alone runs f in a new network namespace, which is gone after it.
func alone(t *testing.T, f func()) {
	t.Helper()
	if err := Usable(); err != nil {
		t.Skipf("SKIPPED: no network namespaces here: %v", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		ns, err := netns.New()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = ns.Close() }()
		f()
	}()
	<-done
}

// wantValues checks values of this thread's network namespace.
func wantValues(t *testing.T, when string, want map[string]string) {
	t.Helper()
	for name, v := range want {
		if got, err := get(name); err != nil || got != v {
			t.Errorf("%s: %s is %q, want %q (%v)", when, name, got, v, err)
		}
	}
}

func mustSet(t *testing.T, name, v string) {
	t.Helper()
	if err := set(name, v); err != nil {
		t.Error(err)
	}
}

// TestForwardingIsPutBack: with all that the kernel changes along, unless
// somebody else decided meanwhile, or still needs it.
func TestForwardingIsPutBack(t *testing.T) {
	idle := func() bool { return false }
	on := func(t *testing.T, s switches) (before map[string]string) {
		t.Helper()
		for _, l := range []string{"one0", "two0"} {
			if err := netlink.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: l}}); err != nil {
				if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: l}, PeerName: l + "p"}); err != nil {
					t.Error(err)
				}
			}
		}
		mustSet(t, "ipv4/ip_forward", "0")
		mustSet(t, "ipv6/conf/all/forwarding", "0")
		mustSet(t, "ipv4/conf/two0/forwarding", "1") // somebody's own
		mustSet(t, "ipv6/conf/one0/accept_ra", "1")
		mustSet(t, "ipv6/conf/two0/accept_ra", "0")
		before = map[string]string{}
		for _, name := range []string{
			"ipv4/ip_forward", "ipv4/conf/all/accept_redirects", "ipv4/conf/default/forwarding", "ipv4/conf/one0/forwarding", "ipv4/conf/two0/forwarding",
			"ipv6/conf/all/forwarding", "ipv6/conf/default/forwarding", "ipv6/conf/one0/forwarding", "ipv6/conf/one0/accept_ra", "ipv6/conf/two0/accept_ra",
		} {
			v, err := get(name)
			if err != nil {
				t.Error(err)
			}
			before[name] = v
		}
		for range 2 { // the second finds it done
			if err := s.ipv4(); err != nil {
				t.Error(err)
			}
			if err := s.ipv6(); err != nil {
				t.Error(err)
			}
		}
		wantValues(t, "switched on", map[string]string{
			"ipv4/ip_forward": "1", "ipv4/conf/one0/forwarding": "1", "ipv6/conf/all/forwarding": "1", "ipv6/conf/one0/accept_ra": "2", "ipv6/conf/two0/accept_ra": "0",
		})
		return before
	}
	for name, test := range map[string]func(t *testing.T, s switches){
		"all": func(t *testing.T, s switches) {
			before := on(t, s)
			if err := Restore(s.dir, idle); err != nil {
				t.Error(err)
			}
			wantValues(t, "put back", before)
			if left, _ := os.ReadDir(s.dir); len(left) != 0 {
				t.Errorf("left %v", left)
			}
		},
		"a link of the machine": func(t *testing.T, s switches) {
			mustSet(t, "ipv4/ip_forward", "0")
			if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "one0"}, PeerName: "one1"}); err != nil {
				t.Error(err)
			}
			mustSet(t, "ipv4/conf/one0/forwarding", "0")
			if err := s.link("one0", false); err != nil {
				t.Error(err)
			}
			wantValues(t, "switched on", map[string]string{"ipv4/conf/one0/forwarding": "1", "ipv4/ip_forward": "0"})
			if err := s.ipv4(); err != nil { // takes it for somebody's
				t.Error(err)
			}
			if err := Restore(s.dir, idle); err != nil {
				t.Error(err)
			}
			wantValues(t, "put back", map[string]string{"ipv4/conf/one0/forwarding": "0", "ipv4/ip_forward": "0"})
		},
		"others decided": func(t *testing.T, s switches) {
			on(t, s)
			mustSet(t, "ipv4/ip_forward", "0")
			mustSet(t, "ipv4/conf/all/accept_redirects", "0")
			mustSet(t, "ipv6/conf/one0/accept_ra", "0")
			if err := Restore(s.dir, idle); err != nil {
				t.Error(err)
			}
			wantValues(t, "put back", map[string]string{"ipv4/ip_forward": "0", "ipv4/conf/all/accept_redirects": "0", "ipv6/conf/one0/accept_ra": "0", "ipv6/conf/all/forwarding": "0"})
		},
		"it was on": func(t *testing.T, s switches) {
			mustSet(t, "ipv4/ip_forward", "1")
			if err := s.ipv4(); err != nil {
				t.Error(err)
			}
			if err := Restore(s.dir, idle); err != nil {
				t.Error(err)
			}
			wantValues(t, "it was on", map[string]string{"ipv4/ip_forward": "1"})
		},
		"others need it": func(t *testing.T, s switches) {
			before := on(t, s)
			if err := Restore(s.dir, func() bool { return true }); err != nil {
				t.Error(err)
			}
			wantValues(t, "an agent runs", map[string]string{"ipv4/ip_forward": "1"})
			veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: vethPrefix + "x"}, PeerName: "peer"}
			if err := netlink.LinkAdd(veth); err != nil {
				t.Error(err)
			}
			if err := Restore(s.dir, idle); err != nil {
				t.Error(err)
			}
			wantValues(t, "a pod is left", map[string]string{"ipv4/ip_forward": "1"})
			if err := netlink.LinkDel(veth); err != nil {
				t.Error(err)
			}
			if err := Restore(s.dir, idle); err != nil {
				t.Error(err)
			}
			wantValues(t, "nobody needs it", before)
		},
		"never": func(t *testing.T, s switches) {
			if err := Restore(s.dir, idle); err != nil {
				t.Error(err)
			}
			if err := Restore(s.dir+"/none", idle); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			alone(t, func() { test(t, switches{dir}) })
		})
	}
}

// TestPodsSwitchForwardingOn: a pod with a namespace of its own is what does.
func TestPodsSwitchForwardingOn(t *testing.T) {
	dir := t.TempDir()
	alone(t, func() {
		mustSet(t, "ipv4/ip_forward", "0")
		n, err := NewNamespaced("dlfwd", []netip.Addr{netip.MustParseAddr("127.0.0.1")})
		if err != nil {
			t.Error(err)
			return
		}
		n.RememberIn(dir)
		if err := n.publish("u", []netip.Addr{netip.MustParseAddr("10.242.77.2")}, nil, ""); err != nil || n.natError != nil {
			t.Error(err, n.natError)
		}
		wantValues(t, "published", map[string]string{"ipv4/ip_forward": "1"})
		if err := Restore(dir, func() bool { return false }); err != nil {
			t.Error(err)
		}
		wantValues(t, "put back", map[string]string{"ipv4/ip_forward": "0"})
	})
}
