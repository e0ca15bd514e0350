package gc

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// stuckAfter is when a deletion that waits is first complained about, and
// complainEvery how often after that.
const (
	stuckAfter    = time.Minute
	complainEvery = 10 * time.Minute
)

// Reasons of manifests.ConditionDeletionBlocked.
const (
	reasonFinalizers = "FinalizersRemain"
	reasonDependents = "DependentsRemain"
)

// blocked is what a deletion waits for. The condition's text stays the same
// while that does; the event may also count.
type blocked struct{ reason, text, more string }

func byFinalizers(names []string) blocked {
	return blocked{reasonFinalizers, "finalizer " + strings.Join(names, ", ") + ", which its own controller must remove", ""}
}

// byDependents names the kinds of what blocks the owner.
func byDependents(list []*state.Record) blocked {
	kinds := make([]string, 0, len(list))
	for _, r := range list {
		kinds = append(kinds, gk(r).Kind)
	}
	slices.Sort(kinds)
	return blocked{reasonDependents, "dependents that block it: " + strings.Join(slices.Compact(kinds), ", "),
		fmt.Sprintf(" (%d, among them %s)", len(list), loop.KeyString(list[0].Header.Key))}
}

// complain names what a deletion has been waiting for, in an event and, where
// the kind has conditions, in one, whose time of transition is the deletion's;
// it returns when to look again.
func (c *controller) complain(ctx context.Context, r *state.Record, b blocked) (time.Duration, error) {
	at := time.Unix(r.Header.Deleted, 0).UTC()
	if age := c.env.Clock.Now().Sub(at); age < stuckAfter {
		return min(stuckAfter-age, stuckAfter), nil
	}
	message := "Deletion was asked for at " + at.Format(time.RFC3339) + " and waits for " + b.text
	if c.said.again(r.Header.UID, message+b.more, c.env.Clock.Now()) {
		c.note(r, "DeletionBlocked", message+b.more)
	}
	return complainEvery, c.condition(ctx, r, metav1.Condition{Type: manifests.ConditionDeletionBlocked, Status: metav1.ConditionTrue,
		Reason: b.reason, Message: message, LastTransitionTime: metav1.NewTime(at)})
}

// said remembers what was complained about, since the condition that is
// written with a complaint wakes the controller again. Its zero value is ready
// for use; bounded by what is stuck at a time.
type said struct {
	mu   sync.Mutex
	last map[string]complaint // by uid
}

type complaint struct {
	text string
	at   time.Time
}

// again says whether the complaint is new, or as old as that it is worth being
// repeated, and remembers it.
func (s *said) again(uid, text string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	age := func(c complaint) time.Duration { return now.Sub(c.at).Abs() }
	if c, ok := s.last[uid]; ok && c.text == text && age(c) < complainEvery {
		return false
	}
	if s.last == nil {
		s.last = map[string]complaint{}
	}
	for u, c := range s.last {
		if age(c) > 2*complainEvery {
			delete(s.last, u)
		}
	}
	s.last[uid] = complaint{text, now}
	return true
}

// condition writes a condition into the object's status, if its kind has any
// and they say something else.
func (c *controller) condition(ctx context.Context, r *state.Record, want metav1.Condition) error {
	if k := manifests.ByGroupKind(gk(r)); k == nil || !k.Status {
		return nil
	}
	obj, err := c.env.Store.Decode(r)
	if err != nil {
		return err
	}
	if !setCondition(obj.DeepCopyObject(), want) {
		return nil
	}
	_, err = c.env.Store.Update(ctx, gk(r), r.Header.Key.Namespace, r.Header.Key.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		m, err := meta.Accessor(cur)
		if err != nil {
			return nil, err
		}
		if string(m.GetUID()) != r.Header.UID {
			return nil, errMoved
		}
		setCondition(cur, want)
		return cur, nil
	}, c.env.Write())
	if apierrors.IsNotFound(err) || errors.Is(err, errMoved) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("condition of %s: %w", loop.KeyString(r.Header.Key), err)
	}
	return nil
}

// setCondition merges a condition by type. Each kind has a type of its own for
// them, with the same fields. It reports whether anything changed: nothing
// does where the kind has no conditions.
func setCondition(obj runtime.Object, want metav1.Condition) bool {
	list := reflect.ValueOf(obj).Elem()
	for _, name := range []string{"Status", "Conditions"} {
		if list.Kind() != reflect.Struct {
			return false
		}
		list = list.FieldByName(name)
	}
	if !list.IsValid() || list.Kind() != reflect.Slice || list.Type().Elem().Kind() != reflect.Struct {
		return false
	}
	fresh := reflect.New(list.Type().Elem()).Elem()
	at := fresh
	isNew := true
	for i := range list.Len() {
		if t := list.Index(i).FieldByName("Type"); t.Kind() == reflect.String && t.String() == want.Type {
			at, isNew = list.Index(i), false
		}
	}
	changed := false
	for name, text := range map[string]string{"Type": want.Type, "Status": string(want.Status), "Reason": want.Reason, "Message": want.Message} {
		f := at.FieldByName(name)
		if f.Kind() != reflect.String {
			return false
		}
		if f.String() != text {
			f.SetString(text)
			changed = true
		}
	}
	since := at.FieldByName("LastTransitionTime")
	if !since.IsValid() || since.Type() != reflect.TypeFor[metav1.Time]() {
		return false
	}
	since.Set(reflect.ValueOf(want.LastTransitionTime))
	if isNew {
		list.Set(reflect.Append(list, fresh))
	}
	return changed
}
