// Package admission is the chain every create, update and delete passes
// before defaulting's result is validated and written: mutating plugins
// first, then validating ones. Quota, limit ranges and webhooks have their
// places in it.
package admission

import (
	"context"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/manifests"
)

// Operation is what is asked.
type Operation string

// Operations.
const (
	Create Operation = "CREATE"
	Update Operation = "UPDATE"
	Delete Operation = "DELETE"
)

// Getter reads other objects (shared, read-only).
type Getter interface {
	Get(gk schema.GroupKind, namespace, name string) (runtime.Object, error)
}

// Lister is what a Getter may also be (the registry is): plugins that need
// more than one object by name, such as quota, ask Attributes.Read for it.
// Objects are shared and read-only, in (namespace, name) order.
type Lister interface {
	List(gk schema.GroupKind, namespace string, sel labels.Selector, f fields.Selector) ([]runtime.Object, error)
}

// Attributes describe one request. Object is private to the request and may
// be changed by Admit; Old is nil on create.
type Attributes struct {
	Operation   Operation
	Kind        *manifests.Kind
	Namespace   string
	Name        string
	Subresource string
	Object      runtime.Object
	Old         runtime.Object
	User        string
	DryRun      bool
	Warn        func(string) // never nil
	Read        Getter
}

// Plugin is one link of the chain. Errors are *apierrors.StatusError.
type Plugin interface {
	Name() string
	// Admit may change Object. Called in chain order, all before any Validate.
	Admit(ctx context.Context, a *Attributes) error
	// Validate only accepts or refuses.
	Validate(ctx context.Context, a *Attributes) error
}

// Chain runs plugins in order.
type Chain []Plugin

// Admit runs every plugin's Admit.
func (c Chain) Admit(ctx context.Context, a *Attributes) error {
	for _, p := range c {
		if err := p.Admit(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// Validate runs every plugin's Validate.
func (c Chain) Validate(ctx context.Context, a *Attributes) error {
	for _, p := range c {
		if err := p.Validate(ctx, a); err != nil {
			return err
		}
	}
	return nil
}
