package network

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/node/network/cni"
)

// bridged is a network of the distribution's plugins with addresses of its
// own; its host ports are portmap's.
const bridged = `{"cniVersion": "1.0.0", "name": "%[1]s", "plugins": [
  {"type": "bridge", "bridge": "%[1]sb", "isGateway": true, "ipMasq": true, "ipam": {"type": "host-local", "dataDir": "%[2]s",
    "ranges": [[{"subnet": "10.242.77.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}`

// routed takes its addresses from the node's own range.
const routed = `{"cniVersion": "1.0.0", "name": "%[1]s", "plugins": [
  {"type": "ptp", "ipam": {"type": "static", "routes": [{"dst": "0.0.0.0/0"}]}}]}`

// cniWorld is a network with a folder for configurations.
func cniWorld(t *testing.T, name, dir string) *Namespaced {
	t.Helper()
	n, err := NewNamespaced(name, []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	n.UseCNI(cni.New(cni.Config{ConfDir: filepath.Join(dir, "net.d"), BinDirs: filepath.SplitList(cni.DefaultBinDirs), StateDir: filepath.Join(dir, "state")}))
	if err := n.SetCIDRs([]string{"10.242.78.0/24"}); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestCNI: a dropped-in list attaches the pods that come after it, with its
// own addresses or ours; they and Wasm pods reach each other, host ports lead
// to them, and all is taken away.
func TestCNI(t *testing.T) {
	if err := Usable(); err != nil {
		t.Skipf("SKIPPED: no network namespaces here: %v", err)
	}
	for _, p := range []string{"/usr/lib/cni/bridge", "/usr/sbin/iptables"} {
		if _, err := os.Stat(p); err != nil {
			t.Skipf("SKIPPED: %v (test/setup.sh installs containernetworking-plugins and iptables)", err)
		}
	}
	name, dir := fmt.Sprintf("dlc%d", os.Getpid()%100000), t.TempDir()
	drop := func(file, text string) {
		t.Helper()
		p := filepath.Join(dir, "net.d", file)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	n := cniWorld(t, name, dir)
	t.Cleanup(func() {
		if err := n.Destroy(); err != nil {
			t.Error(err)
		}
		_ = exec.Command("ip", "link", "del", name+"b").Run() // the plugin leaves its bridge
		for _, show := range [][]string{{"ip", "netns"}, {"ip", "link"}, {"ip", "route"}, {"iptables-save"}} {
			out, err := exec.Command(show[0], show[1:]...).CombinedOutput()
			if err != nil || strings.Contains(string(out), name) || strings.Contains(string(out), "10.242.7") {
				t.Errorf("%v: %v: left behind in %s", show, err, out)
			}
		}
	})
	ctx := t.Context()
	wasm, err := n.Setup(ctx, "wasm", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	own, err := n.SetupNamespace(ctx, Pod{UID: "own"}, nil) // before there is a configuration
	if err != nil {
		t.Fatal(err)
	}
	drop("20-routed.conflist", fmt.Sprintf(routed, name))
	routed, err := n.SetupNamespace(ctx, Pod{UID: "routed", Ports: []HostPort{{Host: 32178, Container: 80, Protocol: "TCP"}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	drop("10-bridged.conflist", fmt.Sprintf(bridged, name, filepath.Join(dir, "host-local")))
	pod := Pod{UID: "bridged", Namespace: "default", Name: "web", Ports: []HostPort{{Host: 32177, Container: 80, Protocol: "TCP"}}}
	bridged, err := n.SetupNamespace(ctx, pod, nil)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := n.SetupNamespace(ctx, Pod{UID: "own"}, &own); err != nil || again.IP != own.IP {
		t.Errorf("a pod from before: %+v, %v", again, err)
	}
	if !strings.HasPrefix(bridged.IP.String(), "10.242.77.") || !strings.HasPrefix(routed.IP.String(), "10.242.78.") || routed.IP == own.IP || routed.IP == wasm.IP {
		t.Errorf("addresses: bridged %s, routed %s, own %s, wasm %s", bridged.IP, routed.IP, own.IP, wasm.IP)
	}
	answer(t, bridged.Namespace, "bridged", 80)
	answer(t, routed.Namespace, "routed", 80)
	answer(t, own.Namespace, "own", 80)
	answer(t, n.Path(), "wasm", 80)
	check := func(n *Namespaced) {
		t.Helper()
		for _, c := range []struct{ from, to, want string }{
			{"", bridged.IP.String() + ":80", "bridged to "},
			{"", routed.IP.String() + ":80", "routed to "},
			{"", "127.0.0.1:32177", "bridged to "},
			{"", "127.0.0.1:32178", "routed to "},
			{bridged.Namespace, routed.IP.String() + ":80", "routed to "},
			{bridged.Namespace, net.JoinHostPort(wasm.IP.String(), "80"), "wasm to "},
			{routed.Namespace, net.JoinHostPort(wasm.IP.String(), "80"), "wasm to " + routed.IP.String() + ":"},
			{routed.Namespace, own.IP.String() + ":80", "own to " + routed.IP.String() + ":"},
			{n.Path(), bridged.IP.String() + ":80", "bridged to "},
			{n.Path(), routed.IP.String() + ":80", "routed to " + wasm.IP.String() + ":"},
		} {
			if got := ask(t, c.from, c.to); !strings.HasPrefix(got, c.want) {
				t.Errorf("%s from %q: %q, want %q", c.to, c.from, got, c.want)
			}
		}
	}
	check(n)

	// The next agent finds them, with the configuration gone, and gives nobody
	// their addresses.
	if err := os.RemoveAll(filepath.Join(dir, "net.d")); err != nil {
		t.Fatal(err)
	}
	n = cniWorld(t, name, dir)
	for uid, a := range map[string]Allocation{"bridged": bridged, "routed": routed} {
		if err := n.Retake(ctx, uid, a); err != nil {
			t.Fatal(err)
		}
	}
	if again, err := n.SetupNamespace(ctx, pod, &bridged); err != nil || again.IP != bridged.IP || again.Namespace != bridged.Namespace {
		t.Errorf("found again: %+v, %v", again, err)
	}
	check(n)
	if err := n.Teardown(ctx, "routed"); err != nil {
		t.Fatal(err)
	}
	if err := n.Teardown(ctx, "routed"); err != nil {
		t.Errorf("a second time: %v", err)
	}
	if err := n.Teardown(ctx, "bridged"); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "host-local", name, "10.*")); len(left) > 0 {
		t.Errorf("host-local still counts %v", left)
	}

	// What is wrong is told, and half of an attachment is taken away.
	for text, want := range map[string]string{
		`{`: "10-bad.conflist: it is not JSON", `{"cniVersion": "1.0.0", "plugins": []}`: "no name",
		`{"cniVersion": "0.2.0", "name": "x", "type": "bridge"}`:                 `cniVersion "0.2.0"`,
		`{"cniVersion": "1.0.0", "name": "x", "type": "../sh"}`:                  "not the name of a program",
		`{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "nowhere"}]}`: "nowhere is in none of /opt/cni/bin, /usr/lib/cni",
		`{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "ptp", "ipam": {"type": "host-local", "dataDir": ` + quote(dir) + `, "subnet": "10.242.79.0/24"}}, {"type": "bandwidth", "ingressRate": -1}]}`: "CNI plugin bandwidth (ADD)",
	} {
		drop("10-bad.conflist", text)
		if _, err := n.SetupNamespace(ctx, Pod{UID: "bad"}, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
		if err := n.Teardown(ctx, "bad"); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func quote(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}
