package gossip

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// memberEnv makes the test binary a member of the pool that TestNamespaces
// makes; its value is the member's number.
const memberEnv = "DUNLIN_GOSSIP_TEST_MEMBER"

func TestMain(m *testing.M) {
	if n, err := strconv.Atoi(os.Getenv(memberEnv)); err == nil {
		os.Exit(runMember(n))
	}
	os.Exit(m.Run())
}

func lanAddr(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 99, 0, byte(i + 1)}), Port)
}

// runMember prints how many members it knows whenever that changes, until
// its input ends.
func runMember(i int) int {
	k, err := newTestKey()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	p, err := New(Config{Cluster: "c", Epoch: 1, Site: "s", Key: k, Boot: 1, Keyring: ring,
		Bind: lanAddr(i), Advertise: lanAddr(i), Seeds: func() []string { return []string{lanAddr(0).String()} }})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	go func() {
		for last, tick := 0, time.NewTicker(50*time.Millisecond); ; <-tick.C {
			if n := len(p.Members()); n != last {
				last = n
				fmt.Println(n)
			}
		}
	}()
	_, _ = bufio.NewReader(os.Stdin).ReadByte()
	if err := p.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// Three members on one machine, each a process in a network namespace of its
// own, joined by a bridge.
func TestNamespaces(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root to make network namespaces; CI runs it as root")
	}
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		t.Skipf("SKIPPED: network namespaces cannot be used here: %v", err)
	}
	defer func() {
		if err := netns.Set(home); err == nil { // else the thread dies with the goroutine
			runtime.UnlockOSThread()
		}
		_ = home.Close()
	}()
	lan, err := netns.New() // holds the bridge; goes away with its last handle
	if err != nil {
		t.Skipf("SKIPPED: network namespaces cannot be made here: %v", err)
	}
	defer func() { _ = lan.Close() }()
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
	if err := netlink.LinkAdd(bridge); err != nil {
		t.Skipf("SKIPPED: no bridge on this kernel: %v", err)
	}
	if err := netlink.LinkSetUp(bridge); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	counts := make(chan [2]string, 64)
	for i := range 3 {
		startMember(ctx, t, lan, bridge, i, counts)
	}
	known := map[string]string{}
	for known["0"] != "3" || known["1"] != "3" || known["2"] != "3" {
		select {
		case c := <-counts:
			known[c[0]] = c[1]
		case <-ctx.Done():
			t.Fatalf("members known: %v", known)
		}
	}
}

// startMember makes a namespace with an address on the bridge and starts a
// member in it; a child is born in the namespace of the thread that starts it.
func startMember(ctx context.Context, t *testing.T, lan netns.NsHandle, bridge netlink.Link, i int, counts chan<- [2]string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ns, err := netns.New()
	must(err)
	defer func() { _ = ns.Close() }() // the child keeps it alive
	must(netns.Set(lan))
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("v%d", i), MasterIndex: bridge.Attrs().Index},
		PeerName: "eth0", PeerNamespace: netlink.NsFd(int(ns))}
	must(netlink.LinkAdd(veth))
	must(netlink.LinkSetUp(veth))
	must(netns.Set(ns))
	eth, err := netlink.LinkByName("eth0")
	must(err)
	addr, err := netlink.ParseAddr(lanAddr(i).Addr().String() + "/24")
	must(err)
	must(netlink.AddrAdd(eth, addr))
	must(netlink.LinkSetUp(eth))
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), memberEnv+"="+strconv.Itoa(i))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(err)
	out, err := cmd.StdoutPipe()
	must(err)
	must(cmd.Start())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for sc := bufio.NewScanner(out); sc.Scan(); {
			counts <- [2]string{strconv.Itoa(i), sc.Text()}
		}
	}()
	t.Cleanup(func() {
		_ = in.Close()
		<-done
		_ = cmd.Wait()
	})
}
