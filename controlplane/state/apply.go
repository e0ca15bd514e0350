package state

import (
	"fmt"
	"slices"
	"strings"
)

// epochStep is what a recovery adds to the version counter.
const epochStep = 1 << 32

// application is one entry being applied. It reads and writes the tables and
// collects the events; nothing is visible before publish.
type application struct {
	t      *tables
	term   uint64
	view   *view
	rv     uint64
	facts  Facts
	events []Event
	// reset says that the ring starts again at resetAt.
	reset   bool
	resetAt uint64
}

// verbs is the table of what each op does.
var verbs = [...]func(*application, *Op) Result{
	OpCreate:       (*application).create,
	OpUpdate:       (*application).update,
	OpDelete:       (*application).remove,
	OpBind:         (*application).bind,
	OpRaiseFeature: (*application).raiseFeature,
	OpTimeFloor:    (*application).timeFloor,
	OpBootstrap:    (*application).bootstrap,
	OpRecover:      (*application).recover,
}

func (a *application) op(o *Op) Result {
	if o.Term != 0 && o.Term != a.term {
		return Result{Reason: ReasonTerm, Detail: fmt.Sprintf("decided in term %d, committed in %d", o.Term, a.term)}
	}
	return verbs[o.Type](a, o)
}

func invalid(format string, args ...any) Result {
	return Result{Reason: ReasonInvalid, Detail: fmt.Sprintf(format, args...)}
}

func refuse(reason Reason, current *Record, format string, args ...any) Result {
	return Result{Reason: reason, Detail: fmt.Sprintf(format, args...), Record: current}
}

// done gives r the next version and stores it in place of old.
func (a *application) done(r, old *Record) Result {
	a.rv++
	r.Header.ResourceVersion = a.rv
	a.t.put(r, old)
	e := Event{Type: Added, ResourceVersion: a.rv, Record: r, Prev: old}
	if old != nil {
		e.Type = Modified
	}
	a.events = append(a.events, e)
	return Result{ResourceVersion: a.rv, Record: r}
}

// normal makes a record canonical, or says what is wrong with it.
func normal(r *Record) (Result, bool) {
	if r == nil {
		return invalid("no record"), false
	}
	h := &r.Header
	if h.Key.Kind == "" || h.Key.Name == "" || h.UID == "" {
		return invalid("record without kind, name or uid"), false
	}
	if h.Version == 0 {
		h.Version = HeaderVersion
	}
	for _, q := range h.Requests {
		if q.Value < 0 || q.Value > MaxQuantity {
			return invalid("request of %s out of range: %d", q.Name, q.Value), false
		}
	}
	internHeader(h)
	return Result{}, true
}

func (a *application) create(o *Op) Result {
	r := o.Record
	if res, ok := normal(r); !ok {
		return res
	}
	k := r.Header.Key
	if old := a.t.get(k); old != nil {
		return refuse(ReasonExists, old, "%s %q exists", k.Kind, k.Name)
	}
	if other := a.t.byUID(r.Header.UID); other != nil {
		return invalid("uid %s belongs to %s %q", r.Header.UID, other.Header.Key.Kind, other.Header.Key.Name)
	}
	if k.Namespace != "" && !o.IgnoreNamespace {
		ns := a.t.get(Key{Kind: kindNamespace, Name: k.Namespace})
		switch {
		case ns == nil:
			return refuse(ReasonNamespace, nil, "namespace %q not found", k.Namespace)
		case ns.Header.Deleted != 0:
			return refuse(ReasonNamespace, ns, "namespace %q is being terminated", k.Namespace)
		}
	}
	if c, taken := a.t.claimedByOther(r); taken {
		return refuse(ReasonClaim, nil, "%s", c)
	}
	return a.done(r, nil)
}

// current finds the record that an op is about and checks the preconditions
// that every change of an existing record has.
func (a *application) current(k Key, o *Op) (*Record, Result, bool) {
	if o.UID == "" {
		return nil, invalid("no uid"), false
	}
	old := a.t.get(k)
	switch {
	case old == nil:
		return nil, refuse(ReasonNotFound, nil, "%s %q not found", k.Kind, k.Name), false
	case old.Header.UID != o.UID:
		return nil, refuse(ReasonUID, old, "uid is %s, not %s", old.Header.UID, o.UID), false
	case o.ResourceVersion != 0 && o.ResourceVersion != old.Header.ResourceVersion:
		return nil, refuse(ReasonConflict, old, "version is %d, not %d", old.Header.ResourceVersion, o.ResourceVersion), false
	}
	return old, Result{}, true
}

func (a *application) update(o *Op) Result {
	r := o.Record
	if res, ok := normal(r); !ok {
		return res
	}
	if r.Header.UID != o.UID {
		return invalid("uid of the record is %s, of the op %s", r.Header.UID, o.UID)
	}
	old, res, ok := a.current(r.Header.Key, o)
	if !ok {
		return res
	}
	// These hold whatever the proposer looked at: a binding is made by
	// OpBind only, and a deletion is never taken back.
	if r.Header.NodeName != old.Header.NodeName && r.Header.Key.Kind == kindPod {
		return refuse(ReasonConflict, old, "nodeName is %q, not %q", old.Header.NodeName, r.Header.NodeName)
	}
	if old.Header.Deleted != 0 && r.Header.Deleted == 0 {
		return refuse(ReasonConflict, old, "is being deleted")
	}
	if c, taken := a.t.claimedByOther(r); taken {
		return refuse(ReasonClaim, old, "%s", c)
	}
	if o.Keep&KeepMeta != 0 {
		r.Meta = old.Meta
	}
	if o.Keep&KeepSpec != 0 {
		r.Spec = old.Spec
	}
	if o.Keep&KeepStatus != 0 {
		r.Status = old.Status
	}
	return a.done(r, old)
}

func (a *application) remove(o *Op) Result {
	if o.Key == nil {
		return invalid("no key")
	}
	old, res, ok := a.current(*o.Key, o)
	if !ok {
		return res
	}
	if len(old.Header.Finalizers) > 0 {
		return refuse(ReasonFinalizers, old, "finalizers left: %s", strings.Join(old.Header.Finalizers, ", "))
	}
	a.rv++
	a.t.remove(old)
	a.events = append(a.events, Event{Type: Deleted, ResourceVersion: a.rv, Record: old, Prev: old})
	return Result{ResourceVersion: a.rv}
}

func (a *application) bind(o *Op) Result {
	if o.Key == nil || o.Node == "" || o.NodeUID == "" || o.Key.Kind != kindPod {
		return invalid("bind without pod, node or node uid")
	}
	pod, res, ok := a.current(*o.Key, o)
	if !ok {
		return res
	}
	h := &pod.Header
	switch {
	case h.NodeName != "":
		return refuse(ReasonBound, pod, "pod is bound to %s", h.NodeName)
	case h.Deleted != 0:
		return refuse(ReasonDeleting, pod, "pod is being deleted")
	case Terminal(h.Phase):
		return refuse(ReasonConflict, pod, "pod is %s", h.Phase)
	case h.Gated:
		return refuse(ReasonGated, pod, "pod has scheduling gates")
	}
	node := a.t.get(Key{Kind: kindNode, Name: o.Node})
	switch {
	case node == nil:
		return refuse(ReasonNoNode, pod, "node %q not found", o.Node)
	case node.Header.UID != o.NodeUID:
		return refuse(ReasonNoNode, pod, "node %q was replaced", o.Node)
	case node.Header.Deleted != 0:
		return refuse(ReasonDeleting, pod, "node %q is being deleted", o.Node)
	}
	taken, _ := a.t.totals.Get(&totals{node: o.Node})
	if detail, ok := fits(pod, node, taken); !ok {
		return refuse(ReasonNoFit, pod, "%s", detail)
	}
	if p, busy := portTaken(pod, taken); busy {
		return refuse(ReasonHostPort, pod, "%s/%d", p.Protocol, p.Port)
	}
	r := *pod
	r.Header.NodeName = node.Header.Key.Name
	return a.done(&r, pod)
}

func (a *application) raiseFeature(o *Op) Result {
	switch {
	case o.Feature < a.facts.Feature:
		return invalid("feature level is %d and never falls", a.facts.Feature)
	case o.Feature > a.facts.Feature:
		a.rv++
		a.facts.Feature = o.Feature
	}
	return Result{ResourceVersion: a.rv}
}

func (a *application) timeFloor(o *Op) Result {
	if o.Unix > a.facts.TimeFloor {
		a.rv++
		a.facts.TimeFloor = o.Unix
	}
	return Result{ResourceVersion: a.rv}
}

func (a *application) bootstrap(o *Op) Result {
	if o.ClusterID == "" || o.Feature == 0 {
		return invalid("bootstrap without cluster id or feature level")
	}
	if a.facts.ClusterID != "" {
		return refuse(ReasonExists, nil, "cluster is %s", a.facts.ClusterID)
	}
	a.rv++
	a.facts.ClusterID, a.facts.Epoch, a.facts.Feature = o.ClusterID, 1, o.Feature
	return Result{ResourceVersion: a.rv}
}

func (a *application) recover(*Op) Result {
	a.facts.Epoch++
	l := Lost{Epoch: a.facts.Epoch, After: a.rv, Before: a.rv + epochStep}
	lost := slices.Clone(a.facts.Lost) // views share the old one
	// Several steps may come at once, of which nothing lies between.
	if n := len(lost); n > 0 && lost[n-1].Before == a.rv {
		l.After, lost = lost[n-1].After, lost[:n-1]
	}
	lost = append(lost, l)
	a.facts.Lost = lost[max(0, len(lost)-maxLost):]
	a.rv = l.Before
	a.events, a.reset, a.resetAt = nil, true, a.rv
	return Result{ResourceVersion: a.rv}
}
