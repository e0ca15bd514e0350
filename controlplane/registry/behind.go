package registry

import (
	"context"
	"time"

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
	if _, leading := r.proposer(stored, namespace).Leadership(); leading {
		return err
	}
	if fault := r.Current(ctx, gk, namespace); fault != nil {
		return fault
	}
	return write()
}

// Current makes sure that this server has read all that was written to objects
// of this kind before the call, for a write that first looks around: an answer
// that may be out of date would be taken for done. It returns
// ServiceUnavailable or Timeout, with a hint, if the leader cannot be asked.
func (r *Registry) Current(ctx context.Context, gk schema.GroupKind, namespace string) error {
	_, stored, err := resolve(gk)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, currentTimeout)
	defer cancel()
	if err := r.proposer(stored, namespace).Barrier(ctx); err != nil {
		return proposeError(err)
	}
	return nil
}

// currentTimeout is how long the leader may take to say what it has.
const currentTimeout = 5 * time.Second
