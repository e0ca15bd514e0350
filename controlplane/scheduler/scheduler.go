package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// flushEvery is how often long-parked pods are looked for.
const flushEvery = time.Minute

// Scheduler places pods for one term. Not safe for concurrent use: Run owns
// it.
type Scheduler struct {
	cfg     Config
	reader  state.Reader
	cache   *cache
	queue   *queue
	classes *classes
	after   uint64 // events up to here are in
	// gated pods whose condition is to be looked at.
	gated []*state.Record
}

// New makes a Scheduler for one term.
func New(cfg Config) *Scheduler {
	if cfg.Batch <= 0 {
		cfg.Batch = 1024
	}
	if cfg.Name == "" {
		cfg.Name = corev1.DefaultSchedulerName
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.System
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Events == nil {
		cfg.Events = events.Discard
	}
	s := &Scheduler{cfg: cfg, reader: cfg.Store.Reader(podGK), classes: newClasses(cfg.Store), queue: newQueue(cfg.Rand)}
	s.cache = newCache()
	return s
}

// Run schedules until ctx ends.
func (s *Scheduler) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		s.resync()
		if err := s.follow(ctx); err != nil && !errors.Is(err, state.ErrTooOld) && ctx.Err() == nil {
			return fmt.Errorf("scheduler: %w", err)
		}
	}
	return nil
}

// errUnsure says that the outcome of a batch is unknown: read again.
var errUnsure = errors.New("outcome of a batch unknown")

// follow schedules and takes in events, until the watch breaks.
func (s *Scheduler) follow(parent context.Context) error {
	g, ctx := errgroup.WithContext(parent)
	ctx, cancel := context.WithCancel(ctx)
	batches := make(chan []state.Event, 64)
	g.Go(func() error { return s.carry(ctx, batches) })
	g.Go(func() error {
		defer cancel()
		return s.loop(ctx, batches)
	})
	err := g.Wait()
	if errors.Is(err, errUnsure) || (errors.Is(err, context.Canceled) && parent.Err() == nil) {
		return nil // resync
	}
	return err
}

// carry reads the watch.
func (s *Scheduler) carry(ctx context.Context, to chan<- []state.Event) error {
	w, err := s.reader.Watch("", "", s.after)
	if err != nil {
		return err
	}
	for {
		batch, _, err := w.Next(ctx)
		relevant := batch[:0:0]
		for _, ev := range batch {
			switch ev.Record.Header.Key.Kind {
			case podGK.String(), nodeGK.String(), runtimeClassGK.String():
				relevant = append(relevant, ev)
			}
		}
		if len(relevant) > 0 {
			select {
			case to <- relevant:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if err != nil {
			return err
		}
	}
}

func (s *Scheduler) loop(ctx context.Context, batches <-chan []state.Event) error {
	flush := time.NewTicker(flushEvery)
	defer flush.Stop()
	for {
		s.drain(batches)
		s.markGated(ctx)
		wait := s.queue.promote(time.Now())
		s.gauge()
		if s.queue.active.Len() > 0 {
			if err := s.Step(ctx); err != nil {
				return err
			}
			continue
		}
		if err := s.idle(ctx, batches, wait, flush.C); err != nil {
			return err
		}
	}
}

// drain takes in what has arrived.
func (s *Scheduler) drain(batches <-chan []state.Event) {
	for {
		select {
		case b := <-batches:
			s.takeIn(b)
		default:
			return
		}
	}
}

// idle waits for events or a due pod.
func (s *Scheduler) idle(ctx context.Context, batches <-chan []state.Event, wait time.Duration, flush <-chan time.Time) error {
	var due <-chan time.Time
	if wait >= 0 {
		t := time.NewTimer(wait)
		defer t.Stop()
		due = t.C
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case b := <-batches:
		s.takeIn(b)
	case <-due:
	case <-flush:
		s.queue.flush(time.Now())
	}
	return nil
}

func (s *Scheduler) gauge() {
	if m := s.cfg.Metrics; m != nil {
		for w, n := range s.queue.counts() {
			m.pending.WithLabelValues(whereNames[w]).Set(float64(n))
		}
	}
}

// resync builds cache and queue anew from a snapshot; pods that wait already
// keep their back-off.
func (s *Scheduler) resync() {
	snap := s.reader.Snapshot()
	s.cache = newCache()
	old := s.queue
	s.queue = newQueue(s.cfg.Rand)
	s.queue.seq = old.seq
	snap.Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		s.setNode(r)
		return true
	})
	snap.Range(podGK.String(), "", state.Key{}, func(r *state.Record) bool {
		s.setPod(r)
		if was, ok := old.pods[r.Header.UID]; ok {
			if p, ok := s.queue.pods[r.Header.UID]; ok {
				p.attempts, p.why, p.written = was.attempts, was.why, was.written
			}
		}
		return true
	})
	s.after = snap.ResourceVersion()
}

func (s *Scheduler) takeIn(batch []state.Event) {
	for _, ev := range batch {
		r := ev.Record
		switch r.Header.Key.Kind {
		case nodeGK.String():
			if ev.Type == state.Deleted {
				s.cache.removeNode(r.Header.Key.Name)
				continue
			}
			s.queue.hint(s.setNode(r))
		case podGK.String():
			if ev.Type == state.Deleted {
				s.dropPod(r)
				continue
			}
			s.setPod(r)
		case runtimeClassGK.String():
			s.runtimesChanged()
		}
	}
}

func (s *Scheduler) setNode(r *state.Record) plan.Change {
	c, err := s.cache.setNode(s.cfg.Store, r)
	if err != nil {
		s.cfg.Log.Error("node left out of scheduling", "node", r.Header.Key.Name, "error", err)
	}
	return c
}

func (s *Scheduler) dropPod(r *state.Record) {
	s.queue.remove(r.Header.UID)
	if s.cache.drop(r.Header.UID) {
		s.queue.hint(plan.Change{More: true})
	}
}

// setPod files a pod: placed, waiting, or none of our business.
func (s *Scheduler) setPod(r *state.Record) {
	h := &r.Header
	switch {
	case terminal(h):
		s.dropPod(r)
	case h.NodeName != "":
		s.queue.remove(h.UID)
		if s.cache.put(h.UID, placed{h.NodeName, h.Requests, h.HostPorts}) {
			s.queue.hint(plan.Change{More: true})
		}
	case h.Deleted != 0:
		s.queue.remove(h.UID)
	default:
		if _, assumed := s.cache.placed[h.UID]; assumed {
			return // an event from before our binding
		}
		c, err := s.classes.of(r)
		if err != nil {
			s.cfg.Log.Error("pod left out of scheduling", "pod", h.Key.Namespace+"/"+h.Key.Name, "error", err)
			return
		}
		if c.scheduler != "" && c.scheduler != s.cfg.Name {
			s.queue.remove(h.UID)
			return
		}
		s.queue.put(r, c)
		if h.Gated {
			s.gated = append(s.gated, r)
		}
	}
}

// runtimesChanged judges all waiting pods anew.
func (s *Scheduler) runtimesChanged() {
	s.classes.clear()
	for _, p := range s.queue.pods {
		if c, err := s.classes.of(p.rec); err == nil {
			s.queue.put(p.rec, c)
		}
	}
}

// Settle takes in the whole state and schedules until nothing more can be
// placed, in the caller's goroutine: for tests and the simulation.
func (s *Scheduler) Settle(ctx context.Context) error {
	s.resync()
	s.markGated(ctx)
	for s.queue.active.Len() > 0 {
		if err := s.Step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Step decides one batch and binds it.
func (s *Scheduler) Step(ctx context.Context) error {
	start := time.Now()
	taken := s.queue.take(s.cfg.Batch)
	var binds []registry.PodBinding
	var bound []*waitingPod
	var failed []*waitingPod
	for _, group := range s.group(taken) {
		slots := plan.Place(s.cache.nodes, &group.Group)
		for i, slot := range slots {
			p := group.pods[i]
			node := s.cache.nodes.At(slot)
			h := &p.rec.Header
			binds = append(binds, registry.PodBinding{Namespace: h.Key.Namespace, Name: h.Key.Name, PodUID: types.UID(h.UID),
				Node: node.Name, NodeUID: types.UID(node.UID)})
			bound = append(bound, p)
			s.cache.put(h.UID, placed{node.Name, h.Requests, h.HostPorts}) // assume
		}
		if rest := group.pods[len(slots):]; len(rest) > 0 {
			why := plan.Explain(s.cache.nodes, &group.Group)
			for _, p := range rest {
				p.why = why
			}
			failed = append(failed, rest...)
		}
	}
	decided := time.Since(start)
	start = time.Now()
	conflicts, err := s.bind(ctx, binds, bound)
	if err != nil {
		return err
	}
	s.cfg.Metrics.observe(decided, time.Since(start), len(binds)-conflicts, conflicts, len(failed))
	s.explain(ctx, failed)
	return ctx.Err()
}

// bind commits the assumed placements. Lost races are forgotten and queued
// again.
func (s *Scheduler) bind(ctx context.Context, binds []registry.PodBinding, pods []*waitingPod) (conflicts int, err error) {
	if len(binds) == 0 {
		return 0, nil
	}
	results, err := s.cfg.Store.Bind(ctx, binds, s.cfg.Term)
	if err != nil || len(results) != len(binds) {
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		s.cfg.Log.Warn("bindings not committed, reading again", "pods", len(binds), "error", err)
		return 0, errors.Join(errUnsure, sleep(ctx, time.Duration((0.5+s.random())*float64(200*time.Millisecond))))
	}
	now := time.Now()
	var told []*waitingPod
	for i, p := range pods {
		h := &p.rec.Header
		if results[i] == nil {
			s.queue.remove(h.UID)
			if !p.written.IsZero() || s.classes.scheduledCondition(p.rec) {
				told = append(told, p)
			}
			s.cfg.Events.Event(podRef(h), events.Normal, "Scheduled",
				"Successfully assigned "+h.Key.Namespace+"/"+h.Key.Name+" to "+binds[i].Node)
			continue
		}
		conflicts++
		s.cache.drop(h.UID)
		if apierrors.IsNotFound(results[i]) {
			s.queue.remove(h.UID)
			continue
		}
		s.cfg.Log.Debug("binding lost a race", "pod", h.Key.Namespace+"/"+h.Key.Name, "node", binds[i].Node, "error", results[i])
		s.queue.retry(p, now)
	}
	s.markScheduled(ctx, told)
	return conflicts, nil
}

func (s *Scheduler) random() float64 {
	if s.cfg.Rand == nil {
		return 0.5
	}
	return s.cfg.Rand()
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

func podRef(h *state.Header) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: h.Key.Namespace, Name: h.Key.Name, UID: types.UID(h.UID)}
}
