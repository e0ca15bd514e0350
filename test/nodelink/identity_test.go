package nodelink

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

func TestCloneIsRefused(t *testing.T) {
	s := start(t, options{ns: true})
	id := s.join("n1")
	a := runLink(t, id, nil)
	eventually(t, "connected", a.Connected)
	stopped := make(chan string, 100)
	clone := runLink(t, id, func(c *link.Config) {
		c.BootID, c.Stopped = "another-1", func(reason string) { stopped <- reason }
	})
	eventually(t, "clone named", func() bool { return s.events.has("DuplicateIdentity") })
	eventually(t, "clone told", func() bool { return strings.Contains(clone.Status().Refused, "duplicate identity") })
	if !a.Connected() || clone.Connected() {
		t.Fatal("the first must stay, the second must not come in")
	}
	if got := <-stopped; !strings.Contains(got, "dunlin agent reset") {
		t.Errorf("the copy was told %q", got)
	}
	eventually(t, "the original knows", func() bool { return a.Status().Twin != "" })
	duplicate := func(want corev1.ConditionStatus) bool {
		for _, c := range s.node("n1").Status.Conditions {
			if c.Type == nodeapi.ConditionDuplicate {
				return c.Status == want
			}
		}
		return false
	}
	eventually(t, "the Node says it", func() bool { return duplicate(corev1.ConditionTrue) })
	// An agent that restarts is no clone, and keeps its place though the clone
	// comes in between.
	a.stop()
	eventually(t, "the clone came again", func() bool { return clone.Status().Attempts > 3 })
	if clone.Connected() {
		t.Error("the clone has the place of a restarting agent")
	}
	b := runLink(t, id, func(c *link.Config) { c.BootID = "boot-2" })
	eventually(t, "restarted agent connected", b.Connected)
	if !duplicate(corev1.ConditionTrue) {
		t.Error("the mark went while the copy is there")
	}
	clone.stop()
}

// Two machines that share a kernel, as containers do, have one boot id: the
// copy is refused all the same, and the original's agent may restart.
func TestCloneOnTheSameKernel(t *testing.T) {
	s := start(t, options{ns: true})
	id := s.join("n1")
	a := runLink(t, id, nil)
	eventually(t, "connected", a.Connected)
	clone := runLink(t, id, func(c *link.Config) { c.BootID = "boot-7" })
	eventually(t, "clone told", func() bool { return strings.Contains(clone.Status().Refused, "duplicate identity") })
	eventually(t, "the Node says it", func() bool { return s.node("n1").Labels[manifests.LabelDuplicate] == "boot-7" })
	a.stop()
	b := runLink(t, id, func(c *link.Config) { c.BootID = "boot-2" })
	eventually(t, "restarted agent connected", b.Connected)
	if clone.Connected() {
		t.Error("the clone is in")
	}
	clone.stop()
	b.stop()
}

// An agent is killed while its greeting is looked at, and the next one is in:
// what hung up is no copy.
func TestWhoHungUpIsNoCopy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New()
		s := startSim(t, n, nil)
		id := s.enroll("n1")
		a := runLink(t, id, func(c *link.Config) { c.Dial = n.Dialer("n1") })
		time.Sleep(5 * time.Second)
		for i := range 10 {
			killed := runLink(t, id, func(c *link.Config) { c.Dial, c.BootID = n.Dialer("n1"), fmt.Sprint("boot-", 100+i) })
			time.Sleep(time.Duration(i+1) * 50 * time.Millisecond)
			killed.stop()
			time.Sleep(10 * time.Second)
		}
		synctest.Wait()
		if mark := s.node("n1").Labels[manifests.LabelDuplicate]; mark != "" || !a.Connected() || a.Status().Attempts != 1 {
			t.Errorf("marked %q; %+v", mark, a.Status())
		}
		a.stop()
		s.stop()
	})
}

// The mark of a copied node goes when the copy does not come any more, also
// under another leader.
func TestTwinGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New()
		s := startSim(t, n, nil)
		id := s.enroll("n1")
		dial := func(c *link.Config) { c.Dial = n.Dialer("n1") }
		a := runLink(t, id, dial)
		time.Sleep(5 * time.Second)
		clone := runLink(t, id, func(c *link.Config) { c.Dial, c.BootID = n.Dialer("copy"), "another-1" })
		time.Sleep(10 * time.Minute)
		marked := func() bool {
			synctest.Wait()
			return s.node("n1").Labels[manifests.LabelDuplicate] != ""
		}
		if !marked() || !a.Connected() || a.Status().Attempts != 1 || clone.Connected() {
			t.Errorf("marked %v; original %+v; copy %+v", marked(), a.Status(), clone.Status())
		}
		rv := s.node("n1").ResourceVersion
		time.Sleep(10 * time.Minute)
		if now := s.node("n1").ResourceVersion; now != rv {
			t.Errorf("a copy that comes again and again changes the Node: %s, was %s", now, rv)
		}
		clone.stop()
		time.Sleep(5 * time.Minute)
		if marked() {
			t.Error("the copy is gone and the mark is not")
		}
		if st := a.Status(); st.Twin != "" || st.Attempts != 1 {
			t.Errorf("the original: %+v", st)
		}
		a.stop()
		s.stop()
	})
}

// A node is declared dead: not while it renews; then it cannot come back,
// under its old certificate or with a new line, and is told to stop its pods.
func TestDeclaredDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New()
		s := startSim(t, n, nil)
		id := s.enroll("n1")
		stopped := make(chan string, 1000)
		a := runLink(t, id, func(c *link.Config) {
			c.Dial, c.Stopped = n.Dialer("n1"), func(reason string) { stopped <- reason }
		})
		s.create(boundPod("p", "n1"))
		time.Sleep(5 * time.Second)
		if got := <-stopped; got != "" {
			t.Errorf("a healthy node was told %q", got)
		}
		if _, err := s.api.DeclareDead(t.Context(), "n1"); !apierrors.IsConflict(err) || !strings.Contains(err.Error(), "it lives") {
			t.Errorf("a node that lives: %v", err)
		}
		if _, err := s.api.DeclareDead(t.Context(), "nobody"); !apierrors.IsNotFound(err) {
			t.Errorf("no such node: %v", err)
		}
		n.Cut("n1", true)
		time.Sleep(10 * time.Second)
		for range 2 { // again is no error
			pods, err := s.api.DeclareDead(t.Context(), "n1")
			if err != nil || len(pods) != 1 || pods[0] != "default/p" {
				t.Errorf("%v, %v", pods, err)
			}
		}
		node := s.node("n1")
		if node.Labels[manifests.LabelDead] != "true" || len(node.Spec.Taints) != 1 || node.Spec.Taints[0].Key != corev1.TaintNodeOutOfService {
			t.Errorf("labels %v, taints %v", node.Labels, node.Spec.Taints)
		}
		n.Cut("n1", false)
		time.Sleep(time.Minute)
		if got := <-stopped; !strings.Contains(got, "declared dead") || !strings.Contains(got, "dunlin agent reset") {
			t.Errorf("it was told %q", got)
		}
		if st := a.Status(); st.Connected || !strings.Contains(st.Failed, "declared dead") {
			t.Errorf("%+v", st)
		}
		csr, err := id.CSR()
		must(t, err)
		if _, err := s.api.Enroll(t.Context(), "n1", csr, nil); err == nil || !strings.Contains(err.Error(), "declared dead") {
			t.Errorf("the same key joins anew: %v", err)
		}
		other, err := pki.OpenNodeIdentity(t.TempDir())
		must(t, err)
		csr, err = other.CSR()
		must(t, err)
		reply, err := s.api.Enroll(t.Context(), "N1", csr, nil)
		must(t, err)
		if reply.NodeName == "n1" || !strings.Contains(reply.Notice, "dunlin delete node NAME") {
			t.Errorf("a new key under the old name: %+v", reply)
		}
		a.stop()
		s.stop()
	})
}
