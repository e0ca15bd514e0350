package cluster

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
)

// ServerProcess is one server without a node.
type ServerProcess struct {
	Name, Dir, Address string
	Env                []string // beside the test's own
	Bin                string   // "" is Binary
	Cmd                *exec.Cmd
	t                  testing.TB
	on                 *Machine
	join               string
	flags              []string
}

// Servers is a cluster of several server processes on this machine.
type Servers struct {
	t    testing.TB
	host string
	port int // of the first
	List []*ServerProcess
	name string
}

// NewServers starts n servers that make one cluster, and waits until they
// have their votes.
func NewServers(t testing.TB, n int) *Servers {
	t.Helper()
	return NewServersOn(t, n, "127.0.0.1")
}

// NewServersOn is NewServers on an address of this machine, a Site's for
// example.
func NewServersOn(t testing.TB, n int, host string) *Servers {
	t.Helper()
	c := &Servers{t: t, host: host, port: 20000 + rand.IntN(9900)}
	for range n {
		c.Add(0)
	}
	c.Roles(map[int]int{1: 1, 2: 1, 3: 3, 4: 3, 5: 5}[n], n)
	return c
}

// NewServersApart is NewServers with a machine for each, in whose network it
// listens on every address, and finds out itself which one it has.
func NewServersApart(t testing.TB, machines ...*Machine) *Servers {
	t.Helper()
	return NewServersNamed(t, "", machines...)
}

// NewServersNamed is NewServersApart of servers that say of themselves that they
// are at a name, and nothing else. The test knows better.
func NewServersNamed(t testing.TB, name string, machines ...*Machine) *Servers {
	t.Helper()
	c := &Servers{t: t, port: 20000 + rand.IntN(9900), name: name}
	for _, m := range machines {
		c.add(0, m)
	}
	c.Roles(len(machines), len(machines))
	return c
}

// Add starts one more server, with a join line of server i, and waits until
// it answers.
func (c *Servers) Add(i int) {
	c.t.Helper()
	c.add(i, nil)
}

func (c *Servers) add(i int, on *Machine) {
	c.t.Helper()
	n := len(c.List)
	s := &ServerProcess{Name: fmt.Sprintf("s%d", n+1), Dir: c.t.TempDir(), Address: fmt.Sprintf("%s:%d", c.host, c.port+n), t: c.t}
	s.Env = []string{ClockVariable + "=" + filepath.Join(s.Dir, clockFile)}
	if s.on = on; on != nil {
		s.Address = ":6443"
	}
	// A range of pod addresses that no other cluster on this machine has.
	s.flags = []string{"--pod-cidr", fmt.Sprintf("198.%d.%d.0/21", 18+c.port/32%2, c.port%32*8)}
	if c.name != "" {
		s.flags = append(s.flags, "--advertise", c.name+":6443")
	}
	if n > 0 {
		s.join = strings.TrimSpace(c.Run(i, "token", "create", "--server"))
	}
	c.List = append(c.List, s)
	c.t.Cleanup(s.destroy)
	s.Start()
	c.Eventually(time.Minute, s.Name+" answers", func() error {
		_, err := c.Try(n, "get", "namespace", "kube-system")
		return err
	})
}

// ClockVariable names the file that moves the clock of a process of the build
// that TestClock gives.
const ClockVariable = "DUNLIN_TEST_CLOCK"

const clockFile = "clock"

// MoveClock sets how far the clock of this server is off; TestClock first.
func (s *ServerProcess) MoveClock(d time.Duration) { moveClock(s.t, s.Dir, d) }

func moveClock(t testing.TB, dir string, d time.Duration) {
	t.Helper()
	p := filepath.Join(dir, clockFile)
	if err := os.WriteFile(p+".new", []byte(d.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(p+".new", p); err != nil { // never read half
		t.Fatal(err)
	}
}

// TestClock makes a test use the build whose clocks can be moved.
func TestClock(t *testing.T) {
	t.Helper()
	p := filepath.Join(Root(t), "bin", "dunlin-testclock")
	if _, err := os.Stat(p); err != nil {
		t.Fatalf("%v: run 'make e2e', which builds first", err)
	}
	t.Setenv("DUNLIN_BIN", p)
}

// DirFlags are the folder flags of every command on this server.
func (s *ServerProcess) DirFlags() []string { return dirFlags(s.Dir) }

// Start runs the server.
func (s *ServerProcess) Start(flags ...string) {
	s.t.Helper()
	log, err := os.OpenFile(filepath.Join(s.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	args := s.on.enter(append(append([]string{"env"}, s.Env...), cmp.Or(s.Bin, Binary(s.t)))...)
	args = append(args, "server", "--no-node", "--node-name", s.Name, "--listen", s.Address, "--gossip-port", s.gossipPort())
	args = append(args, s.DirFlags()...)
	if s.join != "" {
		args = append(args, "--join", s.join)
	}
	args = append(append(args, s.flags...), flags...)
	s.Cmd = program(s.t, log, args...)
}

// gossipPort is the usual one on a machine of its own.
func (s *ServerProcess) gossipPort() string {
	if s.on != nil {
		return "7946"
	}
	return "0"
}

// Rejoin starts the server with another join line, after its state was
// removed.
func (s *ServerProcess) Rejoin(line string) {
	s.t.Helper()
	s.join = line
	s.Start()
}

// Running says whether the process was started and not stopped by Stop.
func (s *ServerProcess) Running() bool { return s.Cmd != nil && s.Cmd.ProcessState == nil }

// Stop ends it with a signal and waits.
func (s *ServerProcess) Stop(sig os.Signal) {
	if !s.Running() {
		return
	}
	_ = s.Cmd.Process.Signal(sig)
	_ = s.Cmd.Wait()
}

// IO is what the process has sent to its disks, in bytes (proc_pid_io(5)).
func (s *ServerProcess) IO(t testing.TB) (n uint64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", s.Cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		if _, err := fmt.Sscanf(line, "write_bytes: %d", &n); err == nil {
			return n
		}
	}
	t.Fatalf("no write_bytes in %s", b)
	return 0
}

// CPU is the time that all servers have used.
func (c *Servers) CPU(t testing.TB) (sum time.Duration) {
	t.Helper()
	for _, s := range c.List {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.Cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		for _, i := range []int{11, 12} { // utime and stime, in ticks of 10 ms
			n, err := strconv.ParseInt(f[i], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += time.Duration(n) * 10 * time.Millisecond
		}
	}
	return sum
}

// Log is the end of what it wrote.
func (s *ServerProcess) Log() string {
	b, _ := os.ReadFile(filepath.Join(s.Dir, "log"))
	return string(b[max(len(b)-6000, 0):])
}

func (s *ServerProcess) destroy() {
	s.Stop(syscall.SIGTERM)
	if s.t.Failed() {
		keepLog(s.t, s.Name, filepath.Join(s.Dir, "log"))
		s.t.Logf("log of %s ends:\n%s", s.Name, s.Log())
	}
}

// Kubeconfig of the administrator at one of the servers.
func (c *Servers) Kubeconfig(i int) string {
	s := c.List[i]
	path := filepath.Join(s.Dir, "config", "admin.kubeconfig")
	if c.name == "" {
		return path
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return path // not made yet
	}
	by := filepath.Join(s.Dir, "by-address.kubeconfig")
	if err := os.WriteFile(by, bytes.ReplaceAll(b, []byte(c.name), []byte(s.on.IP)), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return by
}

// Warnings runs the command line, which must succeed, and returns what it
// wrote beside its output.
func (c *Servers) Warnings(i int, args ...string) (string, error) {
	_, errs, err := commandLine(c.t, time.Minute, c.Kubeconfig(i), "", args...)
	return errs, err
}

// Try runs the command line against one of the servers.
func (c *Servers) Try(i int, args ...string) (string, error) { return c.TryIn(i, "", args...) }

// TryIn is Try with an input.
func (c *Servers) TryIn(i int, in string, args ...string) (string, error) {
	out, _, err := commandLine(c.t, time.Minute, c.Kubeconfig(i), in, args...)
	return out, err
}

// Run is Try that must succeed.
func (c *Servers) Run(i int, args ...string) string {
	c.t.Helper()
	out, err := c.Try(i, args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// ServerState is one line of 'dunlin server list'.
type ServerState struct {
	Name, ID, Role, Reason, Version string
	FeatureLevel                    uint32
	Ready                           bool
}

// Get asks server i by the API. Conditions that are awaited go this way: a
// process a question would keep the machine busy.
func (c *Servers) Get(i int, path string, into any) error {
	k, err := client.Load(c.Kubeconfig(i), "")
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(k.Cert, k.Key)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(k.CA)
	h := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, // servers come and go
		TLSClientConfig:   &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots, Certificates: []tls.Certificate{pair}},
	}}
	resp, err := h.Get(k.Server + path)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, b)
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(b, into)
}

// States asks one of the servers about all.
func (c *Servers) States(i int) (list []ServerState, err error) {
	var l struct{ Items []ServerState }
	err = c.Get(i, "/dunlin.dev/v1/servers", &l)
	return l.Items, err
}

// Leader is the index of the server that leads, asked from those that run.
func (c *Servers) Leader() int {
	c.t.Helper()
	leader := -1
	c.Eventually(time.Minute, "a server leads", func() error {
		for i, s := range c.List {
			if !s.Running() {
				continue
			}
			list, err := c.States(i)
			if err != nil {
				return err
			}
			for _, st := range list {
				for j, other := range c.List {
					if st.Role == "leader" && st.Name == other.Name && other.Running() {
						leader = j
						return nil
					}
				}
			}
		}
		return fmt.Errorf("nobody")
	})
	return leader
}

// Roles waits until so many vote, the leader too, of so many.
func (c *Servers) Roles(voters, all int) {
	c.t.Helper()
	c.Eventually(time.Minute, fmt.Sprintf("%d of %d vote", voters, all), func() error {
		at := 0
		for i, s := range c.List {
			if s.Running() {
				at = i
			}
		}
		list, err := c.States(at)
		if err != nil {
			return err
		}
		got := 0
		for _, s := range list {
			if s.Role == "leader" || s.Role == "voter" {
				got++
			}
			if !s.Ready {
				return fmt.Errorf("%+v", list)
			}
		}
		if got != voters || len(list) != all {
			return fmt.Errorf("%+v", list)
		}
		return nil
	})
}

// NodeReady says whether a Node has condition Ready, asked from server i.
func (c *Servers) NodeReady(i int, name string) error {
	var n corev1.Node
	if err := c.Get(i, "/api/v1/nodes/"+name, &n); err != nil {
		return err
	}
	for _, cond := range n.Status.Conditions {
		if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return fmt.Errorf("conditions %v", n.Status.Conditions)
}

// Eventually waits for a condition; it says what it last saw.
func (c *Servers) Eventually(d time.Duration, what string, f func() error) {
	c.t.Helper()
	deadline := time.After(d)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			c.t.Fatalf("waited %s for: %s; last: %v", d, what, err)
		case <-tick.C:
		}
	}
}
