package node

import (
	"bytes"
	"context"
	"maps"
	"runtime"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/node/eviction"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// RuntimeLabel prefixes the labels that say what a node can run.
const RuntimeLabel = "dunlin.dev/runtime."

// LimitsEnforced is False on a node that cannot hold containers to their
// memory limits.
const LimitsEnforced corev1.NodeConditionType = "dunlin.dev/LimitsEnforced"

// RunsContainers is False on a node that runs Wasm modules only.
const RunsContainers corev1.NodeConditionType = "dunlin.dev/RunsContainers"

// kubernetesVersion is that of the API types, for kubeletVersion.
const kubernetesVersion = "v1.37.2"

// MachineFacts describe the machine as the agent's user space sees it.
type MachineFacts struct {
	Hostname   string
	Kernel     string
	OSImage    string
	MachineID  string
	SystemUUID string
	CPUMilli   int64
	Memory     int64      // bytes
	Storage    int64      // bytes, of the file system of the state folder
	Disk       *DiskFacts // of the same; nil: not known
	// FreeMemory in bytes and PIDs in processes and threads; nil: not known.
	FreeMemory, PIDs *SupplyFacts
	Addresses        []string
	// LimitsReason and LimitsMessage say why limits are not enforced; empty
	// when they are.
	LimitsReason, LimitsMessage string
	// ContainersReason and ContainersMessage say why the node runs no OCI
	// containers, or with an empty reason what runs them; both empty: nothing
	// is said of it.
	ContainersReason, ContainersMessage string
}

// machineInterval is how often the machine is looked at: the kubelet's
// eviction manager looks every 10 s, too.
const machineInterval = 10 * time.Second

// machineLoop notices a changed address, memory or limit, and what runs short.
func (a *Agent) machineLoop(ctx context.Context) {
	defer a.watchStalls(ctx)()
	for sleep(ctx, a.c.Jitter(machineInterval), a.look) {
		a.followLeaving(time.Now())
		addresses, due := a.updateMachine()
		a.relieve(ctx, due)
		if addresses {
			a.mu.RLock()
			for _, i := range a.known {
				if i.worker != nil {
					i.worker.box.tell(func(m *mailbox) { m.look = true })
				}
			}
			a.mu.RUnlock()
		}
		a.tellOfImages()
		a.collectImages(ctx, time.Now())
	}
}

// watchStalls looks at the machine when the kernel says that memory is scarce.
// Call the function that it returns once ctx has ended.
func (a *Agent) watchStalls(ctx context.Context) (wait func()) {
	if a.c.Stalls == nil {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := a.c.Stalls(ctx, a.Refresh); err != nil {
			a.log.Info("the kernel does not tell when memory is scarce", "every", machineInterval, "reason", err)
		}
	}()
	return func() { <-done }
}

// updateMachine reads the facts and sends the Node when its meaning changed.
// due is what a pod has to go for.
func (a *Agent) updateMachine() (addresses bool, due []eviction.Met) {
	f := a.c.Machine.Facts()
	a.mu.Lock()
	addresses = !slices.Equal(f.Addresses, a.machine.Addresses)
	a.machine = f
	a.alloc = corev1.ResourceList{
		corev1.ResourceCPU:              *resource.NewMilliQuantity(f.CPUMilli, resource.DecimalSI),
		corev1.ResourceMemory:           *resource.NewQuantity(f.Memory, resource.BinarySI),
		corev1.ResourceEphemeralStorage: *resource.NewQuantity(f.Storage, resource.BinarySI),
		corev1.ResourcePods:             *resource.NewQuantity(int64(a.c.MaxPods), resource.DecimalSI),
	}
	a.mu.Unlock()
	a.adoptConditions()
	due = a.pressures.look(f.readings(), time.Now())
	n := a.nodeObject(f)
	a.mu.Lock()
	a.pressed = pressed(n.Status.Conditions)
	a.mu.Unlock()
	b, err := direct.Marshal(n)
	if err != nil {
		a.log.Error("node object cannot be encoded", "err", err)
		return addresses, due
	}
	if !bytes.Equal(b, a.nodeSent) {
		a.nodeSent = b
		a.reports.setNode(b)
	}
	return addresses, due
}

func (a *Agent) handlers() []string { return slices.Sorted(maps.Keys(a.c.Runtimes)) }

// ReservedLabel says whether a label is what the node finds out by itself.
func ReservedLabel(key string) bool {
	return key == corev1.LabelArchStable || key == corev1.LabelOSStable || key == corev1.LabelHostname || strings.HasPrefix(key, RuntimeLabel)
}

// ownLabels are the labels that the node gives itself.
func (a *Agent) ownLabels() map[string]string {
	l := maps.Clone(a.c.Labels)
	if l == nil {
		l = map[string]string{}
	}
	l[corev1.LabelArchStable] = runtime.GOARCH // of this user space, not of the kernel
	l[corev1.LabelOSStable] = runtime.GOOS
	l[corev1.LabelHostname] = a.c.NodeName
	for _, h := range a.handlers() {
		l[RuntimeLabel+h] = "true"
	}
	return l
}

func (a *Agent) nodeObject(f MachineFacts) *corev1.Node {
	a.mu.RLock()
	alloc := a.alloc.DeepCopy()
	a.mu.RUnlock()
	n := &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: a.c.NodeName, Labels: a.ownLabels()},
		Spec:       corev1.NodeSpec{Taints: a.c.Taints},
		Status: corev1.NodeStatus{
			Capacity: alloc, Allocatable: alloc,
			NodeInfo: corev1.NodeSystemInfo{
				MachineID: f.MachineID, SystemUUID: f.SystemUUID, BootID: a.c.MachineBoot, KernelVersion: f.Kernel,
				OSImage: f.OSImage, ContainerRuntimeVersion: containerRuntimeVersion(a.c.Runtimes),
				KubeletVersion:  kubernetesVersion + "+dunlin." + a.version(),
				OperatingSystem: runtime.GOOS, Architecture: runtime.GOARCH,
			},
		},
	}
	if a.c.Annotations != nil {
		n.Annotations = a.c.Annotations()
	}
	for _, ip := range f.Addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip})
	}
	host := f.Hostname
	if host == "" {
		host = a.c.NodeName
	}
	n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: host})
	n.Status.Conditions = a.nodeConditions(f)
	n.Status.Images = a.imagesHere(time.Now())
	return n
}

func (a *Agent) version() string {
	if a.c.Version == "" {
		return "0.0.0"
	}
	return strings.TrimPrefix(a.c.Version, "v")
}

// WazeroVersion is the engine's, shown in containerRuntimeVersion.
const WazeroVersion = "1.12.0"

func containerRuntimeVersion(rts map[string]workload.Runtime) string {
	if rts[wasmHandler] != nil || len(rts) == 0 {
		return wasmHandler + "://" + WazeroVersion
	}
	return slices.Sorted(maps.Keys(rts))[0] + "://unknown"
}

// adoptConditions takes up what an earlier agent told: the Node in the
// assignment has it.
func (a *Agent) adoptConditions() {
	n := &corev1.Node{}
	if a.nodeConds == nil && a.object("Node", "", a.c.NodeName, n) {
		a.nodeConds = n.Status.Conditions
		a.pressures.adopt(a.nodeConds, time.Now())
	}
}

// nodeConditions keeps transition times, across agents too.
func (a *Agent) nodeConditions(f MachineFacts) []corev1.NodeCondition {
	no := func(t corev1.NodeConditionType, reason, message string) corev1.NodeCondition {
		return corev1.NodeCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, Message: message}
	}
	disk := a.pressures.condition(corev1.NodeDiskPressure, time.Now())
	if err := a.c.Store.Check(); err != nil && disk.Status != corev1.ConditionTrue {
		disk = unsaved(err)
	}
	conds := []corev1.NodeCondition{
		a.pressures.condition(corev1.NodeMemoryPressure, time.Now()), disk,
		a.pressures.condition(corev1.NodePIDPressure, time.Now()),
		{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "the agent runs and takes pods"},
		{Type: LimitsEnforced, Status: corev1.ConditionTrue, Reason: "LimitsEnforced", Message: "memory limits are enforced"},
	}
	if a.stopped.Load() { // read on this machine only: a server hears nothing from it
		conds[len(conds)-2] = no(corev1.NodeReady, "PodsStopped",
			"the cluster has this node's pods run elsewhere, and they are stopped here: 'dunlin describe node "+a.c.NodeName+" --local' says why, and what to do")
	}
	if f.LimitsReason != "" {
		conds[len(conds)-1] = no(LimitsEnforced, f.LimitsReason, f.LimitsMessage)
	}
	switch {
	case f.ContainersReason != "":
		conds = append(conds, no(RunsContainers, f.ContainersReason, f.ContainersMessage))
	case f.ContainersMessage != "":
		conds = append(conds, corev1.NodeCondition{Type: RunsContainers, Status: corev1.ConditionTrue, Reason: "RuntimeWorks", Message: f.ContainersMessage})
	}
	if c, ok := a.heldCondition(); ok {
		conds = append(conds, c)
	}
	now := metav1.NewTime(a.c.Clock.Now().UTC().Truncate(time.Second))
	for i := range conds {
		c := &conds[i]
		c.LastTransitionTime = now
		j := slices.IndexFunc(a.nodeConds, func(o corev1.NodeCondition) bool { return o.Type == c.Type })
		if j >= 0 && a.nodeConds[j].Status == c.Status {
			c.LastTransitionTime = a.nodeConds[j].LastTransitionTime
		}
		// Leases are the heartbeat; this never moves by itself.
		c.LastHeartbeatTime = c.LastTransitionTime
	}
	a.nodeConds = conds
	return conds
}

func (a *Agent) statusFacts(rt workload.Runtime) facts {
	a.mu.RLock()
	defer a.mu.RUnlock()
	f := facts{hostIPs: a.machine.Addresses, scheme: wasmHandler}
	if rt != nil {
		f.scheme = rt.Name()
	}
	return f
}

// fieldFacts are what the downward API tells a pod.
func (a *Agent) fieldFacts(s *podState) volumes.Facts { return a.fieldFactsFor(s, nil) }

func (a *Agent) fieldFactsFor(s *podState, rt workload.Runtime) volumes.Facts {
	a.mu.RLock()
	f := volumes.Facts{
		NodeName: a.c.NodeName, HostIPs: a.machine.Addresses, PodIPs: s.rec.IPs,
		Allocatable: a.alloc, UID: -1, GID: -1,
	}
	a.mu.RUnlock()
	if id, ok := rt.(Identifier); ok {
		f.UID = id.PodUID(a.identityOf(s))
		f.GID = f.UID
	}
	return f
}
