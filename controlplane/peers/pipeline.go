package peers

import (
	"sync"

	"github.com/hashicorp/raft"
)

// Transport is Raft's own with pipelines that never block their sender for
// good.
//
// Raft stops reading a pipeline's answers when one says no (the follower
// lacks an earlier entry, or knows a later term), while its sender may be
// about to hand over one more request. In hashicorp/raft 1.8.0 that request
// waits for the reader of answers, and that one for somebody who takes them:
// the follower is never written to again, though heartbeats keep it quiet, and
// Raft never ends its shutdown. So answers that nobody takes are taken here.
type Transport struct{ *raft.NetworkTransport }

// AppendEntriesPipeline implements raft.Transport.
func (t Transport) AppendEntriesPipeline(id raft.ServerID, target raft.ServerAddress) (raft.AppendPipeline, error) {
	inner, err := t.NetworkTransport.AppendEntriesPipeline(id, target)
	if err != nil {
		return nil, err
	}
	p := &pipeline{AppendPipeline: inner, out: make(chan raft.AppendFuture), closed: make(chan struct{})}
	p.wg.Go(p.forward)
	return p, nil
}

// pipeline holds the answers that Raft has not taken yet: at most those that
// were asked for between the last that it took and its Close.
type pipeline struct {
	raft.AppendPipeline
	out    chan raft.AppendFuture
	closed chan struct{}
	once   sync.Once
	wg     sync.WaitGroup
}

// Consumer implements raft.AppendPipeline.
func (p *pipeline) Consumer() <-chan raft.AppendFuture { return p.out }

// Close implements raft.AppendPipeline and waits.
func (p *pipeline) Close() error {
	err := p.AppendPipeline.Close()
	p.once.Do(func() { close(p.closed) })
	p.wg.Wait()
	return err
}

func (p *pipeline) forward() {
	var waiting []raft.AppendFuture
	for {
		var out chan raft.AppendFuture
		var next raft.AppendFuture
		if len(waiting) > 0 {
			out, next = p.out, waiting[0]
		}
		select {
		case f := <-p.AppendPipeline.Consumer():
			waiting = append(waiting, f)
		case out <- next:
			waiting = waiting[1:]
		case <-p.closed:
			return
		}
	}
}
