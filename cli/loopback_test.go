package cli

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/api"
	"github.com/dunlin-project/dunlin/pki"
)

func TestOnlyLoopback(t *testing.T) {
	for _, c := range []struct {
		servers string
		want    bool
	}{
		{"127.0.0.1:6443", true},
		{"127.0.0.1:6443 [::1]:6443 localhost:6443 127.9.9.9:1", true},
		{"127.0.0.1:6443 10.0.0.5:6443", false},
		{"[fd00::5]:6443", false},
		{"pi-1:6443", false},
		{"nonsense", false},
		{"", false},
	} {
		if got := onlyLoopback(strings.Fields(c.servers)); got != c.want {
			t.Errorf("%q: %v", c.servers, got)
		}
	}
}

func lineOf(t *testing.T, servers ...string) pki.JoinLine {
	t.Helper()
	l, err := pki.NewJoinLine(strings.Repeat("a", 52), servers)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// A line that leads other machines to themselves is printed with a warning
// beside it, not in it.
func TestTokenOfAServerOnLoopbackWarns(t *testing.T) {
	var line pki.JoinLine
	newWorld(t, func(c *api.Config) {
		c.Extra = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.URL.Path != controlplane.TokensPath {
				http.NotFound(rw, r)
				return
			}
			rw.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(rw).Encode(controlplane.TokenReply{Line: line.String()})
		})
	})
	for _, c := range []struct {
		servers []string
		warns   bool
	}{
		{[]string{"127.0.0.1:6443"}, true},
		{[]string{"127.0.0.1:6443", "10.0.0.5:6443"}, false},
	} {
		line = lineOf(t, c.servers...)
		code, out, errs := run("token", "create")
		if code != 0 || out != line.String()+"\n" {
			t.Fatalf("exit %d: %q %s", code, out, errs)
		}
		if warned := strings.Contains(errs, "tells nodes the address 127.0.0.1:6443, which other machines cannot reach; start it with --listen and --advertise"); warned != c.warns || !c.warns && errs != "" {
			t.Errorf("%v: %q", c.servers, errs)
		}
	}
}

// A server that joins one on another machine, and would tell it an address
// that leads that one to itself, says so.
func TestServerThatAdvertisesLoopbackWarns(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	here, there := lineOf(t, "127.0.0.1:6443"), lineOf(t, "10.0.0.5:6443")
	for _, c := range []struct {
		name  string
		o     serverOptions
		join  *pki.JoinLine
		warns bool
	}{
		{"listens on loopback", serverOptions{listen: "127.0.0.1:0", nodeOptions: nodeOptions{address: "10.0.0.7"}}, &there, true},
		{"has no other address", serverOptions{listen: ":0", nodeOptions: nodeOptions{address: "127.0.0.1"}}, &there, true},
		{"advertises loopback", serverOptions{listen: ":0", advertise: []string{"localhost"}, nodeOptions: nodeOptions{address: "10.0.0.7"}}, &there, true},
		{"advertises another one, too", serverOptions{listen: "127.0.0.1:0", advertise: []string{"localhost", "10.0.0.7"}}, &there, false},
		{"has an address", serverOptions{listen: ":0", nodeOptions: nodeOptions{address: "10.0.0.7"}}, &there, false},
		{"all on one machine", serverOptions{listen: "127.0.0.1:0"}, &here, false},
		{"joins nobody", serverOptions{listen: "127.0.0.1:0"}, nil, false},
	} {
		var log bytes.Buffer
		cfg := c.o.controlPlane(l, serverValues{join: c.join}, slog.New(slog.NewTextHandler(&log, nil)))
		if warned := strings.Contains(log.String(), "an address that other machines cannot reach"); warned != c.warns {
			t.Errorf("%s: advertises %v, log %q", c.name, cfg.Advertise, log.String())
		}
		if slices.ContainsFunc(cfg.Advertise, func(a string) bool { _, port, err := net.SplitHostPort(a); return err != nil || port == "0" }) {
			t.Errorf("%s: advertises %v", c.name, cfg.Advertise)
		}
	}
}
