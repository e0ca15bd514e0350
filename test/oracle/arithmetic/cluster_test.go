package arithmetic

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

var budgetKind = schema.GroupKind{Group: policyv1.GroupName, Kind: "PodDisruptionBudget"}

// cluster is what both schedulers are shown. Its objects were created in
// Dunlin's store: defaults are filled in.
type cluster struct {
	w       *fixture.World
	r       *rand.Rand
	spaces  []*corev1.Namespace
	nodes   []*corev1.Node
	placed  []*corev1.Pod
	budgets []*policyv1.PodDisruptionBudget
}

func (c *cluster) odds(of int) bool { return c.r.IntN(of) == 0 }

func pick[T any](c *cluster, of ...T) T { return of[c.r.IntN(len(of))] }

func newCluster(t testing.TB, seed uint64) *cluster {
	c := &cluster{w: fixture.New(t), r: rand.New(rand.NewPCG(seed, 0))}
	c.w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other", Labels: map[string]string{"team": "x"}}})
	for i := range 1 + c.r.IntN(6) {
		c.w.AddNode(fmt.Sprintf("n%d", i), c.node)
	}
	for i := range c.r.IntN(14) {
		c.place(i)
	}
	c.read()
	return c
}

// node makes one node unlike others. Dunlin counts a taint PreferNoSchedule
// once, and upstream each: so there is one at most.
func (c *cluster) node(n *corev1.Node) {
	n.Status.Allocatable = corev1.ResourceList{
		"cpu": *resource.NewMilliQuantity(int64(500*(1+c.r.IntN(6))), resource.DecimalSI), "memory": *resource.NewQuantity(int64(1+c.r.IntN(4))<<30, resource.BinarySI),
		"pods": *resource.NewQuantity(int64(pick(c, 2, 4, 110)), resource.DecimalSI), "ephemeral-storage": resource.MustParse("10Gi"),
	}
	if c.odds(3) {
		n.Status.Allocatable["example.com/gpu"] = *resource.NewQuantity(int64(c.r.IntN(3)), resource.DecimalSI)
	}
	if zone := pick(c, "a", "b", "c", ""); zone != "" {
		n.Labels["zone"] = zone
	}
	if c.odds(2) {
		n.Labels["disk"] = pick(c, "ssd", "hdd", "7", "12")
	}
	if c.odds(4) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: "k", Value: pick(c, "v", "w"), Effect: pick(c, corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute)})
	}
	n.Spec.Unschedulable = c.odds(10)
	for _, name := range []string{"r.example/a:1", "r.example/b:1"} {
		if c.odds(2) {
			n.Status.Images = append(n.Status.Images, corev1.ContainerImage{Names: []string{name}, SizeBytes: int64(c.r.IntN(3000)) << 20})
		}
	}
}

// pod makes a pod with anything that decides where it goes. Every container
// has requests: where one has none, upstream scores a guess and Dunlin nothing.
func (c *cluster) pod(name string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pick(c, "default", "default", "other"), Name: name, Labels: map[string]string{"app": pick(c, "a", "b")}}}
	for i := range 1 + c.r.IntN(2) {
		p.Spec.Containers = append(p.Spec.Containers, c.container(fmt.Sprintf("c%d", i)))
	}
	if c.odds(5) {
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: int32(pick(c, 80, 81)), Protocol: pick(c, corev1.ProtocolTCP, corev1.ProtocolUDP)}}
	}
	if c.odds(4) {
		p.Spec.InitContainers = append(p.Spec.InitContainers, c.container("i"))
	}
	if c.odds(6) {
		p.Spec.InitContainers = append(p.Spec.InitContainers, c.container("s"))
		always := corev1.ContainerRestartPolicyAlways
		p.Spec.InitContainers[len(p.Spec.InitContainers)-1].RestartPolicy = &always
	}
	if c.odds(8) {
		p.Spec.Overhead = corev1.ResourceList{"cpu": resource.MustParse("50m"), "memory": resource.MustParse("32Mi")}
	}
	p.Spec.Priority = new(int32)
	*p.Spec.Priority = int32(c.r.IntN(4))
	return p
}

func (c *cluster) container(name string) corev1.Container {
	x := corev1.Container{Name: name, Image: pick(c, "r.example/a:1", "r.example/b:1", "r.example/c:1"), Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
		"cpu": *resource.NewMilliQuantity(int64(50*(1+c.r.IntN(10))), resource.DecimalSI), "memory": *resource.NewQuantity(int64(1+c.r.IntN(9))<<26, resource.BinarySI)}}}
	if c.odds(8) {
		one := resource.MustParse("1")
		x.Resources.Requests["example.com/gpu"] = one
		x.Resources.Limits = corev1.ResourceList{"example.com/gpu": one}
	}
	return x
}

func (c *cluster) selector() *metav1.LabelSelector {
	switch c.r.IntN(6) {
	case 0:
		return &metav1.LabelSelector{}
	case 1:
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: metav1.LabelSelectorOpNotIn, Values: []string{"a"}}}}
	}
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": pick(c, "a", "b")}}
}

func (c *cluster) term() corev1.PodAffinityTerm {
	t := corev1.PodAffinityTerm{TopologyKey: pick(c, "zone", corev1.LabelHostname), LabelSelector: c.selector()}
	switch c.r.IntN(5) {
	case 0:
		t.Namespaces = []string{"other"}
	case 1:
		t.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "x"}}
	}
	return t
}

func (c *cluster) terms(p *corev1.Pod, odds int) {
	if c.odds(odds) {
		affinityOf(p).PodAffinity = &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{c.term()}}
	}
	if c.odds(odds) {
		affinityOf(p).PodAntiAffinity = &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{c.term()}}
	}
	if c.odds(odds) {
		a := affinityOf(p)
		if a.PodAffinity == nil {
			a.PodAffinity = &corev1.PodAffinity{}
		}
		a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution = []corev1.WeightedPodAffinityTerm{{Weight: int32(1 + c.r.IntN(100)), PodAffinityTerm: c.term()}}
	}
	if c.odds(odds) {
		a := affinityOf(p)
		if a.PodAntiAffinity == nil {
			a.PodAntiAffinity = &corev1.PodAntiAffinity{}
		}
		a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution = []corev1.WeightedPodAffinityTerm{{Weight: int32(1 + c.r.IntN(100)), PodAffinityTerm: c.term()}}
	}
}

func affinityOf(p *corev1.Pod) *corev1.Affinity {
	if p.Spec.Affinity == nil {
		p.Spec.Affinity = &corev1.Affinity{}
	}
	return p.Spec.Affinity
}

func (c *cluster) requirement() corev1.NodeSelectorRequirement {
	key := pick(c, "zone", "disk")
	switch c.r.IntN(6) {
	case 0:
		return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpExists}
	case 1:
		return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpDoesNotExist}
	case 2:
		return corev1.NodeSelectorRequirement{Key: "disk", Operator: pick(c, corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt), Values: []string{"9"}}
	case 3:
		return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpNotIn, Values: []string{pick(c, "a", "ssd")}}
	}
	return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{pick(c, "a", "b", "ssd"), "hdd"}}
}

// choosy adds what a pod that waits says of nodes. Of preferred node affinity
// one term at most: Dunlin scores a node's share of all weights, upstream its
// share of the best node's.
func (c *cluster) choosy(p *corev1.Pod) {
	if c.odds(3) {
		p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: pick(c, "k", ""), Operator: corev1.TolerationOpExists, Effect: pick(c, "", corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule)})
	}
	if c.odds(4) {
		p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: "k", Operator: corev1.TolerationOpEqual, Value: pick(c, "v", "w")})
	}
	if c.odds(8) {
		p.Spec.NodeSelector = map[string]string{"disk": "ssd"}
	}
	if c.odds(4) {
		na := &corev1.NodeAffinity{}
		affinityOf(p).NodeAffinity = na
		if c.odds(2) {
			na.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{}
			for range 1 + c.r.IntN(2) {
				na.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms = append(na.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms,
					corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{c.requirement()}})
			}
		} else {
			na.PreferredDuringSchedulingIgnoredDuringExecution = []corev1.PreferredSchedulingTerm{{Weight: 10, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{c.requirement()}}}}
		}
	}
	seen := map[string]bool{}
	for range c.r.IntN(3) {
		s := corev1.TopologySpreadConstraint{MaxSkew: int32(1 + c.r.IntN(2)), TopologyKey: pick(c, "zone", corev1.LabelHostname), LabelSelector: c.selector(),
			WhenUnsatisfiable: pick(c, corev1.DoNotSchedule, corev1.ScheduleAnyway)}
		if s.WhenUnsatisfiable == corev1.DoNotSchedule && c.odds(4) {
			s.MinDomains = new(int32)
			*s.MinDomains = int32(1 + c.r.IntN(4))
		}
		if c.odds(3) {
			policy := pick(c, corev1.NodeInclusionPolicyHonor, corev1.NodeInclusionPolicyIgnore)
			s.NodeTaintsPolicy = &policy
		}
		if c.odds(4) {
			policy := corev1.NodeInclusionPolicyIgnore
			s.NodeAffinityPolicy = &policy
		}
		if key := s.TopologyKey + string(s.WhenUnsatisfiable); !seen[key] { // else it is invalid
			seen[key] = true
			p.Spec.TopologySpreadConstraints = append(p.Spec.TopologySpreadConstraints, s)
		}
	}
}

// place puts a pod on a node, whether it fits or not, as a user's nodeName
// does.
func (c *cluster) place(i int) {
	p := c.pod(fmt.Sprintf("p%d", i))
	c.terms(p, 6)
	p.Spec.NodeName = fmt.Sprintf("n%d", c.r.IntN(6))
	if _, err := c.w.Store.Get(fixture.Node, "", p.Spec.NodeName); err != nil {
		return
	}
	c.w.Advance(time.Minute) // no two are as old
	c.w.Create(p)
	// Upstream ages pods by their start, Dunlin by their creation.
	fixture.Change(c.w, fixture.Pod, p.Namespace, p.Name, registry.Status, func(p *corev1.Pod) {
		p.Status.Phase = corev1.PodRunning
		at := p.CreationTimestamp
		p.Status.StartTime = &at
	})
}

// budget protects the pods of one app.
func (c *cluster) budget(app string) {
	b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: app},
		Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}}}
	c.w.Create(b)
	fixture.Change(c.w, budgetKind, "default", app, registry.Status, func(b *policyv1.PodDisruptionBudget) { b.Status.DisruptionsAllowed = int32(c.r.IntN(3)) })
}

func (c *cluster) read() {
	c.spaces = fixture.List[*corev1.Namespace](c.w, fixture.Namespace, "")
	c.nodes = fixture.List[*corev1.Node](c.w, fixture.Node, "")
	c.budgets = fixture.List[*policyv1.PodDisruptionBudget](c.w, budgetKind, "")
	c.placed = nil
	for _, p := range fixture.List[*corev1.Pod](c.w, fixture.Pod, "") {
		if p.Spec.NodeName != "" {
			c.placed = append(c.placed, p)
		}
	}
}
