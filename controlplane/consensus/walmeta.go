package consensus

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/hashicorp/raft-wal/types"
)

// walMeta keeps raft-wal's list of segments in two slots; raft-wal's own
// keeps it in a bbolt file, which panics when it is damaged.
type walMeta struct {
	disk  *Disk
	slots *slots
	state types.PersistentState
}

var _ types.MetaStore = (*walMeta)(nil)

func newWALMeta(d *Disk, dir string) *walMeta {
	return &walMeta{disk: d, slots: &slots{disk: d, path: filepath.Join(dir, "segments")}}
}

// Load implements types.MetaStore.
func (m *walMeta) Load(string) (types.PersistentState, error) {
	b, err := m.slots.load()
	if err != nil {
		return types.PersistentState{}, err
	}
	if b != nil {
		if err := json.Unmarshal(b, &m.state); err != nil {
			return types.PersistentState{}, fmt.Errorf("%w: list of log segments: %w", ErrDamaged, err)
		}
	}
	return m.state, nil
}

// CommitState implements types.MetaStore.
func (m *walMeta) CommitState(s types.PersistentState) error {
	b, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode list of log segments: %w", err)
	}
	if err := m.slots.store(b); err != nil {
		return fmt.Errorf("list of log segments: %w", err)
	}
	m.state = s
	return nil
}

var errStable = errors.New("consensus: the stable store is not the log's")

// GetStable implements types.MetaStore; unused.
func (m *walMeta) GetStable([]byte) ([]byte, error) { return nil, errStable }

// SetStable implements types.MetaStore; unused.
func (m *walMeta) SetStable(_, _ []byte) error { return errStable }

// Close implements types.MetaStore.
func (m *walMeta) Close() error { return m.slots.close() }
