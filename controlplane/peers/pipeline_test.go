package peers

import (
	"io"
	"testing"
	"time"

	"github.com/hashicorp/raft"
)

// Who stops taking a pipeline's answers does not block its sender: Raft does
// so when a follower says no. Without the fix this never ends.
func TestPipelineWithoutReader(t *testing.T) {
	follower, err := raft.NewTCPTransport("127.0.0.1:0", nil, 3, 10*time.Second, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = follower.Close() }()
	go func() {
		for rpc := range follower.Consumer() {
			rpc.Respond(&raft.AppendEntriesResponse{Success: false}, nil)
		}
	}()
	leader, err := raft.NewTCPTransport("127.0.0.1:0", nil, 3, 10*time.Second, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = leader.Close() }()
	p, err := Transport{leader}.AppendEntriesPipeline("f", follower.LocalAddr())
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if _, err := p.AppendEntries(&raft.AppendEntriesRequest{}, &raft.AppendEntriesResponse{}); err != nil {
			t.Fatal(err)
		}
	}
	if f := <-p.Consumer(); f.Response() == nil {
		t.Fatal("an answer without an answer")
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}
