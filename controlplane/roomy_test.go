package controlplane

import (
	"errors"
	"slices"
	"testing"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/wire"
)

// A leader whose disk is full hands over to a voter that follows it and says
// that nothing is wrong, and to nobody else.
func TestWhoHasRoom(t *testing.T) {
	well := func() serverState { return serverState{reply: &wire.ServerStatusReply{Leader: "me", Version: 7}} }
	full := well()
	full.reply.Fault = "its state folder is nearly full"
	elsewhere := well()
	elsewhere.reply.Leader = "other"
	silent := well()
	silent.err = errors.New("time-out")
	members := []consensus.Member{
		{ID: "me", Voter: true}, {ID: "full", Voter: true}, {ID: "elsewhere", Voter: true}, {ID: "silent", Voter: true},
		{ID: "well", Voter: true}, {ID: "learner"}, {ID: "behind", Voter: true}, {ID: "new", Voter: true},
	}
	behind := well()
	behind.reply.Version = 1 // Raft brings it up to date before it hands over
	states := map[string]serverState{"full": full, "elsewhere": elsewhere, "silent": silent, "well": well(), "learner": well(), "behind": behind, "removed": well()}
	if got := roomyOf(members, states, "me"); !slices.Equal(got, []string{"well", "behind"}) {
		t.Errorf("%v have room", got)
	}
	if got := roomyOf(members, map[string]serverState{"full": full}, "me"); got != nil {
		t.Errorf("%v have room, and nobody has", got)
	}
}
