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
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/internal/version"
	"github.com/dunlin-project/dunlin/node/board"
	"github.com/dunlin-project/dunlin/pki"
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
	profiles    string
	unreachable int64
	pprof       bool
	newSealKey  bool
	join        string
	peers       []string
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
Stopping the server does not stop the workloads of its node.

With --join the first start joins an existing cluster as a further server, with
a line from 'dunlin token create --server'. Three servers go on working when
one of them fails, five when two do. A second server keeps a copy and has no
vote until there is a third: two voters would stop when either fails.
'dunlin server list' shows the servers.`,
		Example: `  dunlin server
  dunlin server --no-node --listen 0.0.0.0:6443
  dunlin server --join dunlin1.…@10.0.0.5:6443`,
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
	c.Flags().StringVar(&o.join, "join", "", "join line of an existing cluster, needed once")
	c.Flags().StringSliceVar(&o.peers, "peers", nil, "addresses of other servers, host or host:port, when all of them have new ones")
	lo.add(c)
	f := c.Flags()
	f.StringVar(&o.listen, "listen", ":6443", "address of the one port: API, nodes and other servers")
	f.StringSliceVar(&o.advertise, "advertise", nil, "addresses, host or host:port, at which nodes reach this server (default: the one that routes)")
	f.StringSliceVar(&o.tlsNames, "tls-names", nil, "further names and addresses of the serving certificate")
	f.BoolVar(&o.noNode, "no-node", false, "run no node in this process")
	f.StringSliceVar(&o.podCIDRs, "pod-cidr", []string{"10.42.0.0/16"}, "ranges of pod addresses; a node keeps the one that it got")
	f.StringSliceVar(&o.svcCIDRs, "service-cidr", []string{"10.43.0.0/16"}, "ranges of service addresses")
	f.StringVar(&o.tokenFile, "token-file", "", "file of static bearer tokens, hashed: 'sha256:HEX USER GROUP,...' a line")
	f.Int64Var(&o.unreachable, "default-unreachable-toleration-seconds", 0, "how long pods stay on an unreachable node by default")
	f.StringVar(&o.profiles, "scheduler-profiles", "", "file of the scheduler's profiles: weights and strategy by spec.schedulerName (default: pack, upstream's weights)")
	f.BoolVar(&o.newSealKey, "new-seal-key", false, "make another key for Secrets, where theirs is lost: those of before can then only be deleted")
	f.BoolVar(&o.pprof, "pprof", false, "serve /debug/pprof to administrators")
	c.AddCommand(a.sweepCmd(), a.serverListCmd(), a.serverRemoveCmd(), a.serverRecoverCmd(), a.serverRaiseLevelCmd())
	return c
}

func (a *app) server(ctx context.Context, o serverOptions, log *slog.Logger) error {
	values, err := o.values()
	if err != nil {
		return err
	}
	l, err := listen(ctx, o.listen)
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	if o.address == "" {
		o.address = listensOn(o.listen)
	}
	if err := o.complete(log, ""); err != nil {
		return err
	}
	if !fileThere(filepath.Join(o.state, "server")) { // nothing is made that then stays half-done
		if err := writable(o.config); err != nil {
			return fmt.Errorf("--config-dir=%s: the administrator's kubeconfig cannot be written: %w; name another folder, nothing was made", o.config, err)
		}
	}
	var held *machineClaims
	if !o.noNode {
		if held, err = o.claims(); err != nil {
			return err
		}
		defer held.release()
	}
	cfg := o.controlPlane(l, values, log)
	cfg.Gossip = o.keeper(log)
	s, err := controlplane.New(ctx, cfg)
	if err != nil {
		return err
	}
	log.Info("server is starting", "cluster", s.ClusterID(), "address", cfg.Advertise[0], "version", version.Version, "kubeconfig", cfg.AdminKubeconfig)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.Run(ctx) })
	g.Go(func() error { thrift(ctx, log); return nil })
	g.Go(func() error {
		o.follow(ctx, l.Addr().(*net.TCPAddr).Port, s.Moved, cfg.Gossip.SetAddress, log)
		return nil
	})
	if o.noNode {
		g.Go(func() error { return s.RunGossip(ctx) })
	} else {
		g.Go(func() error { return o.node(ctx, s, cfg, held, log) })
	}
	err = g.Wait()
	if errors.Is(err, consensus.ErrHalted) && !o.noNode {
		err = fmt.Errorf("%w; the pods of this machine's node run on, and 'dunlin agent' takes care of them until the server is back", err)
	}
	return err
}

// node runs the agent in this process. It joins and talks over the real
// socket like any other.
func (o serverOptions) node(ctx context.Context, s *controlplane.Server, cfg controlplane.Config, held *machineClaims, log *slog.Logger) error {
	o.besideServer = true
	line := ""
	// Not joinedAlready: a certificate whose key was removed is none. Of an
	// identity that cannot be read joinNode says why.
	if id, err := pki.OpenNodeIdentity(filepath.Join(o.state, "node", "identity")); err == nil && !id.Joined() {
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
	p.claims = held
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

// listensOn is the one address of this machine on which a server listens, and
// where others therefore find it, by gossip as well; "" is all, or loopback.
func listensOn(listen string) string {
	host, _, _ := net.SplitHostPort(listen)
	ip, err := netip.ParseAddr(host)
	if err != nil || ip.IsUnspecified() || ip.IsLoopback() {
		return ""
	}
	return ip.WithZone("").String()
}

// advertised are the addresses that others are told of a server that listens
// on a port.
func (o serverOptions) advertised(port int) []string {
	adv := slices.Clone(o.advertise)
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
	return adv
}

func (o serverOptions) controlPlane(l net.Listener, v serverValues, log *slog.Logger) controlplane.Config {
	adv := o.advertised(l.Addr().(*net.TCPAddr).Port)
	if v.join != nil && onlyLoopback(adv) && !onlyLoopback(v.join.Servers) {
		log.Warn("this server tells the others an address that other machines cannot reach; start it with --listen and --advertise", "address", adv)
	}
	hostname, _ := os.Hostname()
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return controlplane.Config{
		StateDir: filepath.Join(o.state, "server"), Listener: l, Advertise: adv, Join: v.join, Peers: v.peers, Name: o.name, Fallback: o.address, Names: append(o.tlsNames, hostname, o.address),
		AdminKubeconfig: filepath.Join(o.config, client.AdminFile), TokenFile: o.tokenFile,
		ServiceCIDRs: v.services, PodCIDRs: v.pods, UnreachableSeconds: o.unreachable, NewSealKey: o.newSealKey, Zone: o.labels["topology.kubernetes.io/zone"],
		Memory: board.Memory(), Pprof: o.pprof, Profiles: v.profiles, Version: version.Version, Clock: clock.System, Log: log, Metrics: reg,
	}
}

// checkAddress refuses what is not host:port, where the host may be missing.
func checkAddress(flag, address string) error {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return usagef("--%s=%s: an address with its port is wanted, such as :6443, 10.0.0.5:6443 or [fd00::5]:6443", flag, address)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return usagef("--%s=%s: %q is no port: a number from 0 to 65535 is wanted", flag, address, port)
	}
	return nil
}

// portWait is how long a start waits for its port: after a kill -9 it can stay
// taken for some milliseconds, as in one of some 25 kills of a server with 20
// guests (a child between fork and exec has it, presumably).
const portWait = 3 * time.Second

// untilFree tries to listen while the port is taken, for portWait.
func untilFree(ctx context.Context, try func() (net.Listener, error)) (net.Listener, error) {
	end := time.NewTimer(portWait)
	defer end.Stop()
	tick := time.NewTicker(portWait / 100)
	defer tick.Stop()
	for {
		l, err := try()
		if !errors.Is(err, syscall.EADDRINUSE) {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-end.C:
			return nil, err
		case <-tick.C:
		}
	}
}

// segment is the most that a packet of TCP carries, in bytes: what IPv6 lets
// through everywhere (RFC 8200, section 5: 1280) without its headers. Tunnels
// and mobile links are narrower than what is behind them, and often nobody is
// told what they drop: then a connection opens, and the first certificate hangs.
const segment = 1280 - 40 - 20

// narrowly keeps every connection that comes by a listener to it, both ways:
// the kernel tells the other end while it opens.
func narrowly(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, segment) // without it all wide links work
	})
}

// listen says what to do when the port is taken.
func listen(ctx context.Context, address string) (net.Listener, error) {
	if err := checkAddress("listen", address); err != nil {
		return nil, err
	}
	lc := net.ListenConfig{Control: narrowly}
	l, err := untilFree(ctx, func() (net.Listener, error) { return lc.Listen(ctx, "tcp", address) })
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("port %s is in use: another server on this machine? ('ss -ltnp' names it; --listen chooses another port)", address)
	case errors.Is(err, syscall.EADDRNOTAVAIL), errors.As(err, new(*net.DNSError)):
		return nil, fmt.Errorf("--listen=%s: this machine has no such address ('ip address' lists them; ':PORT' is all of them)", address)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("--listen=%s: only root may listen on ports below 1024", address)
	case err != nil:
		return nil, fmt.Errorf("listen: %w", err)
	}
	return l, nil
}
