// Package cluster runs real one-node clusters for tests: the built binary in
// folders of its own, on a port and with a network namespace of its own, and
// nothing left behind.
package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Root is the folder of the checkout.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	for err == nil && dir != "/" {
		if _, serr := os.Stat(filepath.Join(dir, "go.mod")); serr == nil {
			if _, serr = os.Stat(filepath.Join(dir, "controlplane")); serr == nil {
				return dir
			}
		}
		dir = filepath.Dir(dir)
	}
	t.Fatalf("not inside the checkout: %v", err)
	return ""
}

// Binary is the built program: $DUNLIN_BIN, or else bin/dunlin.
func Binary(t testing.TB) string {
	t.Helper()
	if p := os.Getenv("DUNLIN_BIN"); p != "" {
		return p
	}
	p := filepath.Join(Root(t), "bin", "dunlin")
	if _, err := os.Stat(p); err != nil {
		t.Fatalf("%v: run 'make e2e', which builds first", err)
	}
	return p
}

// Cluster is one server process with its folders.
type Cluster struct {
	Dir   string // holds state, run and config
	NetNS string
	Cmd   *exec.Cmd
	t     testing.TB
	flags []string
	log   *os.File
}

// New starts a one-node cluster; everything goes when the test ends.
func New(t testing.TB, flags ...string) *Cluster {
	t.Helper()
	return NewAt(t, t.TempDir(), flags...)
}

// NewAt is New with its folders below dir.
func NewAt(t testing.TB, dir string, flags ...string) *Cluster {
	t.Helper()
	c := start(t, dir, flags)
	c.Eventually(60*time.Second, "the node is Ready", func() error {
		var n corev1.Node
		if err := c.Get("node/e2e", &n); err != nil {
			return err
		}
		for _, cond := range n.Status.Conditions {
			if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("conditions %v", n.Status.Conditions)
	})
	return c
}

// NewControlPlane starts a server without a node in its process.
func NewControlPlane(t testing.TB, flags ...string) *Cluster {
	t.Helper()
	return start(t, t.TempDir(), append([]string{"--no-node"}, flags...))
}

func start(t testing.TB, dir string, flags []string) *Cluster {
	t.Helper()
	c := &Cluster{t: t, Dir: dir, NetNS: fmt.Sprintf("dne%d", number()), flags: flags}
	if err := os.Chmod(c.Dir, 0o711); err != nil { // guests run as other users
		t.Fatal(err)
	}
	t.Cleanup(c.destroy)
	c.Start()
	return c
}

// DirFlags are the folder flags of every command on this node.
func (c *Cluster) DirFlags() []string { return dirFlags(c.Dir) }

// Kubeconfig is where the administrator's is.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.Dir, "config", "admin.kubeconfig") }

// Start runs the server. It listens on a port that the kernel picks the first
// time and keeps afterwards, as a real server keeps its address.
func (c *Cluster) Start() {
	c.t.Helper()
	args := append([]string{"server", "--node-name", "e2e", "--netns", c.NetNS, "--listen", c.Address(), "--gossip-port", "0"}, c.DirFlags()...)
	if !slices.Contains(c.flags, "--pod-cidr") {
		args = append(args, "--pod-cidr", c.podCIDR())
	}
	args = append(args, c.flags...)
	var err error
	if c.log, err = os.OpenFile(filepath.Join(c.Dir, "server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.Cmd = process(c.t, c.log, args...)
	c.Eventually(60*time.Second, "the API answers", func() error {
		_, err := c.Try("get", "nodes")
		return err
	})
}

// SetFlags replaces the further flags of the next Start.
func (c *Cluster) SetFlags(flags ...string) { c.flags = flags }

// Address is where the API listens.
func (c *Cluster) Address() string {
	p := filepath.Join(c.Dir, "port")
	if b, err := os.ReadFile(p); err == nil {
		return string(b)
	}
	a := "127.0.0.1:" + strconv.Itoa(20000+rand.IntN(10000))
	if err := os.WriteFile(p, []byte(a), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return a
}

// podCIDR is a range that other clusters on this machine do not use, or their
// routes would take each other's packets: made of the namespace's number, in
// the range for benchmarks (RFC 2544). It has room for eight nodes.
func (c *Cluster) podCIDR() string {
	n, _ := strconv.Atoi(strings.TrimPrefix(c.NetNS, "dne"))
	return fmt.Sprintf("198.%d.%d.0/21", 18+n/32%2, n%32*8)
}

// Kill sends SIGKILL to the server process alone.
func (c *Cluster) Kill() {
	c.t.Helper()
	if err := c.Cmd.Process.Kill(); err != nil {
		c.t.Fatal(err)
	}
	_ = c.Cmd.Wait()
	_ = c.log.Close()
}

// Stop ends the server in order.
func (c *Cluster) Stop() error {
	if err := c.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	err := c.Cmd.Wait()
	_ = c.log.Close()
	return err
}

func (c *Cluster) destroy() {
	if c.Cmd.ProcessState == nil {
		_ = c.Cmd.Process.Signal(syscall.SIGTERM)
		done := make(chan struct{})
		go func() { _ = c.Cmd.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(30 * time.Second):
			c.t.Error("the server did not end within 30 s of SIGTERM")
			_ = c.Cmd.Process.Signal(syscall.SIGQUIT)
			<-done
		}
	}
	_ = c.log.Close()
	args := append([]string{"server", "sweep", "--netns", c.NetNS}, c.DirFlags()...)
	if out, err := exec.Command(Binary(c.t), args...).CombinedOutput(); err != nil {
		c.t.Errorf("sweep: %v: %s", err, out)
	}
	if c.t.Failed() {
		keepLog(c.t, "server", filepath.Join(c.Dir, "server.log"))
		b, _ := os.ReadFile(filepath.Join(c.Dir, "server.log"))
		if len(b) > 8000 {
			b = b[len(b)-8000:]
		}
		c.t.Logf("server log ends:\n%s", b)
	}
	if _, err := os.Stat("/run/netns/" + c.NetNS); err == nil {
		c.t.Errorf("network namespace %s was left behind", c.NetNS)
	}
}

// Try runs the command line against the cluster.
func (c *Cluster) Try(args ...string) (string, error) { return c.TryIn("", args...) }

// TryIn is Try with an input.
func (c *Cluster) TryIn(in string, args ...string) (string, error) {
	out, _, err := commandLine(c.t, 2*time.Minute, c.Kubeconfig(), in, args...)
	return out, err
}

// commandLine runs the built program as the administrator of a kubeconfig.
func commandLine(t testing.TB, d time.Duration, kubeconfig, in string, args ...string) (out, errs string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	cmd := exec.CommandContext(ctx, Binary(t), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	var o, e bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in), &o, &e
	if err = cmd.Run(); err != nil {
		err = fmt.Errorf("dunlin %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(e.String()))
	}
	return o.String(), e.String(), err
}

// process starts the built program in a process group of its own, which
// writes to log.
func process(t testing.TB, log *os.File, args ...string) *exec.Cmd {
	t.Helper()
	return program(t, log, append([]string{Binary(t)}, args...)...)
}

// program is process for any program.
func program(t testing.TB, log *os.File, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// dirFlags are the folder flags of every command on a node below dir.
func dirFlags(dir string) []string {
	return []string{"--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"), "--config-dir", filepath.Join(dir, "config")}
}

// Run is Try that must succeed.
func (c *Cluster) Run(args ...string) string {
	c.t.Helper()
	out, err := c.Try(args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// Get decodes an object.
func (c *Cluster) Get(what string, into any) error {
	out, err := c.Try("get", what, "-o", "json")
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), into)
}

// Import gives the node a module.
func (c *Cluster) Import(name, file string) {
	c.t.Helper()
	// A module is compiled, which takes minutes on a machine that has other things to do.
	if _, _, err := commandLine(c.t, 10*time.Minute, c.Kubeconfig(), "", append([]string{"import", name, file}, c.DirFlags()[:4]...)...); err != nil {
		c.t.Fatal(err)
	}
}

// Apply writes the manifest to a file and applies it.
func (c *Cluster) Apply(manifest string) {
	c.t.Helper()
	f := filepath.Join(c.t.TempDir(), "m.yaml")
	if err := os.WriteFile(f, []byte(manifest), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.Run("apply", "-f", f)
}

// Pods lists by label.
func (c *Cluster) Pods(selector string) []corev1.Pod {
	c.t.Helper()
	var l corev1.PodList
	out, err := c.Try("get", "pods", "-l", selector, "-o", "json")
	if err != nil {
		c.t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(out), &l); err != nil {
		c.t.Fatal(err)
	}
	return l.Items
}

// Ready says whether the pod has condition Ready.
func Ready(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// WaitReady waits until exactly n pods are there and Ready.
func (c *Cluster) WaitReady(selector string, n int) []corev1.Pod {
	c.t.Helper()
	var list []corev1.Pod
	c.Eventually(90*time.Second, fmt.Sprintf("%d pods of %s are Ready", n, selector), func() error {
		list = c.Pods(selector)
		good := 0
		for i := range list {
			if Ready(&list[i]) {
				good++
			}
		}
		if good != n || len(list) != n {
			return fmt.Errorf("%d of %d pods are Ready", good, len(list))
		}
		return nil
	})
	return list
}

// Eventually waits for a condition; it says what it last saw.
func (c *Cluster) Eventually(d time.Duration, what string, f func() error) {
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
			if c.Cmd.ProcessState != nil {
				c.t.Fatalf("the server is not running while waiting for: %s", what)
			}
		}
	}
}

// HostPIDs are the host processes of the cluster's guests, by attempt.
func (c *Cluster) HostPIDs() map[string]int {
	c.t.Helper()
	return hostPIDs(c.t, c.Dir)
}

func hostPIDs(t testing.TB, dir string) map[string]int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "run", "wasm", "*", "host.json"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]int{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // its attempt was just removed
		}
		var h struct{ PID int }
		if json.NewDecoder(bytes.NewReader(b)).Decode(&h) == nil && syscall.Kill(h.PID, 0) == nil {
			out[filepath.Base(filepath.Dir(f))] = h.PID
		}
	}
	return out
}

// URL of a pod's port, with and without root.
func URL(p *corev1.Pod, port int) string {
	if s := p.Annotations["dunlin.dev/ports"]; s != "" {
		var m map[string]int
		if json.Unmarshal([]byte(s), &m) == nil && m[strconv.Itoa(port)] != 0 {
			port = m[strconv.Itoa(port)]
		}
	}
	return fmt.Sprintf("http://%s:%d/", p.Status.PodIP, port)
}

// HTTPGet gets a page; anything but 200 is an error.
func HTTPGet(u string) (string, error) {
	cl := http.Client{Timeout: 5 * time.Second}
	resp, err := cl.Get(u)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusOK {
		return "", errors.New(resp.Status)
	}
	return string(b), nil
}

// Module is one of the runtime's small test modules.
func Module(t testing.TB, name string) string {
	return filepath.Join(Root(t), "runtime", "wasm", "testdata", name+".wasm")
}
