package wasm

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// buildHello builds the example as a user would.
func buildHello(t testing.TB) string {
	t.Helper()
	if testing.Short() {
		t.Skip("building a Go guest takes a while")
	}
	if path := os.Getenv("DUNLIN_HELLO_WASM"); path != "" {
		return path
	}
	out := filepath.Join(t.TempDir(), "hello.wasm")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, ".")
	cmd.Dir = filepath.Join("..", "..", "examples", "hello")
	cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build hello: %v\n%s", err, text)
	}
	return out
}

// A Go HTTP server: many connections at once, kept alive, slow ones among
// them; then a stop that lets a request under way finish.
func TestGoHTTPServer(t *testing.T) {
	b := newBench(t)
	s := b.specFile(buildHello(t), "hello")
	l, addr := listener(t, "http")
	s.Listeners = []workload.Listener{l}
	s.Env = []string{"GREETING=Moin", "POD_NAME=hello-0"}
	b.start(s)
	url := "http://" + addr + "/"
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			c := http.Client{Transport: &http.Transport{}, Timeout: 30 * time.Second}
			defer c.CloseIdleConnections()
			for range 20 {
				resp, err := c.Get(url)
				if err != nil {
					t.Errorf("client %d: %v", i, err)
					return
				}
				body, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if err != nil || !strings.HasPrefix(string(body), "Moin from hello-0 (version 1") {
					t.Errorf("client %d: %q, %v", i, body, err)
				}
			}
		}()
	}
	wg.Wait()
	before, err := b.Stats(context.Background(), s.ID)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	idle := time.NewTimer(time.Second)
	<-idle.C
	after, err := b.Stats(context.Background(), s.ID)
	if err != nil {
		t.Fatal(err)
	}
	used := time.Duration(after.CPUNanos - before.CPUNanos)
	t.Logf("idle: %s of CPU in %s", used, time.Since(start))
	if used > 200*time.Millisecond {
		t.Errorf("an idle server used %s of CPU in a second: it spins", used)
	}
	if err := b.Stop(t.Context(), s.ID, 20*time.Second); err != nil {
		t.Fatal(err)
	}
	if st := b.ended(s.ID); st.ExitCode != 0 || st.Reason != "Completed" {
		t.Errorf("ended %+v\n%s", st, b.log(s))
	}
	if got := fmt.Sprint(strings.Contains(b.log(s), "stopping")); got != "true" {
		t.Errorf("log: %s", b.log(s))
	}
}
