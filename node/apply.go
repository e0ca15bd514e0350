package node

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// result is the outcome of one action.
type result struct {
	kind  actionKind
	ctr   int
	id    workload.ID
	err   error
	probe probeKind
	ok    bool   // probe
	text  string // probe message
	state workload.State
	image workload.ImageState
	alloc *network.Allocation
	paths map[string]string // of volumes
	// claims are the names of the volumes of the pod's claims.
	claims []string
	// spread, when not nil, gives the wait for the next try its jitter.
	spread func(time.Duration) time.Duration
	// noted, when not nil, is closed once alloc is durable.
	noted chan<- error
}

// note is an event worth telling about the pod.
type note struct {
	warning   bool
	reason    string
	container string
	init      bool
	message   string
}

// apply takes an action's outcome. Like step it depends on nothing else.
func (s podState) apply(r result, now moment) (podState, []note) {
	s = s.clone()
	switch r.kind {
	case actMount:
		if r.err == nil {
			s.rec.Claims = r.claims
		}
		return s, s.volumes.applied(r, "FailedMount", now)
	case actNetwork:
		if r.err == nil {
			s.setAllocation(r.alloc)
		}
		return s, s.network.applied(r, "FailedCreatePodSandBox", now)
	case actUnmount, actTeardown, actFinish:
		return s.applyRelease(r, now)
	}
	if r.ctr >= len(s.ctrs) {
		return s, nil
	}
	c := &s.ctrs[r.ctr]
	switch r.kind {
	case actPrepare:
		return s, s.applyPrepare(c, r, now)
	case actStart:
		return s, s.applyStart(c, r, now)
	case actStop, actKill:
		if c.inflight--; c.inflight <= 0 {
			c.op, c.inflight = opNone, 0
		}
		if !c.live() || r.id.Attempt != c.rec.Attempt {
			return s, nil
		}
		c.stopTry = now.mono.Add(time.Second)
		if c.seen != absent {
			c.seen = notRead
		}
		if r.err != nil {
			return s, []note{c.note(true, "FailedKillPod", "error killing container: "+r.err.Error())}
		}
	case actAsked:
		c.asked = c.asked || s.closes && c.live() && r.id.Attempt == c.rec.Attempt
	case actRemove:
		c.op = opNone
		c.remove = r.err != nil
		if r.err != nil {
			c.removeTry = now.mono.Add(backoffFirst)
			return s, []note{c.note(true, "FailedCleanup", "what is left of the container cannot be removed: "+r.err.Error())}
		}
	case actProbe:
		if r.id.Attempt == c.rec.Attempt {
			return s, s.probed(r.ctr, r.probe, r.ok, r.text, now)
		}
	}
	return s, nil
}

func (c *ctrState) note(warning bool, reason, message string) note {
	return note{warning: warning, reason: reason, container: c.rec.Name, init: c.init, message: message}
}

func (s *podState) setAllocation(a *network.Allocation) { allocate(&s.rec, a) }

func allocate(rec *store.Pod, a *network.Allocation) {
	rec.Allocation = a
	rec.IPs = nil
	for _, ip := range a.IPs {
		rec.IPs = append(rec.IPs, ip.String())
	}
	if len(rec.IPs) == 0 && a.IP.IsValid() {
		rec.IPs = []string{a.IP.String()}
	}
}

func (r *retry) applied(res result, reason string, now moment) []note {
	if res.err == nil {
		r.succeeded()
		return nil
	}
	f := failureOf(res.err, reason)
	if r.done { // a refresh: what is there stays in use
		r.busy = false
	} else {
		r.failed(now, f, false)
	}
	if errors.Is(res.err, volumes.ErrNotBound) && r.fails <= 1 {
		return nil // the volume of a new claim is on its way
	}
	return []note{{warning: true, reason: reason, message: f.Message}}
}

func (s podState) applyRelease(r result, now moment) (podState, []note) {
	s.release.busy = false
	if r.err != nil {
		s.release.failed(now, failureOf(r.err, "FailedCleanup"), false)
		return s, []note{{warning: true, reason: "FailedCleanup", message: r.err.Error()}}
	}
	s.release = retry{}
	switch r.kind {
	case actUnmount:
		s.rec.Volumes, s.volumes = false, retry{}
	case actTeardown:
		s.rec.Allocation, s.network = nil, retry{}
	case actFinish:
		s.gone = true
	}
	return s, nil
}

func (s *podState) applyPrepare(c *ctrState, r result, now moment) []note {
	came := c.came
	c.op, c.image.busy, c.came = opNone, false, false
	if r.err == nil {
		c.image.succeeded()
		c.digest = r.image.Digest
		return nil
	}
	f := failureOf(r.err, "ErrImagePull")
	first := c.image.fails == 0
	c.image.failed(now, f, fatal(r.err))
	// Many nodes may wait for one registry, and it may have said how long.
	if r.spread != nil {
		c.image.at = now.mono.Add(r.spread(max(c.image.at.Sub(now.mono), retryAfter(r.err))))
	}
	if came {
		c.image.at = now.mono
	}
	if f.Reason == "ErrImagePull" && !first {
		f.Reason = "ImagePullBackOff"
	}
	return []note{c.note(true, "Failed", fmt.Sprintf("Failed to prepare image %q: %s", c.spec.Image, f.Message))}
}

// startErrorCode is upstream's exit code of a container that could not be
// started.
const startErrorCode = 128

func (s *podState) applyStart(c *ctrState, r result, now moment) []note {
	if r.alloc != nil {
		s.setAllocation(r.alloc)
	}
	if r.noted != nil {
		return nil // only the ports; the start itself goes on
	}
	if r.err != nil {
		c.op = opNone
		f := failureOf(r.err, "CreateContainerError")
		var se *workload.StartError
		if errors.As(r.err, &se) && se.Ended {
			c.start.succeeded()
			c.end(&store.Exit{
				Code: startErrorCode, Reason: "StartError", Message: f.Message, NotStarted: true,
				StartedAt: now.wall.UnixMilli(), FinishedAt: now.wall.UnixMilli(),
			}, now, true)
			return nil // told as an end
		}
		c.start.failed(now, f, fatal(r.err))
		c.rec.Refused = true
		s.ran = s.ran && (c.init || c.rec.Last != nil)
		c.image = retry{} // the image may be what is wrong
		return []note{c.note(true, "Failed", "Error: "+f.Message)}
	}
	c.seen, c.run = present, r.state
	c.start.succeeded()
	var notes []note
	if r.state.Phase == workload.Running {
		s.nowRunning(c, now)
		notes = append(notes, c.note(false, "Started", "Container started"))
	}
	c.op = opNone
	return notes
}

// failureOf gives an error its name for the pod's status.
func failureOf(err error, reason string) *failure {
	var se *workload.StartError
	if errors.As(err, &se) && se.Reason != "" {
		reason = se.Reason
	}
	message := err.Error()
	if se != nil {
		message = se.Error()
	}
	const maxLen = 1024
	if len(message) > maxLen {
		message = strings.ToValidUTF8(message[:maxLen], "") + "..."
	}
	return &failure{Reason: reason, Message: message}
}

func fatal(err error) bool {
	var se *workload.StartError
	return errors.As(err, &se) && se.Fatal
}

// crashed tells about an ended attempt that counts as a crash.
func crashed(c *ctrState, e *store.Exit) note {
	if e.Reason == "OOMKilled" {
		return c.note(true, "OOMKilled", "Container was killed: "+e.Message)
	}
	return c.note(true, "BackOff", strings.TrimSuffix(fmt.Sprintf("Container ended (%s, exit code %d): %s", e.Reason, e.Code, e.Message), ": "))
}
