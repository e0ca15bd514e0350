package scheduler

import (
	"cmp"
	"context"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
)

// What a parked pod lacks is told anew at this pace at most: what made it
// worse wakes nobody, and yet makes what was said of it false. The bounds are
// of one sweep (every flushEvery); who is not reached is first in the next.
const (
	figuresEvery = 30 * time.Second
	sweepSets    = 256 // kinds of pods that are judged against all nodes
	sweepWrites  = 256
)

// refresh makes the figures in what is said of parked pods anew, those first
// whose figures are the oldest, and writes those that differ.
func (s *Scheduler) refresh(ctx context.Context, now time.Time) {
	var due []*waitingPod
	for _, p := range s.queue.parked {
		if now.Sub(p.looked) >= figuresEvery {
			due = append(due, p)
		}
	}
	slices.SortFunc(due, func(a, b *waitingPod) int {
		return cmp.Or(a.looked.Compare(b.looked), cmp.Compare(a.seq, b.seq))
	})
	judged, writes := map[groupID]plan.Explanation{}, 0
	var g errgroup.Group
	g.SetLimit(s.cfg.Writers)
	for _, p := range due {
		why, known := judged[p.group.id]
		if !known {
			if len(judged) == sweepSets {
				break
			}
			why = s.lacks(p)
			judged[p.group.id] = why
		}
		message := why.Message + p.note
		if why.Fits || message == p.said { // what fits is woken by its hint, and says more then
			p.looked = now
			continue
		}
		if writes == sweepWrites {
			break
		}
		writes++
		p.looked, p.why.Message = now, message
		s.say(ctx, &g, p, message, now)
	}
	_ = g.Wait() // never fails: the next sweep writes again
}

// lacks judges all nodes for one more pod like a parked one.
func (s *Scheduler) lacks(p *waitingPod) plan.Explanation {
	except := ""
	if p.nominated != "" { // it is alone in its set
		except = p.rec.Header.UID
	}
	s.ghosts.level(p.class.priority, except)
	group := &p.group.Group
	group.Ghosts = nil
	if group.Terms != nil || s.ghosts.terms > 0 {
		group.Ghosts = s.ghosts.list()
	}
	return s.whyNot(group, p.class)
}

// whyNot says why a group's pods fit nowhere, and where their volumes are.
func (s *Scheduler) whyNot(group *plan.Group, c *class) plan.Explanation {
	why := plan.Explain(s.cache.nodes, group)
	if note := s.volumeNote(c); note != "" {
		why.Message += " " + note + "."
	}
	return why
}
