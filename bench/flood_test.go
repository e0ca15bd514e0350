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
	"slices"
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
	const reads = 400
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

// floodAt and floodToken make this program floodClients greedy clients of one
// identity, until its standard input ends.
const (
	floodAt      = "DUNLIN_FLOOD_ADDRESS"
	floodToken   = "DUNLIN_FLOOD_TOKEN" //nolint:gosec // the name of a variable
	floodClients = 100
)

func runFlood(at, token string) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var served, refused atomic.Int64
	for range floodClients {
		wg.Go(func() {
			h := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // the bench's own server
			defer h.CloseIdleConnections()
			for ctx.Err() == nil {
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+at+"/api/v1/namespaces/default/configmaps", nil)
				if err != nil {
					return
				}
				req.Header.Set("Authorization", "Bearer "+token)
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
		})
	}
	start := time.Now()
	_, _ = io.Copy(io.Discard, os.Stdin)
	took := time.Since(start)
	cancel()
	wg.Wait()
	fmt.Printf("%.0f lists a second were served, %d refused", float64(served.Load())/took.Seconds(), refused.Load())
}

// TestFlood measures what one identity that takes all it can get costs the
// others: 100 clients of it that list without a pause, and as many watches as
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
	before := p99(t, cl)

	conf := &tls.Config{InsecureSkipVerify: true, ClientSessionCache: tls.NewLRUClientSessionCache(8)} //nolint:gosec // the bench's own server
	greedy := exec.Command(os.Args[0])
	greedy.Env = append(os.Environ(), floodAt+"="+c.Address(), floodToken+"="+token)
	greedy.Stderr = os.Stderr
	in, err := greedy.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	greedy.Stdout = &said
	if err := greedy.Start(); err != nil {
		t.Fatal(err)
	}
	wait(t, 2*time.Second)
	during := p99(t, cl)
	_ = in.Close()
	if err := greedy.Wait(); err != nil {
		t.Fatal(err)
	}
	row(fmt.Sprintf("%d clients of one identity list %d objects without a pause: p99 of another's reads", floodClients, objects), "≤ 3 × what it was",
		fmt.Sprintf("%.1f ms, was %.1f ms", during.Seconds()*1000, before.Seconds()*1000), held(during <= 3*before),
		strings.TrimSpace(said.String())+"; they share the cores with the server")

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
	before = p99(t, cl)
	row("watches that one identity is given, then 429: RSS each", "(none)", fmt.Sprintf("%d, %.1f KiB each", open, float64(idle-rss)/float64(open)), noTarget,
		fmt.Sprintf("p99 of another's reads beside them %.1f ms", before.Seconds()*1000))
}
