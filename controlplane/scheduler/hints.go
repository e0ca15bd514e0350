package scheduler

import (
	"container/heap"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
)

// parkedSet are parked pods that no decision can tell apart. A change is
// judged once for all of them, and wakes as many as it could help.
type parkedSet struct {
	id    groupID
	group *plan.Group
	// capacity and peers: what they lack, see plan.Explanation.
	capacity, peers bool
	pods            podHeap
}

func bySeq(a, b *waitingPod) bool { return a.seq < b.seq }

// join adds a parked pod to its set.
func (q *queue) join(p *waitingPod) {
	s := q.sets[p.group.id]
	if s == nil {
		s = &parkedSet{id: p.group.id, group: &p.group.Group, pods: podHeap{less: bySeq}}
		q.sets[p.group.id] = s
	}
	s.capacity, s.peers = s.capacity || p.why.Capacity, s.peers || p.why.Peers
	heap.Push(&s.pods, p)
}

// part takes a pod out of its set.
func (q *queue) part(p *waitingPod) {
	s := q.sets[p.group.id]
	heap.Remove(&s.pods, p.index)
	if s.pods.Len() == 0 {
		delete(q.sets, s.id)
	}
}

// wakeSome lets up to n pods of a set try again, the oldest first, not before
// their back-off ends. Who waits for a nominated node does not back off.
func (q *queue) wakeSome(s *parkedSet, n int) {
	for ; n > 0 && s.pods.Len() > 0; n-- {
		p := s.pods.pods[0]
		if p.nominated != "" {
			q.to(p, inActive)
		} else {
			q.to(p, inBackoff)
		}
	}
}

// nodeChanged wakes the pods that a node could take now and did not before.
func (s *Scheduler) nodeChanged(name string, c plan.Change) {
	if !c.Static && !c.More {
		return
	}
	if c.Static {
		s.queue.stale = true
		s.renominate(name)
	}
	slot, ok := s.cache.nodes.Slot(name)
	if !ok {
		return
	}
	for _, set := range s.queue.sets {
		switch {
		case set.peers && c.Static: // its labels count for others' domains
			s.queue.wakeSome(set, set.pods.Len())
		default:
			s.offer(set, slot)
		}
	}
}

// roomOn wakes the pods that a node's free room could take.
func (s *Scheduler) roomOn(name string) {
	slot, ok := s.cache.nodes.Slot(name)
	if !ok {
		return
	}
	for _, set := range s.queue.sets {
		if set.capacity {
			s.offer(set, slot)
		}
	}
}

// offer wakes as many of a set as could have a place on the slot: in its free
// room, or in that of less important pods.
func (s *Scheduler) offer(set *parkedSet, slot int) {
	first := set.pods.pods[0]
	except := ""
	if first.nominated != "" { // it is alone in its set
		except = first.rec.Header.UID
	}
	s.ghosts.level(first.class.priority, except)
	n := plan.Room(s.cache.nodes, set.group, slot)
	if n == 0 && !first.class.never && s.cache.above(first.class.priority) && plan.Could(s.cache.nodes, set.group, slot) {
		n = set.pods.Len()
	}
	s.queue.wakeSome(set, n)
}

// podMoved wakes the pods to which it matters that a pod came or went.
func (s *Scheduler) podMoved(p *plan.Pod, came bool) {
	for _, set := range s.queue.sets {
		if set.peers && set.group.Minds(s.cache.nodes, p, came) {
			s.queue.wakeSome(set, set.pods.Len())
		}
	}
}

// spacesChanged wakes all pods whose terms look at other pods.
func (s *Scheduler) spacesChanged() {
	for _, set := range s.queue.sets {
		if set.peers {
			s.queue.wakeSome(set, set.pods.Len())
		}
	}
}

// flush wakes pods that were parked for long, so that no missing hint is why
// a pod waits for ever; and all, if what is said of nodes is out of date.
func (q *queue) flush(now time.Time) {
	for _, p := range q.parked {
		if q.stale || now.Sub(p.parkedAt) >= parkedMax {
			q.to(p, inBackoff)
		}
	}
	q.stale = false
}
