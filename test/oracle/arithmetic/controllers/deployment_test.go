package controllers

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	upstreamdeployment "k8s.io/kubernetes/pkg/controller/deployment"

	"github.com/dunlin-project/dunlin/controlplane/controllers/deployment"
	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// syncOf is the function by which one of upstream's controllers handles one
// key. It is not exported, and Run would handle keys until nothing changes:
// here what one look at the objects leads to is compared.
func syncOf(controller any) func(context.Context, string) error {
	f := reflect.ValueOf(controller).Elem().FieldByName("syncHandler")
	return *(*func(context.Context, string) error)(unsafe.Pointer(f.UnsafeAddr()))
}

// rolloutCase is a Deployment and its sets, in any state.
type rolloutCase struct {
	w    *fixture.World
	d    *appsv1.Deployment
	sets []*appsv1.ReplicaSet
	// settled: every set has the pods that it wants. Elsewhere Dunlin grows
	// less: what a set has too many of still counts towards the ceiling.
	settled bool
}

func newRolloutCase(t *testing.T, seed uint64) *rolloutCase {
	d := roll(seed)
	c := &rolloutCase{w: fixture.New(t), settled: !d.odds(4)}
	c.w.Advance(time.Since(c.w.Now())) // upstream looks at the real clock
	n := int32(d.r.IntN(12))
	obj := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "d", Annotations: map[string]string{"team": "x"}}, Spec: appsv1.DeploymentSpec{
		Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "d"}}, Template: fixture.Template("d"), Paused: d.odds(8),
		MinReadySeconds: int32(oneOf(d, 0, 0, 5)),
	}}
	image(&obj.Spec.Template, d.r.IntN(5))
	obj.Spec.RevisionHistoryLimit = new(int32)
	*obj.Spec.RevisionHistoryLimit = int32(d.r.IntN(4))
	if obj.Spec.Strategy.Type = appsv1.RecreateDeploymentStrategyType; !d.odds(5) {
		obj.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType, RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: d.share(4), MaxUnavailable: d.share(4)}}
		if r := obj.Spec.Strategy.RollingUpdate; zero(r.MaxSurge) && zero(r.MaxUnavailable) {
			*r.MaxSurge = intstr.FromInt32(1)
		}
	}
	if obj.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		c.settled = true // Dunlin waits for the pods themselves, of which there are none here
	}
	c.w.Create(obj)
	c.read()
	before := n
	if d.odds(4) {
		before = int32(d.r.IntN(12))
	}
	for k := range 5 {
		if !d.odds(3) {
			c.set(d, k, before)
		}
	}
	c.read()
	c.status(d)
	c.read()
	return c
}

func (c *rolloutCase) read() {
	c.d = fixture.Get[*appsv1.Deployment](c.w, fixture.Deployment, "default", "d").DeepCopy()
	c.sets = nil
	for _, rs := range fixture.List[*appsv1.ReplicaSet](c.w, fixture.ReplicaSet, "default") {
		c.sets = append(c.sets, rs.DeepCopy())
	}
}

// set makes the ReplicaSet of one template, as the Deployment's controller
// left it when before replicas were wanted.
func (c *rolloutCase) set(d dice, k int, before int32) {
	hash := fmt.Sprintf("h%d", k)
	t := fixture.Template("d")
	image(&t, k)
	t.Labels["pod-template-hash"] = hash
	size := int32(oneOf(d, 0, 0, d.r.IntN(8), d.r.IntN(8)))
	rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "d-" + hash, Labels: t.Labels, Annotations: map[string]string{"team": "x"},
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(c.d, appsv1.SchemeGroupVersion.WithKind("Deployment"))}},
		Spec: appsv1.ReplicaSetSpec{Replicas: &size, MinReadySeconds: c.d.Spec.MinReadySeconds, Template: t,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "d", "pod-template-hash": hash}}}}
	if !d.odds(8) {
		rs.Annotations["deployment.kubernetes.io/revision"] = strconv.Itoa(1 + d.r.IntN(9))
	}
	if !d.odds(8) {
		rs.Annotations["deployment.kubernetes.io/desired-replicas"] = strconv.Itoa(int(before))
		rs.Annotations["deployment.kubernetes.io/max-replicas"] = strconv.Itoa(int(before) + d.r.IntN(4))
	}
	if d.odds(8) {
		rs.Annotations["deployment.kubernetes.io/revision-history"] = "1,2"
	}
	c.w.Create(rs)
	if d.odds(2) {
		c.w.Advance(time.Second)
	}
	fixture.Change(c.w, fixture.ReplicaSet, "default", rs.Name, registry.Status, func(rs *appsv1.ReplicaSet) {
		st := &rs.Status
		st.ObservedGeneration, st.Replicas = rs.Generation, size
		if !c.settled && d.odds(2) {
			st.Replicas = int32(d.r.IntN(8))
		}
		if !c.settled && d.odds(4) {
			st.ObservedGeneration--
		}
		st.FullyLabeledReplicas = st.Replicas
		if st.Replicas > 0 {
			st.ReadyReplicas = oneOf(d, st.Replicas, st.Replicas, int32(d.r.IntN(int(st.Replicas)+1)))
		}
		if st.ReadyReplicas > 0 {
			st.AvailableReplicas = oneOf(d, st.ReadyReplicas, st.ReadyReplicas, int32(d.r.IntN(int(st.ReadyReplicas)+1)))
		}
		// Upstream gives a look up when a set has more than it wants.
		st.AvailableReplicas = min(st.AvailableReplicas, size)
		if d.odds(10) {
			st.Conditions = []appsv1.ReplicaSetCondition{{Type: appsv1.ReplicaSetReplicaFailure, Status: corev1.ConditionTrue, Reason: "FailedCreate", Message: rs.Name}}
		}
	})
}

// status is the Deployment's from a look before: sometimes of the same sets.
func (c *rolloutCase) status(d dice) {
	fixture.Change(c.w, fixture.Deployment, "default", "d", registry.Status, func(obj *appsv1.Deployment) {
		st := &obj.Status
		st.ObservedGeneration = obj.Generation
		for _, rs := range c.sets {
			st.Replicas += rs.Status.Replicas
			st.ReadyReplicas += rs.Status.ReadyReplicas
			st.AvailableReplicas += rs.Status.AvailableReplicas
			if rs.Spec.Template.Spec.Containers[0].Image == obj.Spec.Template.Spec.Containers[0].Image {
				st.UpdatedReplicas = rs.Status.Replicas
			}
		}
		if d.odds(4) {
			st.Replicas, st.UpdatedReplicas = st.Replicas+1, st.UpdatedReplicas+int32(d.r.IntN(2))
		}
		if d.odds(3) {
			return
		}
		at := metav1.NewTime(c.w.Now().Add(-oneOf(d, time.Second, time.Hour)))
		reason := oneOf(d, "ReplicaSetUpdated", "NewReplicaSetAvailable", "ProgressDeadlineExceeded", "DeploymentPaused")
		status := corev1.ConditionTrue
		if reason == "ProgressDeadlineExceeded" {
			status = corev1.ConditionFalse
		}
		st.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentProgressing, Status: status, Reason: reason, LastUpdateTime: at, LastTransitionTime: at}}
	})
}

// rollout is what one look at the sets led to: set by set its size, its
// revisions, and what its size was computed from.
type rollout struct {
	sizes     map[string]int32
	revisions map[string]string
	from      map[string]string
	status    appsv1.DeploymentStatus
}

func (c *rolloutCase) after(sets []*appsv1.ReplicaSet, st appsv1.DeploymentStatus) rollout {
	r := rollout{map[string]int32{}, map[string]string{}, map[string]string{}, st}
	for _, rs := range sets {
		name := rs.Name
		if !slices.ContainsFunc(c.sets, func(b *appsv1.ReplicaSet) bool { return b.Name == rs.Name }) {
			name = "new" // its hash is each one's own affair
		}
		r.sizes[name] = *rs.Spec.Replicas
		const prefix = "deployment.kubernetes.io/"
		r.revisions[name] = rs.Annotations[prefix+"revision"] + " after " + rs.Annotations[prefix+"revision-history"]
		r.from[name] = rs.Annotations[prefix+"desired-replicas"] + " of " + rs.Annotations[prefix+"max-replicas"]
	}
	return r
}

func (c *rolloutCase) ours() rollout {
	env := c.w.Env()
	c.w.Try(env, deployment.New(env))
	return c.after(fixture.List[*appsv1.ReplicaSet](c.w, fixture.ReplicaSet, "default"), fixture.Get[*appsv1.Deployment](c.w, fixture.Deployment, "default", "d").Status)
}

func (c *rolloutCase) theirs(t *testing.T) rollout {
	all := []runtime.Object{c.d.DeepCopy()}
	for _, rs := range c.sets {
		all = append(all, rs.DeepCopy())
	}
	client := fake.NewClientset(all...)
	factory := informers.NewSharedInformerFactory(client, 0)
	apps := factory.Apps().V1()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	dc, err := upstreamdeployment.NewDeploymentController(ctx, apps.Deployments(), apps.ReplicaSets(), factory.Core().V1().Pods(), client)
	if err != nil {
		t.Fatal(err)
	}
	if err := apps.Deployments().Informer().GetIndexer().Add(c.d.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	for _, rs := range c.sets {
		if err := apps.ReplicaSets().Informer().GetIndexer().Add(rs.DeepCopy()); err != nil {
			t.Fatal(err)
		}
	}
	if err := syncOf(dc)(ctx, "default/d"); err != nil {
		t.Fatal(err)
	}
	cancel()
	dc.Run(ctx, 0) // ends what New began
	sets, err := client.AppsV1().ReplicaSets("default").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	d, err := client.AppsV1().Deployments("default").Get(context.Background(), "d", metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	var left []*appsv1.ReplicaSet
	for i := range sets.Items {
		left = append(left, &sets.Items[i])
	}
	return c.after(left, d.Status)
}

// before is the size that a set had.
func (c *rolloutCase) before(name string) int32 {
	for _, rs := range c.sets {
		if rs.Name == name {
			return *rs.Spec.Replicas
		}
	}
	return 0
}

// compare says in what the two differ; held, that Dunlin grows some set less,
// and so may do otherwise with the others.
func (c *rolloutCase) compare(got, want rollout) (difference string, held bool) {
	resized := false
	for name, n := range want.sizes {
		was := c.before(name)
		resized = resized || n != was
		held = held || !c.settled && n > was && got.sizes[name] < n
	}
	if held {
		for name, n := range got.sizes {
			if n > max(want.sizes[name], c.before(name)) {
				return fmt.Sprintf("grows more: dunlin %v, upstream %v", got.sizes, want.sizes), held
			}
		}
		return "", held
	}
	for name, n := range want.sizes {
		// Of a set that has its size already upstream does not always note what
		// that comes from, and then takes every look for a scaling.
		if n == c.before(name) && name != "new" {
			delete(want.from, name)
			delete(got.from, name)
		}
	}
	// What upstream says at its next look Dunlin says at once.
	if !slices.ContainsFunc(want.status.Conditions, isProgressing) {
		got.status.Conditions = slices.DeleteFunc(slices.Clone(got.status.Conditions), func(x appsv1.DeploymentCondition) bool { return isProgressing(x) && x.Reason == "FoundNewReplicaSet" })
	}
	if resized { // upstream takes it from the sizes before
		got.status.UnavailableReplicas, want.status.UnavailableReplicas = 0, 0
	}
	for _, pair := range [][2]string{{fmt.Sprint(got.sizes), fmt.Sprint(want.sizes)}, {fmt.Sprint(got.revisions, got.from), fmt.Sprint(want.revisions, want.from)}, {rolloutCounts(&got.status), rolloutCounts(&want.status)}} {
		if pair[0] != pair[1] {
			return "\n dunlin   " + pair[0] + "\n upstream " + pair[1], held
		}
	}
	return "", held
}

// One look at a Deployment and its sets, in any state, leads to the same
// sizes, revisions, deletions and status. A set that has not the pods that it
// wants may make Dunlin grow the others less.
func TestDeployments(t *testing.T) {
	moved, less := 0, 0
	for seed := range uint64(cases) {
		c := newRolloutCase(t, seed)
		if c.d.Spec.Paused && !slices.ContainsFunc(c.sets, func(rs *appsv1.ReplicaSet) bool { return *rs.Spec.Replicas > 0 }) {
			continue // upstream grows the newest set, and removes it as one too many in the same look
		}
		want, got := c.theirs(t), c.ours()
		difference, held := c.compare(got, want)
		if difference != "" {
			t.Errorf("seed %d: %s%s", seed, c, difference)
		}
		for name, n := range want.sizes {
			if n != c.before(name) {
				moved++
			}
		}
		if held {
			less++
		}
		if t.Failed() && seed > 200 {
			t.Fatal("enough")
		}
	}
	t.Logf("%d sets resized; %d of %d times Dunlin waits where upstream grows", moved, less, cases)
}

func isProgressing(c appsv1.DeploymentCondition) bool {
	return c.Type == appsv1.DeploymentProgressing
}

func rolloutCounts(s *appsv1.DeploymentStatus) string {
	text := fmt.Sprintf("replicas %d updated %d ready %d available %d unavailable %d", s.Replicas, s.UpdatedReplicas, s.ReadyReplicas, s.AvailableReplicas, s.UnavailableReplicas)
	var conditions []string
	for _, c := range s.Conditions {
		conditions = append(conditions, fmt.Sprintf("%s=%s %s", c.Type, c.Status, c.Reason))
	}
	slices.Sort(conditions)
	return fmt.Sprint(text, conditions)
}

// String tells the case, for whoever reads a failure.
func (c *rolloutCase) String() string {
	s := &c.d.Spec
	text := fmt.Sprintf("%s %s replicas %d, paused %t, limit %d", s.Strategy.Type, s.Template.Spec.Containers[0].Image, *s.Replicas, s.Paused, *s.RevisionHistoryLimit)
	if r := s.Strategy.RollingUpdate; r != nil {
		text += fmt.Sprintf(", surge %s, unavailable %s", r.MaxSurge, r.MaxUnavailable)
	}
	text += "; " + rolloutCounts(&c.d.Status)
	for _, x := range c.d.Status.Conditions {
		text += fmt.Sprintf(", said %s ago", c.w.Now().Sub(x.LastUpdateTime.Time))
	}
	for _, rs := range c.sets {
		text += fmt.Sprintf("\n   %s %s size %d has %d ready %d available %d, seen %t, %v", rs.Name, rs.CreationTimestamp.Format(time.TimeOnly), *rs.Spec.Replicas, rs.Status.Replicas, rs.Status.ReadyReplicas, rs.Status.AvailableReplicas,
			rs.Generation == rs.Status.ObservedGeneration, rs.Annotations)
	}
	return text
}
