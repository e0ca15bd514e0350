package consensus

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

type dropped struct{ raft.Future }

func (dropped) Error() error { select {} }

// A future that Raft dropped when it stopped does not keep anybody.
func TestAwaitADroppedFuture(t *testing.T) {
	n := &Node{down: make(chan struct{})}
	time.AfterFunc(10*time.Millisecond, func() { close(n.down) })
	if err := n.await(dropped{}); !errors.Is(err, raft.ErrRaftShutdown) {
		t.Error(err)
	}
}

// A Node ends when it is told to, at whatever moment of its start, of its
// first leadership and of writes.
func TestCloseAtAnyMoment(t *testing.T) {
	dir := t.TempDir()
	rnd := rand.New(rand.NewPCG(1, 1))
	for i := range 60 {
		n, err := Open(testContext(t), testConfig(t, dir))
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for w := range 3 {
			wg.Go(func() {
				for k := range 20 {
					_, err := n.Propose(testContext(t), []state.Op{{Type: state.OpCreate, Record: object("ConfigMap", "default", fmt.Sprintf("c%d-%d-%d", i, w, k))}})
					if errors.Is(err, ErrClosed) {
						return
					}
				}
			})
		}
		wg.Go(func() { _, _ = n.WaitLeading(testContext(t)) })
		<-time.After(time.Duration(rnd.IntN(40_000)) * time.Microsecond)
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
	}
}
