//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

const box = `apiVersion: v1
kind: Pod
metadata: {name: box, labels: {app: box}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: "busybox:test", imagePullPolicy: Never, ports: [{containerPort: 8080}],
     command: [sh, -c, "mkdir /www; echo page > /www/index.html; exec httpd -f -p 8080 -h /www"]}
`

// TestStreamsThroughFollowers: exec, port-forward and the proxy of pods by way
// of a server that does not lead. When the leader is killed, the server that serves the
// client says what happened, and the next exec works.
func TestStreamsThroughFollowers(t *testing.T) {
	cluster.NeedContainers(t)
	c := cluster.NewServers(t, 3)
	a := cluster.NewAgent(t, "n1", nil)
	a.ImportBusybox("busybox:test", nil)
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady(0, "n1") })
	if _, err := c.TryIn(0, box, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	c.Eventually(time.Minute, "the pod is Ready", func() error {
		list, err := podsOf(c, 0, "app=box")
		if err != nil || len(list) != 1 || !cluster.Ready(&list[0]) {
			return fmt.Errorf("%d pods, %v", len(list), err)
		}
		return nil
	})
	leader := c.Leader()
	follower := (leader + 1) % 3
	text := strings.Repeat("line\n", 50_000)
	if out, err := c.TryIn(follower, text, "exec", "-i", "box", "--", "sh", "-c", "cat; echo end"); err != nil || out != text+"end\n" {
		t.Errorf("exec: %d bytes, %v", len(out), err)
	}
	if _, err := c.Try(follower, "exec", "nobody", "--", "true"); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("exec in no pod: %v", err)
	}
	c.Eventually(time.Minute, "the page by way of each server", func() error {
		for i := range c.List {
			if out, err := c.Try(i, "get", "--raw", "/api/v1/namespaces/default/pods/box/proxy/"); err != nil || out != "page\n" {
				return fmt.Errorf("server %d: %q, %v", i, out, err)
			}
		}
		return nil
	})

	_, lines, stop := besideOf(t, c.Kubeconfig(follower), "port-forward", "box", ":8080", "--address", "127.0.0.1")
	line := <-lines
	address, ok := strings.CutPrefix(strings.TrimSuffix(line, " -> 8080"), "Forwarding from ")
	if !ok {
		t.Fatalf("%q", line)
	}
	for range 3 {
		if got := fetch(t, address); got != "page\n" {
			t.Errorf("forwarded by a follower: %q", got)
		}
	}
	stop(0)

	cmd := exec.Command(cluster.Binary(t), "exec", "box", "--", "sh", "-c", "echo begun; sleep 100000")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig(follower))
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	if line, err = bufio.NewReader(out).ReadString('\n'); line != "begun\n" {
		t.Fatalf("%q, %v: %s", line, err, errs.String())
	}
	c.List[leader].Stop(syscall.SIGKILL)
	if err := cmd.Wait(); err == nil || !strings.Contains(errs.String(), "another server leads now") {
		t.Errorf("after the leader was killed: %v: %s", err, errs.String())
	}
	c.Eventually(time.Minute, "exec works again", func() error {
		out, err := c.Try(follower, "exec", "box", "--", "echo", "again")
		if err != nil || out != "again\n" {
			return fmt.Errorf("%q, %v", out, err)
		}
		return nil
	})
}
