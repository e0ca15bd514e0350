package bootstrap

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func TestEnsureIsIdempotentAndFollowsTheServers(t *testing.T) {
	w := fixture.New(t)
	servers := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:6443")}
	cfg := Config{ServiceCIDR: netip.MustParsePrefix("10.43.0.0/16"), Servers: func() []netip.AddrPort { return servers }}
	ensure := func() {
		t.Helper()
		if err := Ensure(t.Context(), w.Env(), cfg); err != nil {
			t.Fatal(err)
		}
	}
	ensure()
	before := w.Machine.Snapshot().ResourceVersion()
	ensure()
	if after := w.Machine.Snapshot().ResourceVersion(); after != before {
		t.Fatalf("%d writes the second time", after-before)
	}
	servers = append(servers, netip.MustParseAddrPort("192.0.2.2:6443"))
	ensure()
	s := fixture.Get[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default", "kubernetes")
	e := fixture.Get[*corev1.Endpoints](w, schema.GroupKind{Kind: "Endpoints"}, "default", "kubernetes")
	if len(s.Endpoints) != 2 || len(e.Subsets) != 1 || len(e.Subsets[0].Addresses) != 2 {
		t.Fatalf("%+v %+v", s.Endpoints, e.Subsets)
	}
	// What a user changed stays.
	gk := schema.GroupKind{Group: "node.k8s.io", Kind: "RuntimeClass"}
	fixture.Change(w, gk, "", "oci", registry.Main, func(rc *nodev1.RuntimeClass) { rc.Labels = map[string]string{"mine": "yes"} })
	ensure()
	if rc := fixture.Get[*nodev1.RuntimeClass](w, gk, "", "oci"); rc.Labels["mine"] != "yes" || rc.Handler != "runc" {
		t.Fatalf("%+v", rc)
	}
}
