// Package quota keeps status.used of ResourceQuotas: what a namespace holds
// and requests. Enforcing is admission's.
//
// Owned fields: status of ResourceQuotas.
package quota

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// gather is how long changes are gathered before counting again.
const gather = 200 * time.Millisecond

var (
	quotaGK   = schema.GroupKind{Kind: "ResourceQuota"}
	podGK     = schema.GroupKind{Kind: "Pod"}
	serviceGK = schema.GroupKind{Kind: "Service"}
)

type controller struct{ env loop.Env }

// New makes the controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env}
	sources := []loop.Source{loop.Self(quotaGK.String())}
	for _, k := range manifests.Kinds() {
		if k.Namespaced && !k.Soft && k.GroupKind() != quotaGK {
			sources = append(sources, loop.Source{Kind: k.StorageKind(), Keys: c.contentChanged})
		}
	}
	return &loop.Controller{Name: "resource-quota", Sources: sources, Reconcile: c.reconcile, Delay: gather}
}

// contentChanged wakes the namespace's quotas when what they count changed.
func (c *controller) contentChanged(ev state.Event, add func(state.Key)) {
	if ev.Type == state.Modified && ev.Prev != nil && ev.Prev.Header.Phase == ev.Record.Header.Phase &&
		ev.Prev.Spec == ev.Record.Spec && slices.Equal(ev.Prev.Header.Requests, ev.Record.Header.Requests) {
		return
	}
	snap := c.env.Reader.Snapshot()
	if snap.Len(quotaGK.String(), "") == 0 {
		return
	}
	snap.Range(quotaGK.String(), ev.Record.Header.Key.Namespace, state.Key{}, func(r *state.Record) bool {
		add(r.Header.Key)
		return true
	})
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(quotaGK, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	q, ok := obj.(*corev1.ResourceQuota)
	if !ok {
		return 0, loop.Terminal(fmt.Errorf("quota %s is a %T", key.Name, obj))
	}
	used, err := c.count(q)
	if err != nil {
		return 0, err
	}
	want := corev1.ResourceQuotaStatus{Hard: q.Spec.Hard.DeepCopy(), Used: used}
	if apiequality.Semantic.DeepEqual(want, q.Status) {
		return 0, nil
	}
	_, err = c.env.Store.Update(ctx, quotaGK, key.Namespace, key.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		n, ok := cur.(*corev1.ResourceQuota)
		if !ok || n.UID != q.UID {
			return nil, errors.New("another quota has the name by now")
		}
		n.Status = want
		return n, nil
	}, c.env.Write())
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	return 0, err
}

// count computes what the quota's hard limits are about, and nothing else.
func (c *controller) count(q *corev1.ResourceQuota) (corev1.ResourceList, error) {
	used := corev1.ResourceList{}
	for name := range q.Spec.Hard {
		used[name] = resource.MustParse("0")
	}
	snap := c.env.Reader.Snapshot()
	for name := range q.Spec.Hard {
		if gk, ok := objectCount(name); ok {
			used[name] = *resource.NewQuantity(int64(snap.Len(gk.String(), q.Namespace)), resource.DecimalSI)
		}
	}
	if err := c.countPods(snap, q, used); err != nil {
		return nil, err
	}
	return used, c.countServices(snap, q, used)
}

// objectCount is the kind that a limit counts: "configmaps",
// "count/deployments.apps".
func objectCount(name corev1.ResourceName) (schema.GroupKind, bool) {
	text := string(name)
	switch text {
	case "pods", "services.loadbalancers", "services.nodeports":
		return schema.GroupKind{}, false // counted with conditions
	}
	text = strings.TrimPrefix(text, "count/")
	for _, k := range manifests.Kinds() {
		if k.Namespaced && k.AliasOf == (schema.GroupKind{}) && k.GVR().GroupResource().String() == text {
			return k.GroupKind(), true
		}
	}
	return schema.GroupKind{}, false
}

func (c *controller) countPods(snap state.Snapshot, q *corev1.ResourceQuota, used corev1.ResourceList) error {
	var failed error
	snap.Range(podGK.String(), q.Namespace, state.Key{}, func(r *state.Record) bool {
		if r.Header.Phase == string(corev1.PodFailed) || r.Header.Phase == string(corev1.PodSucceeded) {
			return true
		}
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			failed = fmt.Errorf("decode pod %s: %w", r.Header.Key.Name, err)
			return false
		}
		if pod, ok := obj.(*corev1.Pod); ok && inScope(q, pod) {
			addPod(used, pod)
		}
		return true
	})
	return failed
}

// addPod adds a pod's share to the limits that exist.
func addPod(used corev1.ResourceList, pod *corev1.Pod) {
	add := func(name corev1.ResourceName, v resource.Quantity) {
		if sum, ok := used[name]; ok {
			sum.Add(v)
			used[name] = sum
		}
	}
	add(corev1.ResourcePods, resource.MustParse("1"))
	for name, v := range manifests.PodRequests(pod) {
		if name == corev1.ResourcePods {
			continue
		}
		if name == corev1.ResourceCPU || name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage {
			add(name, v)
		}
		add("requests."+name, v)
	}
	for i := range pod.Spec.Containers {
		for name, v := range pod.Spec.Containers[i].Resources.Limits {
			add("limits."+name, v)
		}
	}
}

// inScope applies the quota's scopes (BestEffort, Terminating and their
// opposites, PriorityClass).
func inScope(q *corev1.ResourceQuota, pod *corev1.Pod) bool {
	match := func(scope corev1.ResourceQuotaScope) bool {
		bestEffort := manifests.QOSClass(pod) == corev1.PodQOSBestEffort
		terminating := pod.Spec.ActiveDeadlineSeconds != nil
		switch scope {
		case corev1.ResourceQuotaScopeBestEffort:
			return bestEffort
		case corev1.ResourceQuotaScopeNotBestEffort:
			return !bestEffort
		case corev1.ResourceQuotaScopeTerminating:
			return terminating
		case corev1.ResourceQuotaScopeNotTerminating:
			return !terminating
		}
		return true
	}
	for _, s := range q.Spec.Scopes {
		if !match(s) {
			return false
		}
	}
	if q.Spec.ScopeSelector == nil {
		return true
	}
	for _, e := range q.Spec.ScopeSelector.MatchExpressions {
		if e.ScopeName != corev1.ResourceQuotaScopePriorityClass {
			if !match(e.ScopeName) {
				return false
			}
			continue
		}
		has := pod.Spec.PriorityClassName != ""
		in := slices.Contains(e.Values, pod.Spec.PriorityClassName)
		switch e.Operator {
		case corev1.ScopeSelectorOpIn:
			has = in
		case corev1.ScopeSelectorOpNotIn:
			has = !in
		case corev1.ScopeSelectorOpDoesNotExist:
			has = !has
		}
		if !has {
			return false
		}
	}
	return true
}

func (c *controller) countServices(snap state.Snapshot, q *corev1.ResourceQuota, used corev1.ResourceList) error {
	_, nodePorts := used[corev1.ResourceServicesNodePorts]
	_, balancers := used[corev1.ResourceServicesLoadBalancers]
	if !nodePorts && !balancers {
		return nil
	}
	var failed error
	var ports, lbs int64
	snap.Range(serviceGK.String(), q.Namespace, state.Key{}, func(r *state.Record) bool {
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			failed = fmt.Errorf("decode service %s: %w", r.Header.Key.Name, err)
			return false
		}
		if svc, ok := obj.(*corev1.Service); ok {
			if svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
				lbs++
			}
			for _, p := range svc.Spec.Ports {
				if p.NodePort != 0 {
					ports++
				}
			}
		}
		return true
	})
	if nodePorts {
		used[corev1.ResourceServicesNodePorts] = *resource.NewQuantity(ports, resource.DecimalSI)
	}
	if balancers {
		used[corev1.ResourceServicesLoadBalancers] = *resource.NewQuantity(lbs, resource.DecimalSI)
	}
	return failed
}
