package nodeapi

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// deadName is the Secret in kube-system whose keys are the uids of nodes that
// were declared dead. Unlike banned ones they are talked to: they must hear
// that their pods run elsewhere.
const deadName = "dunlin-dead-nodes"

// Dead says whether a node was declared dead, and when (RFC 3339).
func (s *Server) Dead(uid string) (since string, dead bool) { return s.listed(deadName, uid) }

// listed looks for a node's uid in one of the lists in kube-system.
func (s *Server) listed(name, uid string) (stamp string, ok bool) {
	if uid == "" {
		return "", false
	}
	obj, err := s.cfg.Store.Get(secretGK, tokenNamespace, name)
	if err != nil {
		return "", false // no list yet
	}
	sec, ok := obj.(*corev1.Secret)
	if !ok {
		return "", false
	}
	b, ok := sec.Data[uid]
	return string(b), ok
}

// list adds a node's uid to one of the lists.
func (s *Server) list(ctx context.Context, name, uid string) error {
	stamp := []byte(s.cfg.Clock.Now().UTC().Format(time.RFC3339))
	var err error
	for range 3 {
		_, err = s.cfg.Store.Update(ctx, secretGK, tokenNamespace, name, registry.Main, func(o runtime.Object) (runtime.Object, error) {
			sec, ok := o.(*corev1.Secret)
			if !ok {
				return nil, errors.New("not a Secret")
			}
			if sec.Data == nil {
				sec.Data = map[string][]byte{}
			}
			if sec.Data[uid] == nil {
				sec.Data[uid] = stamp
			}
			return sec, nil
		}, registry.WriteOptions{})
		if apierrors.IsNotFound(err) {
			_, err = s.cfg.Store.Create(ctx, &corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{Namespace: tokenNamespace, Name: name},
				Type:       corev1.SecretTypeOpaque, Data: map[string][]byte{uid: stamp},
			}, registry.WriteOptions{})
		}
		if !apierrors.IsAlreadyExists(err) {
			break
		}
	}
	return err
}

// uidOf is the identity of the node that a Node object stands for.
func (s *Server) uidOf(n *corev1.Node) (string, error) {
	uid, ok := strings.CutPrefix(n.Spec.ProviderID, s.providerID(""))
	if !ok || uid == "" {
		return "", apierrors.NewBadRequest(fmt.Sprintf("node %q has no identity: no agent ever joined under it", n.Name))
	}
	return uid, nil
}

// deadText is what such a node is told when it comes back.
func deadText(node, since string) string {
	return fmt.Sprintf("node %s was declared dead on %s: its pods were started elsewhere, and are stopped here; "+
		"for a place in the cluster again run 'dunlin agent reset' on this machine, and join it with a new line from 'dunlin token create'", node, since)
}

// DeclareDead takes a user's word that a silent node does not run any more:
// it cannot come back under its identity, and podgc releases its pods, also
// those that are allowed once only. It returns the pods ("namespace/name")
// that were there. Again is no error.
func (s *Server) DeclareDead(ctx context.Context, node string) ([]string, error) {
	n, err := s.getNode(node)
	if err != nil {
		return nil, err
	}
	uid, err := s.uidOf(n)
	if err != nil {
		return nil, err
	}
	s.lead()
	s.leases.sweepNow()
	if at, expired := s.leases.lastRenewal(node); !expired {
		if at.IsZero() {
			return nil, apierrors.NewConflict(corev1.Resource("nodes"), node, errors.New("whether it lives is not known yet, since this server leads for a few seconds only: try again in half a minute"))
		}
		return nil, apierrors.NewConflict(corev1.Resource("nodes"), node, fmt.Errorf("it lives: it renewed its lease %.1f s ago; 'dunlin drain %s' empties it, 'dunlin node revoke %s' cuts it off", time.Since(at).Seconds(), node, node))
	}
	// First of all it must not come back, or it would run what others run.
	if err := s.list(ctx, deadName, uid); err != nil {
		return nil, fmt.Errorf("nodeapi: declare %s dead: %w", node, err)
	}
	s.Disconnect(node, errors.New("the node was declared dead"))
	var pods []string
	s.cfg.Store.Reader(podGK).Snapshot().PodsOnNode(node, func(r *state.Record) bool {
		pods = append(pods, r.Header.Key.Namespace+"/"+r.Header.Key.Name)
		return true
	})
	if err := s.markDead(ctx, n, uid); err != nil {
		return nil, fmt.Errorf("nodeapi: mark %s as dead: %w", node, err)
	}
	return pods, nil
}

// updateNode changes a Node object, unless another one has its name by now.
func (s *Server) updateNode(ctx context.Context, node *corev1.Node, sub registry.Subresource, change func(n *corev1.Node)) error {
	_, err := s.cfg.Store.Update(ctx, nodeGK, "", node.Name, sub, func(o runtime.Object) (runtime.Object, error) {
		n, ok := o.(*corev1.Node)
		if !ok || n.UID != node.UID {
			return nil, apierrors.NewNotFound(corev1.Resource("nodes"), node.Name)
		}
		change(n)
		return n, nil
	}, registry.WriteOptions{})
	return err
}

// decided says on the Node object what a user decided about its machine.
func (s *Server) decided(ctx context.Context, node *corev1.Node, c corev1.NodeConditionType, reason, message string) error {
	at := metav1.NewTime(s.cfg.Clock.Now()).Rfc3339Copy()
	return s.updateNode(ctx, node, registry.Status, func(n *corev1.Node) {
		n.Status.Conditions = mergeConditions(n.Status.Conditions, []corev1.NodeCondition{{
			Type: c, Status: corev1.ConditionTrue, Reason: reason, LastTransitionTime: at, LastHeartbeatTime: at, Message: message,
		}})
	})
}

// markDead says on the Node object that its pods run elsewhere.
func (s *Server) markDead(ctx context.Context, node *corev1.Node, uid string) error {
	since, _ := s.Dead(uid)
	err := s.decided(ctx, node, manifests.ConditionDead, "DeclaredByUser", "Declared dead on "+since+
		": its pods are released, and the machine needs a new identity ('dunlin agent reset' there). 'dunlin delete node "+node.Name+"' frees the name.")
	if err != nil {
		return err
	}
	at := metav1.NewTime(s.cfg.Clock.Now()).Rfc3339Copy()
	return s.updateNode(ctx, node, registry.Main, func(n *corev1.Node) {
		if n.Labels == nil {
			n.Labels = map[string]string{}
		}
		n.Labels[manifests.LabelDead] = "true"
		for _, t := range n.Spec.Taints {
			if t.Key == corev1.TaintNodeOutOfService && t.Effect == corev1.TaintEffectNoExecute {
				return
			}
		}
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: "declared-dead", Effect: corev1.TaintEffectNoExecute, TimeAdded: &at})
	})
}

// markRevoked says on the Node object that nobody waits for it.
func (s *Server) markRevoked(ctx context.Context, node *corev1.Node, uid string) error {
	since, _ := s.listed(revokedName, uid)
	return s.decided(ctx, node, manifests.ConditionRevoked, "RevokedByUser", "Revoked on "+since+
		": its key is banned, so it cannot come back. 'dunlin node declare-dead "+node.Name+"' releases the pods that wait for it; 'dunlin delete node "+node.Name+
		"' frees the name; the machine joins anew after 'dunlin agent reset' there.")
}
