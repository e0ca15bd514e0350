package registry

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// surely runs a write, and once more if it was refused for something that this
// server may merely not have read yet: an object that is not there, or has
// another version. Only the leader's state is the newest; a controller's write
// (term is not 0) is made there. If the leader cannot be asked, nobody knows,
// and the error says so.
func (r *Registry) surely(ctx context.Context, gk schema.GroupKind, namespace string, term uint64, write func() error) error {
	err := write()
	if term != 0 || !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return err
	}
	_, stored, unknown := resolve(gk)
	if unknown != nil {
		return err
	}
	p := r.proposer(stored, namespace)
	if _, leading := p.Leadership(); leading {
		return err
	}
	if fault := p.Barrier(ctx); fault != nil {
		return proposeError(fault)
	}
	return write()
}
