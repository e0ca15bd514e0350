package scheduler

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// flushEvery is how often long-parked pods are looked for, and how long what is
// said of a pod's chances may be out of date: a user who looks in between
// mends the wrong thing.
const flushEvery = 15 * time.Second

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
	// ghosts are pods that wait for the room of their nominated node.
	ghosts *ghosts
	// budgetList is read once a step, when a preemption needs it.
	budgetList  []*plan.Budget
	budgetsRead bool
	// freed are nodes on which room was given back since parked pods were
	// last told.
	freed  []string
	claims *claims
	// claimed are the classes of waiting pods that mount claims, by uid.
	claimed map[string]*class
}

// New makes a Scheduler for one term.
func New(cfg Config) *Scheduler {
	if cfg.Batch <= 0 {
		cfg.Batch = 1024
	}
	if cfg.Writers <= 0 {
		cfg.Writers = writers
	}
	if len(cfg.Profiles) == 0 {
		cfg.Profiles = []*Profile{defaultProfile()}
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
	s := &Scheduler{cfg: cfg, reader: cfg.Store.Reader(podGK), classes: newClasses(cfg.Store, cfg.Profiles), queue: newQueue(cfg.Rand)}
	s.cache, s.claims, s.claimed = newCache(), newClaims(), map[string]*class{}
	s.ghosts = newGhosts(s.cache.nodes)
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
			case podGK.String(), nodeGK.String(), runtimeClassGK.String(), namespaceGK.String(),
				claimGK.String(), volumeGK.String(), storageClassGK.String():
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
		now := time.Now()
		s.queue.flush(now)
		s.refresh(ctx, now)
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
	s.cache, s.claims = newCache(), newClaims()
	s.ghosts = newGhosts(s.cache.nodes)
	old := s.queue
	s.queue = newQueue(s.cfg.Rand)
	s.queue.seq = old.seq
	snap.Range(volumeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		s.claims.setVolume(r.Header.Key.Name, s.volumeOf(&state.Event{Type: state.Added, Record: r}))
		return true
	})
	snap.Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		s.setNode(r)
		return true
	})
	snap.Range(namespaceGK.String(), "", state.Key{}, func(r *state.Record) bool {
		s.cache.nodes.SetNamespace(r.Header.Key.Name, spaceLabels(r))
		return true
	})
	// The placed ones first: who waits may wait for their claims.
	snap.Range(podGK.String(), "", state.Key{}, func(r *state.Record) bool {
		if r.Header.NodeName != "" {
			s.setPod(r)
		}
		return true
	})
	snap.Range(podGK.String(), "", state.Key{}, func(r *state.Record) bool {
		if r.Header.NodeName != "" {
			return true
		}
		s.setPod(r)
		if was, ok := old.pods[r.Header.UID]; ok {
			if p, ok := s.queue.pods[r.Header.UID]; ok {
				p.attempts, p.why, p.written, p.said = was.attempts, was.why, was.written, was.said
			}
		}
		return true
	})
	maps.DeleteFunc(s.claimed, func(uid string, _ *class) bool { return s.queue.pods[uid] == nil })
	s.after = snap.ResourceVersion()
}

func (s *Scheduler) takeIn(batch []state.Event) {
	for _, ev := range batch {
		r := ev.Record
		switch r.Header.Key.Kind {
		case nodeGK.String():
			if ev.Type == state.Deleted {
				s.ghosts.release(r.Header.Key.Name)
				s.cache.removeNode(r.Header.Key.Name)
				s.queue.stale = true
				s.renominate(r.Header.Key.Name)
				continue
			}
			s.nodeChanged(r.Header.Key.Name, s.setNode(r))
		case podGK.String():
			if ev.Type == state.Deleted {
				s.dropPod(r)
				continue
			}
			s.setPod(r)
		case runtimeClassGK.String():
			s.runtimesChanged()
		case claimGK.String(), volumeGK.String(), storageClassGK.String():
			s.claimChanged(&ev)
		case namespaceGK.String():
			labels := spaceLabels(r)
			if ev.Type == state.Deleted {
				labels = nil
			}
			if s.cache.nodes.SetNamespace(r.Header.Key.Name, labels) {
				s.spacesChanged()
			}
		}
	}
}

func (s *Scheduler) setNode(r *state.Record) plan.Change {
	if slot, known := s.cache.nodes.Slot(r.Header.Key.Name); !known || s.cache.nodes.At(slot).UID != r.Header.UID {
		s.ghosts.release(r.Header.Key.Name)
	}
	c, err := s.cache.setNode(s.cfg.Store, r, s.claims.room(r.Header.Key.Name, r.Header.Allocatable))
	if err != nil {
		s.cfg.Log.Error("node left out of scheduling", "node", r.Header.Key.Name, "error", err)
	}
	return c
}

// renominate wakes the pods that wait for the room of a node that is not
// what it was.
func (s *Scheduler) renominate(node string) {
	for uid, x := range s.ghosts.byUID {
		if p := s.queue.pods[uid]; p != nil && x.node == node {
			s.queue.wake(p)
		}
	}
}

// leave takes a pod that no longer waits off the queue.
func (s *Scheduler) leave(uid string, placed bool) {
	s.queue.remove(uid, placed)
	delete(s.claimed, uid)
	if x := s.ghosts.byUID[uid]; x != nil {
		s.ghosts.remove(uid)
		s.roomOn(x.node)
	}
}

func (s *Scheduler) dropPod(r *state.Record) {
	s.leave(r.Header.UID, false)
	s.reclass(s.claims.forget(r.Header.UID)...)
	p := s.cache.placed[r.Header.UID]
	if s.cache.drop(r.Header.UID) {
		s.roomOn(p.node)
		s.podMoved(&p.Pod, false)
	}
}

// setPod files a pod: placed, waiting, or none of our business.
func (s *Scheduler) setPod(r *state.Record) {
	h := &r.Header
	switch {
	case terminal(h):
		s.dropPod(r)
	case h.NodeName != "":
		s.leave(h.UID, true)
		s.place(r)
	case h.Deleted != 0:
		s.leave(h.UID, false)
		s.claims.forget(h.UID)
	default:
		if _, assumed := s.cache.placed[h.UID]; assumed {
			return // an event from before our binding
		}
		c, err := s.classOf(r)
		if err != nil {
			s.cfg.Log.Error("pod left out of scheduling", "pod", h.Key.Namespace+"/"+h.Key.Name, "error", err)
			return
		}
		if c.profile == nil { // another scheduler's
			s.leave(h.UID, false)
			return
		}
		s.queue.put(r, c)
		if len(c.claims) > 0 {
			s.claims.wait(h.UID, c.claims)
		}
		s.observe(s.queue.pods[h.UID])
		if h.Gated {
			s.gated = append(s.gated, r)
		}
	}
}

// place takes in a pod that has a node.
func (s *Scheduler) place(r *state.Record) {
	old := s.cache.placed[r.Header.UID]
	p := newPlaced(&r.Header, r.Header.NodeName)
	p.Fixed = r.Meta != nil && bytes.Contains(r.Meta.Data, []byte(corev1.MirrorPodAnnotationKey))
	if holds(r) {
		c, err := s.classes.of(r)
		if err != nil { // it takes room all the same
			s.cfg.Log.Error("a placed pod's affinity is left out", "pod", r.Header.Key.Namespace+"/"+r.Header.Key.Name, "error", err)
		} else {
			p.Terms = c.terms.Others()
		}
	}
	if mountsClaims(r) {
		s.useClaims(r)
	}
	if !s.cache.put(p) || len(s.queue.sets) == 0 {
		return
	}
	if old != nil {
		s.roomOn(old.node)
		s.podMoved(&old.Pod, false)
	}
	s.podMoved(&p.Pod, true)
}

func newPlaced(h *state.Header, node string) *placed {
	return &placed{node: node, Pod: plan.Pod{UID: h.UID, Namespace: h.Key.Namespace, Name: h.Key.Name, Labels: h.Labels, Requests: h.Requests,
		HostPorts: h.HostPorts, Terminating: h.Deleted != 0}}
}

// spaceLabels are a namespace's labels, never nil.
func spaceLabels(r *state.Record) map[string]string {
	if r.Header.Labels == nil {
		return map[string]string{}
	}
	return r.Header.Labels
}

// runtimesChanged judges all waiting pods anew.
func (s *Scheduler) runtimesChanged() {
	s.classes.clear()
	for _, p := range s.queue.pods {
		if c, err := s.classOf(p.rec); err == nil {
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
