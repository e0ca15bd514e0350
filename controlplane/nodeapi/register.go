package nodeapi

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
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

// cidrTries bounds how often the next free range is tried when others take
// ranges at the same time.
const cidrTries = 32

// createNode makes a Node with an identity and ranges of pod addresses of
// its own. Ranges already in n.Spec are tried first: a node whose object was
// deleted keeps its pods' addresses.
func (s *Server) createNode(ctx context.Context, n *corev1.Node, uid string) error {
	n = n.DeepCopy()
	n.Spec.ProviderID = s.providerID(uid)
	n.ResourceVersion, n.UID = "", ""
	if !s.ranges(n.Spec.PodCIDRs) {
		n.Spec.PodCIDR, n.Spec.PodCIDRs = "", nil
	}
	skip := 0
	for try := 0; ; try++ {
		if len(n.Spec.PodCIDRs) == 0 {
			cidrs, err := s.freeCIDRs(skip)
			if err != nil {
				return err
			}
			n.Spec.PodCIDRs = cidrs
		}
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
		_, err := s.cfg.Store.Create(ctx, n.DeepCopy(), registry.WriteOptions{})
		if err == nil {
			s.leases.ensure(n.Name)
			return nil
		}
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "podCIDR") || try >= cidrTries {
			return err
		}
		n.Spec.PodCIDRs = nil
		skip = try // others race for the same ones
	}
}

// ranges says whether every one is a range that this cluster would give.
func (s *Server) ranges(cidrs []string) bool {
	if len(cidrs) != len(s.cfg.PodCIDRs) {
		return false
	}
	for i, c := range cidrs {
		p, err := netip.ParsePrefix(c)
		if err != nil || p != p.Masked() || p.Bits() != s.nodeBits(s.cfg.PodCIDRs[i]) || !s.cfg.PodCIDRs[i].Contains(p.Addr()) {
			return false
		}
	}
	return true
}

func (s *Server) nodeBits(p netip.Prefix) int {
	if p.Addr().Is6() {
		return s.cfg.NodeBits6
	}
	return s.cfg.NodeBits
}

// freeCIDRs finds one range of each family that no Node claims, after
// leaving out the first skip free ones.
func (s *Server) freeCIDRs(skip int) ([]string, error) {
	taken := map[string]bool{}
	s.cfg.Store.Reader(nodeGK).Snapshot().Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		for _, c := range r.Header.Claims {
			if cidr, ok := strings.CutPrefix(c, "podcidr/"); ok {
				taken[cidr] = true
			}
		}
		return true
	})
	var out []string
	for _, p := range s.cfg.PodCIDRs {
		c, ok := nextFree(p, s.nodeBits(p), taken, skip)
		if !ok {
			return nil, apierrors.NewForbidden(corev1.Resource("nodes"), "", fmt.Errorf(
				"every /%d of the pod range %s is taken: no more nodes fit (start the servers with a larger --pod-cidr)", s.nodeBits(p), p))
		}
		out = append(out, c.String())
	}
	return out, nil
}

// nextFree walks the sub-ranges of p in order. The first one is left out:
// its addresses are easily taken for the network's own.
func nextFree(p netip.Prefix, bits int, taken map[string]bool, skip int) (netip.Prefix, bool) {
	for sub := netip.PrefixFrom(p.Addr(), bits); p.Contains(sub.Addr()); {
		if !taken[sub.String()] {
			if skip--; skip < 0 {
				return sub, true
			}
		}
		next, ok := addBit(sub.Addr(), bits)
		if !ok {
			break
		}
		sub = netip.PrefixFrom(next, bits)
	}
	return netip.Prefix{}, false
}

// addBit adds 1 to the first bits of an address; ok is false on overflow.
func addBit(a netip.Addr, bits int) (netip.Addr, bool) {
	b := a.AsSlice()
	carry := byte(1) << ((8 - bits%8) % 8)
	for i := (bits - 1) / 8; i >= 0; i-- {
		sum := uint16(b[i]) + uint16(carry)
		b[i] = byte(sum)
		if sum < 256 {
			out, ok := netip.AddrFromSlice(b)
			return out, ok
		}
		carry = 1
	}
	return netip.Addr{}, false
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

// mayLabel keeps a node from giving itself roles or getting around
// node-restriction labels.
func mayLabel(key string) bool {
	domain, _, _ := strings.Cut(key, "/")
	return !strings.HasSuffix(domain, "node-role.kubernetes.io") && !strings.HasSuffix(domain, "node-restriction.kubernetes.io")
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
		if _, have := cur.Labels[k]; mayLabel(k) && (!have || ownsLabel(k)) {
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
	if out.Capacity == nil {
		out.Capacity = cur.Capacity
	}
	if out.Allocatable == nil {
		out.Allocatable = cur.Allocatable
	}
	if out.VolumesAttached == nil {
		out.VolumesAttached = cur.VolumesAttached
	}
	return out
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
	skip := 0
	for try := 0; ; try++ {
		_, err := s.cfg.Store.Update(ctx, nodeGK, "", sess.node, registry.Main, func(o runtime.Object) (runtime.Object, error) {
			n, ok := o.(*corev1.Node)
			if !ok {
				return nil, fmt.Errorf("nodeapi: Node is a %T", o)
			}
			mergeNodeMeta(n, said)
			if len(n.Spec.PodCIDRs) == 0 && n.Spec.PodCIDR == "" {
				cidrs, err := s.freeCIDRs(skip)
				if err != nil {
					return nil, err
				}
				n.Spec.PodCIDR, n.Spec.PodCIDRs = cidrs[0], cidrs
			}
			return n, nil
		}, registry.WriteOptions{})
		if err == nil || !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "podCIDR") || try >= cidrTries {
			return err
		}
		skip = try
	}
}
