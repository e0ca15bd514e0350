package state

import (
	"errors"
	"testing"
)

var allStages = []Stage{StageAbsent, StageGated, StagePending, StageBound, StageRunning, StageSucceeded, StageFailed}

// TestTransitions walks the table: every stage is reached and left, terminal
// ones are final, and who owns which arrow is as designed.
func TestTransitions(t *testing.T) {
	seen := map[[3]string]bool{}
	reached := map[Stage]bool{StageAbsent: true}
	for more := true; more; {
		more = false
		for _, tr := range Transitions {
			if reached[tr.From] && !reached[tr.To] {
				reached[tr.To], more = true, true
			}
		}
	}
	leaves := map[Stage]bool{}
	for _, tr := range Transitions {
		k := [3]string{string(tr.Owner), string(tr.From), string(tr.To) + tr.Mark}
		if seen[k] {
			t.Errorf("twice in the table: %+v", tr)
		}
		seen[k] = true
		leaves[tr.From] = true
		if tr.Why == "" {
			t.Errorf("no reason: %+v", tr)
		}
		if (tr.From == tr.To) != (tr.Mark != "") {
			t.Errorf("an arrow moves or marks: %+v", tr)
		}
		if (tr.From == StageSucceeded || tr.From == StageFailed) && tr.To != StageAbsent && tr.Mark == "" {
			t.Errorf("a terminal stage is left: %+v", tr)
		}
		if tr.To == StagePending && tr.From == StageBound || tr.From == StageRunning && tr.To == StageBound {
			t.Errorf("backwards: %+v", tr)
		}
		switch {
		case tr.Owner == ActorScheduler && (tr.From != StagePending || tr.To != StageBound),
			tr.To == StageRunning && tr.Mark == "" && tr.Owner != ActorNode,
			tr.To == StageSucceeded && tr.Mark == "" && tr.Owner != ActorNode,
			tr.Mark == MarkDeleting && tr.Owner != ActorRegistry,
			(tr.Mark == MarkLost || tr.Mark == MarkFound) && tr.Owner != ActorNodeLifecycle:
			t.Errorf("not its arrow: %+v", tr)
		}
	}
	for _, s := range allStages {
		if !reached[s] || !leaves[s] {
			t.Errorf("stage %s: reached %v, left %v", s, reached[s], leaves[s])
		}
	}
}

func TestCheckTransition(t *testing.T) {
	pending := &Header{Phase: PodPending}
	bound := &Header{Phase: PodPending, NodeName: "n"}
	running := &Header{Phase: PodRunning, NodeName: "n"}
	failed := &Header{Phase: PodFailed, NodeName: "n"}
	for _, c := range []struct {
		owner    Actor
		from, to *Header
		ok       bool
	}{
		{ActorScheduler, pending, bound, true},
		{ActorNode, pending, bound, false},
		{ActorNode, bound, running, true},
		{ActorNode, running, running, true},
		{ActorNode, failed, running, false},
		{ActorNode, running, bound, false},
		{ActorNodeLifecycle, running, failed, false},
		{ActorGC, running, failed, true},
		{ActorClient, bound, running, false},
	} {
		err := CheckTransition(c.owner, c.from, c.to)
		var et *ErrTransition
		if (err == nil) != c.ok || err != nil && !errors.As(err, &et) {
			t.Errorf("%s from %s to %s: %v", c.owner, StageOf(c.from), StageOf(c.to), err)
		}
	}
}

// TestApplyKeepsToTheTable: what the state machine itself guarantees of it.
func TestApplyKeepsToTheTable(t *testing.T) {
	m, l := newCluster(t)
	node, pod := newNode("n1", 1000, 10), newPod("p", 1)
	must(t, l, create(node), create(pod), bindOp(pod, node))
	cur, _ := m.Snapshot().Get(pod.Header.Key)
	unbound := *cur
	unbound.Header.NodeName = ""
	marked := *cur
	marked.Header.Deleted = 5
	unmarked := *cur
	res := propose(t, l,
		Op{Type: OpUpdate, Record: &unbound, UID: cur.Header.UID},
		Op{Type: OpUpdate, Record: &marked, UID: cur.Header.UID},
		Op{Type: OpUpdate, Record: &unmarked, UID: cur.Header.UID},
	)
	if res[0].Reason != ReasonConflict || res[1].Reason != ReasonNone || res[2].Reason != ReasonConflict {
		t.Errorf("%+v", res)
	}
}
