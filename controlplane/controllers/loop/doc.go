// Package loop is what every controller is made of: a Queue of keys, one
// reconcile function with four outcomes, and a Feed that turns changes of
// the store into keys.
//
// Owner and goroutines: Run owns one Feed goroutine for all controllers
// (watching the durable store once), and Workers goroutines a controller; it
// returns when all of them have ended. Queues carry keys, never objects or
// events: reconcile reads everything it needs from a fresh snapshot, so that
// a lost, repeated or reordered key changes nothing but time. One key is
// reconciled by one worker at a time.
//
// The leader applies a write before Propose returns, so a reconcile that
// runs after another's write sees it: no controller here keeps expectations
// of its own writes.
package loop
