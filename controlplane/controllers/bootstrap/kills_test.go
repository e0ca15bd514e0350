package bootstrap

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// From any part of it, whatever people delete or label, while servers come and
// go and the leader dies between any two writes: everything is there in the
// end, with the addresses of the servers, and people's labels stay.
func TestEverythingThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		var servers []netip.AddrPort
		move := func() {
			servers = nil
			for i := range rapid.IntRange(1, 3).Draw(rt, "servers") {
				servers = append(servers, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(10*rapid.IntRange(0, 3).Draw(rt, "moved") + i)}), 6443))
			}
		}
		move()
		cfg := Config{ServiceCIDR: netip.MustParsePrefix("10.43.0.0/16"), DNS: netip.MustParseAddr("10.43.0.10"), Servers: func() []netip.AddrPort { return servers }}
		all := (&controller{cfg: cfg}).objects()
		mine := map[string]bool{}
		get := func(o object) runtime.Object {
			k := keyOf(o)
			obj, err := w.Store.Get(o.gk, k.Namespace, k.Name)
			if err != nil {
				return nil
			}
			return obj
		}
		check := func() error {
			for _, o := range all {
				if k := keyOf(o); mine[k.Kind+k.Name] && !labelled(get(o)) {
					return fmt.Errorf("%v has lost a user's label", k)
				}
			}
			return nil
		}
		reign := w.Reign(rt, check, func(env loop.Env) []*loop.Controller { return []*loop.Controller{New(env, cfg)} })
		reign.Elect(rapid.IntRange(0, 20).Draw(rt, "first writes"))
		reign.Work()
		for range rapid.IntRange(2, 20).Draw(rt, "steps") {
			o := all[rapid.IntRange(0, len(all)-1).Draw(rt, "object")]
			k := keyOf(o)
			switch rapid.IntRange(0, 4).Draw(rt, "step") {
			case 0:
				reign.Elect(rapid.IntRange(0, 6).Draw(rt, "writes"))
				reign.Work()
			case 1:
				reign.Work()
			case 2:
				if get(o) != nil && o.gk.Kind != "Namespace" {
					w.Delete(o.gk, k.Namespace, k.Name, "")
					delete(mine, k.Kind+k.Name)
				}
			case 3:
				if get(o) != nil {
					fixture.Change(w, o.gk, k.Namespace, k.Name, registry.Main, func(obj runtime.Object) {
						if m, err := meta.Accessor(obj); err == nil {
							l := map[string]string{"mine": "yes"}
							for k, v := range m.GetLabels() {
								l[k] = v
							}
							m.SetLabels(l)
						}
					})
					mine[k.Kind+k.Name] = true
				}
			case 4:
				move()
			}
		}
		reign.Pass() // the servers' addresses are only looked at
		reign.Finish()
		if err := check(); err != nil {
			rt.Fatal(err)
		}
		for _, o := range all {
			if get(o) == nil {
				rt.Fatalf("%v is missing", keyOf(o))
			}
		}
		var want, sliced, old []string
		for _, s := range servers {
			want = append(want, s.Addr().String())
		}
		for _, e := range fixture.Get[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default", kubernetes).Endpoints {
			sliced = append(sliced, e.Addresses...)
		}
		for _, s := range fixture.Get[*corev1.Endpoints](w, schema.GroupKind{Kind: "Endpoints"}, "default", kubernetes).Subsets {
			for _, a := range s.Addresses {
				old = append(old, a.IP)
			}
		}
		slices.Sort(want)
		slices.Sort(sliced)
		slices.Sort(old)
		if !slices.Equal(want, sliced) || !slices.Equal(want, old) {
			rt.Fatal(fmt.Sprintf("servers %v, slice %v, Endpoints %v", want, sliced, old))
		}
	})
}

func labelled(obj runtime.Object) bool {
	if obj == nil {
		return false
	}
	m, err := meta.Accessor(obj)
	return err == nil && m.GetLabels()["mine"] == "yes"
}
