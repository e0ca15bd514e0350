package consensus

import (
	"testing"

	"github.com/hashicorp/raft"
)

// TestNoWayBackToAnOlderSnapshot: a leader that believes this server to be far
// behind does not take its state back.
func TestNoWayBackToAnOlderSnapshot(t *testing.T) {
	s := &snapshotStore{dir: t.TempDir(), list: []*snapshotMeta{{Index: 10, Term: 2}, {Index: 5, Term: 2}}}
	for index, ok := range map[uint64]bool{5: false, 9: false, 10: true, 11: true} {
		_, err := s.Create(raft.SnapshotVersionMax, index, 3, raft.Configuration{}, 1, nil)
		if (err == nil) != ok {
			t.Errorf("snapshot at index %d: %v", index, err)
		}
	}
}
