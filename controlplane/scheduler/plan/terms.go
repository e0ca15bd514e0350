package plan

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Terms is what a pod says about where other pods are: inter-pod affinity
// and anti-affinity, and topology spread. Immutable; the pods of a template
// in one namespace share it.
type Terms struct {
	// Affinity and Anti must hold.
	Affinity, Anti []Term
	// Prefer is scored: affinity with a positive weight, anti-affinity with a
	// negative one.
	Prefer []Term
	// Spread are the topology spread constraints, of both modes.
	Spread []Constraint
	// ID tells Terms apart that decide differently.
	ID string
}

// Others returns the terms if they concern other pods once the pod is placed:
// a spread matters only until then.
func (t *Terms) Others() *Terms {
	if t == nil || len(t.Affinity)+len(t.Anti)+len(t.Prefer) == 0 {
		return nil
	}
	return t
}

// Term speaks of pods in a domain of the nodes' label Key.
type Term struct {
	Who    Who
	Key    string
	Weight int32
	id     string
}

// Constraint is one topology spread constraint (core/v1
// TopologySpreadConstraint), defaults filled in.
type Constraint struct {
	Who        Who
	Key        string
	MaxSkew    int32
	MinDomains int32
	// Hard is DoNotSchedule; otherwise ScheduleAnyway.
	Hard bool
	// HonorAffinity and HonorTaints leave nodes out that the pod's node
	// affinity or taints exclude (KEP-3094).
	HonorAffinity, HonorTaints bool
}

// Who selects pods: by their labels, in the named namespaces and in those
// whose labels the namespace selector matches.
type Who struct {
	namespaces []string // sorted
	spaces     labels.Selector
	pods       labels.Selector
	id         string
}

// covers says whether the selection has a pod of these labels.
func (w *Who) covers(namespace string, spaces, pods map[string]string) bool {
	if !slices.Contains(w.namespaces, namespace) && (w.spaces == nil || !w.spaces.Matches(labels.Set(spaces))) {
		return false
	}
	return w.pods.Matches(labels.Set(pods))
}

// hardAffinityWeight is what a required affinity of an existing pod is worth
// to a pod that it selects: upstream's default.
const hardAffinityWeight = 1

// TermsOf reads a pod's terms; nil if it has none. defaults stand in for
// spread constraints of its own, if it has none; their pods are those that
// like selects.
func TermsOf(pod *corev1.Pod, defaults []corev1.TopologySpreadConstraint, like labels.Selector) (*Terms, error) {
	t := &Terms{}
	if a := pod.Spec.Affinity; a != nil {
		if err := t.addAffinity(pod.Namespace, a); err != nil {
			return nil, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
	}
	for i := range pod.Spec.TopologySpreadConstraints {
		c := &pod.Spec.TopologySpreadConstraints[i]
		s, err := metav1.LabelSelectorAsSelector(c.LabelSelector)
		if err != nil {
			return nil, fmt.Errorf("pod %s/%s: spec.topologySpreadConstraints[%d].labelSelector: %w", pod.Namespace, pod.Name, i, err)
		}
		t.Spread = append(t.Spread, constraint(c, pod.Namespace, s))
	}
	if len(pod.Spec.TopologySpreadConstraints) == 0 && like != nil && !like.Empty() {
		for i := range defaults {
			t.Spread = append(t.Spread, constraint(&defaults[i], pod.Namespace, like))
		}
	}
	if len(t.Affinity)+len(t.Anti)+len(t.Prefer)+len(t.Spread) == 0 {
		return nil, nil
	}
	t.ID = t.text()
	return t, nil
}

func (t *Terms) addAffinity(namespace string, a *corev1.Affinity) error {
	add := func(to *[]Term, term *corev1.PodAffinityTerm, weight int32) error {
		one, err := newTerm(term, namespace, weight)
		*to = append(*to, one)
		return err
	}
	if p := a.PodAffinity; p != nil {
		for i := range p.RequiredDuringSchedulingIgnoredDuringExecution {
			if err := add(&t.Affinity, &p.RequiredDuringSchedulingIgnoredDuringExecution[i], hardAffinityWeight); err != nil {
				return err
			}
		}
		for i := range p.PreferredDuringSchedulingIgnoredDuringExecution {
			w := &p.PreferredDuringSchedulingIgnoredDuringExecution[i]
			if err := add(&t.Prefer, &w.PodAffinityTerm, w.Weight); err != nil {
				return err
			}
		}
	}
	if p := a.PodAntiAffinity; p != nil {
		for i := range p.RequiredDuringSchedulingIgnoredDuringExecution {
			if err := add(&t.Anti, &p.RequiredDuringSchedulingIgnoredDuringExecution[i], 0); err != nil {
				return err
			}
		}
		for i := range p.PreferredDuringSchedulingIgnoredDuringExecution {
			w := &p.PreferredDuringSchedulingIgnoredDuringExecution[i]
			if err := add(&t.Prefer, &w.PodAffinityTerm, -w.Weight); err != nil {
				return err
			}
		}
	}
	return nil
}

func newTerm(t *corev1.PodAffinityTerm, namespace string, weight int32) (Term, error) {
	pods, err := metav1.LabelSelectorAsSelector(t.LabelSelector)
	if err != nil {
		return Term{}, fmt.Errorf("pod affinity: labelSelector: %w", err)
	}
	w := Who{pods: pods, namespaces: slices.Clone(t.Namespaces)}
	if t.NamespaceSelector != nil {
		if w.spaces, err = metav1.LabelSelectorAsSelector(t.NamespaceSelector); err != nil {
			return Term{}, fmt.Errorf("pod affinity: namespaceSelector: %w", err)
		}
	} else if len(w.namespaces) == 0 {
		w.namespaces = []string{namespace}
	}
	w.name()
	return Term{Who: w, Key: t.TopologyKey, Weight: weight, id: fmt.Sprintf("%s in %s", w.id, t.TopologyKey)}, nil
}

func constraint(c *corev1.TopologySpreadConstraint, namespace string, pods labels.Selector) Constraint {
	out := Constraint{Who: Who{pods: pods, namespaces: []string{namespace}}, Key: c.TopologyKey, MaxSkew: c.MaxSkew, MinDomains: 1,
		Hard: c.WhenUnsatisfiable == corev1.DoNotSchedule, HonorAffinity: true}
	if c.MinDomains != nil {
		out.MinDomains = *c.MinDomains
	}
	if p := c.NodeAffinityPolicy; p != nil {
		out.HonorAffinity = *p == corev1.NodeInclusionPolicyHonor
	}
	if p := c.NodeTaintsPolicy; p != nil {
		out.HonorTaints = *p == corev1.NodeInclusionPolicyHonor
	}
	out.Who.name()
	return out
}

// name gives the selection its identity.
func (w *Who) name() {
	slices.Sort(w.namespaces)
	w.namespaces = slices.Compact(w.namespaces)
	spaces := "-"
	if w.spaces != nil {
		spaces = selectorText(w.spaces)
	}
	w.id = strings.Join(w.namespaces, ",") + ";" + spaces + ";" + selectorText(w.pods)
}

// selectorText tells "nothing" from "everything", which String does not.
func selectorText(s labels.Selector) string {
	if _, some := s.Requirements(); !some {
		return "nothing"
	}
	return "{" + s.String() + "}"
}

func (t *Terms) text() string {
	var b strings.Builder
	for _, list := range [][]Term{t.Affinity, t.Anti, t.Prefer} {
		for i := range list {
			fmt.Fprintf(&b, "%s*%d|", list[i].id, list[i].Weight)
		}
		b.WriteByte('/')
	}
	for i := range t.Spread {
		c := &t.Spread[i]
		fmt.Fprintf(&b, "%s by %s,%d,%d,%t,%t,%t|", c.Who.id, c.Key, c.MaxSkew, c.MinDomains, c.Hard, c.HonorAffinity, c.HonorTaints)
	}
	return b.String()
}
