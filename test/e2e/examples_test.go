//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
	"github.com/dunlin-project/dunlin/test/unused"
)

// example is a module that 'make examples' built.
func example(t *testing.T, name string) string {
	t.Helper()
	p := filepath.Join(cluster.Root(t), "bin", "examples", name)
	if _, err := os.Stat(p); err != nil {
		if name == "hello.wasm" || name == "journal.wasm" || strings.HasPrefix(name, "neverready") {
			t.Fatalf("%v: run 'make examples'", err)
		}
		t.Skipf("SKIPPED, %v: its compiler is not installed (test/setup.sh installs it as root)", err)
	}
	return p
}

// manifest is a file or folder of the examples.
func manifest(t *testing.T, parts ...string) string {
	t.Helper()
	return filepath.Join(append([]string{cluster.Root(t), "examples"}, parts...)...)
}

// TestExamples applies each example as its README says, on one cluster.
func TestExamples(t *testing.T) {
	c := cluster.New(t)
	t.Run("hello", func(t *testing.T) { helloExample(t, c) })
	t.Run("sensor", func(t *testing.T) { sensorExample(t, c) })
	t.Run("crashloop", func(t *testing.T) { crashloopExample(t, c) })
	t.Run("outbound-http", func(t *testing.T) { outboundExample(t, c) })
	t.Run("mqtt", func(t *testing.T) { mqttExample(t, c) })
	t.Run("neverready", func(t *testing.T) { neverreadyExample(t, c) })
}

func helloExample(t *testing.T, c *cluster.Cluster) {
	c.Import("hello.wasm", example(t, "hello.wasm"))
	c.Run("apply", "-f", manifest(t, "hello"))
	c.Run("rollout", "status", "deploy/hello", "--timeout", "90s")
	pods := c.WaitReady("app=hello", 2)
	for i := range pods {
		got, err := cluster.HTTPGet(cluster.URL(&pods[i], 8080))
		if err != nil || !strings.HasPrefix(got, "Hello from "+pods[i].Name+" (version 1") {
			t.Fatalf("%q, %v", got, err)
		}
		if log := c.Run("logs", pods[i].Name); !strings.Contains(log, "serving version 1") || !strings.Contains(log, "GET /") {
			t.Fatalf("log: %q", log)
		}
	}
	if out := c.Run("get", "endpointslices", "-l", "kubernetes.io/service-name=hello"); !strings.Contains(out, pods[0].Status.PodIP) {
		t.Fatalf("the Service does not know its pods: %s", out)
	}
	if out := c.Run("apply", "-f", manifest(t, "hello")); strings.Count(out, "unchanged") != 2 {
		t.Fatalf("applied again: %s", out)
	}
	c.Run("scale", "deploy/hello", "--replicas=1")
	c.WaitReady("app=hello", 1)
	c.Run("delete", "-f", manifest(t, "hello"), "--timeout", "60s")
}

func sensorExample(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	c.Import("sensor.wasm", example(t, "sensor.wasm"))
	c.Run("apply", "-f", manifest(t, "sensor"))
	pods := c.WaitReady("app=sensor", 1)
	file := filepath.Join(c.Dir, "state", "volumes", string(pods[0].UID), "data", "readings.csv")
	reading := regexp.MustCompile(`(?m)^\d{10},\d+\.\d{3}$`)
	c.Eventually(30*time.Second, "readings on the volume", func() error {
		found, err := filepath.Glob(file)
		if err != nil || len(found) != 1 {
			return fmt.Errorf("files %v, %v", found, err)
		}
		b, err := os.ReadFile(found[0])
		if n := len(reading.FindAll(b, -1)); err != nil || n < 2 {
			return fmt.Errorf("%d readings in %q, %v", n, b, err)
		}
		return nil
	})
	if log := c.Run("logs", "deploy/sensor"); !strings.Contains(log, "readings, the last one") {
		t.Fatalf("log: %q", log)
	}
	c.Run("delete", "-f", manifest(t, "sensor"), "--timeout", "60s")
	c.Eventually(30*time.Second, "the volume goes with the pod", func() error {
		if found, _ := filepath.Glob(file); len(found) != 0 {
			return fmt.Errorf("%v", found)
		}
		return nil
	})
}

func crashloopExample(t *testing.T, c *cluster.Cluster) {
	c.Import("crashloop.wasm", example(t, "crashloop.wasm"))
	c.Run("apply", "-f", manifest(t, "crashloop"))
	c.Eventually(60*time.Second, "it backs off", func() error {
		if out := c.Run("get", "pod", "crashloop"); !strings.Contains(out, "CrashLoopBackOff") {
			return errors.New(out)
		}
		return nil
	})
	out := c.Run("describe", "pod", "crashloop")
	for _, want := range []string{"Why:", "exit code 7", "back-off", "cannot reach the database", "Next:", "--previous"} {
		if !strings.Contains(out, want) {
			t.Errorf("describe does not say %q:\n%s", want, out)
		}
	}
	if log := c.Run("logs", "crashloop", "--previous"); !strings.Contains(log, "cannot reach the database: giving up!") {
		t.Errorf("log of the run before: %q", log)
	}
	c.Run("delete", "pod", "crashloop", "--timeout", "30s")
}

func neverreadyExample(t *testing.T, c *cluster.Cluster) {
	c.Import("neverready-1.wasm", example(t, "neverready-1.wasm"))
	c.Import("neverready-2.wasm", example(t, "neverready-2.wasm"))
	c.Run("apply", "-f", manifest(t, "neverready", "v1.yaml"))
	before := map[string]bool{} // waited for by pods: a slow machine may miss the deadline
	for _, p := range c.WaitReady("app=neverready", 3) {
		before[p.Name] = true
	}
	c.Run("apply", "-f", manifest(t, "neverready", "v2.yaml"))
	if _, err := c.Try("rollout", "status", "deploy/neverready", "--timeout", "90s"); err == nil || !strings.Contains(err.Error(), "exceeded its progress deadline") {
		t.Fatalf("rollout status: %v", err)
	}
	serving := 0
	for _, p := range c.Pods("app=neverready") {
		if !before[p.Name] {
			if cluster.Ready(&p) {
				t.Errorf("the broken pod %s is Ready", p.Name)
			}
			out := c.Run("describe", "pod", p.Name)
			if !strings.Contains(out, "Why:") || !strings.Contains(out, "503") {
				t.Errorf("describe does not say what the probe gets:\n%s", out)
			}
			continue
		}
		got, err := cluster.HTTPGet(cluster.URL(&p, 8080))
		if err != nil || !strings.Contains(got, "version 1") {
			t.Errorf("%s: %q, %v", p.Name, got, err)
		}
		serving++
	}
	if serving != 3 {
		t.Errorf("%d old pods serve, want 3", serving)
	}
	c.Run("rollout", "undo", "deploy/neverready")
	c.Run("rollout", "status", "deploy/neverready", "--timeout", "60s")
	for _, p := range c.WaitReady("app=neverready", 3) {
		if !before[p.Name] {
			t.Errorf("undo replaced a healthy pod by %s", p.Name)
		}
	}
	if out := c.Run("rollout", "history", "deploy/neverready"); !strings.Contains(out, "neverready-2.wasm") {
		t.Errorf("history: %s", out)
	}
	c.Run("delete", "deploy", "neverready", "--timeout", "60s")
}

// TestRunInTheForeground is 'dunlin run': exit codes, mounts, limits, ports.
func TestRunInTheForeground(t *testing.T) {
	cache := "XDG_CACHE_HOME=" + t.TempDir()
	run := func(args ...string) (string, int) {
		t.Helper()
		cmd := exec.Command("timeout", append([]string{"60", cluster.Binary(t), "run"}, args...)...)
		cmd.Env = append(os.Environ(), "DUNLIN_CONFIG=/dev/null", cache)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	for name, f := range map[string]struct {
		args []string
		code int
		says string
	}{
		"exit code":       {[]string{cluster.Module(t, "fail")}, 3, "no such thing!"},
		"trap":            {[]string{cluster.Module(t, "trap")}, 134, "out of bounds memory access in read_sample"},
		"missing imports": {[]string{cluster.Module(t, "imports")}, 1, "env.read_sensor, spin.http_send"},
		"no file":         {[]string{"/nonexistent.wasm"}, 1, "no such file"},
		"no module":       {nil, 2, "Usage: dunlin run"},
		"bad mount":       {[]string{cluster.Module(t, "fail"), "--mount", "x"}, 2, "HOST:GUEST"},
		"bad memory":      {[]string{cluster.Module(t, "fail"), "--memory", "lots"}, 2, "64Mi"},
		"library":         {[]string{cluster.Module(t, "library")}, 1, "_start"},
	} {
		t.Run(name, func(t *testing.T) {
			out, code := run(f.args...)
			if code != f.code || !strings.Contains(out, f.says) {
				t.Fatalf("exit %d: %s; want %d and %q", code, out, f.code, f.says)
			}
		})
	}
}

// outboundExample calls the address of the machine that the node's own DNS and
// the manifest's annotation lead to: here a server of the test, by an entry for
// just its address.
func outboundExample(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("from the API")) }))
	defer srv.Close()
	c.Import("outbound-http.wasm", example(t, "outbound-http.wasm"))
	text, err := os.ReadFile(manifest(t, "outbound-http", "deployment.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	addr := srv.Listener.Addr().String()
	m := strings.ReplaceAll(strings.ReplaceAll(string(text), "http://hello.default.svc.cluster.local/", srv.URL), "hello.default.svc.cluster.local:80", addr)
	c.Apply(m)
	said := func(want string) {
		t.Helper()
		c.Eventually(90*time.Second, "the guest says "+want, func() error {
			out, err := c.Try("logs", "deploy/outbound-http")
			if err == nil && !strings.Contains(out, want) {
				err = errors.New(out)
			}
			return err
		})
	}
	said("200 OK: from the API")
	c.Apply(strings.Replace(m, "dunlin.dev/outbound: "+addr, "dunlin.dev/outbound: api.example.com:443", 1))
	c.Run("rollout", "status", "deploy/outbound-http", "--timeout", "90s")
	said("annotate the pod with dunlin.dev/outbound")
	if out, err := c.TryIn(strings.Replace(m, "dunlin.dev/outbound: "+addr, "dunlin.dev/outbound: 10.0.0.1/8:443", 1), "apply", "-f", "-"); err == nil || !strings.Contains(err.Error()+out, "10.0.0.1/8 is an address in a range; the range is 10.0.0.0/8") {
		t.Errorf("%v %s", err, out)
	}
	c.Run("delete", "deploy/outbound-http", "--timeout", "60s")
}

func mqttExample(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	if _, err := exec.LookPath("mosquitto"); err != nil {
		t.Skip("SKIPPED: mosquitto is not installed (test/setup.sh installs it as root)")
	}
	addr := unused.Port(t).String()
	_, port, _ := net.SplitHostPort(addr)
	conf := filepath.Join(t.TempDir(), "conf")
	if err := os.WriteFile(conf, []byte("listener "+port+" 127.0.0.1\nallow_anonymous true\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	broker := exec.Command("mosquitto", "-c", conf)
	if err := broker.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = broker.Process.Kill(); _ = broker.Wait() }()
	c.Import("mqtt.wasm", example(t, "mqtt.wasm"))
	text, err := os.ReadFile(manifest(t, "mqtt", "mqtt.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	c.Apply(strings.ReplaceAll(string(text), "broker.example:1883", addr))
	out, err := exec.Command("mosquitto_sub", "-p", port, "-t", "site/reading", "-C", "1", "-W", "60").Output()
	if err != nil || !strings.HasPrefix(string(out), "reading ") {
		t.Fatalf("%q %v: %s", out, err, c.Run("logs", "mqtt"))
	}
	c.Run("delete", "pod", "mqtt", "--timeout", "60s")
}
