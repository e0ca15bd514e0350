package node

import (
	"bytes"
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// reread is how often a running pod's containers are looked at without any
// hint; persistRetry is how long a failed write of the record waits.
const (
	reread       = time.Minute
	persistRetry = 5 * time.Second
)

// mailbox is what others tell a worker; newest wins.
type mailbox struct {
	mu      sync.Mutex
	news    chan struct{} // 1
	pod     *corev1.Pod
	removed bool
	refs    bool // something that pods refer to changed
	look    bool // a hint that a container ended
	extend  bool // the lease was renewed: stop deadlines move
	evict   *store.Verdict
	images  []string // that are here now
	back    **failure
}

func (m *mailbox) tell(f func(*mailbox)) {
	m.mu.Lock()
	f(m)
	m.mu.Unlock()
	select {
	case m.news <- struct{}{}:
	default:
	}
}

// worker owns one pod. One goroutine; each action that may take long runs in
// a goroutine of its own, at most one a container and kind.
type worker struct {
	a       *Agent
	uid     string
	box     mailbox
	results chan result
	done    chan struct{} // closed when nobody reads results any more
	ops     sync.WaitGroup
	log     *slog.Logger
	rt      workload.Runtime // nil: unsupported

	first   *corev1.Pod     // as it was when the worker began
	back    bool            // the pod is held back; main loop only
	refs    uint64          // serial of the assignment last told about; main loop only
	closing <-chan struct{} // the agent ends
	// born is when this node first saw the pod; zero once its start was
	// measured, and for a pod that an earlier agent knew.
	born time.Time
	// mute: the pod had ended before this node knew of it; what the cluster
	// says of its end is better than what can be said here.
	mute bool

	state   podState
	saved   []byte // the record as it is on disk
	unsaved bool   // it could not be written when that was tried last
	sent    []byte // the status as it was last published
	ports   map[int32]int32
	paths   map[string]string
	stale   bool                         // news came while files were written
	cancels map[doing]context.CancelFunc // of prepares and stops under way
	refused string                       // what was told last of destinations that are refused
	relief  int                          // how much of an eviction's relief was told: see tellRelief
	complain
}

// doing names an action under way that can be cut short.
type doing struct {
	kind actionKind
	ctr  int
}

// complain limits a repeated log line.
type complain struct{ last time.Time }

func (c *complain) due(now time.Time) bool {
	if now.Sub(c.last) < time.Minute && !c.last.IsZero() {
		return false
	}
	c.last = now
	return true
}

func (a *Agent) newWorker(pod *corev1.Pod, rec *store.Pod) *worker {
	w := &worker{
		a: a, uid: string(pod.UID), results: make(chan result), done: make(chan struct{}),
		log:     a.log.With("pod", pod.Namespace+"/"+pod.Name, "uid", string(pod.UID)),
		cancels: map[doing]context.CancelFunc{},
	}
	w.box.news = make(chan struct{}, 1)
	w.state = newPodState(pod, rec, a.c.MachineBoot, a.now())
	w.rt = a.runtimeOf(pod)
	w.state.closes = w.rt != nil && w.rt.Name() == wasmHandler
	return w
}

// run drives the pod until it is gone or ctx ends; what runs goes on then.
func (w *worker) run(ctx context.Context) {
	octx, cancel := context.WithCancel(ctx)
	defer w.ops.Wait()
	defer close(w.done)
	defer cancel()
	next := w.a.c.Jitter(reread)
	lookAgain := time.Now().Add(next)
	timer := time.NewTimer(0)
	defer timer.Stop()
	all := false
	for {
		wake, ok := w.advance(octx, all)
		if !ok {
			return
		}
		all = false
		if at := w.drain(); !at.IsZero() && (wake.IsZero() || at.Before(wake)) {
			wake = at
		}
		if w.anyLive() && (wake.IsZero() || lookAgain.Before(wake)) {
			wake = lookAgain
		}
		if wake.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(wake))
		}
		select {
		case <-ctx.Done():
			return
		case <-w.box.news:
		case r := <-w.results:
			w.take(r)
		case <-timer.C:
			if !time.Now().Before(lookAgain) {
				all = true
				lookAgain = time.Now().Add(w.a.c.Jitter(reread))
			}
		}
	}
}

func (w *worker) anyLive() bool {
	for i := range w.state.ctrs {
		if w.state.ctrs[i].live() {
			return true
		}
	}
	return false
}

// advance steps until there is nothing to do now; ok is false when the pod
// is gone.
func (w *worker) advance(ctx context.Context, all bool) (wake time.Time, ok bool) {
	o := w.observe(ctx, all || w.unsaved)
	for {
		before := w.state
		now := w.a.now()
		next, act := step(before, o, now)
		rec := next.record()
		err := w.persist(&next, rec)
		if w.unsaved = err != nil; w.unsaved {
			if w.due(now.mono) {
				w.log.Error("pod record cannot be saved; nothing is done for the pod until it can", "err", err)
			}
			w.tellUnsaved(&next)
			w.a.Refresh() // the Node tells
			return now.mono.Add(persistRetry), true
		}
		o = observed{}
		w.state = next
		w.measureStart()
		w.tellEnds(&before)
		w.tellEviction(&before)
		w.publish()
		w.tellRelief()
		if next.gone {
			w.a.podGone(w)
			return time.Time{}, false
		}
		if act.kind == actNone {
			return act.wake, true
		}
		w.act(ctx, act)
	}
}

// tellUnsaved tells what was seen of a pod whose record cannot be saved: nothing
// is done about it, but a Service must not go on sending to a container that has
// ended. What is seen is read anew for as long as this lasts (unsaved).
func (w *worker) tellUnsaved(next *podState) {
	before := w.state
	w.state = *next
	w.publish()
	w.state = before
}

// measureStart notes once how long the pod took to run.
func (w *worker) measureStart() {
	if w.born.IsZero() {
		return
	}
	for i := range w.state.ctrs {
		if c := &w.state.ctrs[i]; !c.init && !c.running() {
			return
		}
	}
	w.a.fig.podStart.Observe(time.Since(w.born).Seconds())
	w.born = time.Time{}
}

// observe takes the mail and reads the runtime where needed.
func (w *worker) observe(ctx context.Context, all bool) observed {
	w.box.mu.Lock()
	o := observed{pod: w.box.pod, removed: w.box.removed, evict: w.box.evict, images: w.box.images, back: w.box.back}
	look, refs, extend := w.box.look, w.box.refs, w.box.extend
	w.box.pod, w.box.look, w.box.refs, w.box.extend, w.box.evict, w.box.images, w.box.back = nil, false, false, false, nil, nil, nil
	w.box.mu.Unlock()
	if o.pod != nil {
		w.state.setPod(o.pod)
		o.pod = nil
		refs = true // downward API files may have changed
	}
	if refs {
		w.refresh(ctx)
	}
	if w.rt == nil {
		return o
	}
	if extend {
		w.extendAll(ctx)
	}
	for i := range w.state.ctrs {
		c := &w.state.ctrs[i]
		if !c.live() || c.op == opStart || c.seen != notRead && !look && !all {
			continue
		}
		st, ok, err := w.rt.State(ctx, w.state.id(i))
		if err != nil {
			if ctx.Err() == nil && w.due(time.Now()) {
				w.log.Warn("state of a container cannot be read", "container", c.rec.Name, "err", err)
			}
			continue
		}
		if o.runs == nil {
			o.runs = map[int]run{}
		}
		o.runs[i] = run{st, ok}
		w.tellRefused(c, st.Refused)
	}
	return o
}

// refresh lets waiting things try again at once, and renews files whose
// source may have changed.
func (w *worker) refresh(ctx context.Context) {
	s := &w.state
	if s.over() {
		return
	}
	s.volumes.at, s.network.at = time.Time{}, time.Time{}
	for i := range s.ctrs {
		s.ctrs[i].start.at = time.Time{}
	}
	switch {
	case len(s.pod.Spec.Volumes) == 0:
	case s.volumes.busy:
		w.stale = true // what is being written may be of before
	case s.volumes.done:
		s.volumes.busy = true
		w.act(ctx, action{kind: actMount})
	}
}

// persist makes the record durable, unless it is what the disk has.
func (w *worker) persist(next *podState, rec store.Pod) error {
	if next.gone {
		return nil // podGone replaces the record by a tombstone
	}
	if next.rec.Stopping != 0 && next.rec.Object == nil {
		b, err := direct.Marshal(next.pod)
		if err != nil {
			return err
		}
		next.rec.Object, rec.Object = b, b
	}
	enc, err := cbor.Marshal(rec)
	if err != nil {
		return err
	}
	if bytes.Equal(enc, w.saved) {
		return nil
	}
	if err := w.a.c.Store.SavePod(rec); err != nil {
		return err
	}
	w.saved = enc
	return nil
}

// take applies an action's outcome.
func (w *worker) take(r result) {
	if r.kind == actMount && r.err == nil {
		w.paths = r.paths
	}
	if r.kind == actMount && w.stale {
		w.stale = false
		w.box.tell(func(m *mailbox) { m.refs = true })
	}
	if key := (doing{r.kind, r.ctr}); r.noted == nil && w.cancels[key] != nil {
		w.cancels[key]()
		delete(w.cancels, key)
	}
	next, notes := w.state.apply(r, w.a.now())
	if r.noted != nil {
		err := w.persist(&next, next.record())
		if err == nil {
			w.state = next
		}
		r.noted <- err // buffered
		return
	}
	before := w.state
	w.state = next
	w.tellEnds(&before)
	for _, n := range notes {
		w.event(n)
	}
	w.a.askAfter(r.err)
}

// tellEnds makes events of containers that ended in the last step, and stops
// preparing for a pod that is over.
func (w *worker) tellEnds(before *podState) {
	for i := range w.state.ctrs {
		c := &w.state.ctrs[i]
		e := c.rec.Exit
		if e == nil || i < len(before.ctrs) && before.ctrs[i].rec.Exit == e {
			continue
		}
		if cancel := w.cancels[doing{actStop, i}]; cancel != nil {
			cancel() // it has ended; there is nothing to wait for
		}
		w.a.fig.ended(e.Reason)
		w.log.Info("container ended", "container", c.rec.Name, "attempt", e.Attempt, "reason", e.Reason, "code", e.Code, "message", e.Message)
		if e.Code != 0 && !w.state.over() {
			w.event(crashed(c, e))
		}
	}
	if w.state.over() {
		for key, cancel := range w.cancels {
			if key.kind != actStop {
				cancel()
			}
		}
	}
}

// evicted says whether the pod runs no more for what the node was short of.
func (s *podState) evicted() bool {
	v := s.rec.Verdict
	return v != nil && v.Reason == reasonEvicted && !v.Rejected
}

// holdsSpace says whether the pod has anything on this machine that goes with
// its end and is still there.
func (s *podState) holdsSpace() bool {
	return s.rec.Volumes || slices.ContainsFunc(s.ctrs, func(c ctrState) bool { return c.remove })
}

// tellEviction makes the event of an eviction.
func (w *worker) tellEviction(before *podState) {
	if v := w.state.rec.Verdict; w.state.evicted() && before.rec.Verdict == nil {
		w.event(note{warning: true, reason: v.Reason, message: v.Message})
	}
}

// tellRelief wakes the machine loop, which waits for what an evicted pod
// frees, once when nothing of it runs any more, and once when it holds nothing
// any more. It comes after what the loop reads was published.
func (w *worker) tellRelief() {
	if !w.state.evicted() || !w.state.ended() {
		return
	}
	stage := 1
	if !w.state.holdsSpace() {
		stage = 2
	}
	if stage > w.relief {
		w.relief = stage
		w.a.Refresh()
	}
}

// publish hands the status on if it means something new.
func (w *worker) publish() {
	s := &w.state
	if w.mute {
		return
	}
	if s.holds(w.a.now()) {
		// Not for the cluster, whose last word stands; who asks here is told
		// what is known now.
		held := w.state
		st := held.status(w.a.statusFacts(w.rt), w.a.now())
		w.a.remember(w.uid, s, &st)
		return
	}
	st := s.status(w.a.statusFacts(w.rt), w.a.now())
	enc, err := direct.Marshal(&st)
	if err != nil {
		w.log.Error("pod status cannot be encoded", "err", err)
		return
	}
	var ports map[int32]int32
	if s.rec.Allocation != nil {
		ports = s.rec.Allocation.Ports
	}
	if bytes.Equal(enc, w.sent) && maps.Equal(ports, w.ports) {
		w.a.remember(w.uid, s, &st)
		return
	}
	w.sent, w.ports = enc, ports
	w.a.reports.pod(report{
		namespace: s.rec.Namespace, name: s.rec.Name, uid: w.uid, status: enc,
		terminal: ended(st.Phase),
		mirror:   w.a.mirrorOf(s.pod), ports: ports,
	})
	w.a.remember(w.uid, s, &st)
}

func (w *worker) event(n note) { w.eventOf(w.state.pod, n) }

// eventOf is event for an action's goroutine, which has its own copy of the
// state.
func (w *worker) eventOf(pod *corev1.Pod, n note) {
	e := w.a.podEvent(pod, n)
	w.a.reports.event(e)
	level := slog.LevelInfo
	if n.warning {
		level = slog.LevelWarn
	}
	w.log.Log(context.Background(), level, "pod event", "reason", n.reason, "container", n.container, "message", n.message)
}
