package node

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Upstream's figures for restarts.
const (
	backoffFirst = 10 * time.Second
	backoffMax   = 5 * time.Minute
	backoffReset = 10 * time.Minute // running that long forgets earlier crashes
	retryFirst   = 2 * time.Second  // of things that are not crashes: volumes, network, config
	stopSlack    = 2 * time.Second  // what Stop may take beyond grace before Kill
	defaultGrace = 30 * time.Second
)

// moment is one reading of both clocks: mono for waiting, wall for display.
type moment struct {
	mono time.Time
	wall time.Time
}

// op is what is being done to a container or to a pod's resource right now.
type op uint8

const (
	opNone op = iota
	opPrepare
	opStart
	opStop
	opRemove
)

// seen is what is known of the current attempt in the runtime.
type seen uint8

const (
	notRead seen = iota // ask the runtime
	absent              // the runtime knows nothing of it
	present
)

// failure is the current reason for waiting.
type failure struct {
	Reason  string
	Message string
}

// retry is a thing that is tried until it works.
type retry struct {
	busy  bool
	done  bool
	fail  *failure
	fails int
	at    time.Time // not before
}

func (r *retry) failed(now moment, f *failure, fatal bool) {
	r.busy, r.done, r.fail = false, false, f
	r.at = now.mono.Add(retryDelay(r.fails, fatal))
	r.fails++
}

func (r *retry) succeeded() { *r = retry{done: true} }

// retryDelay is 2, 4, 8, ... seconds up to the maximum.
func retryDelay(fails int, fatal bool) time.Duration {
	if fatal || fails > 8 {
		return backoffMax
	}
	return min(retryFirst<<fails, backoffMax)
}

// crashDelay is how long the n-th restart in a row waits: the first one not
// at all, as upstream.
func crashDelay(n int) time.Duration {
	switch {
	case n <= 0:
		return 0
	case n > 6:
		return backoffMax
	}
	return min(backoffFirst<<(n-1), backoffMax)
}

// ctrState is one container: the record that survives, and the rest.
type ctrState struct {
	spec *corev1.Container // of the newest pod object; shared, read-only
	init bool
	rec  store.Container

	op      op
	image   retry // done: digest is usable
	start   retry
	came    bool // the image, while it was being prepared
	digest  string
	seen    seen
	made    bool // absent, but an agent died while starting it: something is left
	run     workload.State
	since   time.Time // when it was first seen running, monotonic
	adopted bool      // was running before this agent

	started   bool // startup probe passed, or there is none
	ready     bool
	everReady bool
	probes    [3]probeState

	kill      *killing // a stop that is not the pod's own
	killed    bool     // Kill was sent
	asked     bool     // to end, of a runtime that then listens no more (podState.closes)
	stopTry   time.Time
	inflight  int8 // stops and kills under way
	restartAt time.Time
	waitsBack bool // in CrashLoopBackOff, from its begin until the next attempt ends
	remove    bool // the ended attempt is still to be removed
	removeTry time.Time
}

// killing says why one container is stopped although its pod goes on.
type killing struct {
	reason  string
	message string
	grace   time.Duration
}

// sidecar says whether an init container is restartable.
func (c *ctrState) sidecar() bool {
	return c.init && c.spec.RestartPolicy != nil && *c.spec.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// running: handed to the runtime and not known to have ended.
func (c *ctrState) live() bool { return c.rec.Begun && c.rec.Exit == nil }

func (c *ctrState) running() bool {
	return c.live() && c.seen == present && c.run.Phase == workload.Running
}

// podState is everything the step function decides on. Values are copied by
// clone; what pointers reach is never changed.
type podState struct {
	pod  *corev1.Pod
	boot string // machine boot
	rec  store.Pod
	ctrs []ctrState

	removed bool // no longer wished at all
	volumes retry
	network retry
	release retry // unmount, teardown and finish share it

	stopSince   time.Time // when the pod's stop began
	activeSince time.Time
	gone        bool
	conditions  []corev1.PodCondition
	// ran: an earlier agent, or an earlier boot, began to start a container of
	// it. It stays Running while all begins anew, as in upstream a pod does
	// that is more than Pending once.
	ran   bool
	drain draining
	// closes: its runtime takes no new connections for a container once that
	// is asked to end.
	closes bool
	back   *failure // why nothing of it is begun
}

func (s podState) clone() podState {
	s.ctrs = slices.Clone(s.ctrs)
	s.rec.Containers = slices.Clone(s.rec.Containers)
	return s
}

// record is what must be on disk before the next action.
func (s *podState) record() store.Pod {
	r := s.rec
	r.Containers = make([]store.Container, len(s.ctrs))
	for i := range s.ctrs {
		r.Containers[i] = s.ctrs[i].rec
	}
	return r
}

// newPodState starts from the record of an earlier agent, or from none.
func newPodState(pod *corev1.Pod, rec *store.Pod, boot string, now moment) podState {
	s := podState{boot: boot}
	if rec != nil {
		s.rec = *rec
	}
	s.rec.UID, s.rec.Namespace, s.rec.Name = string(pod.UID), pod.Namespace, pod.Name
	if s.rec.StartTime == 0 {
		s.rec.StartTime = now.wall.UnixMilli()
	}
	// How long it was active is known from wall time only; a clock that
	// stands wrong must not end the pod, so it never counts below zero.
	s.activeSince = now.mono.Add(-max(0, now.wall.Sub(time.UnixMilli(s.rec.StartTime))))
	if s.rec.Stopping != 0 {
		s.stopSince = now.mono.Add(-max(0, now.wall.Sub(time.UnixMilli(s.rec.Stopping))))
	}
	s.conditions = slices.Clone(pod.Status.Conditions)
	s.setPod(pod)
	s.ran = true
	for i := range s.ctrs {
		c := &s.ctrs[i]
		if c.rec.Begun && c.rec.Boot != boot && !s.rec.Finished {
			s.rec.Initialized = false
		}
		s.ran = s.ran && (c.init || c.rec.Begun && !c.rec.Refused || c.rec.Last != nil)
		c.resume(boot, s.rec.Finished, now)
	}
	return s
}

// resume brings a container's record from an earlier agent, or an earlier
// boot of the machine, to where this one goes on.
func (c *ctrState) resume(boot string, finished bool, now moment) {
	rebooted := c.rec.Begun && c.rec.Boot != boot
	if rebooted && c.init && c.rec.Exit != nil && !finished {
		// What the init containers made may have been in memory: run again.
		c.next()
		return
	}
	if c.rec.Exit == nil {
		return
	}
	c.remove = true
	if d := crashDelay(c.rec.Backoff - 1); d > 0 && !rebooted {
		left := time.UnixMilli(c.rec.Exit.FinishedAt).Add(d).Sub(now.wall)
		c.restartAt = now.mono.Add(min(max(left, 0), d))
	}
}

// setPod takes a newer object of the same pod.
func (s *podState) setPod(pod *corev1.Pod) {
	s.pod = pod
	old := s.ctrs
	s.ctrs = make([]ctrState, 0, len(pod.Spec.InitContainers)+len(pod.Spec.Containers))
	add := func(spec *corev1.Container, init bool) {
		c := ctrState{rec: store.Container{Name: spec.Name}}
		if i := slices.IndexFunc(old, func(o ctrState) bool { return o.rec.Name == spec.Name }); i >= 0 {
			c = old[i]
		} else if i := slices.IndexFunc(s.rec.Containers, func(r store.Container) bool { return r.Name == spec.Name }); i >= 0 {
			c.rec = s.rec.Containers[i]
		}
		c.spec, c.init = spec, init
		s.ctrs = append(s.ctrs, c)
	}
	for i := range pod.Spec.InitContainers {
		add(&pod.Spec.InitContainers[i], true)
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], false)
	}
}

// ending: it is on its way out in a way that leaves nobody to connect to.
func (c *ctrState) ending() bool { return c.kill != nil || c.killed || c.asked }

// next prepares the attempt after an ended one.
func (c *ctrState) next() {
	*c = ctrState{
		spec: c.spec, init: c.init, op: c.op, image: retry{}, removeTry: c.removeTry, waitsBack: c.waitsBack,
		rec: store.Container{
			Name: c.rec.Name, Attempt: c.rec.Attempt + 1, Backoff: c.rec.Backoff, Last: c.rec.Exit, Digest: c.rec.Digest,
		},
	}
}

// restarts says whether an ended container is started again.
func (s *podState) restarts(c *ctrState) bool {
	if c.rec.Exit == nil {
		return true
	}
	if c.init {
		if c.sidecar() {
			return true
		}
		return c.rec.Exit.Code != 0 && s.pod.Spec.RestartPolicy != corev1.RestartPolicyNever
	}
	policy := s.pod.Spec.RestartPolicy
	if c.spec.RestartPolicy != nil {
		policy = corev1.RestartPolicy(*c.spec.RestartPolicy)
	}
	switch policy {
	case corev1.RestartPolicyNever:
		return false
	case corev1.RestartPolicyOnFailure:
		return c.rec.Exit.Code != 0
	}
	return true
}

// over: nothing of the pod shall run any more, for whatever reason.
func (s *podState) over() bool {
	return s.rec.Stopping != 0 || s.rec.Verdict != nil || s.rec.Finished
}

// serves: clients may still be sent to it. A pod that is being deleted goes on
// being as ready as its probes say: who reads that sees the mark of the
// deletion, too, and prefers others (KEP-1669). One that ends for another
// reason has no such mark.
func (s *podState) serves() bool {
	return !s.over() || s.pod.DeletionTimestamp != nil && s.rec.Verdict == nil && !s.rec.Finished
}

// deleted: the pod shall leave the node.
func (s *podState) deleted() bool { return s.removed || s.pod.DeletionTimestamp != nil }

// grace is what the pod's containers get to end.
func (s *podState) grace() time.Duration {
	d := s.ownGrace()
	if s.removed && !s.rec.Static {
		d = min(d, goneGrace)
	}
	if v := s.rec.Verdict; v != nil && v.Grace != nil {
		d = min(d, time.Duration(*v.Grace)*time.Second)
	}
	return d
}

// goneGrace bounds the end of a pod that the cluster has no more: somebody
// deleted it by force, or another one has its place.
const goneGrace = 30 * time.Second

func (s *podState) ownGrace() time.Duration {
	switch {
	case s.pod.DeletionTimestamp != nil && s.pod.DeletionGracePeriodSeconds != nil:
		return time.Duration(*s.pod.DeletionGracePeriodSeconds) * time.Second
	case s.pod.Spec.TerminationGracePeriodSeconds != nil:
		return time.Duration(*s.pod.Spec.TerminationGracePeriodSeconds) * time.Second
	}
	return defaultGrace
}
