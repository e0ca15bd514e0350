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
	"strings"
	"sync"
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

// What members of TestNamespaces tell each other, so long that three of them
// are too much for one packet on their network, and one is not.
const (
	lanMTU      = 1280
	lanMessages = 8
	lanMessage  = 400
)

// runMember prints how many members it knows, how many messages it got of the
// others, and how many fragments of packets, whenever that changes, until its
// input ends. Once all are there it tells the others all it has, at once and
// again and again: gossip promises nothing.
func runMember(i int) int {
	k, err := newTestKey()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var mu sync.Mutex
	got := map[string]bool{}
	p, err := New(Config{Cluster: "c", Epoch: 1, Site: "s", Key: k, Boot: 1, Keyring: ring,
		Message: func(_ byte, b []byte) { mu.Lock(); defer mu.Unlock(); got[string(b[:2])] = true },
		Bind:    lanAddr(i), Advertise: lanAddr(i), Seeds: func() []string { return []string{lanAddr(0).String()} }})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	go func() {
		told := time.Time{}
		for last, tick := "", time.NewTicker(200*time.Millisecond); ; <-tick.C {
			mu.Lock()
			now := fmt.Sprintf("%d/%d/%s", len(p.Members()), len(got), fragments())
			mu.Unlock()
			if now != last {
				last = now
				fmt.Println(now)
			}
			if len(p.Members()) == 3 && time.Since(told) > 3*time.Second {
				told = time.Now()
				for n := range byte(lanMessages) {
					if err := p.Broadcast(fmt.Sprintf("%d/%d", i, n), 1, append([]byte{byte(i), n}, make([]byte, lanMessage)...)); err != nil {
						fmt.Fprintln(os.Stderr, err)
					}
				}
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

// fragments counts those that were dropped in this namespace.
func fragments() string {
	out, err := exec.Command("nft", "list", "table", "ip", "small").CombinedOutput()
	_, rest, ok := strings.Cut(string(out), "counter packets ")
	if err != nil || !ok {
		return string(out)
	}
	n, _, _ := strings.Cut(rest, " ")
	return n
}

// Three members on one machine, each a process in a network namespace of its
// own, joined by a bridge. No packet above 1280 bytes gets through, and no
// fragment of one: all that members say by UDP fits.
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
	all := fmt.Sprintf("3/%d/0", 2*lanMessages)
	for known["0"] != all || known["1"] != all || known["2"] != all {
		select {
		case c := <-counts:
			known[c[0]] = c[1]
		case <-ctx.Done():
			t.Fatalf("members, messages and fragments: %v", known)
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
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("v%d", i), MasterIndex: bridge.Attrs().Index, MTU: lanMTU},
		PeerName: "eth0", PeerNamespace: netlink.NsFd(int(ns))}
	must(netlink.LinkAdd(veth))
	must(netlink.LinkSetUp(veth))
	must(netns.Set(ns))
	eth, err := netlink.LinkByName("eth0")
	must(err)
	addr, err := netlink.ParseAddr(lanAddr(i).Addr().String() + "/24")
	must(err)
	must(netlink.AddrAdd(eth, addr))
	must(netlink.LinkSetMTU(eth, lanMTU))
	nft := exec.CommandContext(ctx, "nft", "-f", "-")
	nft.Stdin = strings.NewReader("table ip small {\n chain in { type filter hook prerouting priority -450; ip frag-off & 0x3fff != 0 counter drop; }\n}\n")
	if out, err := nft.CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: fragments cannot be dropped here: %v: %s", err, out)
	}
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
