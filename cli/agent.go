package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/internal/claim"
	"github.com/dunlin-project/dunlin/internal/version"
	"github.com/dunlin-project/dunlin/node/view"
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
Stopping the agent does not stop its workloads.

It answers on a socket in --run-dir, to root and its own user alone: what it
runs, logs, figures. 'dunlin get pods --local' and 'dunlin describe node NAME
--local' ask it, which works while no server can be reached.`,
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
			if line != "" { // refused before anything is made
				jl, err := pki.ParseJoinLine(line)
				if err != nil {
					return usagef("--join: %w", err)
				}
				if len(jl.Servers) > 0 {
					server = jl.Servers[0]
				}
			}
			if err := o.complete(log, server); err != nil {
				return err
			}
			if line == "" && !joinedAlready(o) {
				return errNotJoined
			}
			held, err := o.claims()
			if err != nil {
				return err
			}
			defer held.release()
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
			p.claims = held
			return p.run(cmd.Context())
		},
	}
	o.add(c)
	lo.add(c)
	c.Flags().StringVar(&join, "join", "", "join line, needed once")
	c.AddCommand(a.agentResetCmd())
	return c
}

var errNotJoined = usagef("this node has not joined a cluster yet: give --join LINE, from 'dunlin token create' on a server")

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

// serveSocket answers on the agent's own socket: health, figures, and what
// the node knows.
func (p *nodeProcess) serveSocket(ctx context.Context) error {
	l, err := view.Listen(agentSocket(p.o.run), p.log)
	if err != nil {
		return err
	}
	srv := &http.Server{
		Handler:           view.Handler(view.Config{Source: p.agent, Metrics: p.metrics, Status: p.status, NetCheck: p.netCheck}),
		ReadHeaderTimeout: 10 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return ctx }, // followed logs end with the agent
		ErrorLog:          slog.NewLogLogger(p.log.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	keeping, end := context.WithCancel(ctx)
	var keeper sync.WaitGroup
	keeper.Go(func() { p.keepRunFolder(keeping, l) })
	defer func() { end(); keeper.Wait() }() // or it would claim what is given back
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("agent socket: %w", err)
	}
	return nil
}

// placeLook is how often the agent looks whether its run folder is there.
const placeLook = 5 * time.Second

// keepRunFolder makes again what somebody removed of the folder: the claims,
// then the socket, unless another agent took the folder meanwhile.
func (p *nodeProcess) keepRunFolder(ctx context.Context, l *view.Listener) {
	t := time.NewTicker(placeLook)
	defer t.Stop()
	told := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		claimed, err := p.claims.renew()
		made := false
		if err == nil {
			made, err = l.Restore()
		}
		switch {
		case err == nil && (claimed || made):
			p.log.Warn("the run folder, or files in it, were removed, and are there again", "dir", p.o.run)
			told = ""
		case errors.Is(err, claim.ErrHeld) && err.Error() != told:
			p.log.Error("the run folder was removed, and another agent has taken it: stop one of the two", "dir", p.o.run, "error", err)
			told = err.Error()
		case err != nil && err.Error() != told:
			p.log.Warn("the run folder was removed and cannot be made again; it is tried on", "dir", p.o.run, "error", err)
			told = err.Error()
		}
	}
}

// status describes the agent for people.
func (p *nodeProcess) status() view.Status {
	l := p.link.Status()
	in, out := p.link.Bytes()
	s := view.Status{
		Node: p.id.Grant().NodeName, Version: version.Version, Uptime: time.Since(p.began),
		Connected: l.Connected, Server: l.Server, Relayed: l.Relayed, Reason: strings.TrimPrefix(l.Failed, "link: "), Servers: p.agent.Servers(), Connects: l.Attempts,
		Generation: p.agent.Generation(), Epoch: p.agent.Epoch(), BytesIn: in, BytesOut: out, Gossip: p.gossipStatus(),
	}
	if at := p.link.LastAcked(); !at.IsZero() {
		age := time.Since(at)
		s.LeaseAge = &age
	}
	pull, report := p.agent.Ages()
	if pull >= 0 {
		s.AssignmentAge = &pull
	}
	if report >= 0 {
		s.ReportAge = &report
	}
	return s
}

// figures registers everything that this node counts.
func (p *nodeProcess) figures() (*prometheus.Registry, error) {
	reg := prometheus.NewRegistry()
	for _, c := range []prometheus.Collector{
		p.agent, p.link, p.db, ingressFigures{ingressDir(p.o.run)}, proxyFigures{proxyDir(p.o.run)},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("metrics: %w", err)
		}
	}
	return reg, nil
}
