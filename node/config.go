package node

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"runtime"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/node/eviction"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Volumes prepares what pods mount; implemented by node/volumes.
type Volumes interface {
	Prepare(ctx context.Context, pod *corev1.Pod, src volumes.Source, f volumes.Facts) (map[string]string, error)
	Teardown(ctx context.Context, podUID string) error
	List() ([]string, error)
}

// ImageMounter brings an image and mounts it, read-only; implemented by
// images.Puller.
type ImageMounter interface {
	Mount(ctx context.Context, req workload.ImageRequest, target string, progress workload.Progress) (digest string, err error)
}

// Static gives the pods of a local folder; implemented by node/static.
type Static interface {
	// Pods reads the folder. Pods are complete (UID, node name, annotations);
	// errors name single files that are left out.
	Pods() ([]*corev1.Pod, []error)
}

// Machine tells what the node is; implemented by HostMachine, and by tests.
type Machine interface {
	// Facts reads what may change while running; cheap.
	Facts() MachineFacts
}

// Identifier is the optional ability of a runtime to tell the uid (and gid)
// of a pod's guests where the pod asks for none, so that their files can
// belong to them; negative is the agent's own.
type Identifier interface {
	PodUID(podUID string) int
}

// Config of an Agent. Zero values are replaced by the defaults named here.
type Config struct {
	NodeName string
	Version  string
	// BootID is the agent's own, as in the link's hello: it must differ on
	// every start of the agent. Empty: made of MachineBoot and the store's
	// boot counter (see BootID).
	BootID string
	// MachineBoot differs after each boot of the machine. Empty: the
	// kernel's.
	MachineBoot string

	Link     Link                        // nil: never connected
	Store    store.Store                 // required
	Runtimes map[string]workload.Runtime // by handler; at least one
	Network  network.Network             // required
	Volumes  Volumes                     // required
	Static   Static                      // nil: no static pods
	Machine  Machine                     // nil: HostMachine
	Clock    clock.Clock                 // nil: clock.System
	// Contact is when, since the boot of the machine, the newest acknowledged
	// renewal of the node's lease was sent; ok is false before the first one
	// since the start of the agent. nil: never. Elapsed is the time since the
	// boot; nil is clock.Elapsed.
	Contact func() (sent time.Duration, ok bool)
	Elapsed func() time.Duration
	Logger  *slog.Logger // nil: slog.Default

	StateDir string // logs of pods go to StateDir/logs
	// AddressDir keeps what pods were given of the network, until the machine's
	// next boot; "": a pod whose record is lost gets another address.
	AddressDir string
	// Cgroups, when not nil, tells what runs in the control groups of pods and
	// ends it: processes of which no run folder speaks any more.
	Cgroups Cgroups
	// MaxPods the node takes; 0 is 110.
	MaxPods int
	// Labels and taints that the node registers with.
	Labels map[string]string
	Taints []corev1.Taint
	// Annotations are asked for again and again and go to the Node; nil is
	// none. Only those of dunlin.dev/ are taken by the servers.
	Annotations func() map[string]string
	// Eviction says when the node runs short; the zero value is
	// eviction.Defaults.
	Eviction eviction.Config
	// PidsLimit of each container; 0 is the runtime's default.
	PidsLimit int64
	// LogMaxBytes of one log file and LogMaxFiles of one container; 0 is
	// 5 MiB and 2.
	LogMaxBytes int64
	LogMaxFiles int
	// Starts is how many containers are prepared or started at once; 0 is
	// twice the number of CPUs, at least 4.
	Starts int
	// ClusterDNS gives the addresses of the cluster's DNS for containers; nil or
	// none: they use the node's resolver. ClusterDomain is "cluster.local" if
	// empty.
	ClusterDNS    func() []netip.Addr
	ClusterDomain string
	// Images, when not nil, is asked for room on the disk: once it is used to
	// ImageGCHigh percent, until it is used to ImageGCLow percent.
	Images                  ImageCollector
	ImageGCHigh, ImageGCLow int
	// Stalls, when not nil, calls wake when work waits for memory, until ctx
	// ends: then the machine is looked at at once. An error says that this
	// machine cannot tell.
	Stalls func(ctx context.Context, wake func()) error
	// ImageList, when not nil, is what the Node's status.images tells.
	ImageList ImageLister
	// ImageVolumes mounts images for pods; nil: they cannot have any.
	ImageVolumes ImageMounter
	// ServiceEnv gives the variables that tell a new container of the API
	// server and, with links, of the Services in its namespace; nil: none.
	ServiceEnv func(namespace string, links bool) [][2]string
	// Resync is how often everything is looked at again without a hint; 0 is
	// 10 minutes. StaticScan is how often the static folder is looked at; 0
	// is 10 seconds.
	Resync, StaticScan time.Duration
	// Jitter spreads a wait; nil: between d and 1.25 d.
	Jitter func(d time.Duration) time.Duration
}

func (c *Config) complete() error {
	switch {
	case c.NodeName == "":
		return errors.New("node: NodeName is required")
	case c.Store == nil, c.Network == nil, c.Volumes == nil:
		return errors.New("node: Store, Network and Volumes are required")
	case c.StateDir == "" || !filepath.IsAbs(c.StateDir):
		return errors.New("node: StateDir must be an absolute path")
	}
	if c.Clock == nil {
		c.Clock = clock.System
	}
	if c.Elapsed == nil {
		c.Elapsed = clock.Elapsed
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.MachineBoot == "" {
		c.MachineBoot = machineBoot()
	}
	if c.BootID == "" {
		c.BootID = BootID(c.MachineBoot, c.Store)
	}
	if c.Machine == nil {
		c.Machine = &HostMachine{StateDir: c.StateDir, Network: c.Network}
	}
	def(&c.MaxPods, 110)
	def(&c.ClusterDomain, "cluster.local")
	if c.ServiceEnv == nil {
		c.ServiceEnv = func(string, bool) [][2]string { return nil }
	}
	if c.ClusterDNS == nil {
		c.ClusterDNS = func() []netip.Addr { return nil }
	}
	def(&c.LogMaxBytes, 5<<20)
	def(&c.LogMaxFiles, 2)
	def(&c.Starts, max(4, 2*runtime.NumCPU()))
	def(&c.Resync, 10*time.Minute)
	def(&c.StaticScan, 10*time.Second)
	if c.Jitter == nil {
		c.Jitter = func(d time.Duration) time.Duration { return d + rand.N(d/4+1) }
	}
	return nil
}

func def[T comparable](v *T, to T) {
	var zero T
	if *v == zero {
		*v = to
	}
}

func (a *Agent) now() moment { return moment{mono: time.Now(), wall: a.c.Clock.Now()} }
