package endpointslicemirroring

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// said is what the mirrored slices say: "ip:port ready", and how often.
func said(w *fixture.World) map[string]int {
	out := map[string]int{}
	for _, s := range fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default") {
		if s.Labels[discoveryv1.LabelManagedBy] != managedBy {
			continue
		}
		for _, e := range s.Endpoints {
			out[fmt.Sprintf("%s:%d %v", e.Addresses[0], *s.Ports[0].Port, *e.Conditions.Ready)]++
		}
	}
	return out
}

// written is what the Endpoints say, if they are to be mirrored.
func written(w *fixture.World) map[string]int {
	out := map[string]int{}
	svcs := fixture.List[*corev1.Service](w, fixture.Service, "default")
	list := fixture.List[*corev1.Endpoints](w, endpointsGK, "default")
	if len(svcs) == 0 || len(list) == 0 || len(svcs[0].Spec.Selector) > 0 || list[0].Labels[discoveryv1.LabelSkipMirror] == "true" {
		return out
	}
	for _, s := range list[0].Subsets {
		for _, a := range s.Addresses {
			out[fmt.Sprintf("%s:%d true", a.IP, s.Ports[0].Port)] = 1
		}
		for _, a := range s.NotReadyAddresses {
			out[fmt.Sprintf("%s:%d false", a.IP, s.Ports[0].Port)] = 1
		}
	}
	return out
}

// bare is the set of "ip:port", whether ready or not.
func bare(m map[string]int) map[string]bool {
	out := map[string]bool{}
	for k := range m {
		place, _, _ := strings.Cut(k, " ")
		out[place] = true
	}
	return out
}

func draw(rt *rapid.T) (out []corev1.EndpointSubset) {
	for port := int32(80); port < 83; port++ {
		s := subset(port)
		for i := range 3 {
			ip := fmt.Sprintf("10.0.0.%d", i+1)
			if rapid.Bool().Draw(rt, "six") {
				ip = fmt.Sprintf("fd00::%d", i+1)
			}
			switch rapid.IntRange(0, 2).Draw(rt, "address") {
			case 1:
				s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: ip})
			case 2:
				s.NotReadyAddresses = append(s.NotReadyAddresses, corev1.EndpointAddress{IP: ip})
			}
		}
		if len(s.Addresses)+len(s.NotReadyAddresses) > 0 {
			out = append(out, s)
		}
	}
	return out
}

// change is what a user does to the Service, its Endpoints and the slices.
func change(rt *rapid.T, w *fixture.World) {
	svcs := fixture.List[*corev1.Service](w, fixture.Service, "default")
	list := fixture.List[*corev1.Endpoints](w, endpointsGK, "default")
	switch what := rapid.IntRange(0, 5).Draw(rt, "changes"); {
	case len(svcs) == 0:
		w.Create(service("svc"))
	case len(list) == 0:
		w.Create(handMade("svc", draw(rt)...))
	case what == 0:
		w.Delete(fixture.Service, "default", "svc", "")
	case what == 1:
		w.Delete(endpointsGK, "default", "svc", "")
	case what == 2:
		fixture.Change(w, fixture.Service, "default", "svc", registry.Main, func(s *corev1.Service) {
			if s.Spec.Selector == nil {
				s.Spec.Selector = map[string]string{"app": "a"}
			} else {
				s.Spec.Selector = nil
			}
		})
	case what == 3:
		fixture.Change(w, endpointsGK, "default", "svc", registry.Main, func(e *corev1.Endpoints) {
			e.Labels = map[string]string{discoveryv1.LabelSkipMirror: rapid.SampledFrom([]string{"true", "false"}).Draw(rt, "skip")}
		})
	case what == 4:
		for _, s := range fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default") {
			if s.Name != "foreign" && rapid.Bool().Draw(rt, "meddled with") {
				w.Delete(fixture.EndpointSlice, "default", s.Name, "")
				return
			}
		}
	default:
		fixture.Change(w, endpointsGK, "default", "svc", registry.Main, func(e *corev1.Endpoints) { e.Subsets = draw(rt) })
	}
}

// Whatever a user writes, and wherever the leader dies: an address that was
// and stays in the Endpoints is never missing in the slices, others' slices
// are left alone, and in the end the slices say what the Endpoints say.
func TestMirrorThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		w.Create(service("svc"))
		w.Create(handMade("svc", subset(80, "10.0.0.1")))
		foreign := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.99"}}}}
		foreign.Namespace, foreign.Name, foreign.Labels = "default", "foreign", map[string]string{discoveryv1.LabelServiceName: "svc", discoveryv1.LabelManagedBy: "me"}
		w.Create(foreign)
		kept := map[string]bool{}
		check := func() error {
			now := bare(said(w))
			for k := range kept {
				if !now[k] {
					return fmt.Errorf("%s is missing: %v", k, now)
				}
			}
			return nil
		}
		reign := w.Reign(rt, check, func(env loop.Env) []*loop.Controller { return []*loop.Controller{New(env)} })
		keep := func() {
			clear(kept)
			now := bare(said(w))
			for k := range bare(written(w)) {
				if now[k] {
					kept[k] = true
				}
			}
		}
		for range rapid.IntRange(4, 30).Draw(rt, "steps") {
			switch rapid.IntRange(0, 3).Draw(rt, "step") {
			case 0:
				reign.Elect(rapid.IntRange(0, 4).Draw(rt, "writes"))
				keep()
				reign.Work()
			case 1:
				keep()
				reign.Work()
			default:
				change(rt, w)
			}
		}
		keep()
		reign.Finish()
		if got, want := said(w), written(w); !maps.Equal(got, want) {
			rt.Fatalf("slices say %v, Endpoints %v", got, want)
		}
		if fixture.Get[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default", "foreign").ResourceVersion == "" {
			rt.Fatal("somebody else's slice is gone")
		}
	})
}
