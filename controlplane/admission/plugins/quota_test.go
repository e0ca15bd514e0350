package plugins

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/admission"
)

func quota(name string, hard corev1.ResourceList, scopes ...corev1.ResourceQuotaScope) *corev1.ResourceQuota {
	return &corev1.ResourceQuota{ObjectMeta: inD(name), Spec: corev1.ResourceQuotaSpec{Hard: hard, Scopes: scopes}}
}

func sized(name, cpu, limit string) *corev1.Pod {
	p := newTestPod(name, "a")
	if cpu != "" {
		p.Spec.Containers[0].Resources.Requests = amounts("cpu", cpu)
	}
	if limit != "" {
		p.Spec.Containers[0].Resources.Limits = amounts("cpu", limit)
	}
	return p
}

func service(name string, t corev1.ServiceType, ports int) *corev1.Service {
	s := &corev1.Service{ObjectMeta: inD(name), Spec: corev1.ServiceSpec{Type: t}}
	for range ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Port: 80})
	}
	return s
}

func TestQuota(t *testing.T) {
	done := sized("done", "1", "")
	done.Status.Phase = corev1.PodSucceeded
	stuck := sized("stuck", "1", "")
	stuck.DeletionTimestamp, stuck.DeletionGracePeriodSeconds = ptr(metav1.NewTime(now.Add(-time.Hour))), ptr[int64](30)
	deadline := sized("deadline", "", "")
	deadline.Spec.ActiveDeadlineSeconds = ptr[int64](5)
	gpu := newTestPod("gpu", "a")
	gpu.Spec.Containers[0].Resources.Requests = amounts("example.com/gpu", "2")
	critical := sized("critical", "", "")
	critical.Spec.PriorityClassName = "high"
	byClass := quota("q", amounts("pods", "0"))
	byClass.Spec.ScopeSelector = &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{
		{ScopeName: corev1.ResourceQuotaScopePriorityClass, Operator: corev1.ScopeSelectorOpIn, Values: []string{"high"}},
	}}
	for _, c := range []struct {
		name string
		read *objects
		a    func(*objects) *admission.Attributes
		text string
	}{
		{"no quota", &objects{}, func(r *objects) *admission.Attributes { return create(sized("p", "1", ""), r) }, ""},
		{"fits", (&objects{}).add(quota("q", amounts("pods", "2", "cpu", "2")), sized("o", "1", "")), func(r *objects) *admission.Attributes { return create(sized("p", "1", ""), r) }, ""},
		{"too many pods", (&objects{}).add(quota("q", amounts("pods", "1")), sized("o", "", "")), func(r *objects) *admission.Attributes { return create(sized("p", "", ""), r) },
			`pods "p" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1`},
		{"too much cpu", (&objects{}).add(quota("q", amounts("requests.cpu", "1500m", "pods", "9")), sized("o", "1", "")), func(r *objects) *admission.Attributes { return create(sized("p", "1", ""), r) },
			"exceeded quota: q, requested: requests.cpu=1, used: requests.cpu=1, limited: requests.cpu=1500m"},
		{"limits", (&objects{}).add(quota("q", amounts("limits.cpu", "1")), sized("o", "", "600m")), func(r *objects) *admission.Attributes { return create(sized("p", "", "600m"), r) },
			"exceeded quota: q, requested: limits.cpu=600m, used: limits.cpu=600m, limited: limits.cpu=1"},
		{"must say", (&objects{}).add(quota("q", amounts("limits.cpu", "1", "memory", "1Gi"))), func(r *objects) *admission.Attributes { return create(newTestPod("p", "a", "b"), r) },
			"failed quota: q: must specify limits.cpu for: c0,c1; memory for: c0,c1"},
		{"finished pods do not count", (&objects{}).add(quota("q", amounts("pods", "1")), done), func(r *objects) *admission.Attributes { return create(sized("p", "", ""), r) }, ""},
		{"but as objects", (&objects{}).add(quota("q", amounts("count/pods", "1")), done), func(r *objects) *admission.Attributes { return create(sized("p", "", ""), r) },
			"requested: count/pods=1, used: count/pods=1, limited: count/pods=1"},
		{"pods that should be gone do not count", (&objects{}).add(quota("q", amounts("pods", "1")), stuck), func(r *objects) *admission.Attributes { return create(sized("p", "", ""), r) }, ""},
		{"another namespace", (&objects{}).add(&corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "e", Name: "q"}, Spec: corev1.ResourceQuotaSpec{Hard: amounts("pods", "0")}}), func(r *objects) *admission.Attributes { return create(sized("p", "", ""), r) }, ""},
		{"scope holds", (&objects{}).add(quota("q", amounts("pods", "0"), corev1.ResourceQuotaScopeTerminating)), func(r *objects) *admission.Attributes { return create(deadline, r) }, "exceeded quota"},
		{"scope does not hold", (&objects{}).add(quota("q", amounts("pods", "0"), corev1.ResourceQuotaScopeNotTerminating)), func(r *objects) *admission.Attributes { return create(deadline, r) }, ""},
		{"best effort", (&objects{}).add(quota("q", amounts("pods", "0"), corev1.ResourceQuotaScopeBestEffort)), func(r *objects) *admission.Attributes { return create(sized("p", "1", ""), r) }, ""},
		{"by class", (&objects{}).add(byClass), func(r *objects) *admission.Attributes { return create(critical, r) }, "exceeded quota"},
		{"by another class", (&objects{}).add(byClass), func(r *objects) *admission.Attributes { return create(sized("p", "", ""), r) }, ""},
		{"extended", (&objects{}).add(quota("q", amounts("requests.example.com/gpu", "1"))), func(r *objects) *admission.Attributes { return create(gpu, r) }, "requested: requests.example.com/gpu=2"},
		{"config maps", (&objects{}).add(quota("q", amounts("configmaps", "1")), &corev1.ConfigMap{ObjectMeta: inD("o")}), func(r *objects) *admission.Attributes {
			return create(&corev1.ConfigMap{ObjectMeta: inD("p")}, r)
		}, `configmaps "p" is forbidden: exceeded quota: q, requested: configmaps=1, used: configmaps=1, limited: configmaps=1`},
		{"update does not count again", (&objects{}).add(quota("q", amounts("configmaps", "1")), &corev1.ConfigMap{ObjectMeta: inD("o")}), func(r *objects) *admission.Attributes {
			o := &corev1.ConfigMap{ObjectMeta: inD("o")}
			return request(admission.Update, o, o, r)
		}, ""},
		{"node ports", (&objects{}).add(quota("q", amounts("services.nodeports", "3")), service("o", corev1.ServiceTypeNodePort, 2)), func(r *objects) *admission.Attributes {
			return create(service("p", corev1.ServiceTypeNodePort, 2), r)
		}, "requested: services.nodeports=2, used: services.nodeports=2, limited: services.nodeports=3"},
		{"a service becomes a load balancer", (&objects{}).add(quota("q", amounts("services.loadbalancers", "0")), service("o", corev1.ServiceTypeClusterIP, 1)), func(r *objects) *admission.Attributes {
			return request(admission.Update, service("o", corev1.ServiceTypeLoadBalancer, 1), service("o", corev1.ServiceTypeClusterIP, 1), r)
		}, "requested: services.loadbalancers=1"},
		{"a service stays one", (&objects{}).add(quota("q", amounts("services.loadbalancers", "0")), service("o", corev1.ServiceTypeLoadBalancer, 1)), func(r *objects) *admission.Attributes {
			return request(admission.Update, service("o", corev1.ServiceTypeLoadBalancer, 1), service("o", corev1.ServiceTypeLoadBalancer, 1), r)
		}, ""},
		{"status is not asked", (&objects{}).add(quota("q", amounts("pods", "0"))), func(r *objects) *admission.Attributes {
			a := request(admission.Update, sized("o", "", ""), sized("o", "", ""), r)
			a.Subresource = "status"
			return a
		}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			refused(t, run(t, NewResourceQuota(fixed), c.a(c.read)), metav1.StatusReasonForbidden, c.text)
		})
	}
}

// TestQuotaHoldsUnderConcurrency: many creates at once, none of which is in
// the snapshot yet, never exceed the quota together.
func TestQuotaHoldsUnderConcurrency(t *testing.T) {
	const limit, attempts = 5, 40
	read := (&objects{}).add(quota("q", amounts("pods", fmt.Sprint(limit))))
	p := NewResourceQuota(fixed)
	var mu sync.Mutex
	admitted := 0
	var wg sync.WaitGroup
	for i := range attempts {
		wg.Go(func() {
			if p.Validate(t.Context(), create(sized(fmt.Sprintf("p%d", i), "", ""), read)) == nil {
				mu.Lock()
				admitted++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if admitted != limit {
		t.Errorf("%d admitted, want %d", admitted, limit)
	}
}

func TestReservations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		read := (&objects{}).add(quota("q", amounts("pods", "1")))
		p := NewResourceQuota(fixed)
		first, second := sized("first", "", ""), sized("second", "", "")
		refused(t, run(t, p, create(first, read)), "", "")
		refused(t, run(t, p, create(first, read)), "", "") // the same object again, after a lost race
		refused(t, run(t, p, create(second, read)), metav1.StatusReasonForbidden, "exceeded quota")
		// Its write failed: it is forgotten after a while.
		time.Sleep(reservationTime + time.Millisecond)
		refused(t, run(t, p, create(second, read)), "", "")
		// It appears: counted once.
		read.add(second)
		refused(t, run(t, p, create(sized("third", "", ""), read)), metav1.StatusReasonForbidden, "used: pods=1")
		// It is deleted at once: nothing is left.
		refused(t, run(t, p, request(admission.Delete, nil, second, read)), "", "")
		read.remove(second)
		refused(t, run(t, p, create(sized("third", "", ""), read)), "", "")
		// A dry run reserves nothing.
		q := NewResourceQuota(fixed)
		a := create(sized("dry", "", ""), read)
		a.DryRun = true
		refused(t, run(t, q, a), "", "")
		refused(t, run(t, q, create(sized("wet", "", ""), read)), "", "")
	})
}

func TestQuotaUsed(t *testing.T) {
	done := sized("done", "1", "")
	done.Status.Phase = corev1.PodFailed
	read := (&objects{}).add(sized("a", "100m", "1"), sized("b", "200m", ""), done, service("s", corev1.ServiceTypeLoadBalancer, 3), &corev1.Secret{ObjectMeta: inD("x")})
	q := quota("q", amounts("pods", "9", "count/pods", "9", "requests.cpu", "9", "limits.cpu", "9", "services", "9", "services.nodeports", "9", "services.loadbalancers", "9", "secrets", "9", "configmaps", "9", "count/deployments.apps", "9"))
	used, err := QuotaUsed(q, read, now)
	if err != nil {
		t.Fatal(err)
	}
	want := "configmaps=0,count/deployments.apps=0,count/pods=3,limits.cpu=1,pods=2,requests.cpu=300m,secrets=1,services=1,services.loadbalancers=1,services.nodeports=3"
	if got := quantities(used); got != want {
		t.Errorf("\n got %s\nwant %s", got, want)
	}
}

// TestQuotaNeverExceeded: whatever sequence of creates and deletes, what
// lives never exceeds the quota, and nothing that fits is refused.
func TestQuotaNeverExceeded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(0, 4).Draw(t, "limit")
		read := (&objects{}).add(quota("q", amounts("pods", fmt.Sprint(limit))))
		p := NewResourceQuota(fixed)
		var live []*corev1.Pod
		for i := range rapid.IntRange(1, 20).Draw(t, "steps") {
			if len(live) > 0 && rapid.Bool().Draw(t, "delete") {
				gone := live[0]
				live = live[1:]
				if err := p.Validate(t.Context(), request(admission.Delete, nil, gone, read)); err != nil {
					t.Fatal(err)
				}
				read.remove(gone)
				continue
			}
			pod := sized(fmt.Sprintf("p%d", i), "", "")
			err := p.Validate(t.Context(), create(pod, read))
			if (err == nil) != (len(live) < limit) {
				t.Fatalf("%d of %d live: %v", len(live), limit, err)
			}
			if err == nil {
				live = append(live, pod)
				read.add(pod)
			}
		}
	})
}
