//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/node/proxy"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestConnectionsToADeadMachine: a request that went to a machine which then
// lost its power is given up once the cluster knows, long before the kernel
// would; connections to others stay.
func TestConnectionsToADeadMachine(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: it takes a minute (make e2e without SHORT runs it); the proxy's own tests have the rule")
	}
	site := cluster.NewSite(t)
	address := fmt.Sprintf("%s:%d", site.Host(), 26000+os.Getpid()%5000)
	c := cluster.NewControlPlane(t, "--listen", address, "--advertise", address)
	var agents []*cluster.Agent
	var machines []*cluster.Machine
	text := strings.NewReplacer("NAME", "tiers", "DISTRIBUTION", "", "PORT", "30685").Replace(tiersService)
	for _, name := range []string{"n1", "n2"} {
		m := site.NewMachine()
		a := cluster.NewAgent(t, name, m)
		a.Import("hello.wasm", example(t, "hello.wasm"))
		a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
		agents, machines = append(agents, a), append(machines, m)
		c.Eventually(time.Minute, name+" is Ready", func() error { return c.NodeReady(name) })
		text += strings.ReplaceAll(tiersPod, "NODE", name)
	}
	c.Apply(text)
	c.WaitReady("app=tiers", 2)
	at := machines[0].IP + ":30685"
	open := map[string]net.Conn{}
	patiently(t, "both answer", func() error {
		who, conn, err := hold(at)
		if err != nil {
			return err
		}
		for _, a := range agents {
			if strings.Contains(who, "on-"+a.Name+" ") && open[a.Name] == nil {
				open[a.Name], conn = conn, nil
			}
		}
		if conn != nil {
			_ = conn.Close()
		}
		if len(open) < 2 {
			return fmt.Errorf("%d of two", len(open))
		}
		return nil
	})
	defer func() { _, _ = open["n1"].Close(), open["n2"].Close() }()

	machines[1].Cut()
	agents[1].Kill()
	cut := time.Now()
	ask := func(name string) error {
		_ = open[name].SetDeadline(time.Now().Add(110 * time.Second)) // without the tables it takes 150 s
		if _, err := fmt.Fprintf(open[name], "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			return err
		}
		_, err := open[name].Read(make([]byte, 1))
		return err
	}
	if err := ask("n2"); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a request to the dead machine after %s: %v", time.Since(cut), err)
	}
	t.Logf("given up after %s", time.Since(cut))
	if err := ask("n1"); err != nil {
		t.Errorf("a connection to the other one: %v", err)
	}
	if st, err := proxy.Ask(filepath.Join(agents[0].Dir, "run", "proxy")); err != nil || st.Silent != 1 {
		t.Errorf("%+v, %v", st, err)
	}
}
