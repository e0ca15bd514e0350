package cli

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/node/services"
	heldpods "github.com/dunlin-project/dunlin/node/services/held"
)

const (
	// cutOffLook is how soon runHeld notices that the node is cut off, or no more.
	cutOffLook = 2 * time.Second
	// startGrace is how long after its start a node that has not reached a
	// server goes by what was saved: its pods are being looked at.
	startGrace = 10 * time.Second
)

// heldSource is the agent, as runHeld needs it.
type heldSource interface {
	HeldPods() []node.HeldPod
	CutOff() bool
	PodsHere() map[string]*corev1.Pod
	HeldNews() <-chan struct{}
}

// runHeld makes this node's Services lead to the pods that it holds after a
// restore: the cluster, which does not know them, has no endpoints of them. While
// no server can be reached, its own pods are endpoints as it sees them itself.
func (t *traffic) runHeld(ctx context.Context, agent heldSource) error {
	var sub *services.Subscription // while there are any
	defer func() {
		if sub != nil {
			sub.Close()
		}
	}()
	look := time.NewTicker(cutOffLook)
	defer look.Stop()
	began := time.Now()
	cutOff := func() bool { return agent.CutOff() && time.Since(began) > startGrace }
	for {
		var pods []heldpods.Pod
		for _, p := range agent.HeldPods() {
			pods = append(pods, heldpods.Pod{Pod: p.Pod, Moved: p.Ports})
		}
		var table <-chan struct{}
		switch {
		case len(pods) == 0 && sub != nil:
			sub.Close()
			sub = nil
		case len(pods) > 0 && sub == nil:
			sub = t.table.Subscribe()
		}
		if sub != nil {
			table = sub.News()
			for more := true; more; {
				_, _, more = sub.Take(1 << 20)
			}
		}
		cut := cutOff()
		var own map[string]*corev1.Pod
		if cut {
			own = agent.PodsHere()
		}
		if err := heldpods.Lead(t.table, t.node, t.zone(), pods, own); err != nil {
			t.log.Error("Services do not lead to the pods of this node", "error", err)
		}
		for news := false; !news; {
			select {
			case <-ctx.Done():
				return nil
			case <-look.C:
				news = cut != cutOff()
			case <-agent.HeldNews():
				news = cut || cutOff() || len(pods) > 0 || len(agent.HeldPods()) > 0
			case <-table:
				news = true
				select { // endpoints come and go all the time
				case <-ctx.Done():
					return nil
				case <-time.After(routesGather):
				}
			}
		}
	}
}
