package quota

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

var configMapGK = schema.GroupKind{Kind: "ConfigMap"}

// limits that quotas of the test are about.
var limits = []corev1.ResourceName{"pods", "requests.cpu", "memory", "limits.cpu", "configmaps", "count/pods", "services", "services.nodeports", "services.loadbalancers"}

// counted tells once more, plainly, what a quota's limit is used.
func counted(w *fixture.World, q *corev1.ResourceQuota, name corev1.ResourceName) string {
	living, milli, mib, all := 0, 0, 0, 0
	for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, q.Namespace) {
		all++
		deadline := p.Spec.ActiveDeadlineSeconds != nil
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed || len(q.Spec.Scopes) > 0 && (q.Spec.Scopes[0] == corev1.ResourceQuotaScopeTerminating) != deadline {
			continue
		}
		living, milli, mib = living+1, milli+100, mib+64
	}
	ports, balancers, svcs := 0, 0, 0
	for _, s := range fixture.List[*corev1.Service](w, fixture.Service, q.Namespace) {
		svcs++
		if s.Spec.Type != corev1.ServiceTypeClusterIP {
			ports++
		}
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
			balancers++
		}
	}
	maps := len(fixture.List[*corev1.ConfigMap](w, configMapGK, q.Namespace))
	return map[corev1.ResourceName]string{"pods": fmt.Sprint(living), "requests.cpu": fmt.Sprintf("%dm", milli), "memory": fmt.Sprintf("%dMi", mib), "limits.cpu": "0",
		"configmaps": fmt.Sprint(maps), "count/pods": fmt.Sprint(all), "services": fmt.Sprint(svcs), "services.nodeports": fmt.Sprint(ports), "services.loadbalancers": fmt.Sprint(balancers)}[name]
}

func happens(rt *rapid.T, w *fixture.World, i int) {
	ns := rapid.SampledFrom([]string{"default", "other"}).Draw(rt, "namespace")
	m := metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprintf("o%d", i)}
	pods := fixture.List[*corev1.Pod](w, fixture.Pod, ns)
	svcs := fixture.List[*corev1.Service](w, fixture.Service, ns)
	switch what := rapid.IntRange(0, 9).Draw(rt, "happens"); {
	case what <= 1:
		p := &corev1.Pod{ObjectMeta: m, Spec: fixture.Template("a").Spec}
		if rapid.Bool().Draw(rt, "deadline") {
			p.Spec.ActiveDeadlineSeconds = new(int64(60))
		}
		w.Create(p)
	case what == 2 && len(pods) > 0:
		zero := int64(0)
		p := pods[rapid.IntRange(0, len(pods)-1).Draw(rt, "pod")]
		if _, _, err := w.Store.Delete(w.T.Context(), fixture.Pod, ns, p.Name, registry.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
			rt.Fatal(err)
		}
	case what <= 4 && len(pods) > 0:
		p := pods[rapid.IntRange(0, len(pods)-1).Draw(rt, "pod")]
		if p.Status.Phase == corev1.PodPending || p.Status.Phase == "" {
			fixture.Change(w, fixture.Pod, ns, p.Name, registry.Status, func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })
		}
	case what == 5:
		w.Create(&corev1.ConfigMap{ObjectMeta: m})
	case what == 6:
		if list := fixture.List[*corev1.ConfigMap](w, configMapGK, ns); len(list) > 0 {
			w.Delete(configMapGK, ns, list[0].Name, "")
		}
	case what == 7:
		w.Create(&corev1.Service{ObjectMeta: m, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}},
			Type: rapid.SampledFrom([]corev1.ServiceType{corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer}).Draw(rt, "type")}})
	case what == 8 && len(svcs) > 0:
		w.Delete(fixture.Service, ns, svcs[rapid.IntRange(0, len(svcs)-1).Draw(rt, "service")].Name, "")
	default:
		hard := corev1.ResourceList{}
		for _, name := range limits {
			if rapid.Bool().Draw(rt, string(name)) {
				hard[name] = resource.MustParse("1000")
			}
		}
		q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "q" + rapid.SampledFrom([]string{"1", "2"}).Draw(rt, "quota")}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}
		if rapid.IntRange(0, 2).Draw(rt, "scoped") == 0 {
			q.Spec.Scopes = []corev1.ResourceQuotaScope{rapid.SampledFrom([]corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating}).Draw(rt, "scope")}
			for _, name := range []corev1.ResourceName{"configmaps", "count/pods", "services", "services.nodeports", "services.loadbalancers"} {
				delete(hard, name)
			}
		}
		if _, err := w.Store.Get(quotaGK, ns, q.Name); err == nil {
			w.Delete(quotaGK, ns, q.Name, "")
		}
		w.Create(q)
	}
}

// Whatever comes and goes, and wherever the leader dies: quotas' limits are
// never changed, and in the end each says what is used, no more and no less.
func TestUsedThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
		quotas := func() []*corev1.ResourceQuota {
			return append(fixture.List[*corev1.ResourceQuota](w, quotaGK, "default"), fixture.List[*corev1.ResourceQuota](w, quotaGK, "other")...)
		}
		reign := w.Reign(rt, func() error {
			for _, q := range quotas() {
				if q.Generation > 1 {
					return fmt.Errorf("the limits of %s were changed", q.Name)
				}
			}
			return nil
		}, func(env loop.Env) []*loop.Controller { return []*loop.Controller{New(env)} })
		for i := range rapid.IntRange(3, 30).Draw(rt, "steps") {
			switch rapid.IntRange(0, 4).Draw(rt, "step") {
			case 0:
				reign.Elect(rapid.IntRange(0, 2).Draw(rt, "writes"))
				reign.Work()
			case 1:
				reign.Work()
			default:
				happens(rt, w, i)
			}
		}
		reign.Finish()
		for _, q := range quotas() {
			if len(q.Status.Used) != len(q.Spec.Hard) || len(q.Status.Hard) != len(q.Spec.Hard) {
				rt.Fatalf("%s/%s: status %+v of %+v", q.Namespace, q.Name, q.Status, q.Spec)
			}
			for name := range q.Spec.Hard {
				if got, want := q.Status.Used[name], counted(w, q, name); got.Cmp(resource.MustParse(want)) != 0 {
					rt.Fatalf("%s/%s: %s is used %s, want %s", q.Namespace, q.Name, name, got.String(), want)
				}
			}
		}
	})
}
