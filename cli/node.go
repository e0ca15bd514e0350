package cli

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/internal/version"
	"github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/node/board"
	"github.com/dunlin-project/dunlin/node/eviction"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/network/cni"
	"github.com/dunlin-project/dunlin/node/static"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/node/view"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/wasm"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// nodeOptions are the flags of the node's part.
type nodeOptions struct {
	dirs
	name    string
	address string
	// fixedAddress: the flag said the address, so the machine's is not followed.
	fixedAddress bool
	named        bool // the flag said the name
	// besideServer: a server runs in the same process.
	besideServer bool
	netns        string
	cgroup       string
	maxPods      int
	labels       map[string]string
	gossip       uint16
	images       imageOptions
	boot         string
	memory       string
	evict        eviction.Flags
	ingress      ingressOptions
	cniConf      string
	cniBin       string
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
	f.StringVar(&o.cniConf, "cni-conf-dir", "", "folder where the first *.conflist, if there is one, says by which CNI plugins pods of containers are attached (default: cni in the configuration folder)")
	f.StringVar(&o.cniBin, "cni-bin-dir", cni.DefaultBinDirs, "folders with CNI plugins, with ':' between them")
	f.Uint16Var(&o.gossip, "gossip-port", gossip.Port, "port of gossip inside the site, UDP and TCP; 0 picks one (several agents on one machine)")
	f.IntVar(&o.maxPods, "max-pods", 110, "how many pods this node takes")
	o.images.add(f)
	// Agents whose machines share a kernel (containers, tests) have no boot of
	// their own that the kernel could name.
	f.StringVar(&o.boot, "machine-boot", "", "what tells this boot of the machine from others (default: the kernel's boot id)")
	_ = f.MarkHidden("machine-boot")
	o.addPressure(f)
	o.ingress.add(f)
	f.StringToStringVar(&o.labels, "node-labels", nil, "labels that the node registers with: key=value,...")
}

// claimsDir has the volumes of claims.
func (o *nodeOptions) claimsDir() string { return filepath.Join(o.state, "claims") }

// check refuses values that no node can have.
func (o *nodeOptions) check() error {
	if o.maxPods < 1 {
		return usagef("--max-pods=%d: must be at least 1", o.maxPods)
	}
	if err := o.images.check(); err != nil {
		return err
	}
	if err := o.checkPressure(); err != nil {
		return err
	}
	if err := o.ingress.check(); err != nil {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(o.labels)) {
		if bad := validation.IsQualifiedName(k); len(bad) > 0 {
			return usagef("--node-labels: %q is not the name of a label: %s", k, bad[0])
		}
		if bad := validation.IsValidLabelValue(o.labels[k]); len(bad) > 0 {
			return usagef("--node-labels: %s=%q is not the value of a label: %s", k, o.labels[k], bad[0])
		}
		if node.ReservedLabel(k) {
			return usagef("--node-labels: %s is what the node finds out by itself", k)
		}
		if !nodeapi.MayLabel(k) {
			return usagef("--node-labels: a node may not give itself %s; an administrator does: kubectl label node NAME %s=%s", k, k, o.labels[k])
		}
	}
	return nil
}

// plainName is one that cannot lead elsewhere as a part of a path.
func plainName(s string) bool {
	return len(s) <= 255 && regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9_.-]*$`).MatchString(s)
}

// maxSocketPath is what sun_path takes beside the zero byte at its end.
const maxSocketPath = 107

// complete fills what depends on the machine, with a line for each choice.
func (o *nodeOptions) complete(log *slog.Logger, server string) error {
	if err := o.check(); err != nil {
		return err
	}
	if err := o.place(); err != nil {
		return err
	}
	if n := len(agentSocket(o.run)); n > maxSocketPath {
		return usagef("--run-dir=%s: the path of the agent's socket in it would be %d bytes long, and Linux takes no more than %d (unix(7)); choose a shorter one", o.run, n, maxSocketPath)
	}
	wanted := o.name
	o.named = wanted != ""
	if !o.named {
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
	o.fixedAddress = o.address != ""
	if o.address == "" {
		ip, err := routeTo(server)
		if err != nil {
			return err
		}
		if ip.IsLoopback() && server == "" {
			ip = unrouted(o.netns)
		}
		o.address = forOthers(ip, o.netns).String()
	}
	ip, err := netip.ParseAddr(o.address)
	if err != nil {
		return usagef("--node-address=%s: not an IP address", o.address)
	}
	o.address = ip.WithZone("").String() // a zone is this machine's own word
	return nil
}

// elsewhere are addresses that nobody has: documentation's (RFC 5737, RFC
// 3849). A route to them is one to the world.
var elsewhere = []string{"192.0.2.1:9", "[2001:db8::1]:9"}

// routeTo is the local address that routes to the server ("host:port"; "" is
// elsewhere, by IPv4 rather than by IPv6); no packet is sent.
func routeTo(server string) (netip.Addr, error) {
	to := []string{server}
	if server == "" {
		to = elsewhere
	}
	for _, s := range to {
		c, err := net.Dial("udp", s)
		if err != nil {
			continue
		}
		a, err := netip.ParseAddrPort(c.LocalAddr().String())
		_ = c.Close()
		if err != nil {
			return netip.Addr{}, fmt.Errorf("find own address: %w (give --node-address)", err)
		}
		return a.Addr().Unmap(), nil
	}
	// No route at all: an offline machine still runs its pods.
	return netip.MustParseAddr("127.0.0.1"), nil
}

// lateStreams lets the link be built before the agent that serves it.
type lateStreams struct {
	node.StreamServer
	sessions node.SessionServer
}

func (l *lateStreams) Logs(ctx context.Context, namespace, pod, uid string, o *corev1.PodLogOptions, w io.Writer) error {
	if l.StreamServer == nil {
		return errors.New("the agent is still starting")
	}
	return l.StreamServer.Logs(ctx, namespace, pod, uid, o, w)
}

// Session implements node.SessionServer.
func (l *lateStreams) Session(ctx context.Context, r *wire.StreamRequest, begin func() (*mux.Mux, error)) error {
	if l.sessions == nil {
		return errors.New("the agent is still starting")
	}
	return l.sessions.Session(ctx, r, begin)
}

// nodeProcess is the running agent with everything it uses.
type nodeProcess struct {
	o          nodeOptions
	log        *slog.Logger
	db         *store.Bolt
	images     *nodeImages
	runtime    *wasm.Runtime
	containers *containers
	agent      *node.Agent
	link       *link.Link
	id         *pki.NodeIdentity
	gossip     *gossip.Keeper
	network    network.Network
	floor      *clock.Floor
	metrics    *prometheus.Registry
	claims     *machineClaims
	traffic    *traffic
	began      time.Time
}

// newNode builds the agent. The identity must have joined, once; after that
// no server and no network is needed.
func newNode(o nodeOptions, id *pki.NodeIdentity, k *gossip.Keeper, log *slog.Logger) (_ *nodeProcess, err error) {
	p := &nodeProcess{o: o, log: log, id: id, gossip: k, began: time.Now()}
	if err := os.MkdirAll(filepath.Join(o.state, "node"), 0o700); err != nil {
		return nil, fmt.Errorf("make state folder: %w", err)
	}
	if p.db, err = openNodeDB(filepath.Join(o.state, "node"), log); err != nil {
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
	net, err := p.openNetwork()
	if err != nil {
		return nil, err
	}
	p.network = net
	tree := cgroup.New(cgroup.Config{Name: o.cgroup, Logger: log})
	facts := tree.Facts()
	if !facts.Memory {
		log.Warn("memory limits are not enforced on this node", "reason", whyNoLimits(facts), "hint", "dunlin preflight")
	}
	machine, evict, err := o.boundPods(tree, net, log)
	if err != nil {
		return nil, err
	}
	if p.images, err = openImages(o, log); err != nil {
		return nil, err
	}
	if p.runtime, err = wasm.New(wasm.Config{StateDir: filepath.Join(o.state, "wasm"), RunDir: filepath.Join(o.run, "wasm"), Cgroups: tree, Fetcher: p.images.puller, Logger: log.With("part", "wasm")}); err != nil {
		return nil, err
	}
	if p.containers, err = openContainers(context.Background(), o, tree, p.images.puller, log.With("part", "oci")); err != nil {
		return nil, err
	}
	p.images.wasm = p.runtime
	vols, err := volumes.New(volumes.Config{Dir: filepath.Join(o.state, "volumes"), MemoryDir: filepath.Join(o.run, "volumes"), ClaimsDir: o.claimsDir(), Logger: log,
		Limited: func(v *corev1.PersistentVolume, err error) { p.agent.Limited(v, err) }})
	if err != nil {
		return nil, err
	}
	if vols.SecretsOnDisk() {
		log.Warn("the run-time folder is on a disk: Secrets that pods are given as files lie in clear", "dir", filepath.Join(o.state, "volumes"), "hint", "--run-dir on a tmpfs, as /run is")
	}
	machine.Containers = func() (string, string) { return p.containers.reason, p.containers.message }
	boot := node.BootID(o.machineBoot(), p.db)
	streams := &lateStreams{}
	grant := id.Grant()
	if p.link, err = p.newLink(boot, streams); err != nil {
		return nil, err
	}
	p.agent, err = node.New(node.Config{
		NodeName: grant.NodeName, Version: version.Version, BootID: boot, MachineBoot: o.machineBoot(), Link: p.link, Store: p.db,
		Runtimes: p.runtimes(), Network: net, Volumes: vols,
		Static:  static.New(filepath.Join(o.config, "manifests"), grant.NodeName),
		Machine: machine, Eviction: evict, Contact: p.link.Contact,
		Clock: p.floor, Logger: log.With("part", "node"), StateDir: filepath.Join(o.state, "node"), AddressDir: filepath.Join(o.run, "addresses"), Cgroups: tree, MaxPods: o.maxPods, Labels: o.labels, Images: p.images, ImageGCHigh: o.images.high, ImageGCLow: o.images.low,
		ImageList: hereImages{p.images}, ImageVolumes: p.images.puller,
		Stalls: func(ctx context.Context, wake func()) error {
			return node.WatchStalls(ctx, node.MemoryStalls, node.StallTrigger, wake)
		},
		Annotations: p.annotations, ClusterDNS: func() []netip.Addr { return p.traffic.dns() },
		ServiceEnv: func(namespace string, links bool) [][2]string { return p.traffic.env(namespace, links) },
	})
	if err != nil {
		return nil, err
	}
	streams.StreamServer, streams.sessions = p.agent, p.agent
	p.traffic = p.newTraffic(net)
	if p.metrics, err = p.figures(); err != nil {
		return nil, err
	}
	p.gossips()
	return p, nil
}

func (p *nodeProcess) newLink(boot string, streams *lateStreams) (*link.Link, error) {
	return link.New(link.Config{
		Identity: p.id, BootID: boot, Version: version.Version, Log: p.log.With("part", "link"), Streams: streams, Sessions: streams, Clock: p.floor,
		Metrics: func(w io.Writer) error { return view.WriteMetrics(w, p.metrics) },
		Usage: func(ctx context.Context, w io.Writer) error {
			if p.agent == nil {
				return errors.New("the agent is still starting")
			}
			return p.agent.Usage(ctx, w)
		},
		Time: p.timeHint, Datagram: p.datagram, NetCheck: p.netCheck,
		Generation: func() uint64 {
			if p.agent == nil {
				return 0
			}
			return p.agent.Generation()
		},
		Stopped: func(reason string) {
			if p.agent != nil {
				p.agent.Stopped(reason)
			}
		},
		Servers: func() []string {
			if p.agent == nil {
				return nil
			}
			return append(p.agent.Servers(), p.hintedServers()...)
		},
	})
}

func (p *nodeProcess) openNetwork() (network.Network, error) {
	ip := netip.MustParseAddr(p.o.address)
	if err := network.Usable(); err != nil {
		p.log.Warn("pods share the node's address, each containerPort gets a port of its own there", "reason", err, "address", ip)
		return &network.NodeAddress{IPs: []netip.Addr{ip}}, nil
	}
	n, err := network.NewNamespaced(p.o.netns, []netip.Addr{ip})
	if err != nil {
		return nil, err
	}
	n.RememberIn(netnsClaims)
	n.UseCNI(p.o.plugins(p.log.With("part", "cni")))
	return n, nil
}

// plugins attach pods where the operator put a CNI configuration.
func (o *nodeOptions) plugins(log *slog.Logger) *cni.Networks {
	return cni.New(cni.Config{ConfDir: cmp.Or(o.cniConf, filepath.Join(o.config, "cni")), BinDirs: filepath.SplitList(cmp.Or(o.cniBin, cni.DefaultBinDirs)),
		StateDir: filepath.Join(o.state, "cni"), Logger: log})
}

// run until ctx ends. Workloads go on after it.
func (p *nodeProcess) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.agent.Run(ctx) })
	g.Go(func() error { return p.link.Run(ctx) })
	g.Go(func() error { return p.serveSocket(ctx) })
	g.Go(func() error { return p.runGossip(ctx) })
	g.Go(func() error { return p.keepFloor(ctx) })
	g.Go(func() error { return p.traffic.puller.Run(ctx) })
	g.Go(func() error { return p.traffic.runRoutes(ctx) })
	g.Go(func() error { return p.traffic.runHeld(ctx, p.agent) })
	g.Go(func() error { return p.traffic.supervisor().Run(ctx) })
	g.Go(func() error { return p.unserved().run(ctx) })
	g.Go(func() error { return p.ingressSupervisor().Run(ctx) })
	g.Go(func() error { p.followAddress(ctx); return nil })
	if !p.o.besideServer {
		g.Go(func() error { thrift(ctx, p.log); return nil })
	}
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
	if p.containers != nil && p.containers.runtime != nil {
		_ = p.containers.runtime.Close()
	}
	if p.images != nil {
		p.images.client.Close()
	}
	if p.db != nil {
		_ = p.db.Close()
	}
}

func (o *nodeOptions) machineBoot() string {
	if o.boot != "" {
		return o.boot
	}
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
		if o.named && o.name != id.Grant().NodeName {
			log.Warn("the node keeps the name under which it joined", "name", id.Grant().NodeName, "wanted", o.name, "hint", "'dunlin agent reset' makes a new node of it")
		}
		return id, joinedSame(id.Grant(), o, line, log)
	}
	if line == "" {
		return nil, errNotJoined
	}
	jl, err := pki.ParseJoinLine(line)
	if err != nil {
		return nil, usagef("--join: %w", err)
	}
	err = link.Join(ctx, link.JoinConfig{
		Line: jl, Identity: id, Name: o.name, BootID: o.machineBoot(), Addresses: []string{o.address}, Log: log,
		Facts: map[string]string{"machine-id": readLine("/etc/machine-id")},
	})
	if err != nil {
		return nil, err
	}
	if got := id.Grant().NodeName; o.named && !strings.HasPrefix(got, o.name) { // of a taken name the reply spoke
		log.Warn("the join line is for a node of another name", "name", got, "wanted", o.name, "hint", "a line of 'dunlin token create' without --node-name leaves the name to the node")
	}
	log.Info("joined", "cluster", id.Grant().ClusterID, "node", id.Grant().NodeName, "address", o.address)
	return id, nil
}

// joinedSame refuses a join line of another cluster than the node's own. A
// line names its cluster by the key of its authority.
func joinedSame(g pki.Grant, o nodeOptions, line string, log *slog.Logger) error {
	if line == "" {
		return nil
	}
	jl, err := pki.ParseJoinLine(line)
	if err != nil {
		return usagef("--join: %w (and this node is in cluster %s already)", err, g.ClusterID)
	}
	var own []string
	for _, der := range g.CA {
		if ca, err := x509.ParseCertificate(der); err == nil {
			own = append(own, pki.PinOf(ca))
		}
	}
	if slices.Contains(own, jl.Pin) {
		log.Info("this node has joined this cluster already: the join line is not needed and was not used", "cluster", g.ClusterID)
		return nil
	}
	return fmt.Errorf("--join: this node (%s) is in cluster %s already (authority %s), and the join line is of another one (authority %s, at %s): start it without --join to stay; "+
		"to move it, run 'dunlin agent reset --state-dir %s --run-dir %s --netns %s', and join again",
		g.NodeName, g.ClusterID, strings.Join(own, ","), jl.Pin, strings.Join(jl.Servers, ","), o.state, o.run, o.netns)
}

func readLine(p string) string {
	b, err := os.ReadFile(p)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
