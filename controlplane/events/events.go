// Package events turns "this happened to that object" into Event objects in
// the soft store: aggregated, counted, rate-limited and never in the way of
// the caller.
//
// Owner and goroutines: callers hand entries to a Sink, which holds at most
// Config.Queue of them (newest wins); one goroutine, Sink.Run, owns the
// aggregation tables and does all writing. An event is a hint for people:
// nothing is ever decided from one, and losing one is allowed and counted.
package events

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/manifests"
)

// Event types, as in core/v1.
const (
	Normal  = corev1.EventTypeNormal
	Warning = corev1.EventTypeWarning
)

// Recorder notes what happened to an object. Implementations never block and
// are safe for concurrent use.
type Recorder interface {
	// Event records one occurrence. eventType is Normal or Warning, reason a
	// CamelCase word, message a sentence for people.
	Event(about corev1.ObjectReference, eventType, reason, message string)
}

// Discard is a Recorder that keeps nothing.
var Discard Recorder = discard{}

type discard struct{}

func (discard) Event(corev1.ObjectReference, string, string, string) {}

// Entry is one occurrence, complete: what a node reports, or what a Recorder
// makes of a call.
type Entry struct {
	About     corev1.ObjectReference
	Type      string
	Reason    string
	Message   string
	Component string    // source.component: "deployment-controller", "dunlin-agent"
	Host      string    // source.host, empty for the control plane
	Time      time.Time // of the last occurrence
	Count     int32     // occurrences that this entry stands for; 0 is 1
	// Over removes what earlier entries, the same but for this, made.
	Over bool
}

// Ref builds the reference of an object that the control plane read: kind
// and version come from the served kinds, since typed objects carry none.
func Ref(gk schema.GroupKind, obj runtime.Object) corev1.ObjectReference {
	ref := corev1.ObjectReference{Kind: gk.Kind}
	if k := manifests.ByGroupKind(gk); k != nil {
		ref.APIVersion = k.GVK.GroupVersion().String()
	}
	if m, err := meta.Accessor(obj); err == nil {
		ref.Namespace, ref.Name, ref.UID = m.GetNamespace(), m.GetName(), m.GetUID()
		ref.ResourceVersion = m.GetResourceVersion()
	}
	return ref
}
