// Package scheduler binds pods to nodes: filter, score, bind.
//
// The decision is package plan, pure. This package is the loop around it:
// one goroutine (Run) owns the cache of nodes and placements and the queue of
// waiting pods; a second one only carries watch events to it. A placement is
// assumed in the cache, then bound in the state machine together with all
// others of the batch (one Raft entry, each binding checked by itself), then
// confirmed, or forgotten and queued again when it lost a race.
//
// Pods that fit nowhere may preempt less important ones (preempt.go): a node
// is nominated, its victims are deleted with their grace periods, and the room
// is held for the pod meanwhile (ghosts.go).
//
// Owned fields: a pod's node (through Store.Bind), and while it has none its
// PodScheduled condition and status.nominatedNodeName.
package scheduler
