package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// A pod with a stop deadline S stops by itself once no renewal of the node's
// lease was acknowledged for S, counted from when the last one was sent, and
// is not started then. What stops it is the process that survives the agent
// (workload.Extender); the agent only moves the deadline, and never past what
// the last acknowledgement allows. All times are the machine's since its boot,
// so a machine that slept has lost them.

// extendEvery is how often it is looked whether the lease was renewed.
const extendEvery = 2 * time.Second

// stopLeft is how long a pod with stop deadline s may run on; not positive is
// not at all. sent is when the last acknowledged renewal was sent, known is
// false if there was none since the agent started. Pure.
func stopLeft(s, sent, now time.Duration, known bool) time.Duration {
	if !known || sent > now {
		return 0
	}
	return s - (now - sent)
}

func (a *Agent) stopLeft(s time.Duration) time.Duration {
	if a.c.Contact == nil {
		return 0
	}
	sent, known := a.c.Contact()
	return stopLeft(s, sent, a.c.Elapsed(), known)
}

// silences keeps the longest time without an acknowledged renewal whose end no
// answered pull has followed yet: meanwhile the cluster may have started
// elsewhere what had to stop here by itself, and this node has not heard. Safe
// for concurrent use.
type silences struct {
	mu    sync.Mutex
	known bool
	last  time.Duration // when the newest acknowledged renewal was sent
	// The longest that ended before the newest pull was asked, and since.
	before, since time.Duration
	pull          uint64 // counts pulls
}

// heard takes what Config.Contact said.
func (s *silences) heard(sent time.Duration, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !known || s.known && sent <= s.last {
		return
	}
	gap := time.Duration(math.MaxInt64) // none before it that this agent knows of
	if s.known {
		gap = sent - s.last
	}
	s.known, s.last, s.since = true, sent, max(s.since, gap)
}

// asked begins a pull.
func (s *silences) asked() (pull uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before, s.since = max(s.before, s.since), 0
	s.pull++
	return s.pull
}

// answered says that a pull was answered, and that the answer is acted on.
func (s *silences) answered(pull uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if pull == s.pull { // or the next one's answer counts
		s.before = 0
	}
}

func (s *silences) longest() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(s.before, s.since)
}

func (a *Agent) hear() {
	if a.c.Contact != nil {
		a.quiet.heard(a.c.Contact())
	}
}

// told says that a server was asked what shall run here since the node was
// last silent for s.
func (a *Agent) told(s time.Duration) bool {
	a.hear()
	return a.c.Link == nil || a.quiet.longest() < s
}

// settled ends a pull whose answer the workers know by now: what waited for it
// is tried.
func (a *Agent) settled(pull uint64) {
	if pull == 0 {
		return
	}
	a.quiet.answered(pull)
	if a.untold.Swap(false) {
		a.eachWithDeadline(func(m *mailbox) { m.refs = true })
	}
}

// eachWithDeadline tells the workers of pods that have a stop deadline.
func (a *Agent) eachWithDeadline(what func(*mailbox)) {
	a.mu.RLock()
	var list []*worker
	for _, i := range a.known {
		if i.worker != nil && i.assigned != nil && i.assigned.Annotations[manifests.AnnotationStopDeadline] != "" {
			list = append(list, i.worker)
		}
	}
	a.mu.RUnlock()
	for _, w := range list {
		w.box.tell(what)
	}
}

// errUntold: a start waits for the answer to a pull.
var errUntold = errors.New("not told what is to run here")

// askAfter asks for it once the start's refusal has got back to its worker: an
// answer that came before would find nothing that waits.
func (a *Agent) askAfter(err error) {
	if errors.Is(err, errUntold) {
		a.untold.Store(true)
		signal(a.pullNow)
	}
}

// limitStart gives a container that is about to start its deadline, or says
// why it may not.
func (w *worker) limitStart(spec *workload.Spec) error {
	s := spec.StopDeadline
	if s == 0 {
		return nil
	}
	if _, ok := w.rt.(workload.Extender); !ok {
		return &workload.StartError{Reason: "CreateContainerConfigError", Fatal: true,
			Message: fmt.Sprintf("annotation %s: the runtime %s cannot stop a container by itself", manifests.AnnotationStopDeadline, w.rt.Name())}
	}
	if spec.StopDeadline = w.a.stopLeft(s); spec.StopDeadline <= 0 {
		return &workload.StartError{Reason: "Disconnected",
			Message: fmt.Sprintf("no server answered for %s (annotation %s), so the pod may run elsewhere: it starts once one answers", s, manifests.AnnotationStopDeadline)}
	}
	if !w.a.told(s) {
		return &workload.StartError{Reason: "Disconnected", Err: errUntold,
			Message: fmt.Sprintf("no server answered for %s or more (annotation %s), so the pod may run elsewhere: it starts once the server that answers now has said that it is still to run here", s, manifests.AnnotationStopDeadline)}
	}
	if since, ok := w.a.givenUp(w.uid); ok {
		return &workload.StartError{Reason: "Disconnected",
			Message: fmt.Sprintf("the cluster gave the pod up at %s and another one may run in its place (annotation %s): it starts once the cluster counts it again", since, manifests.AnnotationStopDeadline)}
	}
	return nil
}

// givenUp says since when the cluster does not count the pod, as it last said.
func (a *Agent) givenUp(uid string) (since string, ok bool) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if pod := a.known[uid].assigned; pod != nil {
		since, ok = pod.Annotations[manifests.AnnotationLostSince]
	}
	return since, ok
}

// extend moves one container's deadline to what the last acknowledgement
// allows.
func (w *worker) extend(ctx context.Context, id workload.ID, s time.Duration) {
	x, ok := w.rt.(workload.Extender)
	left := w.a.stopLeft(s)
	if !ok || left <= 0 {
		return // its own deadline stands
	}
	if err := x.Extend(ctx, id, left); err != nil && ctx.Err() == nil {
		w.log.Debug("stop deadline not moved", "container", id.Container, "err", err) // it has ended, or the next one does it
	}
}

// extendAll moves the deadlines of all that runs of the pod; it does not wait.
func (w *worker) extendAll(ctx context.Context) {
	s, err := manifests.StopDeadline(w.state.pod)
	if err != nil || s == 0 || w.rt == nil || w.state.over() {
		return
	}
	for i := range w.state.ctrs {
		if c := &w.state.ctrs[i]; c.running() {
			id := w.state.id(i)
			w.ops.Go(func() { w.extend(ctx, id, s) })
		}
	}
}

// contactLoop tells workers of pods with a stop deadline when the lease was
// renewed. When it is renewed after a silence, what waited for that is tried
// at once.
func (a *Agent) contactLoop(ctx context.Context) {
	t := time.NewTicker(extendEvery)
	defer t.Stop()
	var last time.Duration
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		sent, known := a.c.Contact()
		if !known || sent == last {
			continue
		}
		back := last == 0 || sent-last > 4*extendEvery
		last = sent
		a.hear()
		a.eachWithDeadline(func(m *mailbox) { m.extend, m.refs = true, m.refs || back })
	}
}
