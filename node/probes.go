package node

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// probeKind indexes a container's probes.
type probeKind uint8

const (
	probeStartup probeKind = iota
	probeLiveness
	probeReadiness
)

var probeNames = [...]string{"Startup", "Liveness", "Readiness"}

// String names the kind as events do.
func (k probeKind) String() string { return probeNames[k] }

type probeState struct {
	due  time.Time
	busy bool
	good int32
	bad  int32
	// known: a verdict was reached in this attempt by this agent.
	known bool
}

func (c *ctrState) probeSpec(k probeKind) *corev1.Probe {
	switch k {
	case probeStartup:
		return c.spec.StartupProbe
	case probeLiveness:
		return c.spec.LivenessProbe
	}
	return c.spec.ReadinessProbe
}

func seconds(n, def int32) time.Duration {
	if n <= 0 {
		n = def
	}
	return time.Duration(n) * time.Second
}

// dueProbe finds the next probe to run, of first and those behind it: the
// startup probe alone until it passed, then the other two.
func (c *ctrState) dueProbe(first probeKind, now moment, wake *waker) (probeKind, bool) {
	for k := first; k <= probeReadiness; k++ {
		p, spec := &c.probes[k], c.probeSpec(k)
		if spec == nil || p.busy || (k == probeStartup) == c.started {
			continue
		}
		if p.due.IsZero() {
			p.due = c.since.Add(time.Duration(spec.InitialDelaySeconds) * time.Second)
		}
		if !now.mono.Before(p.due) {
			return k, true
		}
		wake.at(p.due)
	}
	return 0, false
}

// probed takes one probe's outcome and says what is worth an event.
func (s *podState) probed(i int, k probeKind, ok bool, message string, now moment) []note {
	c := &s.ctrs[i]
	p, spec := &c.probes[k], c.probeSpec(k)
	p.busy = false
	if spec == nil || !c.running() || c.kill != nil || (k == probeStartup) == c.started || s.over() && k != probeReadiness {
		return nil
	}
	period := seconds(spec.PeriodSeconds, 10)
	if p.due = p.due.Add(period); p.due.Before(now.mono) {
		p.due = now.mono.Add(period)
	}
	if ok {
		p.good, p.bad = p.good+1, 0
		if p.good >= max(spec.SuccessThreshold, 1) {
			p.known = true
			s.passed(c, k)
		}
		return nil
	}
	p.good, p.bad = 0, p.bad+1
	notes := []note{{warning: true, reason: "Unhealthy", container: c.rec.Name, message: fmt.Sprintf("%s probe failed: %s", k, message)}}
	threshold := spec.FailureThreshold
	if threshold <= 0 {
		threshold = 3
	}
	if p.bad < threshold {
		return notes
	}
	p.known = true
	if k == probeReadiness {
		c.ready = false
		return notes
	}
	grace := s.grace()
	if spec.TerminationGracePeriodSeconds != nil {
		grace = time.Duration(*spec.TerminationGracePeriodSeconds) * time.Second
	}
	c.ready = false
	c.kill = &killing{reason: "Unhealthy", grace: grace, message: killMessage(c, k, message)}
	return append(notes, note{reason: "Killing", container: c.rec.Name, message: c.kill.message})
}

// killMessage says it plainly when a program was killed before it had a
// chance to come up, which looks like a crash otherwise.
func killMessage(c *ctrState, k probeKind, message string) string {
	m := fmt.Sprintf("Container %s failed %s probe, will be restarted", c.rec.Name, lower(k))
	if k == probeLiveness && !c.everReady {
		return m + ": killed during start-up, before it was ready for the first time (" + message +
			"); a startupProbe would give it time"
	}
	return m
}

func lower(k probeKind) string {
	return [...]string{"startup", "liveness", "readiness"}[k]
}

func (s *podState) passed(c *ctrState, k probeKind) {
	switch k {
	case probeStartup:
		c.started = true
		c.ready = c.spec.ReadinessProbe == nil
	case probeReadiness:
		c.ready = true
	case probeLiveness:
		// A passed liveness probe is a sign of life, also for the wording of
		// a later failure when there is no readiness probe.
	}
	c.everReady = true
}

// holds says whether the status must wait: an adopted container's readiness
// is not known before its first verdict, and must not flap meanwhile.
func (s *podState) holds(now moment) bool {
	if !s.serves() {
		return false
	}
	for i := range s.ctrs {
		c := &s.ctrs[i]
		if c.live() && c.seen == notRead && !s.over() {
			return true
		}
		if !c.adopted || !c.running() || c.ending() || !c.started && s.over() {
			continue
		}
		k := probeReadiness
		if !c.started {
			k = probeStartup
		}
		p, spec := &c.probes[k], c.probeSpec(k)
		if spec == nil || p.known || k == probeStartup && p.bad > 0 {
			continue
		}
		// One that was never due was not ready before either.
		if now.mono.Sub(c.since) >= time.Duration(spec.InitialDelaySeconds)*time.Second {
			return true
		}
	}
	return false
}
