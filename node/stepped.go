package node

import (
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Stepped is one pod under the agent's own decisions, taken in the caller's
// goroutine and at the moments it gives: what a simulation needs that replays
// exactly. Decide, keep the record that it returns, then Act; a crash between
// the two is one in the agent's life.
type Stepped struct {
	s    podState
	next action
}

// Hands do what is decided. Each call ends before it returns.
type Hands interface {
	Look(id workload.ID) (workload.State, bool)
	Prepare(image string) (workload.ImageState, error)
	Start(id workload.ID, image string) (workload.State, error)
	Stop(id workload.ID) error
	Kill(id workload.ID) error
	Remove(id workload.ID) error
	Probe(id workload.ID) (ok bool, text string)
	Address(podUID string) netip.Addr
}

// NewStepped begins with a pod, or goes on from its record.
func NewStepped(pod *corev1.Pod, rec *store.Pod, machineBoot string, now time.Time) *Stepped {
	return &Stepped{s: newPodState(pod, rec, machineBoot, moment{now, now})}
}

// Decide takes the newest object (nil: no news) and what the machine shows,
// and returns the record to keep and the name of the action. gone is the end.
func (p *Stepped) Decide(pod *corev1.Pod, removed bool, h Hands, now time.Time) (rec store.Pod, act string, gone bool) {
	o := observed{pod: pod, removed: removed, runs: map[int]run{}}
	for i := range p.s.ctrs {
		if c := &p.s.ctrs[i]; c.live() && c.op != opStart {
			st, ok := h.Look(p.s.id(i))
			o.runs[i] = run{st, ok}
		}
	}
	p.s, p.next = step(p.s, o, moment{now, now})
	return p.s.record(), p.next.kind.String(), p.s.gone
}

// Act does what was decided and takes in what came of it.
func (p *Stepped) Act(h Hands, now time.Time) {
	a := p.next
	r := result{kind: a.kind, ctr: a.ctr, id: a.id, probe: a.probe}
	switch a.kind {
	case actNone:
		return
	case actNetwork:
		ip := h.Address(p.s.rec.UID)
		r.alloc = &network.Allocation{IP: ip, IPs: []netip.Addr{ip}}
	case actPrepare:
		r.image, r.err = h.Prepare(p.s.ctrs[a.ctr].spec.Image)
	case actStart:
		r.state, r.err = h.Start(a.id, p.s.ctrs[a.ctr].spec.Image)
	case actStop:
		r.err = h.Stop(a.id)
	case actKill:
		r.err = h.Kill(a.id)
	case actRemove:
		r.err = h.Remove(a.id)
	case actProbe:
		r.ok, r.text = h.Probe(a.id)
	}
	p.s, _ = p.s.apply(r, moment{now, now})
}

// Status is what the agent would report.
func (p *Stepped) Status(now time.Time) corev1.PodStatus {
	return p.s.status(facts{hostIPs: []string{"192.0.2.1"}, scheme: wasmHandler}, moment{now, now})
}
