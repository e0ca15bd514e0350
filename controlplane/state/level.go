package state

import (
	"errors"
	"fmt"
)

// opLevels is the feature level with which each verb came. A verb, or a field
// of Op, Record or Header, that is new gets the level that its release has
// (feature.Level), here or in Op.Level; a test compares the list of fields.
var opLevels = [...]uint32{
	OpCreate: 1, OpUpdate: 1, OpDelete: 1, OpBind: 1, OpRaiseFeature: 1, OpTimeFloor: 1, OpBootstrap: 1, OpRecover: 1,
}

// Level is the feature level that a server needs to apply the op: for one
// that sets the cluster's level, that level.
func (o *Op) Level() uint32 {
	switch {
	case o.Type == OpRaiseFeature, o.Type == OpBootstrap:
		return max(o.Feature, 1)
	case o.Type == 0 || int(o.Type) >= len(opLevels):
		return ^uint32(0) // nothing is known of it
	}
	return opLevels[o.Type]
}

// ErrFeatureLevel refuses an op that not every server is known to understand.
var ErrFeatureLevel = errors.New("state: needs a higher feature level of the cluster: upgrade every server, then run 'dunlin server raise-level'")

// Gate says whether ops may be proposed in a cluster of a feature level.
func Gate(ops []Op, level uint32) error {
	for i := range ops {
		o := &ops[i]
		if o.Type == OpRaiseFeature || o.Type == OpBootstrap {
			continue // these set it
		}
		if l := o.Level(); l > level {
			return fmt.Errorf("%w (operation %d needs level %d, the cluster is at %d)", ErrFeatureLevel, o.Type, l, level)
		}
	}
	return nil
}
