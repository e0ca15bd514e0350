package scheduler

import (
	"container/heap"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// where a waiting pod is.
type where uint8

const (
	inActive  where = iota // to be decided
	inBackoff              // to be decided at pod.due
	inParked               // until something relevant changes
	inGated                // until its scheduling gates go
)

var whereNames = map[where]string{inActive: "active", inBackoff: "backoff", inParked: "unschedulable", inGated: "gated"}

// waiting is a pod without a node.
type waitingPod struct {
	rec      *state.Record
	class    *class
	seq      uint64
	attempts int
	where    where
	index    int // in its heap
	due      time.Time
	parkedAt time.Time
	// why it was last unschedulable.
	why     plan.Explanation
	group   *podGroup // in which it was decided last
	written time.Time
	// said is the text that was written; note is what of it a preemption added;
	// looked is when its figures were last made.
	said, note string
	looked     time.Time
	// nominated is the node whose room it waits for; renominated says that
	// the API does not know it yet.
	nominated   string
	renominated bool
	// again: something failed that another try may do.
	again bool
}

// queue orders waiting pods: by priority, then by age. Not safe for
// concurrent use; times come from the caller (monotonic).
type queue struct {
	pods    map[string]*waitingPod // by uid
	active  podHeap
	backoff podHeap
	parked  map[string]*waitingPod
	sets    map[groupID]*parkedSet // of parked
	// stale: what parked pods say of the nodes is out of date.
	stale bool
	seq   uint64
	rand  func() float64
}

// Back-off of a pod that was decided in vain, and the longest a pod stays
// parked without any hint.
const (
	backoffBase = time.Second
	backoffMax  = 10 * time.Second
	parkedMax   = 5 * time.Minute
)

func newQueue(rand func() float64) *queue {
	return &queue{
		pods: map[string]*waitingPod{}, parked: map[string]*waitingPod{}, sets: map[groupID]*parkedSet{}, rand: rand,
		active: podHeap{less: byPriority}, backoff: podHeap{less: byDue},
	}
}

func byPriority(a, b *waitingPod) bool {
	if a.class.priority != b.class.priority {
		return a.class.priority > b.class.priority
	}
	return a.seq < b.seq
}

func byDue(a, b *waitingPod) bool {
	if !a.due.Equal(b.due) {
		return a.due.Before(b.due)
	}
	return a.seq < b.seq
}

// put adds a pod or takes its newer version. A changed spec is worth a new
// try at once.
func (q *queue) put(rec *state.Record, c *class) {
	uid := rec.Header.UID
	p, known := q.pods[uid]
	if !known {
		q.seq++
		p = &waitingPod{rec: rec, class: c, seq: q.seq, where: inGated}
		q.pods[uid] = p
		if !rec.Header.Gated {
			q.to(p, inActive)
		}
		return
	}
	changed := p.class != c || p.rec.Spec != rec.Spec || p.rec.Header.Gated != rec.Header.Gated
	if p.class.priority != c.priority && p.where == inActive {
		q.leave(p) // its place in the heap changes
		p.rec, p.class = rec, c
		q.enter(p, inActive)
	}
	p.rec, p.class = rec, c
	switch {
	case rec.Header.Gated:
		q.to(p, inGated)
	case changed:
		p.attempts = 0
		q.to(p, inActive)
	}
}

// remove forgets a pod. If it was woken for some room, another of its kind is
// woken instead, unless it got it.
func (q *queue) remove(uid string, placed bool) {
	p, ok := q.pods[uid]
	if !ok {
		return
	}
	q.leave(p)
	delete(q.pods, uid)
	if p.group != nil && p.where == inBackoff && !placed {
		if s := q.sets[p.group.id]; s != nil {
			q.wakeSome(s, 1)
		}
	}
}

func (q *queue) to(p *waitingPod, w where) {
	if p.where != w {
		q.leave(p)
		q.enter(p, w)
	}
}

func (q *queue) leave(p *waitingPod) {
	switch p.where {
	case inActive:
		if p.index >= 0 {
			heap.Remove(&q.active, p.index)
		}
	case inBackoff:
		heap.Remove(&q.backoff, p.index)
	case inParked:
		delete(q.parked, p.rec.Header.UID)
		q.part(p)
	}
}

func (q *queue) enter(p *waitingPod, w where) {
	p.where = w
	switch w {
	case inActive:
		heap.Push(&q.active, p)
	case inBackoff:
		heap.Push(&q.backoff, p)
	case inParked:
		q.parked[p.rec.Header.UID] = p
		q.join(p)
	}
}

// take pops up to n pods to decide, in order. They stay known, in no heap,
// until retry, park or remove.
func (q *queue) take(n int) []*waitingPod {
	var out []*waitingPod
	for len(out) < n && q.active.Len() > 0 {
		p := heap.Pop(&q.active).(*waitingPod)
		p.index = -1
		out = append(out, p)
	}
	return out
}

// retry queues a taken pod again after its back-off.
func (q *queue) retry(p *waitingPod, now time.Time) {
	if q.pods[p.rec.Header.UID] != p {
		return
	}
	p.attempts++
	p.due = now.Add(q.delay(p.attempts))
	q.to(p, inBackoff)
}

// park sets a taken pod aside until a hint comes.
func (q *queue) park(p *waitingPod, now time.Time) {
	if q.pods[p.rec.Header.UID] != p {
		return
	}
	p.attempts++
	p.parkedAt, p.looked, p.due = now, now, now.Add(q.delay(p.attempts))
	q.to(p, inParked)
	if p.again {
		p.again = false
		q.to(p, inBackoff)
	}
}

func (q *queue) delay(attempts int) time.Duration {
	d := backoffBase << min(attempts-1, 4)
	d = min(d, backoffMax)
	if q.rand != nil {
		d = time.Duration(float64(d) * (0.8 + 0.4*q.rand()))
	}
	return d
}

// wake lets a parked pod try again at once.
func (q *queue) wake(p *waitingPod) {
	if p.where == inParked || p.where == inBackoff {
		q.to(p, inActive)
	}
}

// promote moves what is due to active, and returns how long until the next
// is (negative: none waits).
func (q *queue) promote(now time.Time) time.Duration {
	for q.backoff.Len() > 0 {
		p := q.backoff.pods[0]
		if d := p.due.Sub(now); d > 0 {
			return d
		}
		q.to(p, inActive)
	}
	return -1
}

func (q *queue) counts() map[where]int {
	n := map[where]int{inActive: q.active.Len(), inBackoff: q.backoff.Len(), inParked: len(q.parked)}
	n[inGated] = len(q.pods) - n[inActive] - n[inBackoff] - n[inParked]
	return n
}

type podHeap struct {
	pods []*waitingPod
	less func(a, b *waitingPod) bool
}

func (h *podHeap) Len() int           { return len(h.pods) }
func (h *podHeap) Less(i, j int) bool { return h.less(h.pods[i], h.pods[j]) }
func (h *podHeap) Swap(i, j int) {
	h.pods[i], h.pods[j] = h.pods[j], h.pods[i]
	h.pods[i].index, h.pods[j].index = i, j
}
func (h *podHeap) Push(x any) {
	p := x.(*waitingPod)
	p.index = len(h.pods)
	h.pods = append(h.pods, p)
}
func (h *podHeap) Pop() any {
	p := h.pods[len(h.pods)-1]
	h.pods[len(h.pods)-1] = nil
	h.pods = h.pods[:len(h.pods)-1]
	return p
}
