package cli

import (
	"context"
	"time"

	"github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/node/services"
	heldpods "github.com/dunlin-project/dunlin/node/services/held"
)

// heldSource is the agent, as runHeld needs it.
type heldSource interface {
	HeldPods() []node.HeldPod
	HeldNews() <-chan struct{}
}

// runHeld makes this node's Services lead to the pods that it holds after a
// restore: the cluster, which does not know them, has no endpoints of them.
func (t *traffic) runHeld(ctx context.Context, agent heldSource) error {
	var sub *services.Subscription // while there are any
	defer func() {
		if sub != nil {
			sub.Close()
		}
	}()
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
		if err := heldpods.Lead(t.table, t.node, t.zone(), pods); err != nil {
			t.log.Error("Services do not lead to the pods that are held", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-agent.HeldNews():
		case <-table:
			select { // endpoints come and go all the time
			case <-ctx.Done():
				return nil
			case <-time.After(routesGather):
			}
		}
	}
}
