package held

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/wire"
)

func pod(name, ip string, ready corev1.ConditionStatus, change ...func(*Pod)) Pod {
	h := Pod{Pod: &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, Labels: map[string]string{"app": "web", "x": "y"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}},
	}}
	for _, f := range change {
		f(&h)
	}
	return h
}

// Held pods are endpoints of what selects them, as the cluster's controller
// would have made them.
func TestHeldPodsAreEndpoints(t *testing.T) {
	web := map[string]string{"app": "web"}
	list := map[string]*wire.Service{
		"n/web":     {Selector: web, Ports: []wire.ServicePort{{Name: "a", Protocol: "TCP", Port: 80, Target: "http"}, {Name: "b", Protocol: "TCP", Port: 90, Target: "9090"}, {Name: "c", Protocol: "TCP", Port: 70}}},
		"n/early":   {Selector: web, NotReady: true, Ports: []wire.ServicePort{{Protocol: "TCP", Port: 80}}},
		"other/web": {Selector: web, Ports: []wire.ServicePort{{Protocol: "TCP", Port: 80}}},
		"n/none":    {Ports: []wire.ServicePort{{Protocol: "TCP", Port: 80}}},
		"n/else":    {Selector: map[string]string{"app": "db"}, Ports: []wire.ServicePort{{Protocol: "TCP", Port: 80}}},
		"n/noport":  {Selector: web, Ports: []wire.ServicePort{{Protocol: "UDP", Port: 80, Target: "http"}}},
	}
	pods := []Pod{
		pod("b", "10.0.0.2", corev1.ConditionFalse),
		pod("a", "10.0.0.1", corev1.ConditionTrue, func(h *Pod) { h.Pod.Spec.Hostname, h.Pod.Spec.Subdomain = "h", "web" }),
		pod("moved", "10.0.0.3", corev1.ConditionTrue, func(h *Pod) { h.Moved = map[int32]int32{8080: 31000} }),
		pod("leaves", "10.0.0.4", corev1.ConditionTrue, func(h *Pod) { h.Pod.DeletionTimestamp = &metav1.Time{} }),
		pod("over", "10.0.0.5", corev1.ConditionTrue, func(h *Pod) { h.Pod.Status.Phase = corev1.PodFailed }),
		pod("starts", "", corev1.ConditionFalse),
		pod("here", "127.0.0.1", corev1.ConditionTrue),
	}
	end := func(name, ip string, state uint8) wire.Endpoint {
		return wire.Endpoint{Address: netip.MustParseAddr(ip).AsSlice(), State: state, Node: "n1", Zone: "z", Pod: name}
	}
	const ready, leaves = wire.EndpointReady | wire.EndpointServing, wire.EndpointServing | wire.EndpointTerminating
	first := end("a", "10.0.0.1", ready)
	first.Hostname = "h"
	ports := []wire.SlicePort{{Name: "a", Protocol: "TCP", Port: 8080}, {Name: "b", Protocol: "TCP", Port: 9090}, {Name: "c", Protocol: "TCP", Port: 70}}
	moved := []wire.SlicePort{{Name: "a", Protocol: "TCP", Port: 31000}, ports[1], ports[2]}
	want := map[string]*wire.Slice{
		"e/n/web~held.0": {Service: "web", Ports: ports, Endpoints: []wire.Endpoint{first, end("b", "10.0.0.2", 0), end("leaves", "10.0.0.4", leaves)}},
		"e/n/web~held.1": {Service: "web", Ports: moved, Endpoints: []wire.Endpoint{end("moved", "10.0.0.3", ready)}},
		"e/n/early~held.0": {Service: "early", Ports: []wire.SlicePort{{Protocol: "TCP", Port: 80}}, Endpoints: []wire.Endpoint{
			end("a", "10.0.0.1", ready), end("b", "10.0.0.2", wire.EndpointReady), end("moved", "10.0.0.3", ready), end("leaves", "10.0.0.4", leaves|wire.EndpointReady)}},
	}
	if got := Endpoints(list, "n1", "z", pods); !reflect.DeepEqual(got, want) {
		g, _ := json.MarshalIndent(got, "", " ")
		w, _ := json.MarshalIndent(want, "", " ")
		t.Errorf("got %s\nwant %s", g, w)
	}
}

// What a node adds is seen by its proxy, ingress and DNS, and by no server.
func TestLocalItemsAreTheNodesOwn(t *testing.T) {
	svc, err := wire.EncodeItem(&wire.Service{Selector: map[string]string{"app": "web"}, Ports: []wire.ServicePort{{Protocol: "TCP", Port: 80}}})
	if err != nil {
		t.Fatal(err)
	}
	items := map[string]string{"s/n/web": string(svc)}
	tab := services.NewTable()
	if _, err := tab.Apply(full(5, items)); err != nil {
		t.Fatal(err)
	}
	sub := tab.Subscribe()
	sub.Take(1 << 20)
	<-sub.News()
	const key = "e/n/web~held.0"
	lead := func(pods ...Pod) (items []wire.ServiceItem, gone []string) {
		t.Helper()
		if err := Lead(tab, "n1", "z", pods, nil); err != nil {
			t.Fatal(err)
		}
		items, gone, _ = sub.Take(1 << 20)
		return items, gone
	}
	one := pod("a", "10.0.0.1", corev1.ConditionTrue)
	if items, gone := lead(one); len(items) != 1 || items[0].Key != key || len(gone) != 0 {
		t.Errorf("told of %v, without %v", items, gone)
	}
	select {
	case <-sub.News():
	default:
		t.Error("a subscriber is not woken")
	}
	if items, gone := lead(one); len(items)+len(gone) != 0 {
		t.Errorf("told again of %v, without %v", items, gone)
	}
	if r := tab.Request(); r.Digest != digest(items) {
		t.Errorf("the server is told of it: %+v", r)
	}
	// A whole new table leaves it there, and so does a new subscriber's view.
	if _, err := tab.Apply(full(9, items)); err != nil {
		t.Fatal(err)
	}
	all, _, _ := tab.Subscribe().Take(1 << 20)
	if len(all) != 2 || tab.Get(key) == nil {
		t.Errorf("after a new table: %v", all)
	}
	if items, gone := lead(); len(items) != 0 || len(gone) != 1 || gone[0] != key || tab.Get(key) != nil {
		t.Errorf("let go: %v, without %v", items, gone)
	}
}

// digest and full are a server's word on a whole table.
func digest(items map[string]string) (sum uint64) {
	for k, v := range items {
		sum += wire.ItemDigest(k, []byte(v))
	}
	return sum
}

func full(gen uint64, items map[string]string) *wire.ServicesReply {
	r := &wire.ServicesReply{Generation: gen, Full: true, Digest: digest(items)}
	for k, v := range items {
		r.Items = append(r.Items, wire.ServiceItem{Key: k, Data: []byte(v)})
	}
	return r
}

// While no server can be reached, what the node sees of its pods is what its
// Services go by; the server's next word on a slice is newer.
func TestOwnPodsWhileCutOff(t *testing.T) {
	encode := func(v any) string {
		b, err := wire.EncodeItem(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	const ready = wire.EndpointReady | wire.EndpointServing
	end := func(pod, node string, state uint8) wire.Endpoint {
		return wire.Endpoint{Address: []byte{10, 0, 0, 1}, State: state, Node: node, Pod: pod}
	}
	slice := func(service string, e ...wire.Endpoint) string {
		return encode(&wire.Slice{Service: service, Endpoints: e})
	}
	given := map[string]string{
		"s/n/web":   encode(&wire.Service{Selector: map[string]string{"app": "web"}}),
		"s/n/early": encode(&wire.Service{NotReady: true}),
		"e/n/web-1": slice("web", end("was-not", "n1", 0), end("was", "n1", ready), end("gone", "n1", ready), end("over", "n1", ready),
			end("leaves", "n1", ready), end("unseen", "n1", ready), end("was-not", "n2", 0), end("", "n1", ready)),
		"e/n/early-1": slice("early", end("was", "n1", wire.EndpointReady)),
		"e/n/same":    slice("web", end("was-not", "n1", ready)),
		"e/o/web-1":   slice("web", end("was-not", "n2", ready)),
	}
	tab := services.NewTable()
	if _, err := tab.Apply(full(5, given)); err != nil {
		t.Fatal(err)
	}
	own := map[string]*corev1.Pod{"n/unseen": nil}
	for _, p := range []Pod{pod("was-not", "10.0.0.1", corev1.ConditionTrue), pod("was", "10.0.0.1", corev1.ConditionFalse),
		pod("over", "10.0.0.1", corev1.ConditionTrue, func(h *Pod) { h.Pod.Status.Phase = corev1.PodFailed }),
		pod("leaves", "10.0.0.1", corev1.ConditionTrue, func(h *Pod) { h.Pod.DeletionTimestamp = &metav1.Time{} })} {
		own["n/"+p.Pod.Name] = p.Pod
	}
	states := func(key string) (out []uint8) {
		s := &wire.Slice{}
		if err := wire.DecodeItem(tab.Get(key), s); err != nil {
			t.Fatal(err)
		}
		for _, e := range s.Endpoints {
			out = append(out, e.State)
		}
		return out
	}
	if err := Lead(tab, "n1", "z", nil, own); err != nil {
		t.Fatal(err)
	}
	want := []uint8{ready, 0, 0, 0, wire.EndpointServing | wire.EndpointTerminating, ready, 0, ready}
	if got := states("e/n/web-1"); !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := states("e/n/early-1"); !reflect.DeepEqual(got, []uint8{wire.EndpointReady}) {
		t.Errorf("one that wants those not ready too: %v", got)
	}
	if r := tab.Request(); r.Digest != digest(given) {
		t.Errorf("the server is told of it: %+v", r)
	}
	// Ready again, and a new word of the server.
	own["n/was"] = pod("was", "10.0.0.1", corev1.ConditionTrue).Pod
	if err := Lead(tab, "n1", "z", nil, own); err != nil {
		t.Fatal(err)
	}
	if got := states("e/n/web-1"); got[1] != ready {
		t.Errorf("ready again: %v", got)
	}
	given["e/n/web-1"] = slice("web", end("was", "n1", 0))
	if _, err := tab.Apply(full(6, given)); err != nil {
		t.Fatal(err)
	}
	if got := states("e/n/web-1"); !reflect.DeepEqual(got, []uint8{0}) {
		t.Errorf("after the server's word: %v", got)
	}
	given["e/n/web-1"] = slice("web", end("was", "n1", ready), end("was-not", "n1", 0))
	if _, err := tab.Apply(full(7, given)); err != nil {
		t.Fatal(err)
	}
	before := states("e/n/web-1")
	if err := Lead(tab, "n1", "z", nil, own); err != nil {
		t.Fatal(err)
	}
	if err := Lead(tab, "n1", "z", nil, nil); err != nil {
		t.Fatal(err)
	}
	if got := states("e/n/web-1"); !reflect.DeepEqual(got, before) {
		t.Errorf("not cut off any more: %v, want %v", got, before)
	}
}
