package state

import "fmt"

// Pod phases, as core/v1 names them.
const (
	PodPending   = "Pending"
	PodRunning   = "Running"
	PodSucceeded = "Succeeded"
	PodFailed    = "Failed"
)

// Stage is where a pod is in its life: its phase, and what of its header
// matters beside it.
type Stage string

// Stages. A pod that is marked for deletion keeps its stage: the mark is an
// arrow of its own, since it may come at any time and is never taken back.
const (
	StageAbsent    Stage = "absent"    // no such object
	StageGated     Stage = "gated"     // Pending, has scheduling gates
	StagePending   Stage = "pending"   // Pending, no node
	StageBound     Stage = "bound"     // Pending, has a node
	StageRunning   Stage = "running"   // Running
	StageSucceeded Stage = "succeeded" // terminal
	StageFailed    Stage = "failed"    // terminal
)

// Actor is a part of the system that owns arrows.
type Actor string

// Actors. An object's own client (a user, a controller that creates pods) is
// ActorClient; it works through the registry.
const (
	ActorClient        Actor = "client"
	ActorRegistry      Actor = "registry"
	ActorScheduler     Actor = "scheduler"
	ActorNode          Actor = "node"
	ActorNodeLifecycle Actor = "nodelifecycle"
	ActorGC            Actor = "gc"
)

// Transition is one allowed move of a pod and who makes it.
type Transition struct {
	Owner    Actor
	From, To Stage
	// Mark is what the arrow sets beside the stage: "deleting" (the deletion
	// timestamp), "lost" (DisruptionTarget with NodeUnreachable, Ready=False).
	Mark string
	Why  string
}

// Marks of a Transition.
const (
	MarkDeleting = "deleting"
	MarkLost     = "lost"
	MarkFound    = "found" // the lost mark is taken back
)

// Transitions is the table of pod transitions: one actor, one arrow. Nothing
// else may happen to a pod.
var Transitions = []Transition{
	{ActorClient, StageAbsent, StageGated, "", "created with scheduling gates"},
	{ActorClient, StageAbsent, StagePending, "", "created"},
	{ActorClient, StageAbsent, StageBound, "", "created with nodeName: daemon pods and the like"},
	{ActorNode, StageAbsent, StageBound, "", "mirror of a static pod"},
	{ActorClient, StageGated, StagePending, "", "last gate removed"},
	{ActorScheduler, StagePending, StageBound, "", "OpBind, checked against the totals"},

	{ActorNode, StageBound, StageRunning, "", "a container runs"},
	{ActorNode, StageBound, StageSucceeded, "", "ran and ended between two reports"},
	{ActorNode, StageBound, StageFailed, "", "refused by the node's admission, or ended between two reports"},
	{ActorNode, StageRunning, StageSucceeded, "", "every container ended well and none restarts"},
	{ActorNode, StageRunning, StageFailed, "", "a container ended badly and none restarts, or evicted"},

	{ActorNodeLifecycle, StageBound, StageBound, MarkLost, "the node's lease ran out"},
	{ActorNodeLifecycle, StageRunning, StageRunning, MarkLost, "the node's lease ran out"},
	{ActorNodeLifecycle, StageBound, StageBound, MarkFound, "the node is back"},
	{ActorNodeLifecycle, StageRunning, StageRunning, MarkFound, "the node is back"},
	{ActorGC, StageBound, StageFailed, "", "the node was declared dead"},
	{ActorGC, StageRunning, StageFailed, "", "the node was declared dead"},

	{ActorRegistry, StageGated, StageGated, MarkDeleting, "delete with grace or finalizers"},
	{ActorRegistry, StagePending, StagePending, MarkDeleting, "delete with finalizers"},
	{ActorRegistry, StageBound, StageBound, MarkDeleting, "delete with grace"},
	{ActorRegistry, StageRunning, StageRunning, MarkDeleting, "delete with grace"},
	{ActorRegistry, StageSucceeded, StageSucceeded, MarkDeleting, "delete with finalizers"},
	{ActorRegistry, StageFailed, StageFailed, MarkDeleting, "delete with finalizers"},

	{ActorRegistry, StageGated, StageAbsent, "", "delete of a pod without a node"},
	{ActorRegistry, StagePending, StageAbsent, "", "delete of a pod without a node"},
	{ActorRegistry, StageBound, StageAbsent, "", "delete with grace 0"},
	{ActorRegistry, StageRunning, StageAbsent, "", "delete with grace 0"},
	{ActorRegistry, StageSucceeded, StageAbsent, "", "delete of a terminal pod"},
	{ActorRegistry, StageFailed, StageAbsent, "", "delete of a terminal pod"},
	{ActorNode, StageBound, StageAbsent, "", "final delete: marked, and nothing of it runs"},
	{ActorNode, StageRunning, StageAbsent, "", "final delete: marked, and nothing of it runs"},
	{ActorNode, StageSucceeded, StageAbsent, "", "final delete: marked, and nothing of it runs"},
	{ActorNode, StageFailed, StageAbsent, "", "final delete: marked, and nothing of it runs"},
	{ActorGC, StageGated, StageAbsent, "", "owner gone"},
	{ActorGC, StagePending, StageAbsent, "", "owner gone, or marked and without a node"},
	{ActorGC, StageBound, StageAbsent, "", "the node object is gone"},
	{ActorGC, StageRunning, StageAbsent, "", "the node object is gone"},
	{ActorGC, StageSucceeded, StageAbsent, "", "terminal pods over the limit, or owner gone"},
	{ActorGC, StageFailed, StageAbsent, "", "terminal pods over the limit, or owner gone"},
}

// StageOf places a pod's header.
func StageOf(h *Header) Stage {
	switch h.Phase {
	case PodRunning:
		return StageRunning
	case PodSucceeded:
		return StageSucceeded
	case PodFailed:
		return StageFailed
	}
	switch {
	case h.NodeName != "":
		return StageBound
	case h.Gated:
		return StageGated
	}
	return StagePending
}

// ErrTransition is the error of CheckTransition.
type ErrTransition struct {
	Owner    Actor
	From, To Stage
}

// Error implements error.
func (e *ErrTransition) Error() string {
	return fmt.Sprintf("%s may not move a pod from %s to %s", e.Owner, e.From, e.To)
}

// CheckTransition says whether the actor may move a pod from one header to
// the other: nil if the stage stays the same or the table has the arrow.
func CheckTransition(owner Actor, from, to *Header) error {
	return CheckStage(owner, StageOf(from), StageOf(to))
}

// CheckStage is CheckTransition for stages.
func CheckStage(owner Actor, from, to Stage) error {
	if from == to {
		return nil
	}
	for i := range Transitions {
		t := &Transitions[i]
		if t.Owner == owner && t.From == from && t.To == to {
			return nil
		}
	}
	return &ErrTransition{Owner: owner, From: from, To: to}
}
