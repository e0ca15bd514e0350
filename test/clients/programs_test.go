//go:build clients

package clients

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestProgramsSurviveServerRestarts runs a client-go informer and a
// controller-runtime manager with leader election, while the server is
// killed and started twice.
func TestProgramsSurviveServerRestarts(t *testing.T) {
	c := cluster.New(t)
	length := 60 * time.Second
	if s := os.Getenv("DUNLIN_CLIENTS_FOR"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatal(err)
		}
		length = d
	}
	type program struct {
		name, wants string
		cmd         *exec.Cmd
		out         bytes.Buffer
	}
	list := []*program{{name: "informer", wants: "the view equals a fresh list"}, {name: "manager", wants: "copies are right"}}
	ctx, cancel := context.WithTimeout(t.Context(), length+4*time.Minute)
	defer cancel()
	for _, p := range list {
		bin := filepath.Join(cluster.Root(t), "bin", "clients", p.name)
		if _, err := os.Stat(bin); err != nil {
			t.Skipf("SKIPPED: %v (test/clients/build.sh makes it)", err)
		}
		p.cmd = exec.CommandContext(ctx, bin, "-for", length.String())
		p.cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig())
		p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
		if err := p.cmd.Start(); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		<-time.After(length / 3)
		c.Kill()
		c.Start()
	}
	for _, p := range list {
		err := p.cmd.Wait()
		if err != nil || !strings.Contains(p.out.String(), p.wants) {
			out := p.out.String()
			t.Errorf("%s: %v\n%s", p.name, err, out[max(0, len(out)-3000):])
			continue
		}
		for line := range strings.Lines(p.out.String()) {
			if !strings.Contains(line, "\t") {
				t.Logf("%s: %s", p.name, strings.TrimSpace(line))
			}
		}
	}
}
