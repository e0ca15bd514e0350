package node

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/wire"
)

// Bounds of events: how many wait, and how often one object may speak.
const (
	eventsMax     = 256
	eventBurst    = 25 // an object may have that many at once,
	eventRefill   = 5 * time.Minute
	eventSources  = 1024
	component     = "dunlin-agent"
	eventMaxChars = 1024
)

// events aggregates: the same event again counts up instead of waiting
// twice, one object gets a burst and then one every five minutes, and when
// the queue is full the oldest normal event goes first.
type events struct {
	queue   []wire.EventReport
	buckets map[string]*bucket
	dropped uint64
}

type bucket struct {
	tokens float64
	last   time.Time
}

func (e *events) len() int { return len(e.queue) }

// add queues an event; false when it was dropped by the rate limit.
func (e *events) add(n wire.EventReport, now time.Time) bool {
	if len(n.Message) > eventMaxChars {
		n.Message = strings.ToValidUTF8(n.Message[:eventMaxChars], "")
	}
	if n.Count == 0 {
		n.Count = 1
	}
	if e.again(n) {
		return true
	}
	if !e.allow(n.UID+"/"+n.Object.Name, now) {
		e.dropped++
		return false
	}
	e.push(n)
	return true
}

// again counts an event that already waits.
func (e *events) again(n wire.EventReport) bool {
	for i := range e.queue {
		q := &e.queue[i]
		if q.Object == n.Object && q.UID == n.UID && q.FieldPath == n.FieldPath && q.Type == n.Type && q.Reason == n.Reason && q.Message == n.Message && q.Over == n.Over {
			q.Count += n.Count
			q.UnixMilli = max(q.UnixMilli, n.UnixMilli)
			return true
		}
	}
	return false
}

// push queues an event; when the queue is full one leaves.
func (e *events) push(n wire.EventReport) {
	if len(e.queue) >= eventsMax {
		i := slices.IndexFunc(e.queue, func(q wire.EventReport) bool { return q.Type == corev1.EventTypeNormal })
		e.queue = slices.Delete(e.queue, max(i, 0), max(i, 0)+1)
		e.dropped++
	}
	e.queue = append(e.queue, n)
}

// restore puts back, before what came meanwhile, what could not be reported.
// Their objects have spoken once already, so no limit counts them again: an
// outage would use it up with nothing but its own retries.
func (e *events) restore(list []wire.EventReport) {
	newer := e.queue
	e.queue = slices.Clone(list)
	for _, n := range newer {
		if !e.again(n) {
			e.push(n)
		}
	}
}

func (e *events) allow(source string, now time.Time) bool {
	if e.buckets == nil || len(e.buckets) >= eventSources {
		e.buckets = map[string]*bucket{}
	}
	b := e.buckets[source]
	if b == nil {
		b = &bucket{tokens: eventBurst, last: now}
		e.buckets[source] = b
	}
	b.tokens = min(eventBurst, b.tokens+float64(now.Sub(b.last))/float64(eventRefill))
	b.last = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

func (e *events) take(n int) []wire.EventReport {
	n = min(n, len(e.queue))
	out := slices.Clone(e.queue[:n])
	e.queue = slices.Delete(e.queue, 0, n)
	return out
}

func (a *Agent) nodeEvent(warning bool, reason, message string) {
	a.reports.event(stamp(a, wire.EventReport{
		Object: wire.Ref{Kind: "Node", Name: a.c.NodeName}, UID: a.c.NodeName,
		Type: eventType(warning), Reason: reason, Message: message, Component: component,
	}))
}

// ServiceEvent tells people of a Service (namespace/name) what this node has to
// do with; over takes back what was told.
func (a *Agent) ServiceEvent(service, reason, message string, over bool) {
	namespace, name, _ := strings.Cut(service, "/")
	a.reports.event(stamp(a, wire.EventReport{
		Object: wire.Ref{Kind: "Service", Namespace: namespace, Name: name},
		Type:   corev1.EventTypeWarning, Reason: reason, Message: message, Component: component, Over: over,
	}))
}

// NodeEvent warns people of this node; over takes back what was told.
func (a *Agent) NodeEvent(reason, message string, over bool) {
	a.reports.event(stamp(a, wire.EventReport{
		Object: wire.Ref{Kind: "Node", Name: a.c.NodeName}, UID: a.c.NodeName,
		Type: corev1.EventTypeWarning, Reason: reason, Message: message, Component: component, Over: over,
	}))
}

func eventType(warning bool) string {
	if warning {
		return corev1.EventTypeWarning
	}
	return corev1.EventTypeNormal
}

func stamp(a *Agent, e wire.EventReport) wire.EventReport {
	e.UnixMilli = a.c.Clock.Now().UnixMilli()
	return e
}

func (a *Agent) podEvent(pod *corev1.Pod, n note) wire.EventReport {
	e := wire.EventReport{
		Object: wire.Ref{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name}, UID: string(pod.UID),
		Type: eventType(n.warning), Reason: n.reason, Message: n.message, Component: component,
	}
	if n.container != "" {
		kind := "containers"
		if n.init {
			kind = "initContainers"
		}
		e.FieldPath = fmt.Sprintf("spec.%s{%s}", kind, n.container)
	}
	return stamp(a, e)
}
