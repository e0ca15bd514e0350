package node

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/network"
)

const (
	// drainLook is how often the connections of a pod that ends are counted.
	drainLook = 2 * time.Second
	// drainTell is how often a figure that changes is told: each is a write.
	drainTell = 5 * time.Second
)

// draining is who is still connected to a pod on its way out.
type draining struct {
	look  time.Time // the next one
	told  time.Time
	most  int  // at once, since it began
	open  int  // as told last
	known bool // there was one
}

// drain counts the open connections of a pod on its way out, and tells the
// figure when it means something. It returns when to look again; zero is
// never. A pod that nobody is connected to says nothing.
func (w *worker) drain() time.Time {
	s := &w.state
	counter, ok := w.a.c.Network.(network.ConnectionCounter)
	if !ok || !s.over() || s.rec.Allocation == nil || !w.anyLive() {
		return time.Time{}
	}
	ports := tcpPorts(s.pod)
	if len(ports) == 0 {
		return time.Time{}
	}
	now, d := w.a.now(), &s.drain
	if now.mono.Before(d.look) {
		return d.look
	}
	d.look = now.mono.Add(drainLook)
	n, err := counter.Connections(*s.rec.Allocation, ports)
	if err != nil {
		w.log.Debug("connections of the pod cannot be counted", "err", err)
		return d.look
	}
	d.most = max(d.most, n)
	if n == d.open || (d.known && n > 0 && now.mono.Sub(d.told) < drainTell) {
		return d.look
	}
	d.known, d.open, d.told = true, n, now.mono
	w.publish()
	return d.look
}

func tcpPorts(pod *corev1.Pod) (out []int32) {
	for i := range pod.Spec.Containers {
		for _, p := range pod.Spec.Containers[i].Ports {
			if p.Protocol == corev1.ProtocolTCP || p.Protocol == "" {
				out = append(out, p.ContainerPort)
			}
		}
	}
	return out
}

// condition says how many connections are open, and by its time since when.
func (d *draining) condition(ended bool) corev1.PodCondition {
	c := corev1.PodCondition{Type: manifests.ConditionDraining, Status: corev1.ConditionTrue, Reason: "ConnectionsOpen",
		Message: fmt.Sprintf("%d of %d connections are still open", d.open, d.most)}
	switch {
	case d.open == 0:
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, "Drained", fmt.Sprintf("all %d connections have ended", d.most)
	case ended:
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, "Ended", fmt.Sprintf("%d of %d connections were open when they were last counted before the containers ended", d.open, d.most)
	}
	return c
}
