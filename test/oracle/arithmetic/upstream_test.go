package arithmetic

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/backend/queue"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultpreemption"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
	"k8s.io/kubernetes/pkg/scheduler/framework/preemption"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
)

// The plugins that Dunlin has, in its order of filters, with its weights.
var filters = []string{"NodeUnschedulable", "TaintToleration", "NodeAffinity", "NodePorts", "NodeResourcesFit", "PodTopologySpread", "InterPodAffinity"}

var weights = map[string]int32{"TaintToleration": 3, "NodeAffinity": 2, "PodTopologySpread": 2, "InterPodAffinity": 2, "NodeResourcesFit": 1, "ImageLocality": 1}

// upstream is upstream's scheduler over one cluster.
type upstream struct {
	t    testing.TB
	f    framework.Framework
	snap *cache.Snapshot
}

func profile() *config.KubeSchedulerProfile {
	set := func(names ...string) config.PluginSet {
		var s config.PluginSet
		for _, n := range names {
			s.Enabled = append(s.Enabled, config.Plugin{Name: n, Weight: weights[n]})
		}
		return s
	}
	var scored []string
	for n := range weights {
		scored = append(scored, n)
	}
	two := []config.ResourceSpec{{Name: "cpu", Weight: 1}, {Name: "memory", Weight: 1}}
	return &config.KubeSchedulerProfile{
		SchedulerName: corev1.DefaultSchedulerName,
		Plugins: &config.Plugins{
			QueueSort: set("PrioritySort"), Bind: set("DefaultBinder"), Filter: set(filters...),
			PreFilter: set("NodeAffinity", "NodePorts", "NodeResourcesFit", "PodTopologySpread", "InterPodAffinity"),
			PreScore:  set("TaintToleration", "NodeAffinity", "NodeResourcesFit", "PodTopologySpread", "InterPodAffinity"),
			Score:     set(scored...),
		},
		PluginConfig: []config.PluginConfig{
			{Name: "NodeResourcesFit", Args: &config.NodeResourcesFitArgs{ScoringStrategy: &config.ScoringStrategy{Type: config.MostAllocated, Resources: two}}},
			{Name: "InterPodAffinity", Args: &config.InterPodAffinityArgs{HardPodAffinityWeight: 1}},
			{Name: "PodTopologySpread", Args: &config.PodTopologySpreadArgs{DefaultingType: config.ListDefaulting}},
			{Name: "NodeAffinity", Args: &config.NodeAffinityArgs{}},
		},
	}
}

func newUpstream(ctx context.Context, t testing.TB, c *cluster) *upstream {
	t.Helper()
	metrics.Register()
	var objects []runtime.Object
	for i := range c.spaces {
		objects = append(objects, c.spaces[i])
	}
	client := fake.NewClientset(objects...)
	factory := informers.NewSharedInformerFactory(client, 0)
	snap := cache.NewSnapshot(c.placed, c.nodes)
	f, err := frameworkruntime.NewFramework(ctx, plugins.NewInTreeRegistry(), profile(),
		frameworkruntime.WithClientSet(client), frameworkruntime.WithInformerFactory(factory), frameworkruntime.WithSnapshotSharedLister(snap), frameworkruntime.WithMutableSnapshotLister(snap),
		frameworkruntime.WithPodNominator(queue.NewTestQueue(ctx, nil)), frameworkruntime.WithLogger(klog.FromContext(ctx)))
	if err != nil {
		t.Fatal(err)
	}
	factory.StartWithContext(ctx)
	factory.WaitForCacheSyncWithContext(ctx)
	return &upstream{t, f, snap}
}

// answer is what upstream says of a pod.
type answer struct {
	state fwk.CycleState
	// objects: the first filter that refuses the node; "" is none.
	objects map[string]string
	// room: the nodes whose refusal a preemption may end.
	room   []fwk.NodeInfo
	scores map[string]int64
}

func (u *upstream) ask(ctx context.Context, pod *corev1.Pod) answer {
	u.t.Helper()
	a := answer{state: framework.NewCycleState(), objects: map[string]string{}, scores: map[string]int64{}}
	all, err := u.snap.NodeInfos().List()
	if err != nil {
		u.t.Fatal(err)
	}
	only, status, _ := u.f.RunPreFilterPlugins(ctx, a.state, pod)
	if !status.IsSuccess() {
		for _, n := range all {
			a.objects[n.Node().Name] = status.Plugin()
		}
		return a
	}
	var feasible []fwk.NodeInfo
	for _, n := range all {
		name := n.Node().Name
		if only != nil && !only.AllNodes() && !only.NodeNames.Has(name) {
			a.objects[name] = "NodeAffinity"
			continue
		}
		s := u.f.RunFilterPlugins(ctx, a.state, pod, n)
		if !s.IsSuccess() {
			a.objects[name] = s.Plugin()
		}
		switch s.Code() {
		case fwk.Success:
			feasible = append(feasible, n)
		case fwk.Unschedulable:
			a.room = append(a.room, n)
		}
	}
	if len(feasible) == 0 {
		return a
	}
	if s := u.f.RunPreScorePlugins(ctx, a.state, pod, feasible); !s.IsSuccess() {
		u.t.Fatal(s.AsError())
	}
	scores, s := u.f.RunScorePlugins(ctx, a.state, pod, feasible)
	if !s.IsSuccess() {
		u.t.Fatal(s.AsError())
	}
	for _, x := range scores {
		a.scores[x.Name] = x.TotalScore
	}
	return a
}

// preempt lists the victims by candidate node, and upstream's choice.
func (u *upstream) preempt(ctx context.Context, pod *corev1.Pod, a answer, budgets []*policyv1.PodDisruptionBudget) (map[string]preemption.Candidate, string) {
	u.t.Helper()
	pl, err := defaultpreemption.New(ctx, &config.DefaultPreemptionArgs{MinCandidateNodesPercentage: 100, MinCandidateNodesAbsolute: 1000}, u.f, feature.Features{})
	if err != nil {
		u.t.Fatal(err)
	}
	if len(a.room) == 0 {
		return nil, ""
	}
	list, _, err := pl.Evaluator.DryRunPreemption(ctx, a.state, pod, a.room, budgets, 0, 1000)
	if err != nil {
		u.t.Fatal(err)
	}
	out := map[string]preemption.Candidate{}
	for _, c := range list {
		out[c.Name()] = c
	}
	best := pl.Evaluator.SelectCandidate(ctx, list)
	if best == nil {
		return out, ""
	}
	return out, best.Name()
}
