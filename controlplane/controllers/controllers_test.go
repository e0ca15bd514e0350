package controllers_test

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers"
	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/nodelifecycle"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

type steadyLeases struct{ nodes []string }

func (l steadyLeases) InTerm(uint64) (map[string]nodelifecycle.LeaseInfo, bool) {
	m := map[string]nodelifecycle.LeaseInfo{}
	for _, n := range l.nodes {
		m[n] = nodelifecycle.LeaseInfo{Renewed: true}
	}
	return m, true
}

func (steadyLeases) Expired(string) bool { return false }

// leadership runs all components for one term.
func leadership(w *fixture.World, reg prometheus.Registerer, term uint64) (stop func()) {
	list := controllers.All(controllers.Config{
		Store: w.Store, Leases: steadyLeases{[]string{"n1", "n2"}}, ServiceCIDR: netip.MustParsePrefix("10.43.0.0/16"),
		Servers: func() []netip.AddrPort { return []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:6443")} },
		CAPEM:   []byte("pem"), Events: events.New(w.Store, events.Config{Clock: w}), Clock: w, Metrics: reg,
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, c := range list {
		wg.Go(func() {
			if err := c.Run(ctx, term); err != nil {
				w.T.Errorf("%s: %v", c.Name, err)
			}
		})
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// From a manifest to endpoints and back, with everything running, over two
// leadership terms; then at rest nothing is written.
func TestEverythingTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := fixture.New(t)
		w.AddNode("n1")
		w.AddNode("n2")
		stop := leadership(w, prometheus.NewRegistry(), 1)
		pass := func(seconds int) {
			t.Helper()
			for range seconds {
				time.Sleep(time.Second)
				w.Advance(time.Second)
				synctest.Wait()
				w.Report(nil)
			}
			synctest.Wait()
		}
		w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "app"}})
		three := int32(3)
		tpl := fixture.Template("web")
		w.Create(&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "app", Name: "web"},
			Spec: appsv1.DeploymentSpec{Replicas: &three, Selector: &metav1.LabelSelector{MatchLabels: tpl.Labels}, Template: tpl}})
		w.Create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "app", Name: "web"},
			Spec: corev1.ServiceSpec{Selector: tpl.Labels, Ports: []corev1.ServicePort{{Port: 80}}}})
		pass(5)
		if d := fixture.Get[*appsv1.Deployment](w, fixture.Deployment, "app", "web"); d.Status.AvailableReplicas != 3 {
			t.Fatalf("status %+v", d.Status)
		}
		ready := 0
		for _, s := range fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "app") {
			for _, e := range s.Endpoints {
				if *e.Conditions.Ready {
					ready++
				}
			}
		}
		if ready != 3 {
			t.Fatalf("%d ready endpoints", ready)
		}
		for _, o := range []struct {
			gk       schema.GroupKind
			ns, name string
		}{
			{schema.GroupKind{Kind: "ServiceAccount"}, "app", "default"}, {schema.GroupKind{Kind: "ConfigMap"}, "app", "kube-root-ca.crt"},
			{fixture.Namespace, "", "kube-system"}, {fixture.Service, "default", "kubernetes"}, {fixture.EndpointSlice, "default", "kubernetes"},
			{schema.GroupKind{Kind: "Endpoints"}, "default", "kubernetes"}, {schema.GroupKind{Group: "node.k8s.io", Kind: "RuntimeClass"}, "", "wasm"},
			{schema.GroupKind{Group: "scheduling.k8s.io", Kind: "PriorityClass"}, "", "system-node-critical"},
		} {
			if _, err := w.Store.Get(o.gk, o.ns, o.name); err != nil {
				t.Errorf("%s %s/%s: %v", o.gk, o.ns, o.name, err)
			}
		}
		if svc := fixture.Get[*corev1.Service](w, fixture.Service, "default", "kubernetes"); svc.Spec.ClusterIP != "10.43.0.1" {
			t.Fatalf("cluster IP %s", svc.Spec.ClusterIP)
		}
		if n := len(fixture.List[*corev1.Event](w, schema.GroupKind{Kind: "Event"}, "app")); n == 0 {
			t.Fatal("no events")
		}

		// At rest, for a quarter of an hour with its resyncs: not one write.
		before := w.Machine.Snapshot().ResourceVersion()
		for range 15 {
			time.Sleep(time.Minute)
			w.Advance(time.Minute)
		}
		synctest.Wait()
		if after := w.Machine.Snapshot().ResourceVersion(); after != before {
			t.Fatalf("%d writes at rest", after-before)
		}

		// Another term: what the first would still write is fenced off.
		stop()
		w.Local.SetTerm(2)
		stop = leadership(w, prometheus.NewRegistry(), 2)
		fixture.Change(w, fixture.Deployment, "app", "web", registry.Main, func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "file:///v2.wasm" })
		pass(15)
		if d := fixture.Get[*appsv1.Deployment](w, fixture.Deployment, "app", "web"); d.Status.UpdatedReplicas != 3 || d.Status.AvailableReplicas != 3 || d.Status.Replicas != 3 {
			t.Fatalf("status %+v", d.Status)
		}
		w.Delete(fixture.Deployment, "app", "web", metav1.DeletePropagationForeground)
		pass(5)
		if n := len(fixture.List[*corev1.Pod](w, fixture.Pod, "app")) + len(fixture.List[*appsv1.ReplicaSet](w, fixture.ReplicaSet, "app")); n != 0 {
			t.Fatalf("%d objects are left of the deployment", n)
		}
		w.Delete(fixture.Namespace, "", "app", "")
		pass(5)
		if _, err := w.Store.Get(fixture.Namespace, "", "app"); !apierrors.IsNotFound(err) {
			ns := fixture.Get[*corev1.Namespace](w, fixture.Namespace, "", "app")
			t.Fatalf("namespace is left: %+v", ns.Status)
		}
		stop()
	})
}
