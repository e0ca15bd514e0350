package nodelink

import (
	"bytes"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/wire"
)

// A nudge goes by gossip too, and a forged storm of them is one hint a
// second.
func TestNudgeByGossip(t *testing.T) {
	nudges := make(chan []byte, 16)
	s := start(t, options{ns: true, change: func(c *nodeapi.Config) {
		c.Nudge = func(_ string, b []byte) {
			select {
			case nudges <- bytes.Clone(b):
			default:
			}
		}
	}})
	id := s.join("n1")
	a := runLink(t, id, nil)
	eventually(t, "connected", a.Connected)
	_, err := a.Pull(t.Context(), wire.PullRequest{})
	must(t, err)
	s.create(boundPod("p", "n1"))
	var b []byte
	select {
	case b = <-nudges:
	case <-time.After(30 * time.Second):
		t.Fatal("no nudge by gossip")
	}
	var n wire.Nudge
	must(t, wire.Unmarshal(b, &n))
	if n.Generation == 0 {
		t.Fatal("a nudge without a generation")
	}
	a.stop() // hints of the connection are over
	drain := func() (got int) {
		for {
			select {
			case <-a.Hints():
				got++
			default:
				return got
			}
		}
	}
	drain()
	a.set(n.Generation)
	a.HandleNudge(b)
	a.HandleNudge([]byte("junk"))
	if drain() != 0 {
		t.Fatal("hint for what is held, or for junk")
	}
	a.set(n.Generation + 1)
	hints := 0
	for range 100 {
		a.HandleNudge(b)
		hints += drain()
	}
	if hints < 1 || hints > 3 {
		t.Fatalf("%d hints for 100 nudges", hints)
	}
}

// A restarted server gives the same generation: nothing is pulled, nothing
// written, and tokens that the node holds are not issued again.
func TestServerRestartKeepsGeneration(t *testing.T) {
	tokens := &fakeTokens{}
	s := start(t, options{ns: true, tokens: tokens})
	s.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "default"}})
	id := s.join("n1")
	a := runLink(t, id, nil)
	p := boundPod("p", "n1")
	seconds := int64(3607)
	p.Spec.ServiceAccountName = "default" // as admission writes it
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "t", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: &seconds}}},
	}}})
	s.create(p)
	eventually(t, "connected", a.Connected)
	asg, err := a.Pull(t.Context(), wire.PullRequest{})
	must(t, err)
	name := wire.TokenSecretName(string(s.pod("p").UID), "", seconds)
	if h := have(asg); h[name] == 0 {
		t.Fatalf("no token in %v", h)
	}
	issued := tokens.n.Load()
	s.stop()
	keep := s.keep()
	s2 := start(t, options{keep: keep, tokens: tokens, listen: relisten(t, s.addr)})
	eventually(t, "connected again", func() bool { return a.Connected() && s2.api.Connected("n1") })
	var same *wire.Assignment
	eventually(t, "a pull from the second server", func() bool { // the first connection's lease may still count
		same, err = a.Pull(t.Context(), wire.PullRequest{Generation: asg.Generation, Have: have(asg)})
		return err == nil
	})
	if !same.Unchanged || tokens.n.Load() != issued {
		t.Fatalf("generation %d became %d, tokens issued %d then %d", asg.Generation, same.Generation, issued, tokens.n.Load())
	}
	tokens.clock.Store(s2.clock)
	// When it is due, the token is issued again and the node is nudged.
	s2.clock.jump(25 * 24 * time.Hour)
	next, err := a.Pull(t.Context(), wire.PullRequest{Generation: asg.Generation, Have: have(asg)})
	must(t, err)
	if next.Unchanged || len(next.Objects) != 1 || next.Objects[0].UID != name {
		t.Fatalf("after 25 days %+v", next)
	}
}

func TestNodeObjectDeletedComesBack(t *testing.T) {
	s := start(t, options{ns: true})
	id := s.join("n1")
	a := runLink(t, id, nil)
	eventually(t, "connected", a.Connected)
	r, err := a.Report(t.Context(), &wire.Report{BootID: "b", Seq: 1, Node: encode(t, nodeSays())})
	must(t, err)
	if r.Refused != "" {
		t.Fatal(r.Refused)
	}
	before := s.node("n1")
	// Somebody writes over what the node owns: it is put right.
	_, err = s.store.Update(t.Context(), nodeGK, "", "n1", registry.Status, func(o runtime.Object) (runtime.Object, error) {
		o.(*corev1.Node).Status.Conditions[0].Status = corev1.ConditionUnknown //nolint:forcetypeassert // a test
		return o, nil
	}, registry.WriteOptions{})
	must(t, err)
	eventually(t, "Ready again", func() bool { return s.node("n1").Status.Conditions[0].Status == corev1.ConditionTrue })
	_, _, err = s.store.Delete(t.Context(), nodeGK, "", "n1", registry.DeleteOptions{})
	must(t, err)
	eventually(t, "registered again", func() bool {
		o, err := s.store.Get(nodeGK, "", "n1")
		return err == nil && o.(*corev1.Node).UID != before.UID //nolint:forcetypeassert // a test
	})
	if n := s.node("n1"); n.Spec.ProviderID != before.Spec.ProviderID {
		t.Fatalf("identity changed: %+v", n.Spec)
	}
}

func TestUpgradePath(t *testing.T) {
	s := start(t, options{ns: true})
	id := s.join("n1")
	a := runLink(t, id, func(c *link.Config) { c.Dial = stripALPN(t) })
	eventually(t, "connected by upgrade", a.Connected)
}

// TestNothingIsDecidedBeforeLeading: a server that does not lead (yet) may hold
// an old view. An assignment made of it would bring back what was deleted, and
// a pod that is not in it would be called unknown. Once it leads the node is
// told to try again.
func TestNothingIsDecidedBeforeLeading(t *testing.T) {
	s := start(t, options{ns: true})
	a := runLink(t, s.join("n1"), nil)
	eventually(t, "connected", a.Connected)
	s.local.SetTerm(0)
	var f *wire.Fault
	if asg, err := a.Pull(t.Context(), wire.PullRequest{}); !errors.As(err, &f) || f.Code != wire.FaultNotLeader {
		t.Fatalf("assignment %+v, error %v", asg, err)
	}
	f = nil
	rep := &wire.Report{BootID: "b", Seq: 1, Pods: []wire.PodReport{{Namespace: "default", Name: "p", UID: "u"}}}
	if reply, err := a.Report(t.Context(), rep); !errors.As(err, &f) || f.Code != wire.FaultNotLeader {
		t.Fatalf("report answered %+v, error %v", reply, err)
	}
	eventually(t, "a refused lease", func() bool { return !a.Connected() })
	for len(a.Hints()) > 0 {
		<-a.Hints()
	}
	s.local.SetTerm(2)
	eventually(t, "a hint once it leads", func() bool { return len(a.Hints()) > 0 })
	if _, err := a.Pull(t.Context(), wire.PullRequest{}); err != nil {
		t.Fatal(err)
	}
}

// TestHelloWaitsForLeading: a node that connects to a server that has just
// started is neither refused (it would stay away for longer than its lease
// lasts) nor judged by a view without it; one that was banned stays out.
func TestHelloWaitsForLeading(t *testing.T) {
	var lead gate
	lead.Store(true)
	s := start(t, options{ns: true, change: func(c *nodeapi.Config) { c.Leadership = &lead }})
	id, stolen := s.join("n1"), s.join("n2")
	lead.Store(false)
	_, _, err := s.store.Delete(t.Context(), nodeGK, "", "n1", registry.DeleteOptions{}) // not replayed yet
	must(t, err)
	s.local.SetTerm(0)
	a := runLink(t, id, nil)
	b := runLink(t, stolen, nil)
	for _, l := range []*agent{a, b} {
		eventually(t, "it connects", func() bool { in, _ := l.Bytes(); return in > 500 }) // the handshake is done
	}
	s.local.SetTerm(2)
	uid := strings.TrimPrefix(s.node("n2").Spec.ProviderID, "dunlin://c-test/node/")
	s.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "dunlin-revoked-nodes"}, Data: map[string][]byte{uid: []byte("now")}})
	lead.Store(true)
	eventually(t, "connected", a.Connected)
	if st := a.Status(); st.Attempts != 1 || st.Refused != "" {
		t.Fatalf("%+v", st)
	}
	eventually(t, "the banned one is refused", func() bool { return b.Status().Attempts > 1 })
	if b.Connected() || s.api.Connected("n2") {
		t.Fatal("the banned one is connected")
	}
}

type gate struct{ atomic.Bool }

func (g *gate) Leadership() (uint64, bool) { return 1, g.Load() }

// TestNodeIsSaidAgainUntilTaken: what a node last said of itself goes out again
// on a new connection, also when the server cannot take it in the first moment.
func TestNodeIsSaidAgainUntilTaken(t *testing.T) {
	s := start(t, options{ns: true})
	a := runLink(t, s.join("n1"), nil)
	eventually(t, "connected", a.Connected)
	r, err := a.Report(t.Context(), &wire.Report{BootID: "b", Seq: 1, Node: encode(t, nodeSays())})
	must(t, err)
	if r.Refused != "" {
		t.Fatal(r.Refused)
	}
	s.stop()
	_, err = s.store.Update(t.Context(), nodeGK, "", "n1", registry.Status, func(o runtime.Object) (runtime.Object, error) {
		o.(*corev1.Node).Status.Conditions[0].Status = corev1.ConditionUnknown //nolint:forcetypeassert // a test
		return o, nil
	}, registry.WriteOptions{})
	must(t, err)
	s2 := start(t, options{keep: s.keep(), listen: relisten(t, s.addr), change: func(c *nodeapi.Config) {
		c.Leadership.(*state.Local).SetTerm(0) //nolint:forcetypeassert // a test
		c.Leadership = leading{}               // it leads, and its disk takes nothing
	}})
	eventually(t, "connected again", func() bool { return s2.api.Connected("n1") })
	eventually(t, "a refused report", func() bool {
		r, err := a.Report(t.Context(), &wire.Report{BootID: "b", Seq: 2, Node: encode(t, nodeSays())})
		return err == nil && r.Refused != ""
	})
	s2.local.SetTerm(2)
	eventually(t, "Ready again", func() bool { return s2.node("n1").Status.Conditions[0].Status == corev1.ConditionTrue })
}

type leading struct{}

func (leading) Leadership() (uint64, bool) { return 2, true }
