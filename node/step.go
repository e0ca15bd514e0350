package node

import (
	"fmt"
	"time"

	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"

	corev1 "k8s.io/api/core/v1"
)

// actionKind is one thing the worker can do for a pod.
type actionKind uint8

const (
	actNone     actionKind = iota // wait, at most until wake
	actMount                      // prepare volumes
	actNetwork                    // get addresses
	actPrepare                    // make the image usable
	actStart                      // start the current attempt
	actStop                       // preStop, then stop within grace
	actKill                       // end it now
	actRemove                     // delete what is left of an ended attempt
	actProbe                      // run one probe
	actUnmount                    // take the volumes down
	actTeardown                   // return the addresses
	actFinish                     // report Gone, forget
	actAsked                      // no step's: actStop is past its hook
)

var actionNames = [...]string{"none", "mount", "network", "prepare", "start", "stop", "kill", "remove", "probe", "unmount", "teardown", "finish", "asked"}

// String names the action.
func (k actionKind) String() string { return actionNames[k] }

// action is what the worker shall do next.
type action struct {
	kind    actionKind
	ctr     int // index of the container
	id      workload.ID
	grace   time.Duration
	preStop bool
	probe   probeKind
	wake    time.Time // actNone: look again then; zero: only on news
}

// observed is what the worker saw since the last step.
type observed struct {
	pod     *corev1.Pod // newer object, or nil
	removed bool
	evict   *store.Verdict // the node cannot keep it
	images  []string       // that came to this node
	back    **failure      // why it is held back now, or nil: that is as it was
	// runs has an entry for each container whose current attempt was read.
	runs map[int]run
}

// run is one reading of the runtime.
type run struct {
	state workload.State
	ok    bool
}

// step decides one transition. It is pure: the same state, observation and
// moment give the same result, and s is not changed. The caller makes the
// next state's record durable, publishes its status, then does the action.
func step(s podState, o observed, now moment) (podState, action) {
	s = s.clone()
	s.observe(o, now)
	if s.gone {
		return s, action{}
	}
	s.judge(now)
	for i := range s.ctrs {
		s.settle(i, now)
	}
	if a, ok := s.removeEnded(now); ok {
		return s, a
	}
	if s.over() {
		return s.stopStep(now)
	}
	if s.back != nil {
		return s, action{}
	}
	return s.runStep(now)
}

func ended(p corev1.PodPhase) bool { return p == corev1.PodFailed || p == corev1.PodSucceeded }

func (s *podState) observe(o observed, now moment) {
	if o.pod != nil {
		s.setPod(o.pod)
	}
	s.removed = s.removed || o.removed
	if o.back != nil {
		s.back = *o.back
	}
	if o.evict != nil && !s.over() {
		s.rec.Verdict = o.evict
	}
	for i := range s.ctrs {
		if c := &s.ctrs[i]; !c.image.done && isAmong(c.spec.Image, o.images) {
			c.image.at, c.came = now.mono, c.image.busy
		}
	}
	for i, r := range o.runs {
		c := &s.ctrs[i]
		c.made = r.ok && r.state.Phase == workload.Created
		if !r.ok || c.made {
			c.seen, c.run = absent, workload.State{}
			continue
		}
		wasRunning := c.running()
		c.seen, c.run = present, r.state
		if c.running() && !wasRunning {
			s.nowRunning(c, now)
		}
	}
}

// nowRunning notes that the attempt runs, whether this agent started it or
// found it.
func (s *podState) nowRunning(c *ctrState, now moment) {
	c.since, c.rec.Refused = now.mono, false
	c.adopted = c.op != opStart
	if c.adopted && !c.run.StartedAt.IsZero() {
		c.since = now.mono.Add(-max(0, now.wall.Sub(c.run.StartedAt)))
	}
	c.start.succeeded()
	c.started = c.spec.StartupProbe == nil || c.adopted && s.over() // that probe is not run any more
	c.ready = c.started && c.spec.ReadinessProbe == nil
	c.everReady = false
	c.probes = [3]probeState{}
}

// judge notes what ends the pod as a whole.
func (s *podState) judge(now moment) {
	if s.deleted() && s.rec.Stopping == 0 {
		s.rec.Stopping = now.wall.UnixMilli()
		s.stopSince = now.mono
		s.release.at = time.Time{}
	}
	if d := s.pod.Spec.ActiveDeadlineSeconds; d != nil && !s.over() && s.back == nil && now.mono.Sub(s.activeSince) >= time.Duration(*d)*time.Second {
		s.rec.Verdict = &store.Verdict{
			Reason:  "DeadlineExceeded",
			Message: "Pod was active on the node longer than the specified deadline",
		}
	}
	if ended(s.pod.Status.Phase) && !s.over() {
		// Somebody else ended the pod (it was lost, say): that stands.
		s.rec.Verdict = &store.Verdict{Reason: s.pod.Status.Reason, Message: s.pod.Status.Message}
		if s.rec.Verdict.Reason == "" {
			s.rec.Verdict.Reason = "Ended"
		}
	}
	if s.over() && s.stopSince.IsZero() {
		s.stopSince = now.mono
	}
}

// settle turns what was seen of a container into its record.
func (s *podState) settle(i int, now moment) {
	c := &s.ctrs[i]
	if !c.live() || c.op == opStart || c.op == opPrepare {
		return
	}
	if c.made && c.op == opNone && s.over() {
		c.rec.Begun, c.made, c.remove = false, false, true // it never came to be
		return
	}
	switch {
	case c.seen == present && c.run.Phase == workload.Exited:
		e := exitOf(c.run, c.since)
		c.end(e, now, e.Reason != reasonHostLost || c.rec.Boot == s.boot)
	case c.seen == present && c.run.Phase == workload.Unknown && c.killed && c.op == opNone,
		c.seen == absent && (!c.since.IsZero() || c.rec.Boot != s.boot):
		c.end(&store.Exit{
			Code: 137, Reason: "ContainerStatusUnknown", FinishedAt: now.wall.UnixMilli(),
			StartedAt:  startedAt(c, now),
			Message:    "The container is not there any more and left no record of its end (the machine or its host process was stopped)",
			NotStarted: c.since.IsZero(),
		}, now, false)
	}
}

func startedAt(c *ctrState, now moment) int64 {
	if !c.run.StartedAt.IsZero() {
		return c.run.StartedAt.UnixMilli()
	}
	return now.wall.UnixMilli()
}

func exitOf(r workload.State, since time.Time) *store.Exit {
	e := &store.Exit{
		Code: int32(r.ExitCode), Signal: int32(r.Signal), Reason: r.Reason, Message: r.Message,
		NotStarted: since.IsZero() && r.StartedAt.IsZero(),
	}
	if !r.StartedAt.IsZero() {
		e.StartedAt = r.StartedAt.UnixMilli()
	}
	if !r.FinishedAt.IsZero() {
		e.FinishedAt = r.FinishedAt.UnixMilli()
	}
	if e.Reason == "" {
		e.Reason = "Error"
		if e.Code == 0 {
			e.Reason = "Completed"
		}
	}
	return e
}

// reasonHostLost is a runtime's word for an attempt that nobody saw end: its
// host process, or with it the machine, was gone.
const reasonHostLost = "HostLost"

// end records how the current attempt ended and when the next may start. An
// end that is not its fault, such as the machine's, makes it wait for nothing.
func (c *ctrState) end(e *store.Exit, now moment, itsFault bool) {
	e.Attempt = c.rec.Attempt
	if c.kill != nil && e.Message == "" {
		e.Message = c.kill.message
	}
	ran := now.mono.Sub(c.since)
	if c.since.IsZero() {
		ran = time.Duration(e.FinishedAt-e.StartedAt) * time.Millisecond
	}
	if ran >= backoffReset || c.kill != nil && c.kill.reason == "ImageChanged" {
		c.rec.Backoff = 0
	}
	c.waitsBack = false
	c.restartAt = now.mono.Add(crashDelay(c.rec.Backoff))
	if c.rec.Exit = e; itsFault {
		c.rec.Backoff++
	} else {
		c.restartAt = now.mono
	}
	c.ready, c.started, c.kill, c.killed, c.asked, c.remove = false, false, nil, false, false, true
	c.probes = [3]probeState{}
}

// removeEnded deletes what the runtime keeps of ended attempts.
func (s *podState) removeEnded(now moment) (action, bool) {
	for i := range s.ctrs {
		c := &s.ctrs[i]
		if c.remove && c.op == opNone && !now.mono.Before(c.removeTry) {
			c.op = opRemove
			return action{kind: actRemove, ctr: i, id: s.id(i)}, true
		}
	}
	return action{}, false
}

func (s *podState) id(i int) workload.ID {
	return workload.ID{PodUID: s.rec.UID, Container: s.ctrs[i].rec.Name, Attempt: s.ctrs[i].rec.Attempt}
}

// runStep brings a pod that shall run forward.
func (s podState) runStep(now moment) (podState, action) {
	wake := &waker{}
	if d := s.pod.Spec.ActiveDeadlineSeconds; d != nil {
		wake.at(s.activeSince.Add(time.Duration(*d) * time.Second))
	}
	if a, ok := s.tend(now, wake); ok {
		return s, a
	}
	if s.allEnded() {
		s.rec.Finished, s.stopSince = true, now.mono
		return s.stopStep(now)
	}
	if a, ok, ready := s.resources(now, wake); ok {
		return s, a
	} else if !ready {
		return s, action{wake: wake.t}
	}
	a, ok, done := s.initStep(now, wake)
	switch {
	case ok:
		return s, a
	case s.over(): // an init container failed for good
		return s.stopStep(now)
	case !done:
		return s, action{wake: wake.t}
	}
	for i := range s.ctrs {
		if c := &s.ctrs[i]; c.init || !s.restarts(c) {
			continue
		}
		if a, ok := s.ensure(i, now, wake); ok {
			return s, a
		}
	}
	return s, action{wake: wake.t}
}

// allEnded: every regular container ended and none is started again.
func (s *podState) allEnded() bool {
	for i := range s.ctrs {
		if c := &s.ctrs[i]; !c.init && s.restarts(c) {
			return false
		}
	}
	return true
}

// tend looks after what runs: stops on failed probes, and probes.
func (s *podState) tend(now moment, wake *waker) (action, bool) {
	for i := range s.ctrs {
		c := &s.ctrs[i]
		if c.live() && c.seen == present && c.run.Phase == workload.Unknown && c.op == opNone && !c.killed {
			return s.killAction(i), true
		}
		if !c.running() {
			continue
		}
		if c.kill == nil && c.rec.Image != "" && c.rec.Image != c.spec.Image {
			c.kill = &killing{reason: "ImageChanged", grace: s.grace(), message: "Container " + c.rec.Name + " definition changed, will be restarted"}
		}
		if c.kill != nil && c.op == opNone {
			if wait := c.stopTry; now.mono.Before(wait) {
				wake.at(wait)
				continue
			}
			return s.stopAction(i, c.kill.grace), true
		}
		if c.op == opNone {
			if kind, ok := c.dueProbe(probeStartup, now, wake); ok {
				c.probes[kind].busy = true
				return action{kind: actProbe, ctr: i, id: s.id(i), probe: kind}, true
			}
		}
	}
	return action{}, false
}

// resources gets volumes and addresses; ready when both are there.
func (s *podState) resources(now moment, wake *waker) (a action, act, ready bool) {
	for _, r := range []struct {
		r    *retry
		kind actionKind
	}{{&s.volumes, actMount}, {&s.network, actNetwork}} {
		switch {
		case r.r.done:
			continue
		case r.r.busy:
		case now.mono.Before(r.r.at):
			wake.at(r.r.at)
		default:
			r.r.busy = true
			if r.kind == actMount {
				s.rec.Volumes = true // there may be something to take down from now on
			}
			return action{kind: r.kind}, true, false
		}
		return action{}, false, false
	}
	return action{}, false, true
}

// initStep runs the init containers in order; done when all of them are.
func (s *podState) initStep(now moment, wake *waker) (a action, act, done bool) {
	for i := range s.ctrs {
		c := &s.ctrs[i]
		if !c.init {
			break
		}
		switch {
		case c.sidecar():
			if a, ok := s.ensure(i, now, wake); ok {
				return a, true, false
			}
			if !s.rec.Initialized && !c.started {
				return action{}, false, false
			}
		case s.rec.Initialized: // it does not run again in this boot
		case c.rec.Exit != nil && c.rec.Exit.Code == 0:
		case c.rec.Exit != nil && !s.restarts(c):
			s.rec.Finished, s.stopSince = true, now.mono
			return action{}, false, false
		default:
			a, ok := s.ensure(i, now, wake)
			return a, ok, false
		}
	}
	s.rec.Initialized = true
	return action{}, false, true
}

// ensure starts, or restarts when its time has come, one container.
func (s *podState) ensure(i int, now moment, wake *waker) (action, bool) {
	c := &s.ctrs[i]
	if c.rec.Exit != nil {
		if now.mono.Before(c.restartAt) {
			c.waitsBack = true
			wake.at(c.restartAt)
			return action{}, false
		}
		if c.op != opNone || c.remove {
			wake.at(c.removeTry)
			return action{}, false
		}
		c.next()
	}
	if c.op != opNone || c.live() && c.seen != absent {
		return action{}, false
	}
	for _, r := range []*retry{&c.image, &c.start} {
		if !r.done && now.mono.Before(r.at) {
			wake.at(r.at)
			return action{}, false
		}
	}
	if !c.image.done {
		c.op, c.image.busy = opPrepare, true
		return action{kind: actPrepare, ctr: i, id: s.id(i)}, true
	}
	c.rec.Begun, c.rec.Boot, c.rec.Digest, c.rec.Image = true, s.boot, c.digest, c.spec.Image
	c.op, c.seen = opStart, absent
	return action{kind: actStart, ctr: i, id: s.id(i)}, true
}

// waker keeps the earliest time.
type waker struct{ t time.Time }

func (w *waker) at(t time.Time) {
	if !t.IsZero() && (w.t.IsZero() || t.Before(w.t)) {
		w.t = t
	}
}

// podName is how messages name a pod, as upstream's.
func (s *podState) podName() string {
	return fmt.Sprintf("%s_%s(%s)", s.rec.Name, s.rec.Namespace, s.rec.UID)
}
