package plugins

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// ResourceQuota refuses what would exceed a quota of its namespace. Usage is
// added up from the live objects in the newest snapshot, so it needs no
// controller and cannot drift; what was admitted a moment ago and is not in
// the snapshot yet is counted as a reservation. Reservations are this
// server's own: two servers that admit at the same instant may together
// exceed a quota by what is in flight.
type ResourceQuota struct {
	clock clock.Clock

	mu       sync.Mutex
	reserved map[reservationKey]reservation
}

type reservationKey struct{ kind, namespace, name string }

type reservation struct {
	obj   runtime.Object
	until time.Time // monotonic
}

const (
	// reservationTime bounds how long an admitted object that never appears
	// (its write failed) is counted.
	reservationTime = 2 * time.Second
	maxReservations = 4096
)

// NewResourceQuota makes the plugin. clk dates deletions.
func NewResourceQuota(clk clock.Clock) *ResourceQuota {
	return &ResourceQuota{clock: clk, reserved: map[reservationKey]reservation{}}
}

// Name implements admission.Plugin.
func (*ResourceQuota) Name() string { return "ResourceQuota" }

// Admit implements admission.Plugin.
func (*ResourceQuota) Admit(context.Context, *admission.Attributes) error { return nil }

// Validate implements admission.Plugin.
func (p *ResourceQuota) Validate(_ context.Context, a *admission.Attributes) error {
	if a.Kind == nil || !a.Kind.Namespaced || a.Namespace == "" {
		return nil
	}
	key := reservationKey{a.Kind.StorageKind(), a.Namespace, a.Name}
	switch {
	case a.Operation == admission.Delete:
		p.mu.Lock()
		delete(p.reserved, key)
		p.mu.Unlock()
		return nil
	case a.Operation == admission.Create && a.Subresource == "":
	case a.Operation == admission.Update && grows(a):
	default:
		return nil
	}
	l, err := lister(a)
	if err != nil {
		return err
	}
	list, err := l.List(schema.GroupKind{Kind: "ResourceQuota"}, a.Namespace, labels.Everything(), fields.Everything())
	if err != nil {
		return err
	}
	var quotas []*corev1.ResourceQuota
	for _, obj := range list {
		if q, ok := obj.(*corev1.ResourceQuota); ok && tracks(q, a.Kind) && matches(q, a.Object) {
			quotas = append(quotas, q)
		}
	}
	if len(quotas) == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, q := range quotas {
		if err := p.check(a, q, l, key); err != nil {
			return err
		}
	}
	if a.Operation == admission.Create && !a.DryRun {
		p.reserve(key, a.Object)
	}
	return nil
}

// grows says whether an update can raise the use of a quota: a Service whose
// type changes, or a pod or claim that is resized.
func grows(a *admission.Attributes) bool {
	switch a.Object.(type) {
	case *corev1.Service, *corev1.PersistentVolumeClaim:
		return a.Subresource == ""
	case *corev1.Pod:
		return a.Subresource == "" || a.Subresource == "resize"
	}
	return false
}

// check compares one quota with what is used, reserved and asked for.
func (p *ResourceQuota) check(a *admission.Attributes, q *corev1.ResourceQuota, l admission.Lister, key reservationKey) error {
	now := p.clock.Now()
	asked := usageOf(a.Kind, a.Object, now)
	if pod, ok := a.Object.(*corev1.Pod); ok && a.Operation == admission.Create {
		if missing := unspecified(pod, q); missing != "" {
			return forbidden(a, "failed quota: %s: must specify %s", q.Name, missing)
		}
	}
	if a.Operation == admission.Update && a.Old != nil && matches(q, a.Old) {
		for name, old := range usageOf(a.Kind, a.Old, now) {
			if have, ok := asked[name]; ok {
				have = have.DeepCopy()
				have.Sub(old)
				asked[name] = have
			}
		}
	}
	used := corev1.ResourceList{}
	for name, amount := range asked {
		if _, limited := q.Spec.Hard[name]; limited && amount.Sign() > 0 {
			used[name] = amount.DeepCopy()
			zero := used[name]
			zero.Sub(amount)
			used[name] = zero
		}
	}
	if len(used) == 0 {
		return nil
	}
	if err := addUsed(used, q, a.Kind, l, now, nil); err != nil {
		return err
	}
	p.addReserved(used, q, a, key, now)
	exceeded, have, limit := corev1.ResourceList{}, corev1.ResourceList{}, corev1.ResourceList{}
	for name := range used {
		total := used[name].DeepCopy()
		total.Add(asked[name])
		if hard := q.Spec.Hard[name]; total.Cmp(hard) > 0 {
			exceeded[name], have[name], limit[name] = asked[name], used[name], hard
		}
	}
	if len(exceeded) == 0 {
		return nil
	}
	return forbidden(a, "exceeded quota: %s, requested: %s, used: %s, limited: %s", q.Name, quantities(exceeded), quantities(have), quantities(limit))
}

// addReserved adds what was admitted and is not in the snapshot yet, and
// forgets what is, or never came.
func (p *ResourceQuota) addReserved(used corev1.ResourceList, q *corev1.ResourceQuota, a *admission.Attributes, own reservationKey, now time.Time) {
	for key, r := range p.reserved {
		if key.namespace != a.Namespace || key.kind != own.kind || key == own {
			continue
		}
		if _, err := a.Read.Get(a.Kind.GroupKind(), key.namespace, key.name); err == nil || time.Now().After(r.until) {
			delete(p.reserved, key)
			continue
		}
		if matches(q, r.obj) {
			addTo(used, usageOf(a.Kind, r.obj, now))
		}
	}
}

func (p *ResourceQuota) reserve(key reservationKey, obj runtime.Object) {
	if len(p.reserved) >= maxReservations {
		for k, r := range p.reserved {
			if time.Now().After(r.until) {
				delete(p.reserved, k)
			}
		}
	}
	if len(p.reserved) < maxReservations {
		p.reserved[key] = reservation{obj: obj.DeepCopyObject(), until: time.Now().Add(reservationTime)}
	}
}

// unspecified lists the compute resources that the quota limits and a
// container leaves open, in upstream's words; "" if there are none.
func unspecified(pod *corev1.Pod, q *corev1.ResourceQuota) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(q.Spec.Hard)) {
		side, plain := requestsOf, name
		switch name {
		case corev1.ResourceCPU, corev1.ResourceMemory:
		case corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory:
			plain = corev1.ResourceName(strings.TrimPrefix(string(name), corev1.DefaultResourceRequestsPrefix))
		case corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory:
			side, plain = limitsOf, corev1.ResourceName(strings.TrimPrefix(string(name), "limits."))
		default:
			continue
		}
		if pod.Spec.Resources != nil {
			if _, ok := side(pod.Spec.Resources)[plain]; ok {
				continue
			}
		}
		var missing []string
		for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
			for i := range list {
				if _, ok := side(&list[i].Resources)[plain]; !ok {
					missing = append(missing, list[i].Name)
				}
			}
		}
		if len(missing) > 0 {
			slices.Sort(missing)
			out = append(out, string(name)+" for: "+strings.Join(missing, ","))
		}
	}
	return strings.Join(out, "; ")
}
