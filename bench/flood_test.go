//go:build bench

package bench

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// p99 is that of reads by another identity, one after the other.
func p99(t *testing.T, cl *client.Client) time.Duration {
	t.Helper()
	const reads = 2000
	all := make([]time.Duration, 0, reads)
	for range reads {
		start := time.Now()
		body, err := cl.Do(t.Context(), client.Request{Method: http.MethodGet, Path: "/api/v1/namespaces/kube-system"})
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(io.Discard, body)
		_ = body.Close()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, time.Since(start))
	}
	slices.Sort(all)
	return all[reads*99/100]
}

// floodAt, floodToken and floodKind make this program floodClients greedy
// clients of one identity, until its standard input ends; floodBurn makes it
// take the processors for that share of a core instead.
const (
	floodAt      = "DUNLIN_FLOOD_ADDRESS"
	floodToken   = "DUNLIN_FLOOD_TOKEN" //nolint:gosec // the name of a variable
	floodKind    = "DUNLIN_FLOOD_KIND"
	floodBurn    = "DUNLIN_FLOOD_BURN"
	floodClients = 100
)

// Kinds of floods.
const (
	floodLists   = "list"
	floodGets    = "get"
	floodConnect = "connect"
)

func runFlood(at, token, kind, burn string) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var served, refused atomic.Int64
	if cores, err := strconv.ParseFloat(burn, 64); err == nil {
		for range runtime.GOMAXPROCS(0) {
			wg.Go(func() { spin(ctx, cores/float64(runtime.GOMAXPROCS(0))) })
		}
	} else {
		for range floodClients {
			wg.Go(func() { greed(ctx, at, token, kind, &served, &refused) })
		}
	}
	start := time.Now()
	_, _ = io.Copy(io.Discard, os.Stdin)
	took := time.Since(start)
	cancel()
	wg.Wait()
	fmt.Printf("%.0f a second were served, %d refused", float64(served.Load())/took.Seconds(), refused.Load())
}

// spin takes a share of one core.
func spin(ctx context.Context, share float64) {
	const period = 5 * time.Millisecond
	for tick := time.NewTicker(period); ctx.Err() == nil; <-tick.C {
		for end := time.Now().Add(time.Duration(share * float64(period))); time.Now().Before(end); {
		}
	}
}

// greed asks without a pause. It unpacks nothing: the work is to be the
// server's.
func greed(ctx context.Context, at, token, kind string, served, refused *atomic.Int64) {
	h := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: kind == floodConnect, //nolint:gosec // the bench's own server
	}}
	defer h.CloseIdleConnections()
	path := "/api/v1/namespaces/default/configmaps"
	if kind != floodLists {
		path += "/c1"
	}
	for ctx.Err() == nil {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+at+path, nil)
		if err != nil {
			return
		}
		req.Header.Set("Authorization", "Bearer "+token)
		req.Header.Set("Accept-Encoding", "gzip")
		resp, err := h.Do(req)
		if err != nil {
			continue
		}
		if _, err = io.Copy(io.Discard, resp.Body); err == nil && resp.StatusCode == http.StatusOK {
			served.Add(1)
		} else if resp.StatusCode == http.StatusTooManyRequests {
			refused.Add(1)
		}
		_ = resp.Body.Close()
	}
}

// beside measures f while this program runs as another process with these
// variables, the cores that one takes, and what it says in the end.
func beside(t *testing.T, f func() time.Duration, env ...string) (took time.Duration, cores float64, said string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	var out bytes.Buffer
	cmd.Stdout = &out
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	wait(t, time.Second)
	start, before := time.Now(), cpuSeconds(t, cmd.Process.Pid)
	took = f()
	cores = (cpuSeconds(t, cmd.Process.Pid) - before) / time.Since(start).Seconds()
	_ = in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	return took, cores, strings.TrimSpace(out.String())
}

// flood measures a kind of flood. Its clients run on the server's machine and
// take what others' clients would not, so it is held against the reads beside
// a process that takes as much of the cores and asks for nothing; what they
// take on a quiet machine stands beside it. All three by turns, and the middle
// of three rounds.
func flood(t *testing.T, c *cluster.Cluster, cl *client.Client, token, kind, what string) {
	t.Helper()
	const rounds = 3
	var quiet, during, burnt []time.Duration
	var cores float64
	var said string
	for range rounds {
		quiet = append(quiet, p99(t, cl))
		read := func() time.Duration { return p99(t, cl) }
		var took time.Duration
		took, cores, said = beside(t, read, floodAt+"="+c.Address(), floodToken+"="+token, floodKind+"="+kind)
		during = append(during, took)
		took, _, _ = beside(t, read, floodAt+"="+c.Address(), fmt.Sprintf("%s=%.2f", floodBurn, cores))
		burnt = append(burnt, took)
	}
	ms := func(all []time.Duration) float64 {
		slices.Sort(all)
		return all[rounds/2].Seconds() * 1000
	}
	row(fmt.Sprintf("%d clients of one identity %s without a pause: p99 of another's reads", floodClients, what),
		"≤ 3 × that beside as busy cores", fmt.Sprintf("%.1f ms; busy cores %.1f, quiet %.1f ms", ms(during), ms(burnt), ms(quiet)),
		held(ms(during) <= 3*ms(burnt)), fmt.Sprintf("%s; the clients took %.2f cores of this machine", said, cores))
}

// TestFlood measures what one identity that takes all it can get costs the
// others: 100 clients of it that ask without a pause, and as many watches as
// it is given, of which it reads none.
func TestFlood(t *testing.T) {
	const token, objects = "the-token-of-greedy", 500
	file := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte(auth.HashToken(token)+" greedy system:masters\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := cluster.NewControlPlane(t, "--token-file", file)
	cl, pid := admin(t, c.Kubeconfig()), c.Cmd.Process.Pid
	var all strings.Builder
	for i := range objects {
		fmt.Fprintf(&all, "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c%d}\ndata: {text: %s}\n", i, strings.Repeat("x", 1000))
	}
	c.Apply(all.String())
	p99(t, cl) // warm
	flood(t, c, cl, token, floodLists, fmt.Sprintf("list %d objects", objects))
	flood(t, c, cl, token, floodGets, "read one object each")
	flood(t, c, cl, token, floodConnect, "connect anew for each read")
	conf := &tls.Config{InsecureSkipVerify: true, ClientSessionCache: tls.NewLRUClientSessionCache(8)} //nolint:gosec // the bench's own server

	rss, open := statusKB(t, pid, "VmRSS"), 0
	for limit := 20_000; ; open++ {
		conn, err := tls.Dial("tcp", c.Address(), conf)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if _, err := io.WriteString(conn, "GET /api/v1/namespaces/default/configmaps?watch=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "+token+"\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), nil)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode == http.StatusTooManyRequests || open == limit {
			break
		}
	}
	idle := statusKB(t, pid, "VmRSS")
	before := p99(t, cl)
	row("watches that one identity is given, then 429: RSS each", "(none)", fmt.Sprintf("%d, %.1f KiB each", open, float64(idle-rss)/float64(open)), noTarget,
		fmt.Sprintf("p99 of another's reads beside them %.1f ms", before.Seconds()*1000))
}
