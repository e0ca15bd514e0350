package cli

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/node/eviction"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/runtime/cgroup"
)

// leastMemory is what a node needs for its pods at least, bytes.
const leastMemory = 16 << 20

// podsGroup is the control group of all pods, below the node's own.
const podsGroup = "pods"

func (o *nodeOptions) addPressure(f *pflag.FlagSet) {
	f.StringVar(&o.memory, "node-memory", "", "memory that this node's pods may take together, as 512Mi (default: the machine's)")
	f.StringVar(&o.evict.Hard, "eviction-hard", "", "when a pod is evicted at once, in the kubelet's syntax (default: memory.available<10% but at most 100Mi, nodefs.available<10% but at most 2Gi, nodefs.inodesFree<5%, pid.available<5% but at most 1000)")
	f.StringVar(&o.evict.Soft, "eviction-soft", "", "when a pod is evicted after a while, as memory.available<20%")
	f.StringVar(&o.evict.SoftGrace, "eviction-soft-grace-period", "", "after which while, as memory.available=1m30s")
	f.StringVar(&o.evict.MinReclaim, "eviction-minimum-reclaim", "", "how much more must be free until a shortage is over, as memory.available=20Mi")
	f.DurationVar(&o.evict.MaxPodGrace, "eviction-max-pod-grace-period", 0, "the most that a pod gets to end under a soft threshold (0: its own time)")
	f.DurationVar(&o.evict.Transition, "eviction-pressure-transition-period", 5*time.Minute, "how long a shortage is told after it was last seen")
}

func (o *nodeOptions) checkPressure() error {
	if _, err := o.memoryBytes(); err != nil {
		return err
	}
	if _, err := o.evict.Parse(); err != nil {
		return usagef("%w", err)
	}
	return nil
}

// memoryBytes is --node-memory; 0 is the machine's.
func (o *nodeOptions) memoryBytes() (int64, error) {
	if o.memory == "" {
		return 0, nil
	}
	q, err := resource.ParseQuantity(o.memory)
	if err != nil || q.Value() < leastMemory {
		return 0, usagef("--node-memory=%s: want an amount of memory, as 512Mi, and at least 16Mi", o.memory)
	}
	return q.Value(), nil
}

// boundPods bounds what all pods take, even where that is the whole machine:
// then the kernel looks for its victim among them. It returns what the agent
// needs to see when it runs short.
func (o *nodeOptions) boundPods(tree *cgroup.Tree, net network.Network, log *slog.Logger) (*node.HostMachine, eviction.Config, error) {
	memory, err := o.memoryBytes()
	if err != nil {
		return nil, eviction.Config{}, err
	}
	evict, err := o.evict.Parse()
	if err != nil {
		return nil, eviction.Config{}, err
	}
	spareAgent()
	facts := tree.Facts()
	m := &node.HostMachine{StateDir: o.state, Network: net, Memory: memory}
	m.Pods = func() (int64, uint64, bool) {
		st, err := tree.Open(podsGroup).Stats()
		return int64(st.MemoryBytes), st.CPUNanos, facts.Memory && (err == nil || errors.Is(err, fs.ErrNotExist))
	}
	m.Limits = func() (string, string) {
		if facts.Memory {
			return "", ""
		}
		if os.Geteuid() != 0 {
			return "NotRoot", "the agent does not run as root, so memory and CPU limits of containers are not enforced"
		}
		return "NoMemoryCgroup", strings.TrimSpace(facts.Reason + " " + facts.MemoryReason)
	}
	have := m.Facts()
	if err := tree.Bound(podsGroup, cgroup.Bound{MemoryBytes: have.Memory, CPUMilli: have.CPUMilli}); err != nil {
		log.Warn("the pods of this node cannot be bounded together", "err", err)
	}
	return m, evict, nil
}

// spareAgent makes the kernel kill the agent last when memory runs out, where
// it lets us (CAP_SYS_RESOURCE); the figure is the kubelet's. Containers are
// given their own.
func spareAgent() {
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-999"), 0)
}
