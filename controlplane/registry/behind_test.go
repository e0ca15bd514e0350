package registry

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// behind is a follower's proposer: its server has not read everything until it
// asked the leader.
type behind struct {
	state.Proposer
	catchUp func() error
	asked   int
}

func (b *behind) Leadership() (uint64, bool) { return 1, false }

func (b *behind) Barrier(context.Context) error {
	b.asked++
	return b.catchUp()
}

// What a follower has not read yet is not refused as absent, or as of another
// version; without the leader it does not know, and says so.
func TestAFollowerThatIsBehindAsksTheLeader(t *testing.T) {
	ctx := context.Background()
	none := func() error { return nil }
	var f *behind
	w := newWorld(t, func(c *Config) { f = &behind{Proposer: c.Proposer, catchUp: none}; c.Proposer = f })
	make1 := func() error {
		_, err := w.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"}}, WriteOptions{})
		return err
	}
	set := func(cur runtime.Object) (runtime.Object, error) {
		c, ok := cur.(*corev1.ConfigMap)
		if !ok {
			return nil, errModified
		}
		c.Data = map[string]string{"k": "v"}
		return c, nil
	}
	update := func() error {
		_, err := w.Registry.Update(ctx, cmGK, "default", "c", Main, set, WriteOptions{})
		return err
	}
	remove := func() error {
		_, _, err := w.Delete(ctx, cmGK, "default", "c", DeleteOptions{})
		return err
	}
	for name, write := range map[string]func() error{"update": update, "delete": remove} {
		f.catchUp = none
		if err := write(); !apierrors.IsNotFound(err) {
			t.Errorf("%s of what is nowhere: %v", name, err)
		}
		f.catchUp = func() error { return state.ErrNoQuorum }
		if err := write(); !apierrors.IsServiceUnavailable(err) {
			t.Errorf("%s while nobody knows: %v", name, err)
		}
		f.catchUp = make1
		if err := write(); err != nil {
			t.Errorf("%s of what it had not read: %v", name, err)
		}
		f.catchUp = none
		_ = remove()
	}
	// A version that it had not read.
	if err := make1(); err != nil {
		t.Fatal(err)
	}
	rv := func(version string) error {
		_, _, err := w.Delete(ctx, cmGK, "default", "c", DeleteOptions{ResourceVersion: &version})
		return err
	}
	if err := rv("1"); !apierrors.IsConflict(err) {
		t.Errorf("another version: %v", err)
	}
	cur := as[*corev1.ConfigMap](t, must(w.Get(cmGK, "default", "c")), nil)
	next := formatRV(parseRV(t, cur.ResourceVersion) + 1)
	f.catchUp = update
	if err := rv(next); err != nil {
		t.Errorf("of a version that it had not read: %v", err)
	}
	// A controller's write is made by the leader, and asks nobody.
	before := f.asked
	if _, _, err := w.Delete(ctx, cmGK, "default", "c", DeleteOptions{Term: 1}); !apierrors.IsNotFound(err) || f.asked != before {
		t.Errorf("in a term: %v, asked %d times", err, f.asked-before)
	}
}
