package claim

import (
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Kind is a kind of owner that claims by a selector in its spec.
type Kind[T metav1.Object] struct {
	GK       schema.GroupKind
	Selector func(T) *metav1.LabelSelector
}

// Claimant is an owner as its reconcile finds it.
type Claimant[T metav1.Object] struct {
	Object   T
	Selector labels.Selector
	// Gone: there is no such object. Live: there is, and it is not being
	// deleted (then the garbage collector removes its pods).
	Gone, Live bool
}

// Find reads the owner of that key, as every reconcile begins. A selector
// that is broken or selects everything is an error that no retry mends.
func (k Kind[T]) Find(env loop.Env, key state.Key) (Claimant[T], error) {
	obj, err := env.Store.Get(k.GK, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		return Claimant[T]{Gone: true}, nil
	}
	if err != nil {
		return Claimant[T]{}, err
	}
	o, ok := obj.(T)
	if !ok {
		return Claimant[T]{}, loop.Terminal(fmt.Errorf("not a %s: %T", k.GK.Kind, obj))
	}
	sel, err := metav1.LabelSelectorAsSelector(k.Selector(o))
	if err != nil || sel.Empty() {
		return Claimant[T]{}, loop.Terminal(fmt.Errorf("selector of %s selects everything or is broken: %w", key.Name, err))
	}
	return Claimant[T]{Object: o, Selector: sel, Live: o.GetDeletionTimestamp() == nil}, nil
}

// SelectorOf reads the selector of an owner's record; nil if there is none
// that can be used.
func (k Kind[T]) SelectorOf(env loop.Env) func(*state.Record) labels.Selector {
	return func(r *state.Record) labels.Selector {
		obj, err := env.Store.Decode(r)
		if err != nil {
			return nil
		}
		o, ok := obj.(T)
		if !ok {
			return nil
		}
		s, err := metav1.LabelSelectorAsSelector(k.Selector(o))
		if err != nil {
			return nil
		}
		return s
	}
}
