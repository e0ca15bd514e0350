//go:build clients

package clients

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/test/cluster"
)

const streamPods = `apiVersion: v1
kind: Pod
metadata: {name: box, labels: {app: streams}}
spec:
  nodeSelector: {kubernetes.io/hostname: hidden}
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: busybox:test
    imagePullPolicy: Never
    command: [sh, -c, "mkdir -p /www /data; head -c 1000000 /dev/urandom > /www/blob; exec httpd -f -p 127.0.0.1:8080 -h /www"]
  - {name: side, image: "busybox:test", imagePullPolicy: Never, command: [sleep, "100000"]}
---
apiVersion: v1
kind: Pod
metadata: {name: echo, labels: {app: streams}}
spec:
  nodeSelector: {kubernetes.io/hostname: hidden}
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: "busybox:test", imagePullPolicy: Never, stdin: true, command: [sh, -c, "while read x; do echo got $x; echo err $x >&2; done; sleep 100000"]}
---
apiVersion: v1
kind: Pod
metadata: {name: guest, labels: {app: streams, web: guest}}
spec:
  nodeSelector: {kubernetes.io/hostname: hidden}
  runtimeClassName: wasm
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: hello.wasm, ports: [{containerPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: cat, labels: {app: streams}}
spec:
  nodeSelector: {kubernetes.io/hostname: hidden}
  runtimeClassName: wasm
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: cat.wasm, stdin: true}
---
apiVersion: v1
kind: Service
metadata: {name: guests}
spec:
  selector: {web: guest}
  ports: [{name: web, port: 80, targetPort: 8080}]
`

// behindNAT is a cluster of a server and a node that nothing can reach, with
// pods of both runtimes.
func behindNAT(t *testing.T) (*cluster.Cluster, *cluster.Agent) {
	t.Helper()
	cluster.NeedContainers(t)
	site := cluster.NewSite(t)
	address := fmt.Sprintf("%s:%d", site.Host(), 21000+os.Getpid()%5000)
	c := cluster.NewControlPlane(t, "--listen", address, "--advertise", address)
	a := cluster.NewAgent(t, "hidden", site.NewMachineBehindNAT())
	a.ImportBusybox("busybox:test", nil)
	a.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	a.Import("cat.wasm", cluster.Module(t, "cat"))
	a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady("hidden") })
	c.Apply(streamPods)
	c.WaitReady("app=streams", 4)
	return c, a
}

// TestStreams: exec, attach, cp and port-forward into pods of a node behind a
// NAT, with kubectl over WebSocket, the same over SPDY, and kubectl 1.20.
func TestStreams(t *testing.T) {
	c, _ := behindNAT(t)
	for _, v := range []struct{ name, bin, env string }{
		{"websocket", "kubectl", ""},
		{"spdy", "kubectl", "KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false"},
		{"1.20", "kubectl-1.20", ""},
	} {
		t.Run(v.name, func(t *testing.T) {
			k := newProgram(t, c, v.bin)
			k.env = append(k.env, v.env, "KUBECTL_PORT_FORWARD_WEBSOCKETS="+map[bool]string{true: "false", false: "true"}[v.env != ""])
			k.execs()
			k.terminal()
			k.copies()
			k.attach("echo", v.name, "got "+v.name, "err "+v.name)
			k.attach("cat", v.name, v.name)
			k.forward("pod/box", "/blob", func(b []byte) bool { return len(b) == 1_000_000 })
			k.forward("pod/guest", "/", func(b []byte) bool { return bytes.Contains(b, []byte("ello")) })
			k.proxies()
			k.fails("no shell and no other programs", "exec", "guest", "--", "ls")
			k.fails("not found", "exec", "nobody", "--", "ls")
		})
	}
}

// separate runs a command and keeps its outputs apart.
func (k *kubectl) separate(stdin io.Reader, args ...string) (out, errs string, code int) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.bin, append([]string{"-n", k.ns}, args...)...)
	var o, e bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = k.env, stdin, &o, &e
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		k.t.Fatalf("kubectl %v: %v", args, err)
	}
	return o.String(), e.String(), cmd.ProcessState.ExitCode()
}

func (k *kubectl) execs() {
	k.t.Helper()
	out, errs, code := k.separate(nil, "exec", "box", "-c", "side", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
	if out != "out\n" || !strings.HasPrefix(errs, "err\n") || !strings.Contains(errs, "exit code 7") || code != 7 {
		k.t.Errorf("exec: %q, %q, code %d", out, errs, code)
	}
	if out, errs, code := k.separate(nil, "exec", "box", "-c", "side", "--", "true"); out+errs != "" || code != 0 {
		k.t.Errorf("exec of true: %q, %q, code %d", out, errs, code)
	}
	blob := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
	sum := fmt.Sprintf("%x  -\n", sha256.Sum256(blob))
	if out, errs, code := k.separate(bytes.NewReader(blob), "exec", "-i", "box", "-c", "side", "--", "sha256sum"); out != sum || code != 0 {
		k.t.Errorf("exec with input: %q, %q, code %d, want %q", out, errs, code, sum)
	}
	// A command that does not read its input ends all the same.
	if out, errs, code := k.separate(bytes.NewReader(blob), "exec", "-i", "box", "-c", "side", "--", "sh", "-c", "echo done; exit 3"); out != "done\n" || code != 3 {
		k.t.Errorf("exec that ignores its input: %q, %q, code %d", out, errs, code)
	}
	if out, _, code := k.separate(nil, "exec", "box", "-c", "side", "--", "sh", "-c", "head -c 3000000 /dev/zero"); len(out) != 3_000_000 || code != 0 {
		k.t.Errorf("exec with much output: %d bytes, code %d", len(out), code)
	}
	if out, errs, code := k.separate(nil, "exec", "box", "-c", "side", "--", "/no/such/program"); code == 0 || !strings.Contains(out+errs, "/no/such/program") {
		k.t.Errorf("exec of nothing: %q, %q, code %d", out, errs, code)
	}
}

// terminal runs a command at a terminal, whose size changes.
func (k *kubectl) terminal() {
	k.t.Helper()
	master, slave := openTerminal(k.t)
	defer master.Close()
	size := func(w, h uint16) {
		if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: w, Row: h}); err != nil {
			k.t.Fatal(err)
		}
	}
	size(91, 33)
	cmd := exec.Command(k.bin, "-n", k.ns, "exec", "-it", "box", "-c", "side", "--", "sh")
	cmd.Env = k.env
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	_ = slave.Close()
	lines := make(chan string, 1000)
	go func() {
		defer close(lines)
		s := bufio.NewScanner(master)
		for s.Scan() {
			lines <- strings.TrimSpace(s.Text())
		}
	}()
	var seen []string
	want := func(what string) {
		k.t.Helper()
		limit := time.After(30 * time.Second)
		for {
			select {
			case l, ok := <-lines:
				if seen = append(seen, l); strings.HasSuffix(l, what) {
					return
				}
				if !ok {
					k.t.Fatalf("no %q: it ended with %q", what, seen)
				}
			case <-limit:
				_ = cmd.Process.Kill()
				k.t.Fatalf("no %q: %q", what, seen)
			}
		}
	}
	fmt.Fprint(master, "tty; until stty size | grep '^33 91'; do sleep 0.1; done\n")
	want("33 91")
	size(120, 40)
	fmt.Fprint(master, "until stty size | grep '^40 120'; do sleep 0.1; done\n")
	want("40 120")
	fmt.Fprint(master, "exit 5\n")
	for range lines {
	}
	if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != 5 {
		k.t.Errorf("terminal: %v: %q", cmd.ProcessState, seen)
	}
}

func openTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	if slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	return master, slave
}

func (k *kubectl) copies() {
	k.t.Helper()
	dir := k.t.TempDir()
	blob := bytes.Repeat([]byte("a line of a file\n"), 100_000)
	for name, b := range map[string][]byte{"tree/one": blob, "tree/deep/er/two": []byte("two"), "tree/empty": nil} {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			k.t.Fatal(err)
		}
		if err := os.WriteFile(p, b, 0o644); err != nil {
			k.t.Fatal(err)
		}
	}
	k.ok("exec", "box", "-c", "side", "--", "rm", "-rf", "/data")
	k.ok("exec", "box", "-c", "side", "--", "mkdir", "/data")
	k.ok("cp", "-c", "side", filepath.Join(dir, "tree"), "box:/data/tree")
	k.ok("cp", "-c", "side", filepath.Join(dir, "tree", "one"), "box:/data/one")
	k.ok("cp", "-c", "side", "box:/data/tree", filepath.Join(dir, "back"))
	k.ok("cp", "-c", "side", "box:/data/one", filepath.Join(dir, "one"))
	if out, err := exec.Command("diff", "-r", filepath.Join(dir, "tree"), filepath.Join(dir, "back")).CombinedOutput(); err != nil {
		k.t.Errorf("the copied folder differs: %s", out)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "one")); err != nil || !bytes.Equal(b, blob) {
		k.t.Errorf("the copied file: %d bytes, %v", len(b), err)
	}
}

// attach writes to a container's own input and reads its outputs.
func (k *kubectl) attach(pod, word string, want ...string) {
	k.t.Helper()
	cmd := exec.Command(k.bin, "-n", k.ns, "attach", "-i", pod)
	cmd.Env = k.env
	in, err := cmd.StdinPipe()
	if err != nil {
		k.t.Fatal(err)
	}
	both, write, err := os.Pipe()
	if err != nil {
		k.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = write, write
	if err := cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	_ = write.Close()
	stop := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
	defer stop.Stop()
	fmt.Fprintln(in, word)
	got := map[string]bool{}
	missing := func() bool { return slices.ContainsFunc(want, func(w string) bool { return !got[w] }) }
	for s := bufio.NewScanner(both); missing() && s.Scan(); {
		got[s.Text()] = true
	}
	if missing() {
		k.t.Errorf("attach to %s: %v", pod, got)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

// once runs a port-forward while f uses it.
func (k *kubectl) once(what string, f func(address string)) {
	k.t.Helper()
	cmd := exec.Command(k.bin, "-n", k.ns, "port-forward", what, ":8080")
	cmd.Env = k.env
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		k.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	var port int
	line, err := bufio.NewReader(out).ReadString('\n')
	if _, serr := fmt.Sscanf(line, "Forwarding from 127.0.0.1:%d ->", &port); serr == nil {
		f(net.JoinHostPort("127.0.0.1", fmt.Sprint(port)))
	} else {
		k.t.Errorf("port-forward %s: %q, %v", what, line, err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if errs.Len() > 0 {
		k.t.Errorf("port-forward %s said: %s", what, errs.String())
	}
}

// forward gets a page several times at once through a port-forward.
func (k *kubectl) forward(what, path string, good func([]byte) bool) {
	k.t.Helper()
	k.once(what, func(address string) { k.fetch(what, address, path, good) })
}

func (k *kubectl) fetch(what, address, path string, good func([]byte) bool) {
	k.t.Helper()
	// One that sends nothing and stays.
	idle, err := net.Dial("tcp", address)
	if err != nil {
		k.t.Fatal(err)
	}
	defer idle.Close()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			cl := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
			for range 3 {
				resp, err := cl.Get("http://" + address + path)
				if err != nil {
					k.t.Errorf("port-forward %s: %v", what, err)
					return
				}
				b, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || !good(b) {
					k.t.Errorf("port-forward %s: %d bytes, %v", what, len(b), err)
				}
			}
		})
	}
	wg.Wait()
}

// proxies reads pages of pods through the server, and what a node tells.
func (k *kubectl) proxies() {
	k.t.Helper()
	base := "/api/v1/namespaces/default"
	for _, path := range []string{"/pods/guest/proxy/", "/pods/http:guest:8080/proxy/x?y=z", "/services/guests:80/proxy/", "/services/http:guests:web/proxy/"} {
		k.has(w("ello"), "get", "--raw", base+path)
	}
	// It listens on its loopback only, which is what port-forward is for.
	k.fails("error trying to reach service", "get", "--raw", base+"/pods/box:8080/proxy/blob")
	k.fails(`no service port 81 found for service "guests"`, "get", "--raw", base+"/services/guests:81/proxy/")
	k.fails(`cannot get resource "pods/proxy"`, "get", "--raw", base+"/pods/guest/proxy/", "--as=jane")
	k.has(w("ok"), "get", "--raw", "/api/v1/nodes/hidden/proxy/healthz")
	cmd := exec.Command(k.bin, "proxy", "--port=0")
	cmd.Env = k.env
	out, err := cmd.StdoutPipe()
	if err != nil {
		k.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if address, ok := strings.CutPrefix(strings.TrimSpace(line), "Starting to serve on "); ok {
		k.fetch("kubectl proxy", address, base+"/pods/guest/proxy/", func(b []byte) bool { return bytes.Contains(b, []byte("ello")) })
	} else {
		k.t.Errorf("kubectl proxy: %q, %v", line, err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

// TestStreamsEndWithProcesses: kill -9 of the agent or the server during an
// exec ends the client with an error, and what it had started; the node and
// its containers go on. Meanwhile a client that does not read costs neither
// side more than its window.
func TestStreamsEndWithProcesses(t *testing.T) {
	c, a := behindNAT(t)
	k := newProgram(t, c, "kubectl")
	ended := func(kill func()) string {
		t.Helper()
		cmd := exec.Command(k.bin, "exec", "box", "-c", "side", "--", "sh", "-c", "echo begun; sleep 98765")
		cmd.Env = k.env
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(out).ReadString('\n'); line != "begun\n" {
			t.Fatalf("%q, %v: %s", line, err, errs.String())
		}
		kill()
		stop := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
		defer stop.Stop()
		if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() < 1 {
			t.Errorf("the client ended with %v", cmd.ProcessState)
		}
		return errs.String()
	}
	gone := func(what string) {
		t.Helper()
		c.Eventually(time.Minute, "nothing is left of the command after "+what, func() error {
			if out, err := exec.Command("pgrep", "-f", "^sleep 98765").Output(); err == nil {
				return fmt.Errorf("processes %s", bytes.TrimSpace(out))
			}
			if left, _ := filepath.Glob(filepath.Join(a.Dir, "run", "*", "c", "*", "exec-*")); len(left) > 0 {
				return fmt.Errorf("folders %v", left)
			}
			return nil
		})
		c.Eventually(time.Minute, "exec works again", func() error {
			_, err := k.command("", "exec", "box", "-c", "side", "--", "true")
			return err
		})
	}
	if said := ended(func() { a.Stop(syscall.SIGKILL) }); !strings.Contains(said, "node") {
		t.Errorf("after kill -9 of the agent the client said %q", said)
	}
	a.Start()
	gone("kill -9 of the agent")
	ended(func() { c.Kill() })
	c.Start()
	gone("kill -9 of the server")
	if said := ended(func() { k.ok("delete", "pod", "box", "--wait=false") }); said == "" {
		t.Error("after the pod's end the client said nothing")
	}
}

// TestStreamsAreQuickAndSmall prints what 100 MB through exec and through a
// port-forward take beside a local pipe and a direct connection, and bounds
// what that costs in memory; a client that reads nothing is beside them.
func TestStreamsAreQuickAndSmall(t *testing.T) {
	c, a := behindNAT(t)
	k := newProgram(t, c, "kubectl")
	const size = 100_000_000
	before := rss(t, c.Cmd.Process.Pid) + rss(t, a.Cmd.Process.Pid)
	var stuck []*exec.Cmd
	for range 4 {
		cmd := exec.Command(k.bin, "exec", "box", "-c", "side", "--", "cat", "/dev/zero")
		cmd.Env = k.env
		if _, err := cmd.StdoutPipe(); err != nil { // never read
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		stuck = append(stuck, cmd)
	}
	began := time.Now()
	if out, _, code := k.separate(nil, "exec", "box", "-c", "side", "--", "head", "-c", fmt.Sprint(size), "/dev/zero"); len(out) != size || code != 0 {
		t.Errorf("exec: %d bytes, code %d", len(out), code)
	}
	t.Logf("100 MB out of exec: %.1f MB/s", size/1e6/time.Since(began).Seconds())
	began = time.Now()
	if out, errs, code := k.separate(io.LimitReader(zeros{}, size), "exec", "-i", "box", "-c", "side", "--", "sh", "-c", "cat | wc -c"); strings.TrimSpace(out) != fmt.Sprint(size) {
		t.Errorf("exec -i: %q, %q, code %d", out, errs, code)
	}
	t.Logf("100 MB into exec -i: %.1f MB/s", size/1e6/time.Since(began).Seconds())
	k.ok("exec", "box", "-c", "main", "--", "sh", "-c", "head -c 100000000 /dev/zero > /www/big")
	began = time.Now()
	if out, _, code := k.separate(nil, "exec", "box", "-c", "side", "--", "sh", "-c", "wget -qO- http://127.0.0.1:8080/big | wc -c"); strings.TrimSpace(out) != fmt.Sprint(size) {
		t.Errorf("direct: %q, code %d", out, code)
	}
	direct := time.Since(began)
	k.once("pod/box", func(address string) {
		began := time.Now()
		resp, err := http.Get("http://" + address + "/big")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if n, err := io.Copy(io.Discard, resp.Body); n != size || err != nil {
			t.Errorf("port-forward: %d bytes, %v", n, err)
		}
		took := time.Since(began)
		t.Logf("100 MB through port-forward: %.1f MB/s, %.1f times as long as inside the pod", size/1e6/took.Seconds(), took.Seconds()/direct.Seconds())
	})
	after := rss(t, c.Cmd.Process.Pid) + rss(t, a.Cmd.Process.Pid)
	t.Logf("server and agent: %d MiB before, %d MiB after", before>>20, after>>20)
	if after-before > 64<<20 {
		t.Errorf("memory grew by %d MiB", (after-before)>>20)
	}
	for _, cmd := range stuck {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	c.Eventually(time.Minute, "the commands of clients that are gone have ended", func() error {
		if out, err := exec.Command("pgrep", "-f", "^cat /dev/zero").Output(); err == nil {
			return fmt.Errorf("processes %s", bytes.TrimSpace(out))
		}
		return nil
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// rss is a process's resident memory, bytes.
func rss(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	var total, resident int
	if _, err := fmt.Sscan(string(b), &total, &resident); err != nil {
		t.Fatal(err)
	}
	return resident * os.Getpagesize()
}
