package consensus

import (
	"time"

	"github.com/hashicorp/raft"
)

// await is f's answer. Raft drops what it has in its queues when it stops
// (v1.8.0: fsmMutateCh and verifyCh are buffered), and such a future is never
// answered: whoever waits for it alone waits for ever.
func (n *Node) await(f raft.Future) error {
	n.asked.Add(1)
	defer n.asked.Add(-1)
	answer := make(chan error, 1)
	go func() { answer <- f.Error() }() // ends with its answer; only one that Raft dropped stays
	select {
	case err := <-answer:
		return err
	case <-n.down:
	}
	select {
	case err := <-answer:
		return err
	default:
		return raft.ErrRaftShutdown
	}
}

// settleTimeout is how long Close lets Raft answer what was asked.
const settleTimeout = 5 * time.Second

// settle waits until what Raft was asked is answered, so that an end seldom
// leaves somebody without; a Raft that cannot answer is stopped all the same.
func (n *Node) settle() {
	t := time.NewTicker(time.Millisecond)
	defer t.Stop()
	for end := time.Now().Add(settleTimeout); n.asked.Load() > 0 && n.Err() == nil && time.Now().Before(end); {
		<-t.C
	}
}

// stopRaft stops Raft and waits for it.
func (n *Node) stopRaft() error {
	err := n.raft.Shutdown().Error()
	n.downOnce.Do(func() { close(n.down) })
	return err
}
