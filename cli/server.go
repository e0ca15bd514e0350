package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/internal/version"
)

type serverOptions struct {
	nodeOptions
	listen      string
	advertise   []string
	tlsNames    []string
	noNode      bool
	podCIDRs    []string
	svcCIDRs    []string
	tokenFile   string
	unreachable int64
	pprof       bool
}

func (a *app) serverCmd() *cobra.Command {
	var o serverOptions
	var lo logOptions
	c := &cobra.Command{
		Use:   "server",
		Short: "Run a control plane, with a node in the same process",
		Long: `Run a control plane, with a node in the same process unless --no-node.

The first start makes a new cluster with its own certificate authority and
writes an administrator's kubeconfig. Everything is kept in --state-dir.
Stopping the server does not stop the workloads of its node.`,
		Example: `  dunlin server
  dunlin server --no-node --listen 0.0.0.0:6443`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := lo.logger(a.errw)
			if err != nil {
				return err
			}
			return a.server(cmd.Context(), o, log)
		},
	}
	o.add(c)
	lo.add(c)
	f := c.Flags()
	f.StringVar(&o.listen, "listen", ":6443", "address of the one port: API, nodes and other servers")
	f.StringSliceVar(&o.advertise, "advertise", nil, "addresses, host or host:port, at which nodes reach this server (default: the one that routes)")
	f.StringSliceVar(&o.tlsNames, "tls-names", nil, "further names and addresses of the serving certificate")
	f.BoolVar(&o.noNode, "no-node", false, "run no node in this process")
	f.StringSliceVar(&o.podCIDRs, "pod-cidr", []string{"10.42.0.0/16"}, "ranges of pod addresses")
	f.StringSliceVar(&o.svcCIDRs, "service-cidr", []string{"10.43.0.0/16"}, "ranges of service addresses")
	f.StringVar(&o.tokenFile, "token-file", "", "file of static bearer tokens, hashed: 'sha256:HEX USER GROUP,...' a line")
	f.Int64Var(&o.unreachable, "default-unreachable-toleration-seconds", 0, "how long pods stay on an unreachable node by default")
	f.BoolVar(&o.pprof, "pprof", false, "serve /debug/pprof to administrators")
	sweep := &cobra.Command{
		Use: "sweep", Short: "Stop every workload of this machine and remove its network namespace and control groups",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := slog.New(slog.DiscardHandler)
			if err := o.complete(log, ""); err != nil {
				return err
			}
			return sweepMachine(cmd.Context(), o.nodeOptions)
		},
	}
	o.add(sweep)
	c.AddCommand(sweep)
	return c
}

func (a *app) server(ctx context.Context, o serverOptions, log *slog.Logger) error {
	setMemoryLimit()
	l, err := listen(ctx, o.listen)
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	if err := o.complete(log, ""); err != nil {
		return err
	}
	cfg, err := o.controlPlane(l, log)
	if err != nil {
		return err
	}
	cfg.Gossip = o.keeper(log)
	s, err := controlplane.New(ctx, cfg)
	if err != nil {
		return err
	}
	log.Info("server is starting", "cluster", s.ClusterID(), "address", cfg.Advertise[0], "version", version.Version, "kubeconfig", cfg.AdminKubeconfig)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.Run(ctx) })
	if o.noNode {
		g.Go(func() error { return s.RunGossip(ctx) })
	} else {
		g.Go(func() error { return o.node(ctx, s, cfg, log) })
	}
	return g.Wait()
}

// node runs the agent in this process. It joins and talks over the real
// socket like any other.
func (o serverOptions) node(ctx context.Context, s *controlplane.Server, cfg controlplane.Config, log *slog.Logger) error {
	line := ""
	if !joinedAlready(o.nodeOptions) {
		if err := s.WaitReady(ctx); err != nil {
			return ignoreCanceled(err)
		}
		var lastErr error
		for line == "" {
			jl, err := s.JoinLine(ctx, nodeapi.TokenOptions{TTL: 10 * time.Minute})
			if err == nil {
				line = jl.String()
				break
			}
			lastErr = err
			select { // kube-system may not exist in the first moment
			case <-ctx.Done():
				return ignoreCanceled(errors.Join(lastErr, ctx.Err()))
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
	id, err := joinNode(ctx, o.nodeOptions, line, log)
	if err != nil {
		return ignoreCanceled(err)
	}
	p, err := newNode(o.nodeOptions, id, cfg.Gossip, log)
	if err != nil {
		return err
	}
	defer p.close()
	return p.run(ctx)
}

func joinedAlready(o nodeOptions) bool {
	_, err := os.Stat(filepath.Join(o.state, "node", "identity", "grant.json"))
	return err == nil
}

func ignoreCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (o serverOptions) controlPlane(l net.Listener, log *slog.Logger) (controlplane.Config, error) {
	port := l.Addr().(*net.TCPAddr).Port
	adv := o.advertise
	if len(adv) == 0 {
		host, _, _ := net.SplitHostPort(o.listen)
		if ip, err := netip.ParseAddr(host); err == nil && !ip.IsUnspecified() {
			adv = []string{host}
		} else {
			adv = []string{o.address}
		}
	}
	for i, h := range adv {
		if _, _, err := net.SplitHostPort(h); err != nil {
			adv[i] = net.JoinHostPort(trimBrackets(h), fmt.Sprint(port))
		}
	}
	pods, err := prefixes("pod-cidr", o.podCIDRs)
	if err != nil {
		return controlplane.Config{}, err
	}
	services, err := prefixes("service-cidr", o.svcCIDRs)
	if err != nil {
		return controlplane.Config{}, err
	}
	hostname, _ := os.Hostname()
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return controlplane.Config{
		StateDir: filepath.Join(o.state, "server"), Listener: l, Advertise: adv, Fallback: o.address, Names: append(o.tlsNames, hostname, o.address),
		AdminKubeconfig: filepath.Join(o.config, "admin.kubeconfig"), TokenFile: o.tokenFile,
		ServiceCIDRs: services, PodCIDRs: pods, UnreachableSeconds: o.unreachable, Zone: o.labels["topology.kubernetes.io/zone"],
		Pprof: o.pprof, Version: version.Version, Clock: clock.System, Log: log, Metrics: reg,
	}, nil
}

func trimBrackets(h string) string {
	if len(h) > 1 && h[0] == '[' && h[len(h)-1] == ']' {
		return h[1 : len(h)-1]
	}
	return h
}

func prefixes(flag string, list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, usagef("--%s=%s: not a range such as 10.42.0.0/16", flag, s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// listen says what to do when the port is taken.
func listen(ctx context.Context, address string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("port %s is in use: another server on this machine? ('ss -ltnp' names it; --listen chooses another port)", address)
	case err != nil:
		return nil, fmt.Errorf("listen: %w", err)
	}
	return l, nil
}

// setMemoryLimit gives the garbage collector a soft limit, unless the
// operator set one: small machines trade a little CPU for memory.
func setMemoryLimit() {
	if os.Getenv("GOMEMLIMIT") == "" && os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}
