package quota

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func TestUsed(t *testing.T) {
	w := fixture.New(t)
	hard := corev1.ResourceList{}
	for _, name := range []corev1.ResourceName{"pods", "requests.cpu", "memory", "limits.cpu", "configmaps", "count/deployments.apps", "services", "services.nodeports", "requests.example.com/gpu"} {
		hard[name] = resource.MustParse("10")
	}
	w.Create(&corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "q"}, Spec: corev1.ResourceQuotaSpec{Hard: hard}})
	w.Create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"}})
	for _, n := range []string{"a", "b", "over"} {
		w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: n}, Spec: fixture.Template("a").Spec})
	}
	fixture.Change(w, fixture.Pod, "default", "over", registry.Status, func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })
	w.Create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80}}}})
	w.Settle(New(w.Env()))
	st := fixture.Get[*corev1.ResourceQuota](w, quotaGK, "default", "q").Status
	want := map[corev1.ResourceName]string{"pods": "2", "requests.cpu": "200m", "memory": "128Mi", "limits.cpu": "0", "configmaps": "1",
		"count/deployments.apps": "0", "services": "1", "services.nodeports": "1", "requests.example.com/gpu": "0"}
	if len(st.Used) != len(want) || len(st.Hard) != len(want) {
		t.Fatalf("status %+v", st)
	}
	for name, v := range want {
		if got := st.Used[name]; got.Cmp(resource.MustParse(v)) != 0 {
			t.Errorf("%s: used %s, want %s", name, got.String(), v)
		}
	}
}
