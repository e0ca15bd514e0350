package registry

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Subresource of a write; it decides which fields are taken.
type Subresource string

// Subresources that write.
const (
	Main      Subresource = ""
	Status    Subresource = "status"
	Scale     Subresource = "scale"
	Finalize  Subresource = "finalize" // namespaces
	Binding   Subresource = "binding"
	Ephemeral Subresource = "ephemeralcontainers"
	Resize    Subresource = "resize"
)

// WriteOptions go with every write.
type WriteOptions struct {
	FieldManager string // "" leaves managedFields alone (our own controllers)
	DryRun       bool
	// Term, when not 0, fences the write to a leadership term.
	Term uint64
	// Warn receives admission and unsupported-field warnings; may be nil.
	Warn func(string)
	// User is who asks, for admission; zero is the control plane itself.
	User string
}

// DeleteOptions of one delete; zero values are upstream's defaults.
type DeleteOptions struct {
	GracePeriodSeconds *int64
	UID                *types.UID
	ResourceVersion    *string
	Propagation        metav1.DeletionPropagation // "" is the kind's default
	DryRun             bool
	Term               uint64
	Warn               func(string)
	// User is who asks, for admission; zero is the control plane itself.
	User string
}

// Mutate receives a private copy of the current object and returns what it
// shall become. It may be called again after a lost race when the caller set
// no resourceVersion of its own.
type Mutate func(current runtime.Object) (runtime.Object, error)

// Store is the typed store. Implemented by *Registry; controllers and
// nodeapi depend on this interface only. Kinds are named by their
// GroupKind ("Deployment.apps" as schema.GroupKind), versions are storage
// versions. Objects returned by Get and List are shared and must not be
// modified: DeepCopy first.
type Store interface {
	Get(gk schema.GroupKind, namespace, name string) (runtime.Object, error)
	// Decode turns a record (from a Snapshot or an Event) into its typed,
	// shared object, through a small LRU.
	Decode(*state.Record) (runtime.Object, error)
	// List returns shared objects in (namespace, name) order.
	List(gk schema.GroupKind, namespace string, sel labels.Selector, f fields.Selector) ([]runtime.Object, error)
	// Reader gives the store that holds the kind (durable or soft), for
	// headers, indexes and watches.
	Reader(gk schema.GroupKind) state.Reader

	Create(ctx context.Context, obj runtime.Object, o WriteOptions) (runtime.Object, error)
	// Update runs the mutation and writes it under the sub-resource's rules.
	// If the object that Mutate returns carries a resourceVersion other than
	// the current one, the write fails with a conflict; otherwise lost races
	// are retried with fresh objects. A mutation that changes nothing writes
	// nothing.
	Update(ctx context.Context, gk schema.GroupKind, namespace, name string, sub Subresource, m Mutate, o WriteOptions) (runtime.Object, error)
	// Delete applies grace, finalizers and propagation. gone is true when the
	// object no longer exists; otherwise obj is what remains, marked.
	Delete(ctx context.Context, gk schema.GroupKind, namespace, name string, o DeleteOptions) (obj runtime.Object, gone bool, err error)
	// Bind proposes many bindings in one Raft entry; one error (or nil) each.
	Bind(ctx context.Context, b []PodBinding, term uint64) ([]error, error)
}

// PodBinding places one pod on one node, guarded by both uids.
type PodBinding struct {
	Namespace, Name string
	PodUID          types.UID
	Node            string
	NodeUID         types.UID
}
