//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// waitLocally waits for a condition that needs no server.
func waitLocally(t *testing.T, what string, f func() error) {
	t.Helper()
	deadline := time.After(60 * time.Second)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("%s: %v", what, err)
		case <-tick.C:
		}
	}
}

// figure is one figure of a text of metrics.
func figure(text, name string) (float64, error) {
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\S+)$`).FindStringSubmatch(text)
	if m == nil {
		return 0, fmt.Errorf("no %s", name)
	}
	return strconv.ParseFloat(m[1], 64)
}

// TestOperatorOnACutOffSite: the server is gone for good, the agent boots
// offline, and who stands before the machine sees what it runs, what does not
// run and why, logs and figures.
func TestOperatorOnACutOffSite(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Import("fail.wasm", cluster.Module(t, "fail"))
	c.Apply(deployment("known", "sleep.wasm", 2, ""))
	c.Apply("apiVersion: v1\nkind: Pod\nmetadata: {name: crasher, labels: {app: crasher}}\nspec:\n  runtimeClassName: wasm\n  containers: [{name: main, image: fail.wasm}]\n")
	c.Apply("apiVersion: v1\nkind: Pod\nmetadata: {name: noimage}\nspec:\n  runtimeClassName: wasm\n  containers: [{name: main, image: nowhere.wasm, imagePullPolicy: Never}]\n")
	known := c.WaitReady("app=known", 2)
	c.Eventually(60*time.Second, "the crasher was started again", func() error {
		if p := c.Pods("app=crasher"); len(p) != 1 || len(p[0].Status.ContainerStatuses) != 1 || p[0].Status.ContainerStatuses[0].RestartCount < 1 {
			return fmt.Errorf("%v", statuses(p))
		}
		return nil
	})
	served := c.Run("get", "pods", "-A", "-o", "wide")
	c.Eventually(30*time.Second, "the server hands out the node's figures", func() error {
		text := c.Run("get", "--raw", "/api/v1/nodes/e2e/proxy/metrics")
		if n, err := figure(text, "dunlin_agent_connected"); err != nil || n != 1 {
			return fmt.Errorf("connected: %v %w", n, err)
		}
		if n, err := figure(text, `dunlin_agent_containers{state="running"}`); err != nil || n != 2 {
			return fmt.Errorf("running: %v %w", n, err)
		}
		return nil
	})
	before := c.HostPIDs()
	c.Kill()
	agent := startAgentOnly(t, c)
	defer agent()

	local := func(args ...string) (string, error) {
		return c.Try(append(args, "--local", "--run-dir", filepath.Join(c.Dir, "run"))...)
	}
	says := func(args string, want ...string) string {
		t.Helper()
		var out string
		waitLocally(t, "dunlin "+args+" --local", func() (err error) {
			if out, err = local(strings.Fields(args)...); err != nil {
				return err
			}
			for _, w := range want {
				if !regexp.MustCompile(w).MatchString(out) {
					return fmt.Errorf("no %q in:\n%s", w, out)
				}
			}
			return nil
		})
		return out
	}
	out := says("get pods -o wide", `known-\S+ +1/1 +Running`, `crasher +0/1`, `noimage +0/1 +ErrImageNeverPull`)
	header := func(s string) string {
		line, _, _ := strings.Cut(s, "\n")
		return strings.Join(strings.Fields(line), " ")
	}
	if header(out) != header(served) {
		t.Errorf("columns %q, the server's are %q", header(out), header(served))
	}
	says("get nodes", `e2e +Ready`)
	says("describe pod crasher", `Why: +container main ended with exit code 3`, `Next: +'dunlin logs crasher -c main --previous --local'`, `no such thing!`)
	says("describe pod noimage", `Why: +ErrImageNeverPull: .*nowhere.wasm`, `Next: +'dunlin import nowhere.wasm FILE.wasm'`)
	says("describe node e2e", `Control plane: out of reach since the agent started`, `connection refused`, regexp.QuoteMeta(c.Address()), `default/crasher`)
	says("get events", `pod/crasher`)
	for _, args := range []string{"logs crasher", "logs crasher -p", "logs crasher --tail 1", "logs crasher --since 1h"} {
		says(args, `^no such thing!`)
	}
	followed := make(chan string, 1)
	go func() { // ends by itself: with the attempt
		out, err := local("logs", "crasher", "-f")
		followed <- fmt.Sprint(out, err)
	}()
	if out := <-followed; !strings.HasPrefix(out, "no such thing!\n") {
		t.Errorf("followed log: %q", out)
	}
	if _, err := c.Try("get", "pods", "--run-dir", filepath.Join(c.Dir, "run")); err == nil || !strings.Contains(err.Error(), "dunlin get pods --local") {
		t.Errorf("the ordinary command names no way out: %v", err)
	}

	sock := filepath.Join(c.Dir, "run", "agent.sock")
	if info, err := os.Stat(sock); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket's permissions: %v %v", info.Mode(), err)
	}
	waitLocally(t, "figures over the socket", func() error {
		text, err := overSocket(sock, "/metrics")
		if err != nil {
			return err
		}
		for name, ok := range map[string]func(float64) bool{
			"dunlin_agent_connected":                            func(v float64) bool { return v == 0 },
			`dunlin_agent_pods{phase="Running"}`:                func(v float64) bool { return v == 3 },
			`dunlin_agent_pods{phase="Pending"}`:                func(v float64) bool { return v == 1 },
			`dunlin_agent_containers{state="running"}`:          func(v float64) bool { return v >= 2 },
			"dunlin_agent_pod_restarts":                         func(v float64) bool { return v >= 1 },
			"dunlin_agent_connects_total":                       func(v float64) bool { return v >= 1 },
			`dunlin_agent_reports_total{result="error"}`:        func(v float64) bool { return v >= 1 },
			"dunlin_agent_unreported_pods":                      func(v float64) bool { return v >= 1 },
			"dunlin_agent_store_writes_total":                   func(v float64) bool { return v >= 1 && v < 1000 },
			"dunlin_agent_store_written_bytes_total":            func(v float64) bool { return v >= 4096 && v < 100<<20 },
			`dunlin_agent_image_store_images{runtime="wazero"}`: func(v float64) bool { return v == 2 },
			`dunlin_agent_image_store_bytes{runtime="wazero"}`:  func(v float64) bool { return v > 100 },
			"process_resident_memory_bytes":                     func(v float64) bool { return v > 1<<20 },
		} {
			if v, err := figure(text, name); err != nil || !ok(v) {
				return fmt.Errorf("%s is %v %w", name, v, err)
			}
		}
		if strings.Contains(text, "crasher") {
			return errors.New("a pod's name is a label")
		}
		return nil
	})
	if text, err := overSocket(sock, "/healthz"); err != nil || text != "ok" {
		t.Errorf("health: %q %v", text, err)
	}
	// Neither the server's end nor looking disturbed what runs.
	now := c.HostPIDs()
	for _, p := range known {
		same := 0
		for id, pid := range before {
			if strings.Contains(id, string(p.UID)) && now[id] == pid {
				same++
			}
		}
		if same != 1 {
			t.Errorf("guest of %s: %v, were %v", p.Name, now, before)
		}
	}
}

func overSocket(sock, path string) (string, error) {
	cl := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", sock)
	}}}
	resp, err := cl.Get("http://agent" + path)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return string(b), err
}
