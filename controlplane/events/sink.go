package events

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/internal/clock"
)

var eventGK = schema.GroupKind{Kind: "Event"}

// Config of a Sink; zero values are defaults.
type Config struct {
	Queue    int           // entries waiting to be written; default 4096
	Remember int           // distinct events and objects remembered; default 4096
	Similar  int           // different messages of one reason before they are combined; default 10
	Window   time.Duration // of Similar; default 10 min
	Burst    int           // events an object may have at once; default 25
	Refill   time.Duration // time in which an object earns one more; default 1 min
	Clock    clock.Clock
	Log      *slog.Logger
}

func (c Config) withDefaults() Config {
	setInt := func(p *int, v int) {
		if *p <= 0 {
			*p = v
		}
	}
	setInt(&c.Queue, 4096)
	setInt(&c.Remember, 4096)
	setInt(&c.Similar, 10)
	setInt(&c.Burst, 25)
	if c.Window <= 0 {
		c.Window = 10 * time.Minute
	}
	if c.Refill <= 0 {
		c.Refill = time.Minute
	}
	if c.Clock == nil {
		c.Clock = clock.System
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Sink collects entries and writes them as Events.
type Sink struct {
	cfg   Config
	store registry.Store

	mu      sync.Mutex
	ring    []Entry // at most cfg.Queue; when full, head is the oldest
	head    int
	dropped uint64
	wake    chan struct{}

	agg *aggregator // owned by Run
}

// New makes a Sink over the store that holds Events. Nothing is written
// until Run.
func New(store registry.Store, cfg Config) *Sink {
	cfg = cfg.withDefaults()
	return &Sink{cfg: cfg, store: store, wake: make(chan struct{}, 1), agg: newAggregator(cfg)}
}

// For returns the Recorder of one component of the control plane.
func (s *Sink) For(component string) Recorder { return recorder{s, component} }

type recorder struct {
	s         *Sink
	component string
}

// Event implements Recorder.
func (r recorder) Event(about corev1.ObjectReference, eventType, reason, message string) {
	r.s.Add(Entry{About: about, Type: eventType, Reason: reason, Message: message,
		Component: r.component, Time: r.s.cfg.Clock.Now(), Count: 1})
}

// Add queues an entry. When the queue is full the oldest entry goes.
func (s *Sink) Add(e Entry) {
	if e.Count <= 0 {
		e.Count = 1
	}
	s.mu.Lock()
	if len(s.ring) >= s.cfg.Queue {
		s.ring[s.head] = e
		s.head = (s.head + 1) % len(s.ring)
		s.dropped++
	} else {
		s.ring = append(s.ring, e)
	}
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Dropped is how many entries were never written, because the queue was full
// or their object had too many.
func (s *Sink) Dropped() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropped
}

// Run writes queued entries until ctx ends.
func (s *Sink) Run(ctx context.Context) error {
	for {
		batch := s.take()
		for _, e := range batch {
			if ctx.Err() != nil {
				return nil
			}
			s.write(ctx, e)
		}
		if len(batch) > 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-s.wake:
		}
	}
}

// take empties the queue, oldest entry first.
func (s *Sink) take() []Entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	batch := append(s.ring[s.head:], s.ring[:s.head]...)
	s.ring, s.head = nil, 0
	return batch
}

// remove takes back what an entry said that is not so any more: whoever looks
// at the object sees what is wrong now.
func (s *Sink) remove(ctx context.Context, e Entry) {
	list, err := s.store.List(eventGK, cmp.Or(e.About.Namespace, metav1.NamespaceDefault), labels.Everything(), nil)
	if err != nil {
		s.cfg.Log.Debug("events not listed", "error", err)
		return
	}
	for _, o := range list {
		ev, ok := o.(*corev1.Event)
		if !ok || ev.InvolvedObject.Kind != e.About.Kind || ev.InvolvedObject.Name != e.About.Name || ev.Reason != e.Reason ||
			ev.Source.Component != e.Component || ev.Source.Host != e.Host || strings.TrimPrefix(ev.Message, combinedPrefix) != clip(e.Message) {
			continue
		}
		if _, _, err := s.store.Delete(ctx, eventGK, ev.Namespace, ev.Name, registry.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			s.cfg.Log.Debug("event not removed", "event", ev.Name, "error", err)
		}
	}
}

func (s *Sink) write(ctx context.Context, e Entry) {
	if e.Over {
		s.remove(ctx, e)
		return
	}
	w, ok := s.agg.observe(e)
	if !ok {
		s.mu.Lock()
		s.dropped++
		s.mu.Unlock()
		return
	}
	if w.update {
		_, err := s.store.Update(ctx, eventGK, w.namespace, w.name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
			ev, ok := cur.(*corev1.Event)
			if !ok {
				return nil, fmt.Errorf("event %s/%s is a %T", w.namespace, w.name, cur)
			}
			ev.Count += e.Count
			ev.LastTimestamp = metav1.NewTime(e.Time)
			ev.Message = w.message
			return ev, nil
		}, registry.WriteOptions{})
		if err == nil {
			return
		}
		if !apierrors.IsNotFound(err) {
			s.cfg.Log.Debug("event not updated", "event", w.name, "error", err)
			return
		}
	}
	if _, err := s.store.Create(ctx, w.object(e), registry.WriteOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		// A terminating namespace refuses new objects, and that is fine.
		s.cfg.Log.Debug("event not created", "event", w.name, "error", err)
	}
}

// written is what the aggregator made of an entry.
type written struct {
	namespace, name string
	message         string
	update          bool
}

func (w written) object(e Entry) *corev1.Event {
	at := metav1.NewTime(e.Time)
	return &corev1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: w.namespace, Name: w.name},
		InvolvedObject:      e.About,
		Reason:              e.Reason,
		Message:             w.message,
		Type:                e.Type,
		Source:              corev1.EventSource{Component: e.Component, Host: e.Host},
		FirstTimestamp:      at,
		LastTimestamp:       at,
		Count:               e.Count,
		ReportingController: e.Component,
		ReportingInstance:   e.Host,
	}
}

// maxMessage is upstream's bound of an Event's message, in bytes.
const maxMessage = 1024

func clip(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	return strings.ToValidUTF8(s[:maxMessage-3], "") + "..."
}
