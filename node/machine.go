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

	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// RuntimeLabel prefixes the labels that say what a node can run.
const RuntimeLabel = "dunlin.dev/runtime."

// LimitsEnforced is False on a node that cannot hold containers to their
// memory limits.
const LimitsEnforced corev1.NodeConditionType = "dunlin.dev/LimitsEnforced"

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
	Memory     int64 // bytes
	Storage    int64 // bytes, of the file system of the state folder
	Addresses  []string
	// LimitsReason and LimitsMessage say why limits are not enforced; empty
	// when they are.
	LimitsReason, LimitsMessage string
}

const machineInterval = 30 * time.Second

// machineLoop notices a changed address, memory or limit.
func (a *Agent) machineLoop(ctx context.Context) {
	for sleep(ctx, a.c.Jitter(machineInterval), a.look) {
		if a.updateMachine() {
			a.mu.RLock()
			for _, i := range a.known {
				if i.worker != nil {
					i.worker.box.tell(func(m *mailbox) { m.look = true })
				}
			}
			a.mu.RUnlock()
		}
	}
}

// updateMachine reads the facts and sends the Node when its meaning changed.
func (a *Agent) updateMachine() (addresses bool) {
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
	n := a.nodeObject(f)
	b, err := direct.Marshal(n)
	if err != nil {
		a.log.Error("node object cannot be encoded", "err", err)
		return addresses
	}
	if !bytes.Equal(b, a.nodeSent) {
		a.nodeSent = b
		a.reports.setNode(b)
	}
	return addresses
}

func (a *Agent) handlers() []string { return slices.Sorted(maps.Keys(a.c.Runtimes)) }

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

// nodeConditions keeps transition times, across agents too: those of the
// Node in the assignment are taken up.
func (a *Agent) nodeConditions(f MachineFacts) []corev1.NodeCondition {
	if a.nodeConds == nil {
		n := &corev1.Node{}
		if a.object("Node", "", a.c.NodeName, n) {
			a.nodeConds = n.Status.Conditions
		}
	}
	no := func(t corev1.NodeConditionType, reason, message string) corev1.NodeCondition {
		return corev1.NodeCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, Message: message}
	}
	conds := []corev1.NodeCondition{
		no(corev1.NodeMemoryPressure, "KubeletHasSufficientMemory", "the agent sees no memory pressure"),
		no(corev1.NodeDiskPressure, "KubeletHasNoDiskPressure", "the agent sees no disk pressure"),
		no(corev1.NodePIDPressure, "KubeletHasSufficientPID", "the agent sees no shortage of process ids"),
		{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "the agent runs and takes pods"},
		{Type: LimitsEnforced, Status: corev1.ConditionTrue, Reason: "LimitsEnforced", Message: "memory limits are enforced"},
	}
	if f.LimitsReason != "" {
		conds[len(conds)-1] = no(LimitsEnforced, f.LimitsReason, f.LimitsMessage)
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
		f.UID = id.PodUID(s.rec.UID)
		f.GID = f.UID
	}
	return f
}
