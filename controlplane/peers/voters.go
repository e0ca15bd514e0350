package peers

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

const (
	// maxVoters bounds the servers that vote: each write waits for a majority
	// of them.
	maxVoters = 5
	// Steady is how long a server must have been well, without a break, to be
	// given a vote.
	Steady = 3 * time.Second
)

// Standing is what the leader knows of one server of the Raft configuration.
type Standing struct {
	ID    string
	Voter bool
	Self  bool // the leader
	// Well: it answers, follows this leader and has what the leader had a
	// moment ago. Since is for how long; Trouble says what else.
	Well    bool
	Since   time.Duration
	Trouble string
	// Removed: an operator took it out of the cluster.
	Removed bool
}

// Change is one change of the Raft configuration.
type Change struct {
	Kind ChangeKind
	ID   string
	Why  string
}

// ChangeKind says what a Change does.
type ChangeKind uint8

// Kinds of changes.
const (
	NoChange ChangeKind = iota
	Promote
	Demote
	Remove
)

// Decide is the rule of who votes: the number of voters is odd, since an even
// one tolerates no more failures than the odd one below it, and one more
// machine can fail. It is a pure function: one change at a time, the most
// urgent first. why says, for each server without a vote, what it waits for.
func Decide(list []Standing) (next Change, why map[string]string) {
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b Standing) int { return cmp.Compare(a.ID, b.ID) })
	var voters, ready []Standing
	why = map[string]string{}
	for _, s := range list {
		switch {
		case s.Removed && s.Self:
			return Change{}, why // somebody else must lead first
		case s.Removed:
			next = Change{Remove, s.ID, "an operator removed it"}
		case s.Voter:
			voters = append(voters, s)
		case !s.Well:
			why[s.ID] = "it is not ready: " + s.Trouble
		case s.Since < Steady:
			why[s.ID] = "it has caught up just now"
		default:
			ready = append(ready, s)
		}
	}
	if next.Kind != NoChange {
		return next, why
	}
	even := len(voters)%2 == 0
	switch {
	case len(ready) > 0 && len(voters) < maxVoters && (even || len(ready) > 1):
		return Change{Promote, ready[0].ID, "there will be an odd number of voters"}, why
	case even && (len(ready) == 0 || len(voters) >= maxVoters):
		if d := spare(voters); d != nil {
			return Change{Demote, d.ID, fmt.Sprintf("%d voters tolerate no more failures than %d", len(voters), len(voters)-1)}, why
		}
	}
	for _, s := range ready {
		if len(voters) >= maxVoters {
			why[s.ID] = fmt.Sprintf("there are %d voters, which is enough; it keeps a copy", len(voters))
			continue
		}
		why[s.ID] = fmt.Sprintf("%d voters would tolerate no more failures than %d; it keeps a copy, and votes once there is one server more", len(voters)+1, len(voters))
	}
	return Change{}, why
}

// spare is the voter that an even number can do without: only when all of
// them are well is the number even because somebody was removed, and not
// because somebody will be back.
func spare(voters []Standing) *Standing {
	var found *Standing
	for i := range voters {
		v := &voters[i]
		if !v.Self && !v.Well {
			return nil
		}
		if !v.Self {
			found = v
		}
	}
	if len(voters) < 2 {
		return nil
	}
	return found
}
