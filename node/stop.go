package node

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// stopStep brings a pod that shall not run to its end: regular containers
// together, then sidecars in reverse order, then what the pod holds.
func (s podState) stopStep(now moment) (podState, action) {
	wake := &waker{}
	deadline := s.stopSince.Add(s.grace())
	waiting := false
	order := make([]int, 0, len(s.ctrs))
	for i := range s.ctrs {
		if !s.ctrs[i].sidecar() {
			order = append(order, i)
		}
	}
	for i := range slices.Backward(s.ctrs) {
		if s.ctrs[i].sidecar() {
			order = append(order, i)
		}
	}
	for _, i := range order {
		c := &s.ctrs[i]
		if c.sidecar() && waiting {
			break
		}
		if c.live() && c.seen == absent && c.op == opNone {
			c.rec.Begun = false // it never came to be
		}
		if !c.live() && c.op == opNone {
			if c.remove {
				waiting = true
				wake.at(c.removeTry)
			}
			continue
		}
		waiting = true
		if a, ok := s.stopOne(i, deadline, now, wake); ok {
			return s, a
		}
	}
	if waiting {
		if a, ok := s.probeStopping(now, wake); ok {
			return s, a
		}
		return s, action{wake: wake.t}
	}
	return s.releaseStep(now)
}

// probeStopping goes on with the readiness probes of what still serves, as the
// kubelet does: a pod that is the only one serves to its end.
func (s *podState) probeStopping(now moment, wake *waker) (action, bool) {
	if !s.serves() {
		return action{}, false
	}
	for i := range s.ctrs {
		c := &s.ctrs[i]
		if !c.running() || !c.started || c.ending() {
			continue
		}
		if kind, ok := c.dueProbe(probeReadiness, now, wake); ok {
			c.probes[kind].busy = true
			return action{kind: actProbe, ctr: i, id: s.id(i), probe: kind}, true
		}
	}
	return action{}, false
}

func (s *podState) stopOne(i int, deadline time.Time, now moment, wake *waker) (action, bool) {
	c := &s.ctrs[i]
	switch {
	case c.op == opNone && now.mono.Before(c.stopTry):
		wake.at(c.stopTry)
	case c.op == opNone && c.seen == present:
		if c.run.Phase == workload.Unknown || c.killed {
			return s.killAction(i), true
		}
		left := max(deadline.Sub(now.mono), 0)
		if s.grace() > 0 {
			left = max(left, time.Second) // also for a sidecar that comes last, and after an agent restart
		}
		return s.stopAction(i, left), true
	case c.op == opStop && !c.killed && c.live():
		// Grace may have been shortened since the stop began.
		if at := deadline.Add(stopSlack); now.mono.Before(at) {
			wake.at(at)
		} else {
			return s.killAction(i), true
		}
	}
	return action{}, false
}

func (s *podState) stopAction(i int, grace time.Duration) action {
	c := &s.ctrs[i]
	c.op = opStop
	c.inflight++
	a := action{kind: actStop, ctr: i, id: s.id(i), grace: grace, preStop: c.stopTry.IsZero()}
	c.asked = c.asked || s.closes && !a.hooks(c.spec)
	return a
}

// hooks says whether a stop begins with a preStop hook, until whose end
// nothing is asked to end.
func (a action) hooks(c *corev1.Container) bool {
	return a.preStop && a.grace > 0 && c.Lifecycle != nil && c.Lifecycle.PreStop != nil
}

func (s *podState) killAction(i int) action {
	c := &s.ctrs[i]
	c.op, c.killed = opStop, true
	c.inflight++
	return action{kind: actKill, ctr: i, id: s.id(i)}
}

// releaseStep gives back what the pod held, one thing a call.
func (s podState) releaseStep(now moment) (podState, action) {
	if s.release.busy || s.volumes.busy || s.network.busy {
		return s, action{}
	}
	if now.mono.Before(s.release.at) {
		return s, action{wake: s.release.at}
	}
	var kind actionKind
	switch {
	case s.rec.Volumes:
		kind = actUnmount
	case s.rec.Allocation != nil:
		kind = actTeardown
	case s.deleted():
		kind = actFinish
	default:
		return s, action{} // finished; it stays until it is deleted
	}
	s.release.busy = true
	return s, action{kind: kind}
}
