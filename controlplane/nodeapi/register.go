package nodeapi

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

// Annotations of a Node that belong to its identity.
const (
	// AnnotationHardware holds the facts of the board as the node told them
	// when it joined: for people, who look for clones.
	AnnotationHardware = "dunlin.dev/hardware"
)

// providerID is where a Node object carries the identity of its node; once
// set it cannot change.
func (s *Server) providerID(uid string) string { return "dunlin://" + s.cfg.ClusterID + "/node/" + uid }

func (s *Server) nodeNames() []string {
	var out []string
	s.cfg.Store.Reader(nodeGK).Snapshot().Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		out = append(out, r.Header.Key.Name)
		return true
	})
	return out
}

// GossipAddresses are where nodes gossip, by name; "" where one did not say.
func (s *Server) GossipAddresses() map[string]string {
	out := map[string]string{}
	for _, name := range s.nodeNames() {
		if n, err := s.getNode(name); err == nil {
			out[name] = n.Annotations[wire.AnnotationGossip]
		}
	}
	return out
}

func (s *Server) getNode(name string) (*corev1.Node, error) {
	obj, err := s.cfg.Store.Get(nodeGK, "", name)
	if err != nil {
		return nil, err
	}
	n, ok := obj.(*corev1.Node)
	if !ok {
		return nil, fmt.Errorf("nodeapi: Node %s is a %T", name, obj)
	}
	return n, nil
}

// claimName makes sure that the Node object under the session's name is, or
// becomes, this node's. "" is success.
func (s *Server) claimName(ctx context.Context, sess *session) string {
	want := s.providerID(sess.uid)
	n, err := s.getNode(sess.node)
	switch {
	case apierrors.IsNotFound(err):
		// Deleted while it was away: deleting the object is not declaring the
		// node dead, and its certificate was not revoked.
		if err := s.createNode(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: sess.node}}, sess.uid); err != nil && !apierrors.IsAlreadyExists(err) {
			return "the Node object cannot be made: " + err.Error()
		}
		return ""
	case err != nil:
		return err.Error()
	case n.Spec.ProviderID == want:
		return ""
	case n.Spec.ProviderID != "":
		return fmt.Sprintf("the name %q belongs to another node now (%s); join again under another name", sess.node, n.Spec.ProviderID)
	}
	if _, err := s.cfg.Store.Update(ctx, nodeGK, "", sess.node, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		node, ok := cur.(*corev1.Node)
		if !ok || (node.Spec.ProviderID != "" && node.Spec.ProviderID != want) {
			return nil, apierrors.NewConflict(corev1.Resource("nodes"), sess.node, fmt.Errorf("taken by another node"))
		}
		node.Spec.ProviderID = want
		return node, nil
	}, registry.WriteOptions{}); err != nil {
		return "the Node object cannot be taken: " + err.Error()
	}
	return ""
}

// createNode makes a Node with an identity and ranges of pod addresses of
// its own. Ranges already in n.Spec are tried first: a node whose object was
// deleted keeps its pods' addresses.
func (s *Server) createNode(ctx context.Context, n *corev1.Node, uid string) error {
	n = n.DeepCopy()
	n.Spec.ProviderID = s.providerID(uid)
	n.ResourceVersion, n.UID = "", ""
	if !s.givesRanges(n.Spec.PodCIDRs) {
		n.Spec.PodCIDR, n.Spec.PodCIDRs = "", nil
	}
	for try := 0; ; try++ {
		release := func() {}
		if len(n.Spec.PodCIDRs) == 0 {
			var err error
			if n.Spec.PodCIDRs, release, err = s.takeCIDRs(); err != nil {
				return err
			}
		}
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
		_, err := s.cfg.Store.Create(ctx, n.DeepCopy(), registry.WriteOptions{})
		release()
		if err == nil {
			s.leases.ensure(n.Name)
			return nil
		}
		if !cidrTaken(err) || try >= cidrTries {
			return err
		}
		n.Spec.PodCIDRs = nil
	}
}

// ownsLabel says which labels of its Node a node may set at any time; others
// it may set only while nobody has.
func ownsLabel(key string) bool {
	domain, _, _ := strings.Cut(key, "/")
	switch {
	case key == corev1.LabelArchStable || key == corev1.LabelOSStable || key == corev1.LabelHostname:
		return true
	case domain == "dunlin.dev" || strings.HasSuffix(domain, ".dunlin.dev") || domain == "node.kubernetes.io":
		return true
	}
	return false
}

// MayLabel keeps a node from giving itself roles (serving Ingresses brings
// their private keys), getting around node-restriction labels, and declaring
// itself dead.
func MayLabel(key string) bool {
	domain, _, _ := strings.Cut(key, "/")
	return key != manifests.LabelDead && key != manifests.LabelIngress && key != manifests.LabelDuplicate && !strings.HasSuffix(domain, "node-role.kubernetes.io") && !strings.HasSuffix(domain, "node-restriction.kubernetes.io")
}

// mergeNodeMeta takes what the node owns of labels and annotations. It says
// whether anything changed.
func mergeNodeMeta(cur, said *corev1.Node) bool {
	changed := false
	set := func(m *map[string]string, k, v string) {
		if old, ok := (*m)[k]; ok && old == v {
			return
		}
		if *m == nil {
			*m = map[string]string{}
		}
		(*m)[k] = v
		changed = true
	}
	for _, k := range slices.Sorted(maps.Keys(said.Labels)) {
		if _, have := cur.Labels[k]; MayLabel(k) && (!have || ownsLabel(k)) {
			set(&cur.Labels, k, said.Labels[k])
		}
	}
	for _, k := range slices.Sorted(maps.Keys(said.Annotations)) {
		if strings.HasPrefix(k, "dunlin.dev/") || strings.HasPrefix(k, "node.alpha.kubernetes.io/") {
			set(&cur.Annotations, k, said.Annotations[k])
		}
	}
	return changed
}

// mergeNodeStatus takes the node's word for its own status; conditions merge
// by type, and those that the node did not mention are others'.
func mergeNodeStatus(cur, said corev1.NodeStatus) corev1.NodeStatus {
	out := *said.DeepCopy()
	out.Conditions = mergeConditions(cur.Conditions, said.Conditions)
	out.Phase = cur.Phase
	out.Capacity = keepExtended(out.Capacity, cur.Capacity)
	out.Allocatable = keepExtended(out.Allocatable, cur.Allocatable)
	if out.VolumesAttached == nil {
		out.VolumesAttached = cur.VolumesAttached
	}
	return out
}

// keepExtended adds to what a node said the resources that others advertise on
// it through the API (example.com/dongle): nodes know nothing of those.
func keepExtended(said, cur corev1.ResourceList) corev1.ResourceList {
	if said == nil {
		return cur
	}
	for name, n := range cur {
		if _, ok := said[name]; !ok && strings.Contains(string(name), "/") {
			said[name] = n
		}
	}
	return said
}

// mergeConditions keeps the times of a condition that says the same as
// before, so that a repeated report changes nothing.
func mergeConditions(cur, said []corev1.NodeCondition) []corev1.NodeCondition {
	out := slices.Clone(cur)
	for _, c := range said {
		i := slices.IndexFunc(out, func(o corev1.NodeCondition) bool { return o.Type == c.Type })
		switch {
		case i < 0:
			out = append(out, c)
		case out[i].Status == c.Status && out[i].Reason == c.Reason && out[i].Message == c.Message:
		default:
			if out[i].Status == c.Status {
				c.LastTransitionTime = out[i].LastTransitionTime
			}
			out[i] = c
		}
	}
	return out
}

// nodeNews writes what the node says of itself.
func (s *Server) nodeNews(ctx context.Context, sess *session, said *corev1.Node) error {
	cur, err := s.getNode(sess.node)
	if apierrors.IsNotFound(err) {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: sess.node}}
		n.Spec.PodCIDRs = said.Spec.PodCIDRs
		mergeNodeMeta(n, said)
		n.Status = said.Status
		err = s.createNode(ctx, n, sess.uid)
		if err == nil || !apierrors.IsAlreadyExists(err) {
			return err
		}
		cur, err = s.getNode(sess.node)
	}
	if err != nil {
		return err
	}
	if cur.Spec.ProviderID != s.providerID(sess.uid) {
		return fmt.Errorf("nodeapi: the name %q belongs to another node", sess.node)
	}
	if probe := cur.DeepCopy(); mergeNodeMeta(probe, said) || len(probe.Spec.PodCIDRs) == 0 {
		if err := s.updateNodeMain(ctx, sess, said); err != nil {
			return err
		}
	}
	if equality.Semantic.DeepEqual(mergeNodeStatus(cur.Status, said.Status), cur.Status) {
		return nil
	}
	_, err = s.cfg.Store.Update(ctx, nodeGK, "", sess.node, registry.Status, func(o runtime.Object) (runtime.Object, error) {
		n, ok := o.(*corev1.Node)
		if !ok {
			return nil, fmt.Errorf("nodeapi: Node is a %T", o)
		}
		n.Status = mergeNodeStatus(n.Status, said.Status)
		return n, nil
	}, registry.WriteOptions{})
	return err
}

func (s *Server) updateNodeMain(ctx context.Context, sess *session, said *corev1.Node) error {
	var cidrs []string
	release := func() {}
	defer func() { release() }()
	for try := 0; ; try++ {
		_, err := s.cfg.Store.Update(ctx, nodeGK, "", sess.node, registry.Main, func(o runtime.Object) (runtime.Object, error) {
			n, ok := o.(*corev1.Node)
			if !ok {
				return nil, fmt.Errorf("nodeapi: Node is a %T", o)
			}
			mergeNodeMeta(n, said)
			if len(n.Spec.PodCIDRs) == 0 && n.Spec.PodCIDR == "" {
				if len(cidrs) == 0 {
					var err error
					if cidrs, release, err = s.takeCIDRs(); err != nil {
						return nil, err
					}
				}
				n.Spec.PodCIDR, n.Spec.PodCIDRs = cidrs[0], cidrs
			}
			return n, nil
		}, registry.WriteOptions{})
		if !cidrTaken(err) || try >= cidrTries {
			return err
		}
		release()
		cidrs, release = nil, func() {}
	}
}
