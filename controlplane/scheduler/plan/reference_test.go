package plan

import (
	"math"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// cluster is upstream's rules of inter-pod affinity and topology spread told
// plainly: every answer is computed anew from all pods.
type cluster struct {
	nodes  []*corev1.Node
	pods   []*corev1.Pod // with spec.nodeName
	spaces map[string]map[string]string
}

func (c *cluster) on(node string) (out []*corev1.Pod) {
	for _, p := range c.pods {
		if p.Spec.NodeName == node {
			out = append(out, p)
		}
	}
	return out
}

func (c *cluster) node(name string) *corev1.Node {
	for _, n := range c.nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

func selectorOf(s *metav1.LabelSelector) labels.Selector {
	out, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		panic(err)
	}
	return out
}

// selects: does the term of a pod in namespace own select the pod?
func (c *cluster) selects(t *corev1.PodAffinityTerm, own string, p *corev1.Pod) bool {
	in := false
	for _, n := range t.Namespaces {
		in = in || n == p.Namespace
	}
	if len(t.Namespaces) == 0 && t.NamespaceSelector == nil {
		in = p.Namespace == own
	}
	if t.NamespaceSelector != nil {
		in = in || selectorOf(t.NamespaceSelector).Matches(labels.Set(c.spaces[p.Namespace]))
	}
	return in && selectorOf(t.LabelSelector).Matches(labels.Set(p.Labels))
}

func affinityOf(p *corev1.Pod) (must, mustNot []corev1.PodAffinityTerm, like, dislike []corev1.WeightedPodAffinityTerm) {
	a := p.Spec.Affinity
	if a == nil {
		return
	}
	if a.PodAffinity != nil {
		must, like = a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution, a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution
	}
	if a.PodAntiAffinity != nil {
		mustNot, dislike = a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution, a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution
	}
	return
}

// together: both nodes are in one domain of the key.
func together(a, b *corev1.Node, key string) bool {
	if a == nil || b == nil {
		return false
	}
	x, ok1 := a.Labels[key]
	y, ok2 := b.Labels[key]
	return ok1 && ok2 && x == y
}

// judge says what of the filters that look at pods speaks against the node.
func (c *cluster) judge(p *corev1.Pod, n *corev1.Node) objection {
	if o := c.judgeSpread(p, n); o != none {
		return o
	}
	must, mustNot, _, _ := affinityOf(p)
	all := func(q *corev1.Pod) bool {
		for i := range must {
			if !c.selects(&must[i], p.Namespace, q) {
				return false
			}
		}
		return true
	}
	satisfied, somewhere := true, false
	for i := range must {
		key := must[i].TopologyKey
		if _, ok := n.Labels[key]; !ok {
			return noAffinity
		}
		here := false
		for _, q := range c.pods {
			at := c.node(q.Spec.NodeName)
			if !all(q) {
				continue
			}
			if _, ok := at.Labels[key]; ok {
				somewhere = true
			}
			here = here || together(at, n, key)
		}
		satisfied = satisfied && here
	}
	if !satisfied && (somewhere || !all(p)) {
		return noAffinity
	}
	for i := range mustNot {
		for _, q := range c.pods {
			if c.selects(&mustNot[i], p.Namespace, q) && together(c.node(q.Spec.NodeName), n, mustNot[i].TopologyKey) {
				return hasAnti
			}
		}
	}
	for _, q := range c.pods {
		_, theirs, _, _ := affinityOf(q)
		for i := range theirs {
			if c.selects(&theirs[i], q.Namespace, p) && together(c.node(q.Spec.NodeName), n, theirs[i].TopologyKey) {
				return isKeptAway
			}
		}
	}
	return none
}

func constraintsOf(p *corev1.Pod, mode corev1.UnsatisfiableConstraintAction) (out []corev1.TopologySpreadConstraint) {
	for _, c := range p.Spec.TopologySpreadConstraints {
		if c.WhenUnsatisfiable == mode {
			out = append(out, c)
		}
	}
	return out
}

// counts: do the node's pods count for the constraint?
func counts(p *corev1.Pod, n *corev1.Node, t *corev1.TopologySpreadConstraint, all []corev1.TopologySpreadConstraint) bool {
	for _, o := range all {
		if _, ok := n.Labels[o.TopologyKey]; !ok {
			return false
		}
	}
	s := &Shape{Selector: p.Spec.NodeSelector, Tolerations: p.Spec.Tolerations}
	facts := factsOf(n)
	if (t.NodeAffinityPolicy == nil || *t.NodeAffinityPolicy == corev1.NodeInclusionPolicyHonor) && !s.matches(&facts) {
		return false
	}
	return t.NodeTaintsPolicy == nil || *t.NodeTaintsPolicy == corev1.NodeInclusionPolicyIgnore || s.untolerated(&facts) == nil
}

func matching(pods []*corev1.Pod, p *corev1.Pod, s labels.Selector) (count int) {
	if s.Empty() {
		return 0
	}
	for _, q := range pods {
		if q.DeletionTimestamp == nil && q.Namespace == p.Namespace && s.Matches(labels.Set(q.Labels)) {
			count++
		}
	}
	return count
}

func (c *cluster) judgeSpread(p *corev1.Pod, n *corev1.Node) objection {
	all := constraintsOf(p, corev1.DoNotSchedule)
	for i := range all {
		t := &all[i]
		s := selectorOf(t.LabelSelector)
		found := map[string]int{}
		for _, m := range c.nodes {
			if counts(p, m, t, all) {
				found[m.Labels[t.TopologyKey]] += matching(c.on(m.Name), p, s)
			}
		}
		value, ok := n.Labels[t.TopologyKey]
		if !ok {
			return noTopology
		}
		least := math.MaxInt32
		for _, k := range found {
			least = min(least, k)
		}
		if want := t.MinDomains; len(found) < 1 || want != nil && len(found) < int(*want) {
			least = 0
		}
		own := 0
		if s.Matches(labels.Set(p.Labels)) {
			own = 1
		}
		if found[value]+own-least > int(t.MaxSkew) {
			return skewed
		}
	}
	return none
}

// liking is the node's inter-pod score, not normalized.
func (c *cluster) liking(p *corev1.Pod, n *corev1.Node) (sum int64) {
	_, _, like, dislike := affinityOf(p)
	for _, q := range c.pods {
		at := c.node(q.Spec.NodeName)
		for i := range like {
			if c.selects(&like[i].PodAffinityTerm, p.Namespace, q) && together(at, n, like[i].PodAffinityTerm.TopologyKey) {
				sum += int64(like[i].Weight)
			}
		}
		for i := range dislike {
			if c.selects(&dislike[i].PodAffinityTerm, p.Namespace, q) && together(at, n, dislike[i].PodAffinityTerm.TopologyKey) {
				sum -= int64(dislike[i].Weight)
			}
		}
		must, _, theirs, averse := affinityOf(q)
		for i := range must {
			if c.selects(&must[i], q.Namespace, p) && together(at, n, must[i].TopologyKey) {
				sum += hardAffinityWeight
			}
		}
		for i := range theirs {
			if c.selects(&theirs[i].PodAffinityTerm, q.Namespace, p) && together(at, n, theirs[i].PodAffinityTerm.TopologyKey) {
				sum += int64(theirs[i].Weight)
			}
		}
		for i := range averse {
			if c.selects(&averse[i].PodAffinityTerm, q.Namespace, p) && together(at, n, averse[i].PodAffinityTerm.TopologyKey) {
				sum -= int64(averse[i].Weight)
			}
		}
	}
	return sum
}

// crowding is the score of the ScheduleAnyway constraints before it is
// normalized; -1 if the node has none.
func (c *cluster) crowding(p *corev1.Pod, n *corev1.Node) float64 {
	all := constraintsOf(p, corev1.ScheduleAnyway)
	s := &Shape{Selector: p.Spec.NodeSelector, Tolerations: p.Spec.Tolerations}
	sum := 0.0
	for i := range all {
		t := &all[i]
		value, ok := n.Labels[t.TopologyKey]
		if !ok {
			return -1
		}
		size := map[string]bool{}
		count := 0
		for _, m := range c.nodes {
			facts := factsOf(m)
			lacks := false
			for _, o := range all {
				_, has := m.Labels[o.TopologyKey]
				lacks = lacks || !has
			}
			if !lacks && s.check(&facts) == fits {
				size[m.Labels[t.TopologyKey]] = true
			}
			if m.Labels[t.TopologyKey] == value && counts(p, m, t, all) {
				count += matching(c.on(m.Name), p, selectorOf(t.LabelSelector))
			}
		}
		sum += float64(count)*math.Log(float64(len(size)+2)) + float64(t.MaxSkew-1)
	}
	for _, t := range all {
		if _, ok := n.Labels[t.TopologyKey]; !ok {
			return -1
		}
	}
	return math.Round(sum)
}

func factsOf(n *corev1.Node) Node {
	return Node{Name: n.Name, UID: n.Name, Labels: n.Labels, Taints: n.Spec.Taints}
}
