package nodeapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

// Two machines with one key, and so one identity, are a disk and its copy.
// The one that has the node's place keeps it, by name of its boot, through
// restarts of its agent and changes of the leader; the other one is refused.

// ConditionDuplicate is the condition of a Node of which there are two.
const ConditionDuplicate corev1.NodeConditionType = "DuplicateIdentity"

const (
	// twinFor is how long after it tried last a copy is believed to be there:
	// it tries at least every 25 s.
	twinFor   = 2 * time.Minute
	twinCheck = 30 * time.Second
	// cloneWait is how long the machine that has the place has to prove that it
	// lives: one interval and some.
	cloneWait = LeaseInterval + time.Second
	// cloneLate is how long a renewal may have been under way: the last one of an
	// agent that restarts can arrive behind the new one's greeting, over a slow
	// link or at a server that is busy.
	cloneLate = 900 * time.Millisecond
)

// twin is the copy of a node, as it was seen last.
type twin struct {
	boot   string // of its machine, or of its agent
	remote string
	at     time.Time
	marked bool // the Node object says so
}

// machineOf takes what tells the agent's starts apart from a boot id, so that
// an agent that restarts is the same machine.
func machineOf(boot string) string {
	if i := strings.LastIndexByte(boot, '-'); i > 0 {
		return boot[:i]
	}
	return boot
}

// bootName is a boot id as the value of a label.
func bootName(boot string) string {
	if boot != "" && len(validation.IsValidLabelValue(boot)) == 0 {
		return boot
	}
	sum := sha256.Sum256([]byte(boot))
	return hex.EncodeToString(sum[:16])
}

// admit decides whether a new session may take the node's place: the newest
// of one boot wins; of two boots the one that renews, which an agent that
// restarted does not.
func (s *Server) admit(ctx context.Context, c net.Conn, sess *session) (refused string, copied bool) {
	if reason := s.claimName(ctx, sess); reason != "" {
		return reason, false
	}
	old := s.sessionOf(sess.uid)
	if b := s.twinBoot(sess.node); b != "" && (b == bootName(machineOf(sess.boot)) || b == bootName(sess.boot)) {
		return s.cloneOrGone(ctx, c, old, sess, b)
	}
	if old == nil || old.boot == sess.boot {
		return "", false
	}
	// Where machines share a kernel (containers) their boots have one name, and
	// only the agents' own starts tell them apart.
	boot := machineOf(sess.boot)
	if boot == machineOf(old.boot) {
		boot = sess.boot
	}
	boot = bootName(boot)
	since := time.Now()
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	for {
		if at, _ := s.leases.lastRenewal(old.node); at.After(since.Add(cloneLate)) && s.sessionOf(sess.uid) == old && !over(old.conn) {
			return s.cloneOrGone(ctx, c, old, sess, boot)
		}
		if time.Since(since) > cloneWait {
			return "", false
		}
		select {
		case <-old.conn.Done():
			return "", false
		case <-ctx.Done():
			return "the server is stopping", false
		case <-t.C:
		}
	}
}

// cloneOrGone refuses a copy, unless it has hung up meanwhile: an agent that is
// killed while its greeting waits for a leader, and starts again at once, would
// be its own copy.
func (s *Server) cloneOrGone(ctx context.Context, c net.Conn, old, sess *session, boot string) (refused string, copied bool) {
	if hungUp(c) {
		return "the node hung up", false
	}
	return s.clone(ctx, old, sess, boot), true
}

func over(c *wire.Conn) bool {
	select {
	case <-c.Done():
		return true
	default:
		return false
	}
}

// twinBoot is the boot id of the machine that is known as a node's copy; ""
// is none.
func (s *Server) twinBoot(node string) string {
	r, ok := s.cfg.Store.Reader(nodeGK).Snapshot().Get(state.Key{Kind: nodeGK.String(), Name: node})
	if !ok {
		return ""
	}
	return r.Header.Labels[manifests.LabelDuplicate]
}

// twinOf is where the copy of a node is; "" is nowhere.
func (s *Server) twinOf(node string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.twins[node].remote
}

// clone refuses a copy, and names it by its boot. old is nil while the
// original is away.
func (s *Server) clone(ctx context.Context, old, sess *session, boot string) string {
	at := "(away at the moment)"
	if old != nil {
		at = old.remote
	}
	s.mu.Lock()
	t := s.twins[sess.node]
	known := t.boot == boot
	if !known {
		t = twin{boot: boot}
	}
	t.remote, t.at = sess.remote, time.Now()
	s.twins[sess.node] = t
	s.mu.Unlock()
	text := fmt.Sprintf("node %s runs at %s and at %s with the same key (a copied disk?); the second is refused, and what the cluster gave it does not run there", sess.node, at, sess.remote)
	if !known {
		s.log.Error("duplicate node identity", "node", sess.node, "first", at, "second", sess.remote, "hint", "on the second: dunlin agent reset")
		s.event(corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: sess.node}, corev1.EventTypeWarning, string(ConditionDuplicate),
			text+": run 'dunlin agent reset' on that machine, and join it anew")
	}
	if !t.marked {
		if err := s.markTwin(ctx, sess.node, boot, text+": run 'dunlin agent reset' on that machine, and join it anew."); err != nil {
			s.warn("twin", sess.node, "a copied node is not marked", err) // it comes again
		}
	}
	return "duplicate identity: " + text + "; if this machine is the copy, run here: dunlin agent reset; and join it with a new line from 'dunlin token create'"
}

// markTwin says on the Node that there are two of it; boot "" that there are
// not.
func (s *Server) markTwin(ctx context.Context, node, boot, text string) error {
	at := metav1.NewTime(s.cfg.Clock.Now()).Rfc3339Copy()
	c := corev1.NodeCondition{Type: ConditionDuplicate, Status: corev1.ConditionTrue, Reason: "SameKeyTwice", Message: text, LastTransitionTime: at, LastHeartbeatTime: at}
	if boot == "" {
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, "Gone", "The other machine did not come again."
	}
	_, err := s.cfg.Store.Update(ctx, nodeGK, "", node, registry.Status, func(o runtime.Object) (runtime.Object, error) {
		n, ok := o.(*corev1.Node)
		if !ok {
			return nil, fmt.Errorf("nodeapi: Node is a %T", o)
		}
		n.Status.Conditions = mergeConditions(n.Status.Conditions, []corev1.NodeCondition{c})
		return n, nil
	}, registry.WriteOptions{})
	if err != nil {
		return err
	}
	_, err = s.cfg.Store.Update(ctx, nodeGK, "", node, registry.Main, func(o runtime.Object) (runtime.Object, error) {
		n, ok := o.(*corev1.Node)
		if !ok {
			return nil, fmt.Errorf("nodeapi: Node is a %T", o)
		}
		if boot == "" {
			delete(n.Labels, manifests.LabelDuplicate)
			return n, nil
		}
		if n.Labels == nil {
			n.Labels = map[string]string{}
		}
		n.Labels[manifests.LabelDuplicate] = boot
		return n, nil
	}, registry.WriteOptions{})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if t, ok := s.twins[node]; ok && t.boot == boot {
		t.marked = true
		s.twins[node] = t
	}
	return nil
}

// watchTwins takes the mark from nodes whose copy did not come again.
func (s *Server) watchTwins(ctx context.Context) {
	t := time.NewTicker(twinCheck)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if _, leading := s.cfg.Leadership.Leadership(); leading {
			for _, node := range s.goneTwins(time.Now()) {
				if err := s.markTwin(ctx, node, "", ""); err != nil && !apierrors.IsNotFound(err) {
					s.warn("twin", node, "the mark of a copied node is not removed", err)
					continue
				}
				s.mu.Lock()
				delete(s.twins, node)
				s.mu.Unlock()
			}
		}
	}
}

// goneTwins lists the marked nodes whose copy was not seen for twinFor. What
// an earlier leader marked counts from now.
func (s *Server) goneTwins(now time.Time) (out []string) {
	marked := map[string]string{}
	s.cfg.Store.Reader(nodeGK).Snapshot().Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		if b := r.Header.Labels[manifests.LabelDuplicate]; b != "" {
			marked[r.Header.Key.Name] = b
		}
		return true
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	for node, boot := range marked {
		t, ok := s.twins[node]
		switch {
		case !ok:
			s.twins[node] = twin{boot: boot, at: now, marked: true}
		case now.Sub(t.at) > twinFor:
			out = append(out, node)
		}
	}
	return out
}
