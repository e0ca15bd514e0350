package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/pki"
)

func (a *app) agentCmd() *cobra.Command {
	var o nodeOptions
	var lo logOptions
	var join string
	c := &cobra.Command{
		Use:   "agent [--join LINE]",
		Short: "Run the node agent of this machine",
		Long: `Run the node agent of this machine.

The first start needs a join line from 'dunlin token create' on a server; it is
used once, and the node keeps its own key and certificate. After that the
agent starts, and runs what it knows, without any server, network or clock.
Stopping the agent does not stop its workloads.`,
		Example: `  dunlin agent --join dunlin1.…@10.0.0.5:6443
  dunlin agent`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := lo.logger(a.errw)
			if err != nil {
				return err
			}
			line, used, err := joinLine(join, filepath.Join(o.config, "join"))
			if err != nil {
				return err
			}
			server := ""
			if jl, err := pki.ParseJoinLine(line); err == nil && len(jl.Servers) > 0 {
				server = jl.Servers[0]
			}
			if err := o.complete(log, server); err != nil {
				return err
			}
			id, err := joinNode(cmd.Context(), o, line, log)
			if err != nil {
				return err
			}
			if used != "" {
				_ = os.Remove(used) // single-use: nothing to keep
			}
			p, err := newNode(o, id, o.keeper(log), log)
			if err != nil {
				return err
			}
			defer p.close()
			return p.run(cmd.Context())
		},
	}
	o.add(c)
	lo.add(c)
	c.Flags().StringVar(&join, "join", "", "join line, needed once")
	return c
}

// joinLine is the flag's, or else what an installation left in the file.
func joinLine(flag, file string) (line, used string, err error) {
	if flag != "" {
		return flag, "", nil
	}
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", fmt.Errorf("read join line: %w", err)
	}
	return strings.TrimSpace(string(b)), file, nil
}

// agentSocket is where the agent answers locally, also while cut off.
func agentSocket(runDir string) string { return filepath.Join(runDir, "agent.sock") }

// serveSocket answers health and state on the agent's own socket.
func (p *nodeProcess) serveSocket(ctx context.Context) error {
	path := agentSocket(p.o.run)
	if err := os.MkdirAll(p.o.run, 0o711); err != nil {
		return fmt.Errorf("make run-time folder: %w", err)
	}
	_ = os.Remove(path) // of an agent that was killed
	l, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("agent socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return fmt.Errorf("agent socket: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok")) })
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		in, out := p.link.Bytes()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{
			"connected": p.link.Connected(), "generation": p.agent.Generation(), "epoch": p.agent.Epoch(),
			"bytesIn": in, "bytesOut": out, "servers": p.agent.Servers(),
			"gossip": p.gossipStatus(),
		})
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("agent socket: %w", err)
	}
	return nil
}
