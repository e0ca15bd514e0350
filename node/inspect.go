package node

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/wire"
)

// Pods are those that this node knows, sorted by namespace and name: what a
// server assigned, and static ones. Each is the object as the node has it,
// with the status as the node sees it now. The copies are the caller's.
func (a *Agent) Pods() []*corev1.Pod {
	a.mu.RLock()
	defer a.mu.RUnlock()
	out := make([]*corev1.Pod, 0, len(a.known))
	for _, i := range a.known {
		pod := i.copy()
		if pod == nil {
			continue
		}
		if a.asg.Held[string(pod.UID)].Kind == store.HoldPod && pod.Status.Reason == "" {
			pod.Status.Reason, pod.Status.Message = manifests.ReasonHeldAfterRestore, heldText(&a.asg, a.c.NodeName)
		}
		out = append(out, pod)
	}
	slices.SortFunc(out, func(x, y *corev1.Pod) int {
		return cmp.Or(cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name), cmp.Compare(x.UID, y.UID))
	})
	return out
}

// copy is the pod as the node sees it now; nil is not known yet.
func (i *podInfo) copy() *corev1.Pod {
	pod := i.pod
	if i.assigned != nil && i.worker != nil && !isStatic(i.assigned) {
		pod = i.assigned // a deletion is known here before the worker took it
	}
	if pod == nil {
		return nil
	}
	pod = pod.DeepCopy()
	pod.APIVersion, pod.Kind = "v1", "Pod"
	if i.status != nil {
		pod.Status = statusHere(&pod.Status, i.status)
	}
	return pod
}

// HeldPod is a pod of which no server knows, and where its ports are on a node
// without a pod network.
type HeldPod struct {
	Pod   *corev1.Pod
	Ports map[int32]int32
}

// HeldPods are those that are held after a restore and that the cluster does
// not know, as the node sees them now.
func (a *Agent) HeldPods() (out []HeldPod) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	for uid, h := range a.asg.Held {
		i := a.known[uid]
		pod := i.copy()
		if h.Kind != store.HoldPod || pod == nil {
			continue
		}
		p := HeldPod{Pod: pod}
		if i.alloc != nil {
			p.Ports = maps.Clone(i.alloc.Ports)
		}
		out = append(out, p)
	}
	return out
}

// CutOff says that no server can be reached.
func (a *Agent) CutOff() bool { return a.c.Link != nil && !a.c.Link.Connected() }

// PodsHere are the pods that this node knows, by namespace/name, as it sees
// them now; nil for one that it has not looked at yet.
func (a *Agent) PodsHere() map[string]*corev1.Pod {
	a.mu.RLock()
	defer a.mu.RUnlock()
	out := make(map[string]*corev1.Pod, len(a.known))
	for _, i := range a.known {
		if pod := i.copy(); pod != nil && i.status != nil {
			out[pod.Namespace+"/"+pod.Name] = pod
		} else if pod != nil {
			out[pod.Namespace+"/"+pod.Name] = nil
		}
	}
	return out
}

// HeldNews is signalled when HeldPods may be others, or pods of PodsHere serve
// otherwise.
func (a *Agent) HeldNews() <-chan struct{} { return a.heldNews }

// statusHere is the node's own status, with the conditions that others set.
// That the node is out of reach is not for the node to repeat.
func statusHere(theirs, own *corev1.PodStatus) corev1.PodStatus {
	out := *own.DeepCopy()
	for _, c := range theirs.Conditions {
		mine := slices.ContainsFunc(out.Conditions, func(o corev1.PodCondition) bool { return o.Type == c.Type })
		if !mine && c.Type != corev1.DisruptionTarget {
			out.Conditions = append(out.Conditions, c)
		}
	}
	return out
}

// Node is this node's object: what the node says of itself, with what it
// knows of the cluster's (labels, taints, whether it is cordoned).
func (a *Agent) Node() *corev1.Node {
	n := &corev1.Node{}
	a.object("Node", "", a.c.NodeName, n)
	own := &corev1.Node{}
	if b := a.reports.lastNode(); b != nil {
		if err := direct.Unmarshal(b, own); err != nil {
			a.log.Error("node object cannot be decoded", "err", err)
		}
	}
	n.APIVersion, n.Kind, n.Name = "v1", "Node", a.c.NodeName
	if n.Labels == nil {
		n.Labels = map[string]string{}
	}
	maps.Copy(n.Labels, own.Labels)
	n.Status = own.Status
	return n
}

// WaitingEvents are the events that were not reported yet: while no server
// can be reached, what happened here, up to a bound.
func (a *Agent) WaitingEvents() []corev1.Event {
	list := a.reports.waitingEvents()
	out := make([]corev1.Event, len(list))
	for i, e := range list {
		at := metav1.NewTime(time.UnixMilli(e.UnixMilli))
		namespace := e.Object.Namespace
		if namespace == "" {
			namespace = metav1.NamespaceDefault
		}
		out[i] = corev1.Event{
			TypeMeta:       metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
			ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, Name: e.Object.Name + "." + strconv.FormatInt(e.UnixMilli, 16) + "." + strconv.Itoa(i), CreationTimestamp: at},
			InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: e.Object.Kind, Namespace: e.Object.Namespace, Name: e.Object.Name, UID: types.UID(e.UID), FieldPath: e.FieldPath},
			Type:           e.Type, Reason: e.Reason, Message: e.Message, Count: e.Count, FirstTimestamp: at, LastTimestamp: at,
			Source: corev1.EventSource{Component: e.Component, Host: a.c.NodeName},
		}
	}
	return out
}

func (r *reports) lastNode() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.node
}

func (r *reports) waitingEvents() []wire.EventReport {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.events.queue)
}
