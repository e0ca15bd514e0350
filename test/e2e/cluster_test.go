//go:build e2e

// Package e2e tests real processes: the built binaries, real guests, real
// signals, real sockets. Run it with 'make e2e'.
package e2e

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
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

var root = func() string {
	p, err := filepath.Abs("../..")
	if err != nil {
		panic(err)
	}
	return p
}()

func binary(t *testing.T) string {
	t.Helper()
	p := filepath.Join(root, "bin", "dunlin")
	if _, err := os.Stat(p); err != nil {
		t.Fatalf("%v: run 'make e2e', which builds first", err)
	}
	return p
}

// cluster is one server process with its folders.
type cluster struct {
	t     *testing.T
	dir   string
	netns string
	flags []string
	cmd   *exec.Cmd
	log   *os.File
}

// newCluster starts a one-node cluster; everything goes when the test ends.
func newCluster(t *testing.T, flags ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), netns: fmt.Sprintf("dne%d", rand.IntN(1e6)), flags: flags}
	if err := os.Chmod(c.dir, 0o711); err != nil { // guests run as other users
		t.Fatal(err)
	}
	t.Cleanup(c.destroy)
	c.start()
	c.eventually(60*time.Second, "the node is Ready", func() error {
		var n corev1.Node
		if err := c.get("node/e2e", &n); err != nil {
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

func (c *cluster) dirFlags() []string {
	return []string{"--state-dir", filepath.Join(c.dir, "state"), "--run-dir", filepath.Join(c.dir, "run"), "--config-dir", filepath.Join(c.dir, "config")}
}

func (c *cluster) kubeconfig() string { return filepath.Join(c.dir, "config", "admin.kubeconfig") }

// start runs the server. It listens on a port that the kernel picks the first
// time and keeps afterwards, as a real server keeps its address.
func (c *cluster) start() {
	c.t.Helper()
	args := append([]string{"server", "--node-name", "e2e", "--netns", c.netns, "--listen", c.address()}, c.dirFlags()...)
	args = append(args, c.flags...)
	var err error
	if c.log, err = os.OpenFile(filepath.Join(c.dir, "server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.cmd = exec.Command(binary(c.t), args...)
	c.cmd.Stdout, c.cmd.Stderr = c.log, c.log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.eventually(60*time.Second, "the API answers", func() error {
		_, err := c.try("get", "nodes")
		return err
	})
}

func (c *cluster) address() string {
	p := filepath.Join(c.dir, "port")
	if b, err := os.ReadFile(p); err == nil {
		return string(b)
	}
	a := "127.0.0.1:" + strconv.Itoa(20000+rand.IntN(10000))
	if err := os.WriteFile(p, []byte(a), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return a
}

// kill sends SIGKILL to the server process alone.
func (c *cluster) kill() {
	c.t.Helper()
	if err := c.cmd.Process.Kill(); err != nil {
		c.t.Fatal(err)
	}
	_ = c.cmd.Wait()
	_ = c.log.Close()
}

// stop ends the server in order.
func (c *cluster) stop() error {
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	err := c.cmd.Wait()
	_ = c.log.Close()
	return err
}

func (c *cluster) destroy() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Signal(syscall.SIGTERM)
		done := make(chan struct{})
		go func() { _ = c.cmd.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(30 * time.Second):
			c.t.Error("the server did not end within 30 s of SIGTERM")
			_ = c.cmd.Process.Signal(syscall.SIGQUIT)
			<-done
		}
	}
	args := append([]string{"server", "sweep", "--netns", c.netns}, c.dirFlags()...)
	if out, err := exec.Command(binary(c.t), args...).CombinedOutput(); err != nil {
		c.t.Errorf("sweep: %v: %s", err, out)
	}
	if c.t.Failed() {
		b, _ := os.ReadFile(filepath.Join(c.dir, "server.log"))
		if len(b) > 8000 {
			b = b[len(b)-8000:]
		}
		c.t.Logf("server log ends:\n%s", b)
	}
	if _, err := os.Stat("/run/netns/" + c.netns); err == nil {
		c.t.Errorf("network namespace %s was left behind", c.netns)
	}
}

// try runs the command line against the cluster.
func (c *cluster) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary(c.t), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.kubeconfig())
	var out, errw bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errw
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("dunlin %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errw.String()))
	}
	return out.String(), nil
}

func (c *cluster) run(args ...string) string {
	c.t.Helper()
	out, err := c.try(args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

func (c *cluster) get(what string, into any) error {
	out, err := c.try("get", what, "-o", "json")
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), into)
}

func (c *cluster) importModule(name, file string) {
	c.t.Helper()
	c.run(append([]string{"import", name, file}, c.dirFlags()[:4]...)...)
}

// apply writes the manifest to a file and applies it.
func (c *cluster) apply(manifest string) {
	c.t.Helper()
	f := filepath.Join(c.t.TempDir(), "m.yaml")
	if err := os.WriteFile(f, []byte(manifest), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.run("apply", "-f", f)
}

func (c *cluster) pods(selector string) []corev1.Pod {
	c.t.Helper()
	var l corev1.PodList
	out, err := c.try("get", "pods", "-l", selector, "-o", "json")
	if err != nil {
		c.t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(out), &l); err != nil {
		c.t.Fatal(err)
	}
	return l.Items
}

func ready(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func (c *cluster) waitReady(selector string, n int) []corev1.Pod {
	c.t.Helper()
	var list []corev1.Pod
	c.eventually(90*time.Second, fmt.Sprintf("%d pods of %s are Ready", n, selector), func() error {
		list = c.pods(selector)
		good := 0
		for i := range list {
			if ready(&list[i]) {
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

// eventually waits for a condition; it says what it last saw.
func (c *cluster) eventually(d time.Duration, what string, f func() error) {
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
			if c.cmd.ProcessState != nil {
				c.t.Fatalf("the server is not running while waiting for: %s", what)
			}
		}
	}
}

// hostPIDs are the host processes of the cluster's guests, by attempt.
func (c *cluster) hostPIDs() map[string]int {
	c.t.Helper()
	files, err := filepath.Glob(filepath.Join(c.dir, "run", "wasm", "*", "host.json"))
	if err != nil {
		c.t.Fatal(err)
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

// url of a pod's port, with and without root.
func url(p *corev1.Pod, port int) string {
	if s := p.Annotations["dunlin.dev/ports"]; s != "" {
		var m map[string]int
		if json.Unmarshal([]byte(s), &m) == nil && m[strconv.Itoa(port)] != 0 {
			port = m[strconv.Itoa(port)]
		}
	}
	return fmt.Sprintf("http://%s:%d/", p.Status.PodIP, port)
}

func httpGet(u string) (string, error) {
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

// module is one of the runtime's small test modules.
func module(name string) string {
	return filepath.Join(root, "runtime", "wasm", "testdata", name+".wasm")
}
