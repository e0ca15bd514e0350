package sim

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// lastWord is how long after an agent's end what it said may still be on its
// way to the state.
const lastWord = 15 * time.Second

// silentFor is how long no agent has run on the host.
func (h *host) silentFor() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ceased.IsZero() {
		return 0
	}
	return time.Since(h.ceased)
}

// nodeChanged holds the Ready condition against what is true: whoever is
// dead is not called alive, by a new leader least of all. mu is held.
func (c *checker) nodeChanged(srv *controlplane.Server, ev state.Event) {
	i := slices.IndexFunc(c.w.hosts, func(h *host) bool { return h.name == ev.Record.Header.Key.Name })
	if i < 0 || ev.Prev == nil || ev.Type != state.Modified || ev.Record.Status == ev.Prev.Status {
		return
	}
	if d := c.w.hosts[i].silentFor(); d > lastWord && c.ready(srv, ev.Record) && !c.ready(srv, ev.Prev) {
		c.w.violated("%s is called Ready, and its agent does not run for %s", c.w.hosts[i].name, d)
	}
}

func (c *checker) ready(srv *controlplane.Server, r *state.Record) bool {
	obj, err := srv.Store().Decode(r)
	if err != nil {
		c.w.violated("decode %v: %v", r.Header.Key, err)
		return false
	}
	n, ok := obj.(*corev1.Node)
	return ok && slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
