package nodelink

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

func serverRoots(ca *pki.CA) []*x509.Certificate { return []*x509.Certificate{ca.Cert} }

func TestMainPath(t *testing.T) {
	s := start(t, options{ns: true})
	id := s.join("Rpi_Node1")
	if got := id.Grant().NodeName; got != "rpi-node1" {
		t.Fatalf("name %q", got)
	}
	a := runLink(t, id, func(c *link.Config) { c.Streams = logs{} })
	eventually(t, "lease acknowledged", a.Connected)
	n := s.node("rpi-node1")
	if n.Spec.PodCIDR != "10.42.0.0/24" || !strings.HasPrefix(n.Spec.ProviderID, "dunlin://c-test/node/") {
		t.Fatalf("node spec %+v", n.Spec)
	}
	r, err := a.Report(t.Context(), &wire.Report{BootID: "b", Seq: 1, Node: encode(t, nodeSays())})
	must(t, err)
	if r.Refused != "" {
		t.Fatal(r.Refused)
	}
	n = s.node("rpi-node1")
	if n.Labels["kubernetes.io/arch"] != "arm64" || n.Labels["node-role.kubernetes.io/master"] != "" || n.Status.Conditions[0].Status != "True" {
		t.Fatalf("node %+v", n)
	}
	first, err := a.Pull(t.Context(), wire.PullRequest{})
	must(t, err)
	if len(first.Objects) != 1 || first.Objects[0].Ref.Kind != "Node" || first.PodCIDRs[0] != "10.42.0.0/24" || len(first.Keyring) != 1 {
		t.Fatalf("assignment %+v", first)
	}
	a.set(first.Generation)

	for len(a.Hints()) > 0 {
		<-a.Hints()
	}
	s.create(boundPod("p", "rpi-node1"))
	<-a.Hints()
	asg, err := a.Pull(t.Context(), wire.PullRequest{Generation: first.Generation, Have: have(first)})
	must(t, err)
	if len(asg.Objects) != 1 || asg.Objects[0].Ref.Kind != "Pod" || len(asg.Keep) != 1 {
		t.Fatalf("assignment %+v", asg)
	}
	a.set(asg.Generation)
	// What the pod refers to appears later, and reaches the node.
	s.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "cfg"}, Data: map[string]string{"a": "b"}})
	<-a.Hints()
	s.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "top"}, Data: map[string][]byte{"k": []byte("v")}})
	eventually(t, "all objects", func() bool {
		asg, err = a.Pull(t.Context(), wire.PullRequest{})
		must(t, err)
		return len(asg.Objects) == 4
	})
	a.set(asg.Generation)

	// The node's own status brings no new generation.
	p := s.pod("p")
	st := &corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.42.0.5", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: "True"}}}
	r, err = a.Report(t.Context(), &wire.Report{BootID: "b", Seq: 2, Pods: []wire.PodReport{
		{Namespace: "default", Name: "p", UID: string(p.UID), Status: encode(t, st)},
		{Namespace: "default", Name: "p", UID: "another", Status: encode(t, st)},
		{Namespace: "default", Name: "nobody", UID: "u3", Status: encode(t, st)},
	}, Events: []wire.EventReport{{Object: wire.Ref{Kind: "Pod", Namespace: "default", Name: "p"}, Type: "Normal", Reason: "Started"}}})
	must(t, err)
	if len(r.Committed) != 1 || r.Committed[0] != string(p.UID) || len(r.Unknown) != 2 {
		t.Fatalf("reply %+v", r)
	}
	if p = s.pod("p"); p.Status.Phase != corev1.PodRunning || p.Status.PodIP != "10.42.0.5" {
		t.Fatalf("status %+v", p.Status)
	}
	if !s.events.has("Started") {
		t.Fatal("event lost")
	}
	same, err := a.Pull(t.Context(), wire.PullRequest{Generation: asg.Generation})
	must(t, err)
	if !same.Unchanged {
		t.Fatalf("the node's own status changed the assignment: %+v", same)
	}

	var out bytes.Buffer
	must(t, s.api.Logs(t.Context(), p, &corev1.PodLogOptions{Container: "c"}, &out))
	if !strings.HasPrefix(out.String(), "default/p "+string(p.UID)+" c\n") || out.Len() < 100_000 {
		t.Fatalf("log of %d bytes: %.60s", out.Len(), out.String())
	}
	missing := p.DeepCopy()
	missing.Name = "missing"
	if err := s.api.Logs(t.Context(), missing, &corev1.PodLogOptions{}, &out); !apierrors.IsNotFound(err) {
		t.Fatalf("log of nothing: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, cancel)
	if err := s.api.Logs(ctx, p, &corev1.PodLogOptions{Follow: true}, &out); !errors.Is(err, context.Canceled) {
		t.Fatalf("followed log: %v", err)
	}

	// The node's figures come the same way; who says nothing of them refuses.
	if err := s.api.Metrics(t.Context(), "rpi-node1", &out); !apierrors.IsBadRequest(err) {
		t.Fatalf("figures of a node that has none: %v", err)
	}
	if err := s.api.Metrics(t.Context(), "elsewhere", &out); !apierrors.IsServiceUnavailable(err) || !strings.Contains(err.Error(), "--local") {
		t.Fatalf("figures of a node that is not connected: %v", err)
	}

	// Deletion: marked, reported gone, removed.
	_, gone, err := s.store.Delete(t.Context(), podGK, "default", "p", registry.DeleteOptions{})
	must(t, err)
	if gone {
		t.Fatal("a running pod must not go at once")
	}
	r, err = a.Report(t.Context(), &wire.Report{BootID: "b", Seq: 3, Pods: []wire.PodReport{{Namespace: "default", Name: "p", UID: string(p.UID), Gone: true}}})
	must(t, err)
	if len(r.Committed) != 1 {
		t.Fatalf("reply %+v", r)
	}
	if _, err := s.store.Get(podGK, "default", "p"); !apierrors.IsNotFound(err) {
		t.Fatalf("still there: %v", err)
	}
}

func have(a *wire.Assignment) map[string]uint64 {
	m := map[string]uint64{}
	for _, o := range a.Objects {
		m[o.UID] = o.ResourceVersion
	}
	return m
}

func TestJoinRefusals(t *testing.T) {
	s := start(t, options{ns: true})
	ctx := t.Context()
	line, err := s.api.CreateToken(ctx, nodeapi.TokenOptions{TTL: time.Minute}, nil)
	must(t, err)
	join := func(l pki.JoinLine, id *pki.NodeIdentity) error {
		t.Helper()
		if id == nil {
			id, err = pki.OpenNodeIdentity(t.TempDir())
			must(t, err)
		}
		return link.Join(ctx, link.JoinConfig{Line: l, Identity: id, Name: "raspberrypi"})
	}
	wrong := line
	wrong.Secret = strings.Repeat("a", len(line.Secret))
	if err := join(wrong, nil); !errors.Is(err, link.ErrRefused) || !strings.Contains(err.Error(), "secret is wrong") {
		t.Errorf("wrong secret: %v", err)
	}
	pinned := line
	pinned.Pin = strings.Repeat("A", len(line.Pin))
	if err := join(pinned, nil); !errors.Is(err, pki.ErrUntrusted) {
		t.Errorf("wrong pin: %v", err)
	}
	id, err := pki.OpenNodeIdentity(t.TempDir())
	must(t, err)
	must(t, join(line, id))
	must(t, join(line, id)) // the answer was lost: the same key may ask again
	if err := join(line, nil); !errors.Is(err, link.ErrRefused) || !strings.Contains(err.Error(), "used already") {
		t.Errorf("used twice: %v", err)
	}
	late, err := s.api.CreateToken(ctx, nodeapi.TokenOptions{TTL: time.Minute}, nil)
	must(t, err)
	s.clock.jump(2 * time.Minute)
	if err := join(late, nil); !errors.Is(err, link.ErrRefused) || !strings.Contains(err.Error(), "expired") {
		t.Errorf("expired: %v", err)
	}
	// Five boards with the default name are five nodes.
	multi, err := s.api.CreateToken(ctx, nodeapi.TokenOptions{Uses: 4}, nil)
	must(t, err)
	names := map[string]bool{id.Grant().NodeName: true}
	for range 4 {
		id, err := pki.OpenNodeIdentity(t.TempDir())
		must(t, err)
		must(t, join(multi, id))
		names[id.Grant().NodeName] = true
	}
	if len(names) != 5 {
		t.Errorf("names %v", names)
	}
	// A line may be for one node of a name.
	named, err := s.api.CreateToken(ctx, nodeapi.TokenOptions{Name: "shop-12"}, nil)
	must(t, err)
	shop, err := pki.OpenNodeIdentity(t.TempDir())
	must(t, err)
	must(t, join(named, shop))
	if got := shop.Grant().NodeName; got != "shop-12" {
		t.Errorf("the node is called %s", got)
	}
	must(t, join(named, shop)) // the answer was lost
	taken, err := s.api.CreateToken(ctx, nodeapi.TokenOptions{Name: "shop-12"}, nil)
	must(t, err)
	if err := join(taken, nil); !errors.Is(err, link.ErrRefused) || !strings.Contains(err.Error(), `"shop-12", and that name belongs to a node with another key`) {
		t.Errorf("a name that another node has: %v", err)
	}
	if err := join(named, nil); !errors.Is(err, link.ErrRefused) || !strings.Contains(err.Error(), "used already") {
		t.Errorf("a line that is used up, whatever its name is: %v", err)
	}
	for _, o := range []nodeapi.TokenOptions{{Name: "Shop_12"}, {Name: "a", Uses: 2}, {Name: "a", Server: true}} {
		if _, err := s.api.CreateToken(ctx, o, nil); !errors.Is(err, nodeapi.ErrTokenOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	must(t, s.api.Revoke(ctx, id.Grant().NodeName))
	if n := s.node(id.Grant().NodeName); !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == manifests.ConditionRevoked && c.Status == corev1.ConditionTrue
	}) {
		t.Errorf("its Node does not say so: %+v", n.Status.Conditions)
	}
	again, err := s.api.CreateToken(ctx, nodeapi.TokenOptions{}, nil)
	must(t, err)
	if err := join(again, id); !errors.Is(err, link.ErrRefused) || !strings.Contains(err.Error(), "banned") {
		t.Errorf("revoked node joined again: %v", err)
	}
}

// An expired certificate renews itself over the limited connection, and a
// revoked one does not.
func TestExpiredRenews(t *testing.T) {
	s := start(t, options{ns: true})
	id := s.join("n1")
	old := id.Certificate().Leaf.SerialNumber
	s.clock.jump(400 * 24 * time.Hour)
	a := runLink(t, id, func(c *link.Config) { c.Clock = s.clock })
	eventually(t, "connected after renewal", a.Connected)
	if id.Certificate().Leaf.SerialNumber.Cmp(old) == 0 {
		t.Fatal("not renewed")
	}
	must(t, s.api.Revoke(t.Context(), "n1"))
	eventually(t, "revoked and cut", func() bool { return !s.api.Connected("n1") })
	a.stop()
	b := runLink(t, id, nil)
	eventually(t, "tried", func() bool { return b.Status().Attempts >= 2 })
	if b.Connected() || s.api.Connected("n1") {
		t.Fatal("a revoked node came back")
	}
}

func TestWrongClockOnNode(t *testing.T) {
	s := start(t, options{ns: true})
	id := s.join("n1")
	past := &wall{off: -50 * 365 * 24 * time.Hour}
	hints := make(chan link.TimeHint, 16)
	a := runLink(t, id, func(c *link.Config) {
		c.Clock = past
		c.Time = func(h link.TimeHint) {
			select {
			case hints <- h:
			default:
			}
		}
	})
	eventually(t, "connected with a clock of 1976", a.Connected)
	if h := <-hints; h.Server.Year() < 2020 {
		t.Fatalf("hint %v", h)
	}
}

func TestEpochFence(t *testing.T) {
	claims := make(chan string, 16)
	s := start(t, options{ns: true, epoch: 3, change: func(c *nodeapi.Config) {
		c.HigherEpoch = func(node string, epoch uint64) {
			select {
			case claims <- fmt.Sprintf("%s saw %d", node, epoch):
			default:
			}
		}
	}})
	id := s.join("n1")
	a := runLink(t, id, nil)
	eventually(t, "connected", a.Connected)
	a.stop()
	must(t, id.Update(func(g *pki.Grant) { g.Epoch = 4 }))
	b := runLink(t, id, nil)
	eventually(t, "refused", func() bool { return strings.Contains(b.Status().Refused, "before a recovery") })
	b.stop()
	if got, want := <-claims, id.Grant().NodeUID+" saw 4"; got != want {
		t.Fatalf("the server heard %q, want %q", got, want)
	}
}

// A server whose clock jumped issues nothing and tells nobody the time; who
// is connected stays so.
func TestClockThatJumpedIssuesNothing(t *testing.T) {
	var bad atomic.Bool
	s := start(t, options{ns: true, change: func(c *nodeapi.Config) {
		c.ClockOK = func() error {
			if bad.Load() {
				return &clock.JumpError{By: time.Hour, Until: time.Minute}
			}
			return nil
		}
	}})
	id := s.join("n1")
	a := runLink(t, id, nil)
	eventually(t, "connected", a.Connected)
	line, err := s.api.CreateToken(t.Context(), nodeapi.TokenOptions{}, nil)
	must(t, err)
	bad.Store(true)
	var jump *clock.JumpError
	if _, err := s.api.CreateToken(t.Context(), nodeapi.TokenOptions{}, nil); !errors.As(err, &jump) {
		t.Fatalf("a token: %v", err)
	}
	other, err := pki.OpenNodeIdentity(t.TempDir())
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err = link.Join(ctx, link.JoinConfig{Line: line, Identity: other, Name: "n2", BootID: "b"})
	if err == nil || !strings.Contains(err.Error(), "jumped") {
		t.Fatalf("join: %v", err)
	}
	if asg, err := a.Pull(t.Context(), wire.PullRequest{}); err != nil || asg.UnixMilli != 0 {
		t.Fatalf("time %d, %v", asg.UnixMilli, err)
	}
	bad.Store(false)
	must(t, link.Join(t.Context(), link.JoinConfig{Line: line, Identity: other, Name: "n2", BootID: "b"}))
}
