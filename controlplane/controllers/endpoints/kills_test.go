package endpoints

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// town is a world with Services and the pods that may stand behind them.
type town struct {
	*fixture.World
	rt   *rapid.T
	kept map[string]bool // "service pod": endpoints before and after
}

// serves tells the rules once more, plainly: what a Service's slices and its
// Endpoints must say of a pod.
func serves(svc *corev1.Service, p *corev1.Pod) (slice, endpoints string) {
	if p.Labels["app"] != svc.Spec.Selector["app"] || p.Spec.NodeName == "" || p.Status.PodIP == "" ||
		p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return "", ""
	}
	port := svc.Spec.Ports[0].TargetPort.IntVal
	if svc.Spec.Ports[0].TargetPort.Type == intstr.String {
		port = 8080
	}
	if p.Annotations[PortsAnnotation] != "" && port == 8080 {
		port = 30001
	}
	up, going := podReady(p), p.DeletionTimestamp != nil
	ready := svc.Spec.PublishNotReadyAddresses || up && !going
	slice = fmt.Sprintf("%s:%d %v %v %v", p.Name, port, ready, up, going)
	if !going || svc.Spec.PublishNotReadyAddresses {
		endpoints = fmt.Sprintf("%s:%d %v", p.Name, port, ready)
	}
	return slice, endpoints
}

func (c *town) services() []*corev1.Service {
	return fixture.List[*corev1.Service](c.World, fixture.Service, "default")
}

func (c *town) pods() []*corev1.Pod {
	return fixture.List[*corev1.Pod](c.World, fixture.Pod, "default")
}

// listed is what the slices of a Service say, and how often.
func (c *town) listed(svc string) map[string]int {
	out := map[string]int{}
	for _, s := range slicesOf(c.World) {
		if s.Labels[discoveryv1.LabelServiceName] != svc || s.Labels[discoveryv1.LabelManagedBy] != managedBy {
			continue
		}
		for _, e := range s.Endpoints {
			out[fmt.Sprintf("%s:%d %v %v %v", e.TargetRef.Name, *s.Ports[0].Port, *e.Conditions.Ready, *e.Conditions.Serving, *e.Conditions.Terminating)]++
		}
	}
	return out
}

func names(of map[string]int) map[string]bool {
	out := map[string]bool{}
	for e := range of {
		var name string
		_, _ = fmt.Sscanf(e, "%s", &name)
		out[name[:2]] = true
	}
	return out
}

// keep notes which pods serve, and shall go on to.
func (c *town) keep() {
	c.kept = map[string]bool{}
	for _, svc := range c.services() {
		now := names(c.listed(svc.Name))
		for _, p := range c.pods() {
			if s, _ := serves(svc, p); s != "" && now[p.Name] {
				c.kept[svc.Name+" "+p.Name] = true
			}
		}
	}
}

// check holds after every write: who serves before and after is never
// missing, and what others made is left alone.
func (c *town) check() error {
	for _, svc := range c.services() {
		now := names(c.listed(svc.Name))
		for _, p := range c.pods() {
			if c.kept[svc.Name+" "+p.Name] && !now[p.Name] {
				return fmt.Errorf("%s is missing in %s: %v", p.Name, svc.Name, c.listed(svc.Name))
			}
		}
	}
	for _, s := range slicesOf(c.World) {
		if s.Name == "foreign" && s.Endpoints[0].Addresses[0] == "192.0.2.99" {
			return nil
		}
	}
	return errors.New("somebody else's slice was touched")
}

func (c *town) pick() *corev1.Pod {
	if list := c.pods(); len(list) > 0 {
		return list[rapid.IntRange(0, len(list)-1).Draw(c.rt, "pod")]
	}
	return nil
}

// happens is what befalls pods and Services meanwhile.
func (c *town) happens(i int) {
	p := c.pick()
	switch what := rapid.IntRange(0, 9).Draw(c.rt, "happens"); {
	case what <= 1 && i < 10:
		addPod(c.World, fmt.Sprintf("p%d", i), func(p *corev1.Pod) {
			p.Labels["app"] = rapid.SampledFrom([]string{"a", "b"}).Draw(c.rt, "app")
			if rapid.Bool().Draw(c.rt, "rootless") {
				p.Annotations = map[string]string{PortsAnnotation: `{"8080":30001}`}
			}
		})
	case what == 2:
		c.BindAll("n")
	case what == 3 && p != nil && p.Spec.NodeName != "":
		c.SetReady(p, rapid.Bool().Draw(c.rt, "ready"))
	case what == 4 && p != nil:
		c.Delete(fixture.Pod, "default", p.Name, "")
	case what == 5:
		ready := rapid.Bool().Draw(c.rt, "all ready")
		c.Report(func(*corev1.Pod) bool { return ready })
	case what == 6 && p != nil && p.Spec.NodeName != "" && p.Status.Phase == corev1.PodRunning:
		c.Finish(p, 0)
	case what == 7 && p != nil:
		fixture.Change(c.World, fixture.Pod, "default", p.Name, registry.Main, func(p *corev1.Pod) {
			p.Labels["app"] = rapid.SampledFrom([]string{"a", "b", "c"}).Draw(c.rt, "other app")
		})
	case what == 8:
		c.serviceChanges()
	case what == 9:
		c.meddle()
	}
}

func (c *town) serviceChanges() {
	list := c.services()
	if len(list) < 2 {
		c.Create(service(func(s *corev1.Service) {
			s.Name = rapid.SampledFrom([]string{"late", "later"}).Draw(c.rt, "name")
			s.Spec.Selector["app"] = rapid.SampledFrom([]string{"a", "b"}).Draw(c.rt, "selects")
		}))
		return
	}
	svc := list[rapid.IntRange(0, len(list)-1).Draw(c.rt, "service")]
	if svc.Name != "svc" && rapid.Bool().Draw(c.rt, "goes") {
		c.Delete(fixture.Service, "default", svc.Name, "")
		return
	}
	fixture.Change(c.World, fixture.Service, "default", svc.Name, registry.Main, func(s *corev1.Service) {
		switch rapid.IntRange(0, 3).Draw(c.rt, "changes") {
		case 0:
			s.Spec.Selector["app"] = rapid.SampledFrom([]string{"a", "b"}).Draw(c.rt, "selects")
		case 1:
			s.Spec.PublishNotReadyAddresses = !s.Spec.PublishNotReadyAddresses
		case 2:
			s.Spec.Ports[0].TargetPort = rapid.SampledFrom([]intstr.IntOrString{intstr.FromString("web"), intstr.FromInt32(8080), intstr.FromInt32(9090)}).Draw(c.rt, "port")
		case 3:
			s.Labels = map[string]string{"team": rapid.SampledFrom([]string{"x", "y"}).Draw(c.rt, "team")}
		}
	})
}

// meddle is somebody who changes what is ours.
func (c *town) meddle() {
	for _, s := range slicesOf(c.World) {
		if s.Name == "foreign" || rapid.Bool().Draw(c.rt, "spared") {
			continue
		}
		if rapid.Bool().Draw(c.rt, "removed") {
			c.Delete(fixture.EndpointSlice, "default", s.Name, "")
		} else {
			fixture.Change(c.World, fixture.EndpointSlice, "default", s.Name, registry.Main, func(s *discoveryv1.EndpointSlice) { s.Endpoints = nil })
		}
		return
	}
	if list := fixture.List[*corev1.Endpoints](c.World, endpointsGK, "default"); len(list) > 0 {
		e := list[rapid.IntRange(0, len(list)-1).Draw(c.rt, "endpoints")]
		if rapid.Bool().Draw(c.rt, "removed") {
			c.Delete(endpointsGK, "default", e.Name, "")
		} else {
			fixture.Change(c.World, endpointsGK, "default", e.Name, registry.Main, func(e *corev1.Endpoints) { e.Subsets = nil })
		}
	}
}

// goal compares everything with the plain rules.
func (c *town) goal() error {
	mirrors := map[string]bool{}
	for _, svc := range c.services() {
		want, short := map[string]int{}, map[string]int{}
		for _, p := range c.pods() {
			s, e := serves(svc, p)
			if s != "" {
				want[s] = 1
			}
			if e != "" {
				short[e] = 1
			}
		}
		if got := c.listed(svc.Name); !maps.Equal(got, want) {
			return fmt.Errorf("slices of %s: %v, want %v", svc.Name, got, want)
		}
		got := map[string]int{}
		e := fixture.Get[*corev1.Endpoints](c.World, endpointsGK, "default", svc.Name)
		for _, sub := range e.Subsets {
			for _, a := range sub.Addresses {
				got[fmt.Sprintf("%s:%d true", a.TargetRef.Name, sub.Ports[0].Port)]++
			}
			for _, a := range sub.NotReadyAddresses {
				got[fmt.Sprintf("%s:%d false", a.TargetRef.Name, sub.Ports[0].Port)]++
			}
		}
		if !maps.Equal(got, short) {
			return fmt.Errorf("endpoints of %s: %v, want %v", svc.Name, got, short)
		}
		mirrors[svc.Name] = true
	}
	for _, e := range fixture.List[*corev1.Endpoints](c.World, endpointsGK, "default") {
		if !mirrors[e.Name] {
			return fmt.Errorf("endpoints of %s outlive it", e.Name)
		}
	}
	for _, s := range slicesOf(c.World) {
		if owner := s.Labels[discoveryv1.LabelServiceName]; mirrors[owner] && (s.Labels["team"] == "") != (s.Name == "foreign") {
			return fmt.Errorf("slice %s has the labels %v", s.Name, s.Labels)
		}
	}
	return nil
}

// Whatever happens to pods and Services, whoever meddles with the slices, and
// wherever the leader dies: a pod that serves all the time is never missing,
// others' slices are left alone, and in the end slices and Endpoints say what
// is so, each once.
func TestSlicesThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := &town{World: fixture.New(t), rt: rt}
		c.AddNode("n")
		c.Create(service())
		c.Create(&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "foreign", Labels: map[string]string{discoveryv1.LabelServiceName: "svc", discoveryv1.LabelManagedBy: "me"}},
			AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.99"}}}})
		c.keep()
		reign := c.Reign(rt, c.check, func(env loop.Env) []*loop.Controller { return []*loop.Controller{New(env)} })
		for i := range rapid.IntRange(5, 40).Draw(rt, "steps") {
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 0:
				c.keep()
				reign.Elect(rapid.IntRange(0, 4).Draw(rt, "writes"))
				reign.Work()
			case 1:
				c.keep()
				reign.Work()
			default:
				c.happens(i)
			}
		}
		c.keep()
		reign.Finish()
		if err := c.goal(); err != nil {
			rt.Fatal(err)
		}
		before := c.Machine.Snapshot().ResourceVersion()
		reign.Elect(fixture.Immortal)
		if reign.Work(); c.Machine.Snapshot().ResourceVersion() != before {
			rt.Fatalf("the next leader writes what is right already: %v", slices.Collect(maps.Keys(c.kept)))
		}
	})
}
