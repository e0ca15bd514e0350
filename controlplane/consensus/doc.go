// Package consensus makes the state machine durable and replicated:
// hashicorp/raft over our own log, stable store and snapshot store, also with
// a single server.
//
// Owner and goroutines: a Node owns one state folder (guarded by a lock
// file), the Raft instance and the state.Machine that it feeds. Raft runs its
// own goroutines; ours are the batcher (proposals), the verifier (barriers),
// the watcher of leadership and the keeper (snapshots, time-outs that follow
// the disk). Close stops and waits for all of them.
//
// Invariants: what Propose acknowledged is on the disk; damaged files are
// recognised before they are used and moved aside, never deleted; nothing is
// written while nothing changes.
package consensus
