package plan

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

func drawSelector(t *rapid.T) *metav1.LabelSelector {
	switch rapid.IntRange(0, 7).Draw(t, "selector") {
	case 0:
		return nil
	case 1:
		return &metav1.LabelSelector{}
	case 2:
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "ver", Operator: metav1.LabelSelectorOpNotIn, Values: []string{"1"}}}}
	case 3:
		return &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a", "ver": "1"}}
	}
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": rapid.SampledFrom([]string{"a", "b"}).Draw(t, "app")}}
}

func drawKey(t *rapid.T) string {
	return rapid.SampledFrom([]string{"zone", "rack", corev1.LabelHostname}).Draw(t, "key")
}

func drawTerm(t *rapid.T) corev1.PodAffinityTerm {
	out := corev1.PodAffinityTerm{LabelSelector: drawSelector(t), TopologyKey: drawKey(t)}
	switch rapid.IntRange(0, 5).Draw(t, "namespaces") {
	case 0:
		out.Namespaces = []string{"ns1", "ns2"}
	case 1:
		out.NamespaceSelector = &metav1.LabelSelector{}
	case 2:
		out.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "x"}}
		out.Namespaces = []string{"ns1"}
	}
	return out
}

func drawTerms(t *rapid.T, label string) (out []corev1.PodAffinityTerm) {
	for range max(0, rapid.IntRange(-3, 2).Draw(t, label)) {
		out = append(out, drawTerm(t))
	}
	return out
}

func drawWeighted(t *rapid.T, label string) (out []corev1.WeightedPodAffinityTerm) {
	for range max(0, rapid.IntRange(-3, 2).Draw(t, label)) {
		out = append(out, corev1.WeightedPodAffinityTerm{Weight: rapid.Int32Range(1, 100).Draw(t, "weight"), PodAffinityTerm: drawTerm(t)})
	}
	return out
}

func drawPod(t *rapid.T, name string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "", Namespace: rapid.SampledFrom([]string{"ns1", "ns2"}).Draw(t, "ns"),
		Labels: map[string]string{"app": rapid.SampledFrom([]string{"a", "b"}).Draw(t, "app"), "ver": rapid.SampledFrom([]string{"1", "2"}).Draw(t, "ver")}}}
	if rapid.IntRange(0, 3).Draw(t, "affine") > 0 {
		p.Spec.Affinity = &corev1.Affinity{
			PodAffinity:     &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: drawTerms(t, "must"), PreferredDuringSchedulingIgnoredDuringExecution: drawWeighted(t, "like")},
			PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: drawTerms(t, "mustnot"), PreferredDuringSchedulingIgnoredDuringExecution: drawWeighted(t, "dislike")},
		}
	}
	for range max(0, rapid.IntRange(-2, 2).Draw(t, "spread")) {
		c := corev1.TopologySpreadConstraint{MaxSkew: rapid.Int32Range(1, 3).Draw(t, "skew"), TopologyKey: drawKey(t), LabelSelector: drawSelector(t),
			WhenUnsatisfiable: rapid.SampledFrom([]corev1.UnsatisfiableConstraintAction{corev1.DoNotSchedule, corev1.ScheduleAnyway}).Draw(t, "mode")}
		if c.WhenUnsatisfiable == corev1.DoNotSchedule && rapid.Bool().Draw(t, "min") {
			c.MinDomains = new(rapid.Int32Range(1, 4).Draw(t, "minDomains"))
		}
		policies := rapid.SampledFrom([]corev1.NodeInclusionPolicy{corev1.NodeInclusionPolicyHonor, corev1.NodeInclusionPolicyIgnore})
		if rapid.Bool().Draw(t, "policies") {
			c.NodeAffinityPolicy, c.NodeTaintsPolicy = new(policies.Draw(t, "affinityPolicy")), new(policies.Draw(t, "taintsPolicy"))
		}
		p.Spec.TopologySpreadConstraints = append(p.Spec.TopologySpreadConstraints, c)
	}
	if rapid.IntRange(0, 3).Draw(t, "selects") == 0 {
		p.Spec.NodeSelector = map[string]string{"rack": "1"}
	}
	if rapid.Bool().Draw(t, "tolerates") {
		p.Spec.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}
	}
	return p
}

func drawPlace(t *rapid.T, name string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	if z := rapid.SampledFrom([]string{"a", "b", "c", ""}).Draw(t, "zone"); z != "" {
		n.Labels["zone"] = z
	}
	if r := rapid.SampledFrom([]string{"1", "2", ""}).Draw(t, "rack"); r != "" {
		n.Labels["rack"] = r
	}
	if rapid.IntRange(0, 5).Draw(t, "host") > 0 {
		n.Labels[corev1.LabelHostname] = name
	}
	if rapid.IntRange(0, 4).Draw(t, "taint") == 0 {
		n.Spec.Taints = []corev1.Taint{{Key: "k", Effect: corev1.TaintEffectNoSchedule}}
	}
	return n
}

func termsOf(t *rapid.T, p *corev1.Pod) *Terms {
	out, err := TermsOf(p, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func peerOf(t *rapid.T, p *corev1.Pod) *Pod {
	return &Pod{UID: string(p.UID), Namespace: p.Namespace, Name: p.Name, Labels: p.Labels, Requests: onePod, Terminating: p.DeletionTimestamp != nil, Terms: termsOf(t, p)}
}

var onePod = []state.Quantity{{Name: "pods", Value: 1}}

func groupOf(t *rapid.T, p *corev1.Pod) *Group {
	return &Group{Shape: &Shape{Selector: p.Spec.NodeSelector, Tolerations: p.Spec.Tolerations}, Requests: onePod, Count: 1,
		Namespace: p.Namespace, Labels: p.Labels, Terms: termsOf(t, p)}
}

// world is one cluster twice: flat, and plain.
type world struct {
	*cluster
	flat *Nodes
	made int
}

func (w *world) place(t *rapid.T, p *corev1.Pod, node string) *Pod {
	w.made++
	p = p.DeepCopy()
	p.Spec.NodeName = node
	p.Name = fmt.Sprintf("p%d", w.made)
	if rapid.IntRange(0, 6).Draw(t, "terminating") == 0 {
		p.DeletionTimestamp = &metav1.Time{}
	}
	w.pods = append(w.pods, p)
	peer := peerOf(t, p)
	slot, _ := w.flat.Slot(node)
	w.flat.Add(slot, peer)
	return peer
}

func (w *world) set(t *rapid.T, name string) {
	n := drawPlace(t, name)
	facts := factsOf(n)
	facts.Allocatable = []state.Quantity{{Name: "pods", Value: rapid.Int64Range(1, 8).Draw(t, "room")}}
	w.flat.Set(facts)
	w.nodes = slices.DeleteFunc(w.nodes, func(m *corev1.Node) bool { return m.Name == name })
	w.nodes = append(w.nodes, n)
}

func (w *world) remove(name string) {
	w.flat.Remove(name)
	w.nodes = slices.DeleteFunc(w.nodes, func(m *corev1.Node) bool { return m.Name == name })
	w.pods = slices.DeleteFunc(w.pods, func(p *corev1.Pod) bool { return p.Spec.NodeName == name })
}

func (w *world) drop(k int) {
	p := w.pods[k]
	slot, _ := w.flat.Slot(p.Spec.NodeName)
	for _, peer := range w.flat.Pods(slot) {
		if peer.Name == p.Name {
			w.flat.Drop(slot, peer)
			break
		}
	}
	w.pods = slices.Delete(w.pods, k, k+1)
}

func drawWorld(t *rapid.T) *world {
	w := &world{cluster: &cluster{spaces: map[string]map[string]string{"ns1": {"team": "x"}, "ns2": {}}}, flat: NewNodes()}
	for name, l := range w.spaces {
		w.flat.SetNamespace(name, l)
	}
	for i := range rapid.IntRange(1, 7).Draw(t, "nodes") {
		w.set(t, fmt.Sprintf("n%d", i))
	}
	for range rapid.IntRange(0, 8).Draw(t, "pods") {
		w.place(t, drawPod(t, ""), w.nodes[rapid.IntRange(0, len(w.nodes)-1).Draw(t, "on")].Name)
	}
	return w
}

// agree compares what both say of one more such pod on every node, and
// returns the nodes that could take it.
func (w *world) agree(t *rapid.T, p *corev1.Pod, g *Group) (feasible []string) {
	g.Shape.judge(w.flat)
	v := newView(w.flat, g)
	for _, n := range w.nodes {
		slot, _ := w.flat.Slot(n.Name)
		want := w.judge(p, n)
		got, raw, crowd := none, int64(0), 0.0
		if v != nil {
			got, raw, crowd = v.check(slot), v.raw(slot), v.crowd(slot)
		}
		if got != want {
			t.Fatalf("%s: %q, by the rules %q", n.Name, objections[got], objections[want])
		}
		if like := w.liking(p, n); raw != like {
			t.Fatalf("%s: score %d, by the rules %d", n.Name, raw, like)
		}
		if c := w.crowding(p, n); len(constraintsOf(p, corev1.ScheduleAnyway)) > 0 && crowd != c {
			t.Fatalf("%s: crowd %v, by the rules %v", n.Name, crowd, c)
		}
		if want == none && g.Shape.verdicts[slot] == fits && w.flat.Free(slot, "pods") > 0 {
			feasible = append(feasible, n.Name)
		}
	}
	return feasible
}

// Groups of pods that look at each other, placed among others: every pod
// goes where upstream's rules, told plainly, allow it, those that are left
// out fit nowhere, and a group is placed as its pods one by one would be.
func TestPeersByThePlainRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		for range rapid.IntRange(1, 4).Draw(t, "groups") {
			p := drawPod(t, "")
			g := groupOf(t, p)
			g.Count = rapid.IntRange(1, 5).Draw(t, "count")
			slots := Place(w.flat, g)
			if len(slots) > g.Count {
				t.Fatalf("%d places for %d pods", len(slots), g.Count)
			}
			one := groupOf(t, p)
			for _, slot := range slots {
				feasible := w.agree(t, p, one)
				if name := w.flat.At(slot).Name; !slices.Contains(feasible, name) {
					t.Fatalf("placed on %s, feasible are %v", name, feasible)
				}
				if single := Place(w.flat, one); len(single) != 1 || single[0] != slot {
					t.Fatalf("in the group on %d, alone on %v", slot, single)
				}
				q := p.DeepCopy()
				q.Name = fmt.Sprintf("g%d", w.made)
				q.Spec.NodeName = w.flat.At(slot).Name
				w.made++
				w.pods = append(w.pods, q)
				w.flat.Add(slot, peerOf(t, q))
			}
			if rest := w.agree(t, p, one); len(slots) < g.Count && len(rest) > 0 {
				t.Fatalf("left out, but fits on %v", rest)
			} else if len(slots) < g.Count {
				w.explained(t, p, one)
			}
			w.shake(t)
		}
	})
}

// explained: the counts of a message are those of the plain rules.
func (w *world) explained(t *rapid.T, p *corev1.Pod, g *Group) {
	want := map[objection]int{}
	for _, n := range w.nodes {
		slot, _ := w.flat.Slot(n.Name)
		if g.Shape.verdicts[slot] == fits && w.flat.Free(slot, "pods") > 0 {
			want[w.judge(p, n)]++
		}
	}
	e := Explain(w.flat, g)
	for o, k := range want {
		if text := fmt.Sprintf("%d %s", k, objections[o]); !strings.Contains(e.Message, text) || !e.Peers {
			t.Fatalf("%q does not say %q", e.Message, text)
		}
	}
}

// shake changes the cluster.
func (w *world) shake(t *rapid.T) {
	switch rapid.IntRange(0, 5).Draw(t, "shake") {
	case 0:
		w.set(t, "n1")
	case 1:
		if len(w.nodes) > 1 {
			w.remove(w.nodes[0].Name)
		}
	case 2:
		if len(w.pods) > 0 {
			w.drop(rapid.IntRange(0, len(w.pods)-1).Draw(t, "dropped"))
		}
	case 3:
		w.spaces["ns2"] = map[string]string{"team": rapid.SampledFrom([]string{"x", "y"}).Draw(t, "team")}
		w.flat.SetNamespace("ns2", w.spaces["ns2"])
	}
}
