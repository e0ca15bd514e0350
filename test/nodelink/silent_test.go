package nodelink

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/wire"
)

// A node whose lease is lost is told to the others as one small item, however
// many endpoints it has, and so is its return. Its endpoints stay as they are.
func TestSilentNodeIsOneItem(t *testing.T) {
	s := start(t, options{ns: true})
	here := runLink(t, s.join("here"), nil)
	eventually(t, "the link is up", here.Connected)
	ready, port := true, int32(80)
	away := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "away"}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.2"}}}}
	s.create(away)
	for _, name := range []string{"a-1", "b-1"} {
		s.create(&discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name[:1]}},
			AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.42.1.2"}, NodeName: &away.Name, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
		})
	}
	held := map[string][]byte{}
	var gen uint64
	// pull takes what changed, and names it.
	pull := func() (changed []string) {
		t.Helper()
		var digest uint64
		for k, v := range held {
			digest += wire.ItemDigest(k, v)
		}
		r, err := here.Services(t.Context(), wire.ServicesRequest{Generation: gen, Digest: digest})
		must(t, err)
		if r.More || r.Full && gen != 0 {
			t.Fatalf("an answer of %d items, full %v", len(r.Items), r.Full)
		}
		gen = r.Generation
		for _, it := range r.Items {
			held[it.Key] = it.Data
			changed = append(changed, it.Key)
		}
		return changed
	}
	eventually(t, "the table is whole", func() bool {
		gen = 0
		pull()
		return held["e/default/a-1"] != nil && held["e/default/b-1"] != nil && held["n/away"] != nil && held["n/here"] != nil
	})
	for _, silent := range []bool{true, false} {
		for pull() != nil { // what the node here still told of itself
		}
		_, err := s.store.Update(t.Context(), nodeGK, "", "away", registry.Status, func(o runtime.Object) (runtime.Object, error) {
			status := map[bool]corev1.ConditionStatus{true: corev1.ConditionUnknown, false: corev1.ConditionTrue}[silent]
			o.(*corev1.Node).Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
			return o, nil
		}, registry.WriteOptions{})
		must(t, err)
		var changed []string
		eventually(t, "the change arrives", func() bool { changed = pull(); return changed != nil })
		var n wire.NodeInfo
		must(t, wire.DecodeItem(held["n/away"], &n))
		if len(changed) != 1 || changed[0] != "n/away" || n.Silent != silent {
			t.Errorf("silent %v: %v changed, the node is %+v", silent, changed, n)
		}
		if b := len(held["n/away"]); b > 64 {
			t.Errorf("the item has %d bytes", b)
		}
	}
}
