//go:build e2e

package e2e

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// residentKB is what a process has in memory.
func residentKB(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no VmRSS of process %d", pid)
	return 0
}

// TestStory06Watches: one identity opens watches until it is refused, and
// reads none of them. It gets half of the places and then 429 with a
// Retry-After; everybody else is served, watches included; what changes
// meanwhile is not kept for those who do not read: their connections are cut,
// and the server's memory stays bounded.
func TestStory06Watches(t *testing.T) {
	const places, body = 5000, 64 << 10 // half of the server's places for watches
	const token = "the-token-of-greedy"
	file := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte(auth.HashToken(token)+" greedy system:masters\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := cluster.NewControlPlane(t, "--token-file", file)
	cl, err := client.New(c.Kubeconfig(), "story")
	if err != nil {
		t.Fatal(err)
	}
	before := residentKB(t, c.Cmd.Process.Pid)
	conf := &tls.Config{InsecureSkipVerify: true, ClientSessionCache: tls.NewLRUClientSessionCache(8)} //nolint:gosec // the test's own server
	var open []net.Conn
	var refused *http.Response
	// The kernel takes little for them, so that they are slow from the start.
	narrow := &tls.Dialer{Config: conf, NetDialer: &net.Dialer{Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
	}}}
	for len(open) <= places+10 && refused == nil {
		conn, err := narrow.DialContext(t.Context(), "tcp", c.Address())
		if err != nil {
			t.Fatalf("after %d watches: %v", len(open), err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		_, err = io.WriteString(conn, "GET /api/v1/namespaces/default/configmaps?watch=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+token+"\r\n\r\n")
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), nil)
		if err != nil {
			t.Fatalf("after %d watches: %v", len(open), err)
		}
		switch resp.StatusCode {
		case http.StatusOK:
			open = append(open, conn)
		case http.StatusTooManyRequests:
			refused = resp
		default:
			t.Fatalf("after %d watches: %s", len(open), resp.Status)
		}
	}
	if refused == nil || len(open) != places || refused.Header.Get("Retry-After") == "" {
		t.Fatalf("%d watches are open, then %+v", len(open), refused)
	}
	t.Logf("%d watches, %d MiB, were %d", len(open), residentKB(t, c.Cmd.Process.Pid)>>10, before>>10)

	// Others watch and write meanwhile.
	seen := make(chan error, 1)
	go func() { seen <- lastSeen(t, cl) }()
	for i := range 24 {
		c.Apply(fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: big}\ndata: {turn: '%d', text: '%s'}\n", i, strings.Repeat(string(rune('a'+i)), body)))
		c.Run("get", "namespaces")
	}
	c.Apply("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: big}\ndata: {turn: last}\n")
	select {
	case err := <-seen:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("who reads does not hear of the last write")
	}
	after := residentKB(t, c.Cmd.Process.Pid)
	t.Logf("1.5 MiB were written to %d watches that nobody reads: %d MiB", len(open), after>>10)
	if most := before + 1<<20; after > most { // all of it for each were 7.5 GiB
		t.Errorf("the server has %d MiB, at most %d", after>>10, most>>10)
	}
	c.Eventually(3*time.Minute, "who does not read is cut", func() error {
		// All of them: the next lines read, and whoever reads is not cut.
		if n := established(t, c.Cmd.Process.Pid, open); n > 0 {
			return fmt.Errorf("the server still has %d of their connections", n)
		}
		return nil
	})
	for i, conn := range open {
		_ = conn.SetReadDeadline(time.Now().Add(far))
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("watch %d is still open", i)
		}
	}
	c.Run("get", "namespaces")
}

// established counts the connections that are open at the server's end. A
// client that does not read does not hear of the other end.
func established(t *testing.T, server int, conns []net.Conn) (n int) {
	t.Helper()
	ports := map[int64]bool{}
	for _, c := range conns {
		if a, ok := c.LocalAddr().(*net.TCPAddr); ok {
			ports[int64(a.Port)] = true
		}
	}
	for _, file := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", server, file))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line) // sl local remote st ...; 01 is ESTABLISHED (proc(5))
			if len(f) < 4 || f[3] != "01" {
				continue
			}
			if _, hex, ok := strings.Cut(f[2], ":"); ok {
				if port, err := strconv.ParseInt(hex, 16, 32); err == nil && ports[port] {
					n++
				}
			}
		}
	}
	return n
}

// lastSeen watches the ConfigMap until its last content.
func lastSeen(t *testing.T, cl *client.Client) error {
	err := cl.Watch(t.Context(), "/api/v1/namespaces/default/configmaps", nil, client.JSON, func(_ string, o json.RawMessage) (bool, error) {
		var m struct{ Data map[string]string }
		err := json.Unmarshal(o, &m)
		return m.Data["turn"] != "last", err
	})
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	return nil
}

// TestStory09RolloutDuringNodeFailure: a machine dies in the middle of a
// rolling update whose pods a budget guards. No budget holds a dead machine;
// there are never more pods than the surge allows, the rollout takes no ready
// pod below its floor, and it ends without the machine.
func TestStory09RolloutDuringNodeFailure(t *testing.T) {
	const pods, surge = 6, 2
	c := newCrew(t, pods)
	apply := func(m string) {
		t.Helper()
		if _, err := c.TryIn(0, m, "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
	}
	apply("apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: app}\nspec: {maxUnavailable: 0, selector: {matchLabels: {app: app}}}\n")
	d := strings.Replace(deployment("app", "sleep.wasm", pods, ", env: [{name: V, value: '2'}]"), "{app: app}}\n    spec:",
		"{app: app}, annotations: {dunlin.dev/placement: spread}}\n    spec:\n      terminationGracePeriodSeconds: 1", 1)
	apply(strings.Replace(d, "  replicas: 6\n", "  replicas: 6\n  strategy: {rollingUpdate: {maxSurge: 2, maxUnavailable: 1}}\n", 1))
	counted := func() (all, ready, fresh int) {
		list, err := podsOf(c.Servers, 0, "app=app")
		if err != nil {
			return 0, pods, 0
		}
		for i := range list {
			p := &list[i]
			lost := false
			for _, x := range p.Status.Conditions {
				lost = lost || x.Type == "DisruptionTarget" && x.Reason == "NodeUnreachable"
			}
			if p.DeletionTimestamp != nil || lost {
				continue
			}
			all++
			if cluster.Ready(p) {
				ready++
			}
			if len(p.Spec.Containers[0].Env) > 0 {
				fresh++
			}
		}
		return all, ready, fresh
	}
	c.Eventually(time.Minute, "the rollout has begun", func() error {
		if _, _, fresh := counted(); fresh == 0 {
			return errors.New("no new pod")
		}
		return nil
	})
	dead, _ := c.busy(1)
	gone := len(dead.HostPIDs())
	dead.Kill()
	floor := pods - 1 - gone // what died with the machine is not the rollout's doing
	c.Eventually(3*time.Minute, "the rollout ends without the machine", func() error {
		all, ready, fresh := counted()
		if all > pods+surge {
			t.Fatalf("%d pods", all)
		}
		if ready < floor {
			t.Fatalf("%d are Ready, at least %d", ready, floor)
		}
		var now appsv1.Deployment
		out, err := c.Try(0, "get", "deploy", "app", "-o", "json")
		if err == nil {
			err = json.Unmarshal([]byte(out), &now)
		}
		if err != nil || now.Status.AvailableReplicas != pods || now.Status.UpdatedReplicas != pods || fresh != pods {
			return fmt.Errorf("%d pods, %d Ready, %d new, %+v, %v", all, ready, fresh, now.Status, err)
		}
		list, err := podsOf(c.Servers, 0, "app=app")
		for _, p := range list {
			if p.Spec.NodeName == dead.Name && cluster.Ready(&p) {
				// A quick rollout is over before the end of the machine shows.
				return fmt.Errorf("%s is Ready on the dead machine", p.Name)
			}
		}
		return err
	})
	if _, err := c.Try(0, "rollout", "status", "deploy/app", "--timeout", "30s"); err != nil {
		t.Error(err)
	}
	dead.Start()
}
