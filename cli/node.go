package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/internal/version"
	"github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/node/board"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/static"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/wasm"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// nodeOptions are the flags of the node's part.
type nodeOptions struct {
	dirs
	name    string
	address string
	netns   string
	cgroup  string
	maxPods int
	labels  map[string]string
	gossip  uint16
}

func (o *nodeOptions) add(c *cobra.Command) {
	d := defaultDirs()
	f := c.Flags()
	f.StringVar(&o.state, "state-dir", d.state, "folder for everything that must survive a reboot")
	f.StringVar(&o.run, "run-dir", d.run, "folder for sockets and what may vanish at a reboot")
	f.StringVar(&o.config, "config-dir", d.config, "folder for the kubeconfig and static pods (manifests/)")
	f.StringVar(&o.name, "node-name", "", "name of this node (default: made of the hostname)")
	f.StringVar(&o.address, "node-address", "", "address of this node (default: the one that routes to the server)")
	f.StringVar(&o.netns, "netns", "dunlin", "name of the network namespace that holds pod addresses (several agents on one machine need several)")
	f.StringVar(&o.cgroup, "cgroup", "", "name of the root control group (default: as --netns)")
	f.Uint16Var(&o.gossip, "gossip-port", gossip.Port, "port of gossip inside the site, UDP and TCP; 0 picks one (several agents on one machine)")
	f.IntVar(&o.maxPods, "max-pods", 110, "how many pods this node takes")
	f.StringToStringVar(&o.labels, "node-labels", nil, "labels that the node registers with: key=value,...")
}

// complete fills what depends on the machine, with a line for each choice.
func (o *nodeOptions) complete(log *slog.Logger, server string) error {
	for _, p := range []*string{&o.state, &o.run, &o.config} {
		abs, err := filepath.Abs(*p)
		if err != nil {
			return fmt.Errorf("folder %s: %w", *p, err)
		}
		*p = abs
	}
	if o.cgroup == "" {
		o.cgroup = o.netns
	}
	wanted := o.name
	if wanted == "" {
		h, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("read hostname: %w (give --node-name)", err)
		}
		wanted = h
	}
	name, changed, err := board.NodeName(wanted)
	if err != nil {
		return fmt.Errorf("node name %q: %w; give --node-name", wanted, err)
	}
	if changed {
		log.Warn("the name is no valid node name and was changed", "from", wanted, "to", name, "hint", "--node-name chooses another")
	}
	o.name = name
	if o.address == "" {
		ip, err := routeTo(server)
		if err != nil {
			return err
		}
		o.address = ip.String()
	}
	if _, err := netip.ParseAddr(o.address); err != nil {
		return usagef("--node-address=%s: not an IP address", o.address)
	}
	return nil
}

// routeTo is the local address that routes to the server ("host:port"); no
// packet is sent.
func routeTo(server string) (netip.Addr, error) {
	if server == "" {
		server = "192.0.2.1:9" // TEST-NET-1 (RFC 5737): stands for "elsewhere"
	}
	c, err := net.Dial("udp", server)
	if err != nil {
		// No route at all: an offline machine still runs its pods.
		return netip.MustParseAddr("127.0.0.1"), nil
	}
	defer func() { _ = c.Close() }()
	a, err := netip.ParseAddrPort(c.LocalAddr().String())
	if err != nil {
		return netip.Addr{}, fmt.Errorf("find own address: %w (give --node-address)", err)
	}
	return a.Addr().Unmap(), nil
}

// lateStreams lets the link be built before the agent that serves it.
type lateStreams struct{ node.StreamServer }

func (l *lateStreams) Logs(ctx context.Context, namespace, pod, uid string, o *corev1.PodLogOptions, w io.Writer) error {
	if l.StreamServer == nil {
		return errors.New("the agent is still starting")
	}
	return l.StreamServer.Logs(ctx, namespace, pod, uid, o, w)
}

// nodeProcess is the running agent with everything it uses.
type nodeProcess struct {
	o       nodeOptions
	log     *slog.Logger
	db      *store.Bolt
	runtime *wasm.Runtime
	agent   *node.Agent
	link    *link.Link
	id      *pki.NodeIdentity
	gossip  *gossip.Keeper
	floor   *clock.Floor
}

// newNode builds the agent. The identity must have joined, once; after that
// no server and no network is needed.
func newNode(o nodeOptions, id *pki.NodeIdentity, k *gossip.Keeper, log *slog.Logger) (_ *nodeProcess, err error) {
	p := &nodeProcess{o: o, log: log, id: id, gossip: k}
	if err := os.MkdirAll(filepath.Join(o.state, "node"), 0o700); err != nil {
		return nil, fmt.Errorf("make state folder: %w", err)
	}
	if p.db, err = store.Open(filepath.Join(o.state, "node", "node.db"), 10*time.Second, log); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.floor, err = clock.OpenFloor(clock.System, filepath.Join(o.state, "node", "time-floor")); err != nil {
		return nil, err
	}
	net, err := p.network()
	if err != nil {
		return nil, err
	}
	tree := cgroup.New(cgroup.Config{Name: o.cgroup, Logger: log})
	facts := tree.Facts()
	if !facts.Memory {
		log.Warn("memory limits are not enforced on this node", "reason", strings.TrimSpace(facts.Reason+" "+facts.MemoryReason), "hint", "dunlin preflight")
	}
	if p.runtime, err = wasm.New(wasm.Config{StateDir: filepath.Join(o.state, "wasm"), RunDir: filepath.Join(o.run, "wasm"), Cgroups: tree, Logger: log.With("part", "wasm")}); err != nil {
		return nil, err
	}
	vols, err := volumes.New(volumes.Config{Dir: filepath.Join(o.state, "volumes"), MemoryDir: filepath.Join(o.run, "volumes"), Logger: log})
	if err != nil {
		return nil, err
	}
	boot := node.BootID(bootOfMachine(), p.db)
	streams := &lateStreams{}
	grant := id.Grant()
	p.link, err = link.New(link.Config{
		Identity: id, BootID: boot, Version: version.Version, Log: log.With("part", "link"), Streams: streams, Clock: p.floor,
		Time: p.timeHint, Datagram: p.datagram,
		Generation: func() uint64 {
			if p.agent == nil {
				return 0
			}
			return p.agent.Generation()
		},
		Servers: func() []string {
			if p.agent == nil {
				return nil
			}
			return p.agent.Servers()
		},
	})
	if err != nil {
		return nil, err
	}
	p.agent, err = node.New(node.Config{
		NodeName: grant.NodeName, Version: version.Version, BootID: boot, Link: p.link, Store: p.db,
		Runtimes: map[string]workload.Runtime{p.runtime.Name(): p.runtime}, Network: net, Volumes: vols,
		Static: static.New(filepath.Join(o.config, "manifests"), grant.NodeName),
		Machine: &node.HostMachine{StateDir: o.state, Network: net, Limits: func() (string, string) {
			if facts.Memory {
				return "", ""
			}
			if os.Geteuid() != 0 {
				return "NotRoot", "the agent does not run as root, so memory and CPU limits of containers are not enforced"
			}
			return "NoMemoryCgroup", strings.TrimSpace(facts.Reason + " " + facts.MemoryReason)
		}},
		Clock: p.floor, Logger: log.With("part", "node"), StateDir: filepath.Join(o.state, "node"), MaxPods: o.maxPods, Labels: o.labels,
		Annotations: p.annotations,
	})
	if err != nil {
		return nil, err
	}
	streams.StreamServer = p.agent
	p.gossips()
	return p, nil
}

func (p *nodeProcess) network() (network.Network, error) {
	ip := netip.MustParseAddr(p.o.address)
	if err := network.Usable(); err != nil {
		p.log.Warn("pods share the node's address, each containerPort gets a port of its own there", "reason", err, "address", ip)
		return &network.NodeAddress{IPs: []netip.Addr{ip}}, nil
	}
	return network.NewNamespaced(p.o.netns, []netip.Addr{ip})
}

// run until ctx ends. Workloads go on after it.
func (p *nodeProcess) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.agent.Run(ctx) })
	g.Go(func() error { return p.link.Run(ctx) })
	g.Go(func() error { return p.serveSocket(ctx) })
	g.Go(func() error { return p.runGossip(ctx) })
	g.Go(func() error { return p.keepFloor(ctx) })
	err := g.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (p *nodeProcess) close() {
	if p.runtime != nil {
		_ = p.runtime.Close()
	}
	if p.db != nil {
		_ = p.db.Close()
	}
}

func bootOfMachine() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(b))
}

// joinNode gives the node an identity with a join line, unless it has one.
func joinNode(ctx context.Context, o nodeOptions, line string, log *slog.Logger) (*pki.NodeIdentity, error) {
	id, err := pki.OpenNodeIdentity(filepath.Join(o.state, "node", "identity"))
	if err != nil {
		return nil, err
	}
	if id.Joined() {
		return id, nil
	}
	if line == "" {
		return nil, usagef("this node has not joined a cluster yet: give --join LINE, from 'dunlin token create' on a server")
	}
	jl, err := pki.ParseJoinLine(line)
	if err != nil {
		return nil, usagef("--join: %w", err)
	}
	err = link.Join(ctx, link.JoinConfig{
		Line: jl, Identity: id, Name: o.name, BootID: bootOfMachine(), Addresses: []string{o.address}, Log: log,
		Facts: map[string]string{"machine-id": readLine("/etc/machine-id")},
	})
	if err != nil {
		return nil, err
	}
	log.Info("joined", "cluster", id.Grant().ClusterID, "node", id.Grant().NodeName, "address", o.address)
	return id, nil
}

func readLine(p string) string {
	b, err := os.ReadFile(p)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// sweepMachine stops every workload of this machine and removes what the
// agent made outside its folders: network namespace, control groups, mounts.
func sweepMachine(ctx context.Context, o nodeOptions) error {
	var errs []error
	tree := cgroup.New(cgroup.Config{Name: o.cgroup})
	if _, err := os.Stat(filepath.Join(o.run, "wasm")); !errors.Is(err, fs.ErrNotExist) {
		rt, err := wasm.New(wasm.Config{StateDir: filepath.Join(o.state, "wasm"), RunDir: filepath.Join(o.run, "wasm"), Cgroups: tree, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		list, err := rt.List(ctx)
		errs = append(errs, err)
		for _, st := range list {
			errs = append(errs, rt.Kill(ctx, st.ID), rt.Remove(ctx, st.ID))
		}
		errs = append(errs, rt.Close())
	}
	if vols, err := volumes.New(volumes.Config{Dir: filepath.Join(o.state, "volumes"), MemoryDir: filepath.Join(o.run, "volumes"), Logger: slog.New(slog.DiscardHandler)}); err == nil {
		uids, err := vols.List()
		errs = append(errs, err)
		for _, uid := range uids {
			errs = append(errs, vols.Teardown(ctx, uid))
		}
	}
	errs = append(errs, tree.Destroy())
	if os.Geteuid() == 0 {
		if n, err := network.NewNamespaced(o.netns, []netip.Addr{netip.MustParseAddr("127.0.0.1")}); err == nil {
			errs = append(errs, n.Destroy())
		}
	}
	return errors.Join(errs...)
}
