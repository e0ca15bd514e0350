//go:build e2e

package e2e

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// far is how long anything here may take on a busy machine. The node's resync
// is ten minutes: what only that would mend is a fault.
const far = 45 * time.Second

// barePod has all that an object must have to be whole.
func barePod(name string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {app: half}, annotations: {whole: "yes"}}
spec:
  runtimeClassName: wasm
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: sleep.wasm, env: [{name: ME, value: %[1]s}], resources: {requests: {cpu: 1m}, limits: {memory: 16Mi}}}
`, name)
}

func whole(p *corev1.Pod) error {
	if p.Annotations["whole"] != "yes" || len(p.Spec.Containers) != 1 || p.UID == "" || p.Generation < 1 {
		return fmt.Errorf("pod %s is not whole: %+v", p.Name, p)
	}
	c := p.Spec.Containers[0]
	if c.Image != "sleep.wasm" || len(c.Env) != 1 || c.Env[0].Value != p.Name || c.Resources.Limits.Memory().String() != "16Mi" {
		return fmt.Errorf("pod %s is not whole: %+v", p.Name, c)
	}
	return nil
}

// during runs the command line against the cluster and calls f in the middle
// of it; how the command ends is its own affair.
func during(t *testing.T, c *cluster.Cluster, after time.Duration, f func(*exec.Cmd), args ...string) {
	t.Helper()
	cmd := exec.Command(cluster.Binary(t), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pause(t, after)
	f(cmd)
	_ = cmd.Wait()
}

// TestKilledDuringAnApply kills the server, with its node, at a random moment
// of an apply of 20 pods. Each pod is there as a whole or not at all, and all
// can be deleted: none waits for the node's resync.
func TestKilledDuringAnApply(t *testing.T) {
	const pods = 20
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	var docs []string
	for i := range pods {
		docs = append(docs, barePod(fmt.Sprintf("half-%02d", i)))
	}
	file := filepath.Join(t.TempDir(), "pods.yaml")
	if err := os.WriteFile(file, []byte(strings.Join(docs, "---\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range loops(5) {
		after := rand.N(800 * time.Millisecond)
		during(t, c, after, func(*exec.Cmd) { c.Kill() }, "apply", "-f", file)
		c.Start()
		there := c.Pods("app=half")
		for j := range there {
			if err := whole(&there[j]); err != nil {
				t.Fatalf("round %d: %v", i, err)
			}
		}
		start := time.Now()
		c.Run("delete", "pods", "-l", "app=half", "--wait=false")
		c.Eventually(far, "all pods are gone", func() error {
			if left := c.Pods("app=half"); len(left) > 0 {
				return fmt.Errorf("round %d, killed after %s: of %d pods %d are left, as %s: generation %d, observed %d, %+v", i, after, len(there), len(left),
					left[0].Name, left[0].Generation, left[0].Status.ObservedGeneration, left[0].Status)
			}
			if n := len(c.HostPIDs()); n > 0 {
				return fmt.Errorf("round %d: %d guests run without a pod", i, n)
			}
			return nil
		})
		t.Logf("round %d: killed after %s with %d pods; gone %.1f s after their deletion", i, after.Round(time.Millisecond), len(there), time.Since(start).Seconds())
	}
}

// fresh is the module with other bytes in it that mean nothing, so that it is
// read and compiled as a new one.
func fresh(t *testing.T, module string) string {
	t.Helper()
	b, err := os.ReadFile(module)
	if err != nil {
		t.Fatal(err)
	}
	section := []byte{0, 10, 1, 'x'} // a custom section of 10 bytes named x
	section = binary.LittleEndian.AppendUint64(section, rand.Uint64())
	to := filepath.Join(t.TempDir(), "fresh.wasm")
	if err := os.WriteFile(to, append(b, section...), 0o644); err != nil { //nolint:gosec // the agent reads it
		t.Fatal(err)
	}
	return to
}

// store says what is wrong with the node's modules: every one is what its
// name says, and nothing half-made is left.
func store(dir string) error {
	root := filepath.Join(dir, "state", "wasm")
	for _, p := range []string{"modules/blobs/sha256/.*", "modules/names/.*", "compiled/.*", "modules/blobs/sha256/*.damaged"} {
		if left, err := filepath.Glob(filepath.Join(root, p)); err != nil || len(left) > 0 {
			return fmt.Errorf("left over: %v, %v", left, err)
		}
	}
	blobs, err := filepath.Glob(filepath.Join(root, "modules", "blobs", "sha256", "*"))
	if err != nil || len(blobs) == 0 {
		return fmt.Errorf("modules: %v, %w", blobs, err)
	}
	for _, p := range blobs {
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != filepath.Base(p) {
			return fmt.Errorf("%s is not what its name says", p)
		}
	}
	return nil
}

// compilers counts the processes that compile for the node.
func compilers(dir string) (n int) {
	all, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, p := range all {
		cwd, err := os.Readlink(p)
		if err == nil && strings.HasPrefix(cwd, filepath.Join(dir, "state", "wasm", "compiled")) {
			n++
		}
	}
	return n
}

// TestKilledDuringAnImport kills the command that imports, and an agent that
// takes a module from a file by itself, at random moments; then again. The
// store is whole, nothing half-made stays, and nothing goes on compiling for
// nobody.
func TestKilledDuringAnImport(t *testing.T) {
	c := cluster.New(t)
	args := func(file string) []string {
		return append([]string{"import", "app.wasm", file}, c.DirFlags()[:4]...)
	}
	for i := range loops(10) {
		file := fresh(t, cluster.Module(t, "chello"))
		after := rand.N(400 * time.Millisecond)
		if i == 0 { // a large one, in the middle of its compilation
			file, after = fresh(t, example(t, "hello.wasm")), time.Second
		}
		during(t, c, after, func(cmd *exec.Cmd) { _ = cmd.Process.Kill() }, args(file)...)
		c.Eventually(far, "nobody compiles", func() error {
			if n := compilers(c.Dir); n > 0 {
				return fmt.Errorf("round %d, killed after %s: %d processes compile", i, after, n)
			}
			return nil
		})
		file = fresh(t, cluster.Module(t, "chello"))
		// A process that ends has no name before it has closed its files: it may
		// still hold what the next import would remove, and the one after does.
		c.Eventually(far, "nothing is left over", func() error {
			c.Run(args(file)...)
			if err := store(c.Dir); err != nil {
				return fmt.Errorf("round %d, killed after %s: %w", i, after, err)
			}
			return nil
		})
	}
	for i := range loops(3) {
		file := fresh(t, cluster.Module(t, "sleep"))
		if err := os.Chmod(filepath.Dir(file), 0o755); err != nil { //nolint:gosec // nothing but the module is there
			t.Fatal(err)
		}
		name := fmt.Sprintf("byfile%d", i)
		c.Apply(deployment(name, "file://"+file, 1, ""))
		pause(t, rand.N(300*time.Millisecond))
		c.Kill()
		c.Start()
		if p := c.WaitReady("app="+name, 1); p[0].Status.ContainerStatuses[0].RestartCount != 0 {
			t.Fatalf("round %d: %+v", i, p[0].Status)
		}
		c.Eventually(far, "the store is whole", func() error { return store(c.Dir) })
	}
}

const (
	rolling = 4           // replicas
	floor   = rolling - 1 // of available pods: maxUnavailable is 1
)

func rollingVersion(version string) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: rolling}
spec:
  replicas: %d
  minReadySeconds: 1
  strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 1}}
  selector: {matchLabels: {app: rolling}}
  template:
    metadata: {labels: {app: rolling}}
    spec:
      runtimeClassName: wasm
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 1
      containers: [{name: main, image: sleep.wasm, env: [{name: VERSION, value: %q}], resources: {requests: {cpu: 1m}}}]
`, rolling, version)
}

// belowFloor looks again and again at the pods and the guests, until stop is
// called, which says when there were too few. While no server answers only
// the guests are seen.
func belowFloor(c *cluster.Cluster, guests func() map[string]int) (stop func() error) {
	quit, done := make(chan struct{}), make(chan error, 1)
	go func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		var worst error
		for {
			if n := len(guests()); n < floor && worst == nil {
				worst = fmt.Errorf("%d guests run", n)
			}
			var l corev1.PodList
			if out, err := c.Try("get", "pods", "-l", "app=rolling", "-o", "json"); err == nil && json.Unmarshal([]byte(out), &l) == nil {
				n := 0
				for i := range l.Items {
					if p := &l.Items[i]; cluster.Ready(p) && p.DeletionTimestamp == nil {
						n++
					}
				}
				if n < floor && worst == nil {
					worst = fmt.Errorf("%d pods are ready: %s", n, out)
				}
			}
			select {
			case <-quit:
				done <- worst
				return
			case <-tick.C:
			}
		}
	}()
	return func() error {
		close(quit)
		return <-done
	}
}

// rollThrough updates the deployment, has kill end a process in the middle
// of it and start it again, and wants the rollout to end as if nothing had
// been.
func rollThrough(t *testing.T, c *cluster.Cluster, guests func() map[string]int, version string, kill func()) {
	t.Helper()
	stop := belowFloor(c, guests)
	start := time.Now()
	c.Apply(rollingVersion(version))
	pause(t, rand.N(2*time.Second))
	at := time.Since(start)
	kill()
	c.Run("rollout", "status", "deploy/rolling", "--timeout", "60s")
	t.Logf("killed after %.1f s, rolled out after %.1f s", at.Seconds(), time.Since(start).Seconds())
	if err := stop(); err != nil {
		t.Errorf("killed after %s: below the floor of %d: %v", at, floor, err)
	}
	c.Eventually(far, "the old pods are gone", func() error {
		if n := len(c.Pods("app=rolling")); n != rolling || len(guests()) != rolling {
			return fmt.Errorf("%d pods, %d guests", n, len(guests()))
		}
		return nil
	})
	for _, p := range c.WaitReady("app=rolling", rolling) {
		if v := p.Spec.Containers[0].Env[0].Value; v != version || p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("killed after %s: pod %s has version %s and %d restarts", at, p.Name, v, p.Status.ContainerStatuses[0].RestartCount)
		}
	}
}

// TestKilledDuringARollingUpdate kills the server alone, the agent alone, and
// both in one process.
func TestKilledDuringARollingUpdate(t *testing.T) {
	t.Run("apart", func(t *testing.T) {
		t.Parallel()
		c := cluster.NewControlPlane(t)
		a := cluster.NewAgent(t, "n1", nil)
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		var line string
		c.Eventually(far, "a join line", func() (err error) { line, err = c.Try("token", "create"); return err })
		a.Start("--join", strings.TrimSpace(line))
		c.Eventually(far, "it is Ready", func() error { return c.NodeReady("n1") })
		c.Apply(rollingVersion("first"))
		c.WaitReady("app=rolling", rolling)
		for i := range loops(1) {
			rollThrough(t, c, a.HostPIDs, fmt.Sprintf("server%d", i), func() { c.Kill(); c.Start() })
			rollThrough(t, c, a.HostPIDs, fmt.Sprintf("agent%d", i), func() { a.Stop(syscall.SIGKILL); a.Start() })
		}
	})
	t.Run("together", func(t *testing.T) {
		t.Parallel()
		c := cluster.New(t)
		c.Import("sleep.wasm", cluster.Module(t, "sleep"))
		c.Apply(rollingVersion("first"))
		c.WaitReady("app=rolling", rolling)
		for i := range loops(2) {
			rollThrough(t, c, c.HostPIDs, fmt.Sprintf("both%d", i), func() { c.Kill(); c.Start() })
		}
	})
}

// slowly opens a connection to the API as the administrator and sends that
// and no more.
func slowly(t *testing.T, c *cluster.Cluster, cert *tls.Certificate, text string) net.Conn {
	t.Helper()
	conf := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // the test's own server
	if cert != nil {
		conf.Certificates = []tls.Certificate{*cert}
	}
	var conn net.Conn
	var err error
	if text == "" { // not even a handshake
		conn, err = net.Dial("tcp", c.Address())
	} else if conn, err = tls.Dial("tcp", c.Address(), conf); err == nil {
		_, err = io.WriteString(conn, text)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// TestSlowClientsAreCut: clients that never finish a handshake, a header or a
// body, and one with endless headers, hold up nobody and are cut.
func TestSlowClientsAreCut(t *testing.T) {
	c := cluster.NewControlPlane(t)
	kc, err := client.Load(c.Kubeconfig(), "")
	if err != nil {
		t.Fatal(err)
	}
	admin, err := tls.X509KeyPair(kc.Cert, kc.Key)
	if err != nil {
		t.Fatal(err)
	}
	const path = "/api/v1/namespaces/default/configmaps"
	post := func(query string) string {
		return "POST " + path + query + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"kind\":"
	}
	var conns []net.Conn
	for range 50 {
		conns = append(conns,
			slowly(t, c, nil, ""),
			slowly(t, c, nil, "GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "),
			slowly(t, c, &admin, post("?timeout=8s")),
			slowly(t, c, nil, post("?timeout=8s"))) // anonymous
	}
	for range 10 {
		c.Run("get", "namespaces") // others are served meanwhile
	}
	endless := slowly(t, c, &admin, "GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
	_ = endless.SetDeadline(time.Now().Add(far))
	for err = nil; err == nil; {
		_, err = io.WriteString(endless, strings.Repeat("x", 64<<10))
	}
	if os.IsTimeout(err) {
		t.Error("endless headers are read without end")
	}
	for i, conn := range conns {
		_ = conn.SetReadDeadline(time.Now().Add(far))
		if _, err := io.Copy(io.Discard, conn); os.IsTimeout(err) {
			t.Fatalf("connection %d is kept for %s", i, far)
		}
	}
	c.Run("get", "namespaces")
}
