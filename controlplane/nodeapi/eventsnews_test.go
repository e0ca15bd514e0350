package nodeapi

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/wire"
)

type heard []events.Entry

func (h *heard) Add(e events.Entry) { *h = append(*h, e) }

// A node knows a Service by its name alone, and people look for events by uid.
func TestEventsOfServicesHaveTheirUID(t *testing.T) {
	w := fixture.New(t)
	obj, err := w.Store.Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, registry.WriteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var h heard
	s := &Server{cfg: Config{Store: w.Store, Events: &h}}
	s.eventsNews(&session{node: "n1"}, []wire.EventReport{
		{Object: wire.Ref{Kind: "Service", Namespace: "default", Name: "web"}, Reason: "PortNotServed", Over: true},
		{Object: wire.Ref{Kind: "Service", Namespace: "default", Name: "gone"}, Reason: "PortNotServed"},
	})
	if len(h) != 1 || h[0].About.UID != obj.(*corev1.Service).UID || h[0].About.UID == "" || h[0].About.APIVersion != "v1" || !h[0].Over || h[0].Host != "n1" {
		t.Fatalf("%+v", h)
	}
}
