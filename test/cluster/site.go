package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// Site is a network of machines: a bridge on this host, and a network
// namespace for each machine.
type Site struct {
	t      testing.TB
	bridge string
	net    int
	n      int
}

// NewSite makes the bridge; it needs root.
func NewSite(t testing.TB) *Site {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for network namespaces")
	}
	s := &Site{t: t, net: 1 + rand.IntN(250)}
	s.bridge = fmt.Sprintf("dnbr%d", rand.IntN(1e6))
	// An address of its own: one that is not given is the lowest of the ports',
	// and with each new machine the others may send to one that is nobody's,
	// until their neighbour entry is too old.
	s.ip("link", "add", s.bridge, "address", "02:00:0a:e7:00:01", "type", "bridge")
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", s.bridge).Run() })
	s.ip("addr", "add", s.Host()+"/24", "dev", s.bridge)
	s.ip("link", "set", s.bridge, "up")
	s.ip("addr", "add", "fd31::1/64", "dev", s.bridge, "nodad")
	return s
}

// Host is this host's address there.
func (s *Site) Host() string { return fmt.Sprintf("10.231.%d.1", s.net) }

func (s *Site) ip(args ...string) {
	s.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		s.t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

// Machine is one machine of a Site.
type Machine struct {
	s    *Site
	ns   string
	veth string
	IP   string
	// Lone is a network of a switch and nothing else: no way leads elsewhere.
	Lone bool
	// resolv is the machine's resolv.conf; "" is this host's.
	resolv string
}

// Resolver gives what is started on the machine from now on a resolv.conf of
// its own.
func (m *Machine) Resolver(path string) { m.resolv = path }

// NewMachine adds one.
func (s *Site) NewMachine() *Machine {
	s.t.Helper()
	s.n++
	m := &Machine{s: s, ns: fmt.Sprintf("%sm%d", s.bridge, s.n), IP: fmt.Sprintf("10.231.%d.%d", s.net, s.n+1)}
	m.veth = fmt.Sprintf("%sv%d", s.bridge, s.n)
	s.ip("netns", "add", m.ns)
	s.t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", m.ns).Run() })
	s.ip("link", "add", m.veth, "type", "veth", "peer", "name", "eth0", "netns", m.ns)
	s.ip("link", "set", m.veth, "master", s.bridge, "up")
	s.ip("-n", m.ns, "addr", "add", m.IP+"/24", "dev", "eth0")
	s.ip("-n", m.ns, "link", "set", "eth0", "up")
	s.ip("-n", m.ns, "link", "set", "lo", "up")
	return m
}

// Address takes the machine to another address of the site's network, as DHCP
// does: the old one is gone at once. The way elsewhere, if any, leads by this
// host.
func (m *Machine) Address(last int) {
	m.s.t.Helper()
	m.IP = fmt.Sprintf("10.231.%d.%d", m.s.net, last)
	m.s.ip("-n", m.ns, "addr", "flush", "dev", "eth0")
	m.s.ip("-n", m.ns, "addr", "add", m.IP+"/24", "dev", "eth0")
	if !m.Lone {
		m.s.ip("-n", m.ns, "route", "replace", "default", "via", m.s.Host())
	}
}

// AddIPv6 gives the machine an address under fd31::/64 beside its own.
func (m *Machine) AddIPv6(last string) string {
	m.s.t.Helper()
	m.s.ip("-n", m.ns, "addr", "add", "fd31::"+last+"/64", "dev", "eth0", "nodad")
	return "fd31::" + last
}

// OnlyIPv6 takes the machine's IPv4 addresses away; what it has is an address
// under fd31::/64, its link-local one, and the way elsewhere by this host. last
// "" leaves it the link-local one alone. It returns that one.
func (m *Machine) OnlyIPv6(last string) (linkLocal string) {
	m.s.t.Helper()
	m.s.ip("-n", m.ns, "-4", "addr", "flush", "dev", "eth0")
	if m.IP = ""; last != "" {
		m.IP = "fd31::" + last
		m.s.ip("-n", m.ns, "addr", "add", m.IP+"/64", "dev", "eth0", "nodad")
		m.s.ip("-n", m.ns, "route", "replace", "default", "via", "fd31::1")
	}
	for range 100 {
		out, err := exec.Command("ip", "-n", m.ns, "-6", "-o", "addr", "show", "dev", "eth0", "scope", "link", "-tentative").Output()
		if f := strings.Fields(string(out)); err == nil && len(f) > 3 {
			a, _, _ := strings.Cut(f[3], "/")
			return a
		}
		<-time.After(100 * time.Millisecond)
	}
	m.s.t.Fatal("the machine has no link-local address")
	return ""
}

// SecondNIC gives the machine another network card, by which the default route
// goes, and returns its address there.
func (m *Machine) SecondNIC() string {
	m.s.t.Helper()
	m.s.ip("-n", m.ns, "link", "add", "eth1", "type", "veth", "peer", "name", "far")
	m.s.ip("-n", m.ns, "link", "set", "far", "up")
	m.s.ip("-n", m.ns, "addr", "add", "172.31.9.2/24", "dev", "eth1")
	m.s.ip("-n", m.ns, "link", "set", "eth1", "up")
	m.s.ip("-n", m.ns, "route", "replace", "default", "via", "172.31.9.1", "dev", "eth1")
	return "172.31.9.2"
}

// enter makes the arguments of a command that runs on the machine: only the
// network is its own.
func (m *Machine) enter(args ...string) []string {
	if m == nil {
		return args
	}
	if m.resolv != "" {
		// Only what is below / itself is its own: network namespaces, which ip made
		// a shared mount, are everybody's.
		args = append([]string{"unshare", "--mount", "--propagation", "unchanged", "sh", "-c", `mount --make-private / && mount --bind "$0" /etc/resolv.conf && exec "$@"`, m.resolv}, args...)
	}
	return append([]string{"nsenter", "--net=/run/netns/" + m.ns, "--"}, args...)
}

// Path of the machine's network namespace.
func (m *Machine) Path() string { return "/run/netns/" + m.ns }

// Inside runs f on a thread inside the network namespace at path.
func Inside(path string, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with it
		ns, err := os.Open(path)
		if err == nil {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			_ = ns.Close()
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// Cut takes the machine's link down, Heal up again.
func (m *Machine) Cut() { m.s.t.Helper(); m.s.ip("link", "set", m.veth, "down") }

// Heal undoes Cut.
func (m *Machine) Heal() { m.s.t.Helper(); m.s.ip("link", "set", m.veth, "up") }

// BlockUDP drops every UDP packet from and to the machine.
func (m *Machine) BlockUDP() {
	m.s.t.Helper()
	const rules = `table inet dunlintest {
	chain in { type filter hook input priority 0; meta l4proto udp drop; }
	chain out { type filter hook output priority 0; meta l4proto udp drop; }
}`
	args := m.enter("nft", "-f", "-")
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		m.s.t.Fatalf("nft: %v: %s", err, out)
	}
}

// Part drops every packet between the machine and others.
func (m *Machine) Part(others ...*Machine) {
	m.s.t.Helper()
	var list []string
	for _, o := range others {
		list = append(list, o.IP)
	}
	all := strings.Join(list, ", ")
	m.nft(m.enter("nft", "-f", "-"), fmt.Sprintf(`table inet dunlinpart {
	chain in { type filter hook input priority 0; ip saddr { %s } drop; }
	chain out { type filter hook output priority 0; ip daddr { %s } drop; }
}
`, all, all))
}

// Unite undoes Part.
func (m *Machine) Unite() {
	m.s.t.Helper()
	m.nft(m.enter("nft", "delete", "table", "inet", "dunlinpart"), "")
}

// CutFrom drops every TCP packet between the machine and one server; nothing
// answers for it, as on a broken path.
func (m *Machine) CutFrom(address string) {
	m.s.t.Helper()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		m.s.t.Fatal(err)
	}
	m.nft(m.enter("nft", "-f", "-"), fmt.Sprintf(`table inet dunlincut {
	chain in { type filter hook input priority 0; ip saddr %s tcp sport %s drop; }
	chain out { type filter hook output priority 0; ip daddr %s tcp dport %s drop; }
}
`, host, port, host, port))
}

// HealFrom undoes every CutFrom.
func (m *Machine) HealFrom() {
	m.s.t.Helper()
	m.nft(m.enter("nft", "delete", "table", "inet", "dunlincut"), "")
}

// BlockUDPTo drops the UDP packets that the machine sends to another one; what
// the other sends arrives.
func (m *Machine) BlockUDPTo(other *Machine) {
	m.s.t.Helper()
	m.nft(m.enter("nft", "-f", "-"), fmt.Sprintf(`table inet dunlinoneway {
	chain out { type filter hook output priority 0; ip daddr %s meta l4proto udp drop; }
}
`, other.IP))
}

// Agent is one node's process with its folders.
type Agent struct {
	Name  string
	Dir   string
	NetNS string // holds its pods' addresses
	Bin   string // "" is Binary
	Cmd   *exec.Cmd
	Env   []string // beside the test's own
	t     testing.TB
	on    *Machine
}

// NewAgent prepares the folders of a node; on is nil for this host's network.
func NewAgent(t testing.TB, name string, on *Machine) *Agent {
	t.Helper()
	a := &Agent{Name: name, Dir: t.TempDir(), NetNS: fmt.Sprintf("dna%d", number()), t: t, on: on}
	if err := os.Chmod(a.Dir, 0o711); err != nil {
		t.Fatal(err)
	}
	a.Env = []string{ClockVariable + "=" + filepath.Join(a.Dir, clockFile)}
	t.Cleanup(a.destroy)
	return a
}

// MoveClock sets how far the clock of this node's agent is off; TestClock
// first.
func (a *Agent) MoveClock(d time.Duration) { moveClock(a.t, a.Dir, d) }

// DirFlags are the folder flags of every command on this node.
func (a *Agent) DirFlags() []string { return dirFlags(a.Dir) }

func (a *Agent) command(args ...string) *exec.Cmd {
	args = a.on.enter(append([]string{cmp.Or(a.Bin, Binary(a.t))}, args...)...)
	return exec.Command(args[0], args[1:]...)
}

// Start runs the agent; flags are those of the first start, as --join.
func (a *Agent) Start(flags ...string) {
	a.t.Helper()
	log, err := os.OpenFile(filepath.Join(a.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		a.t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	args := append([]string{"agent", "--node-name", a.Name, "--netns", a.NetNS, "--gossip-port", "0"}, a.DirFlags()...)
	a.Cmd = a.command(append(args, flags...)...)
	a.Cmd.Env = append(os.Environ(), a.Env...)
	a.Cmd.Stdout, a.Cmd.Stderr = log, log
	if err := a.Cmd.Start(); err != nil {
		a.t.Fatal(err)
	}
}

// Run is another command on the machine, with the agent's folders; it
// returns all that was written.
func (a *Agent) Run(args ...string) (string, error) {
	cmd := a.command(append(append(args, a.DirFlags()...), "--netns", a.NetNS)...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Command is Run without the flags that only the agent's own commands have.
func (a *Agent) Command(args ...string) (string, error) {
	out, err := a.command(append(args, a.DirFlags()[2:4]...)...).CombinedOutput()
	return string(out), err
}

// Stop ends the agent with a signal and waits; its guests run on.
func (a *Agent) Stop(s os.Signal) {
	if a.Cmd == nil || a.Cmd.ProcessState != nil {
		return
	}
	_ = a.Cmd.Process.Signal(s)
	_ = a.Cmd.Wait()
}

// Kill ends the agent and its guests at once, as a power cut does.
func (a *Agent) Kill() {
	a.Stop(syscall.SIGKILL)
	for _, pid := range a.HostPIDs() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

func (a *Agent) destroy() {
	a.Stop(syscall.SIGTERM)
	args := append([]string{"server", "sweep", "--netns", a.NetNS}, a.DirFlags()...)
	if out, err := a.command(args...).CombinedOutput(); err != nil {
		a.t.Errorf("sweep of %s: %v: %s", a.Name, err, out)
	}
	if a.t.Failed() {
		keepLog(a.t, a.Name, filepath.Join(a.Dir, "log"))
		a.t.Logf("log of %s ends:\n%s", a.Name, a.Log())
	}
}

// Log is the end of what the agent wrote.
func (a *Agent) Log() string {
	b, _ := os.ReadFile(filepath.Join(a.Dir, "log"))
	return string(b[max(len(b)-6000, 0):])
}

// Import gives the node a module.
func (a *Agent) Import(name, file string) {
	a.t.Helper()
	if out, err := a.command(append([]string{"import", name, file}, a.DirFlags()[:4]...)...).CombinedOutput(); err != nil {
		a.t.Fatalf("import: %v: %s", err, out)
	}
}

// HostPIDs are the host processes of the node's guests, by attempt.
func (a *Agent) HostPIDs() map[string]int { return hostPIDs(a.t, a.Dir) }

// AgentStatus is what an agent says on its socket.
type AgentStatus struct {
	Connected         bool
	Server            string
	Relayed           bool
	Reason            string
	Servers           []string
	BytesIn, BytesOut uint64
	Gossip            struct {
		Running     bool
		ID          string
		Address     string
		Members     []string
		LeasesByUDP uint64
	}
}

// Status asks the agent on its socket.
func (a *Agent) Status() (AgentStatus, error) { return statusOf(a.Dir) }

// Status asks the node of the server's process on its socket.
func (c *Cluster) Status() (AgentStatus, error) { return statusOf(c.Dir) }

func statusOf(dir string) (out AgentStatus, err error) {
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, "run", "agent.sock"))
	}}
	cl := http.Client{Transport: tr, Timeout: 5 * time.Second}
	resp, err := cl.Get("http://agent/status")
	if err != nil {
		return out, err
	}
	defer func() { _ = resp.Body.Close() }()
	return out, json.NewDecoder(resp.Body).Decode(&out)
}

// NodeReady says whether a Node has condition Ready; an error says what else.
func (c *Cluster) NodeReady(name string) error {
	var n corev1.Node
	if err := c.Get("node/"+name, &n); err != nil {
		return err
	}
	for _, cond := range n.Status.Conditions {
		if cond.Type == corev1.NodeReady {
			if cond.Status == corev1.ConditionTrue {
				return nil
			}
			return fmt.Errorf("node %s: Ready=%s, %s", name, cond.Status, cond.Message)
		}
	}
	return errors.New("no condition yet")
}
