package nodelink

import (
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

// The Secrets of Ingresses go to the nodes that serve them, and to no other;
// a node cannot make itself one.
func TestIngressSecretsGoToNodesThatServe(t *testing.T) {
	s := start(t, options{ns: true})
	first := runLink(t, s.join("first"), nil)
	second := runLink(t, s.join("second"), nil)
	eventually(t, "both are up", func() bool { return first.Connected() && second.Connected() })
	class := manifests.IngressClassName
	s.create(&networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: class}, Spec: networkingv1.IngressClassSpec{Controller: manifests.IngressController}})
	s.create(&networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: "foreign"}, Spec: networkingv1.IngressClassSpec{Controller: "example.com/x"}})
	ing := func(name, class, secret string) *networkingv1.Ingress {
		return &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: networkingv1.IngressSpec{IngressClassName: &class,
			DefaultBackend: &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: "s", Port: networkingv1.ServiceBackendPort{Number: 80}}},
			TLS:            []networkingv1.IngressTLS{{SecretName: secret}}}}
	}
	s.create(ing("ours", class, "cert"), ing("tricky", class, "password"), ing("foreign", "foreign", "other"))
	for name, data := range map[string]map[string][]byte{
		"cert": {"tls.crt": []byte("c"), "tls.key": []byte("k")}, "other": {"tls.crt": []byte("c"), "tls.key": []byte("k")}, "password": {"password": []byte("p")},
	} {
		s.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Data: data})
	}
	secrets := func(a *agent) []string {
		asg, err := a.Pull(t.Context(), wire.PullRequest{})
		must(t, err)
		names := map[string]bool{}
		for _, o := range asg.Objects {
			if o.Ref.Kind == "Secret" {
				names[o.Ref.Name] = true
			}
		}
		return slices.Sorted(maps.Keys(names))
	}
	has := func(want string, a *agent, names ...string) {
		t.Helper()
		eventually(t, want, func() bool { return slices.Equal(secrets(a), names) })
	}
	// Nobody has the label: the oldest serves, by name where two are as old.
	oldest, other, names := first, second, []string{"first", "second"}
	if b := s.node("second").CreationTimestamp; b.Before(&metav1.Time{Time: s.node("first").CreationTimestamp.Time}) {
		oldest, other = second, first
		names = []string{"second", "first"}
	}
	has("the oldest node has the certificate alone", oldest, "cert")
	has("the other one has none", other)

	// A node that gives itself the label gets nothing.
	says := nodeSays()
	says.Labels[manifests.LabelIngress] = "true"
	r, err := other.Report(t.Context(), &wire.Report{BootID: "b", Seq: 1, Node: encode(t, says)})
	must(t, err)
	if r.Refused != "" || s.node(names[1]).Labels[manifests.LabelIngress] != "" {
		t.Fatalf("a node made itself one that serves: %+v", r)
	}
	has("still none", other)
	for len(other.Hints()) > 0 {
		<-other.Hints()
	}
	_, err = s.store.Update(t.Context(), nodeGK, "", names[1], registry.Main, func(o runtime.Object) (runtime.Object, error) {
		o.(*corev1.Node).Labels[manifests.LabelIngress] = "true"
		return o, nil
	}, registry.WriteOptions{})
	must(t, err)
	has("the labelled node has the certificate", other, "cert")
	has("the oldest has it no more", oldest)
	held, err := s.api.SecretsOn(names[1])
	must(t, err)
	if !slices.Equal(held, []string{"default/cert"}) {
		t.Fatalf("on the node are %v", held)
	}

	// The table says who serves, and what.
	eventually(t, "the service table", func() bool {
		reply, err := oldest.Services(t.Context(), wire.ServicesRequest{})
		must(t, err)
		found := map[string][]byte{}
		for _, it := range reply.Items {
			found[it.Key] = it.Data
		}
		var n wire.IngressNodes
		if wire.DecodeItem(found[wire.ItemIngressNodes], &n) != nil || !slices.Equal(n.Nodes, names[1:]) {
			return false
		}
		return found[wire.ItemIngress+"default/ours"] != nil && found[wire.ItemIngress+"default/foreign"] == nil
	})
	// The class goes to another controller: nothing of it is ours any more.
	must(t, func() error {
		_, _, err := s.store.Delete(t.Context(), classGK, "", class, registry.DeleteOptions{})
		return err
	}())
	has("no certificate without a class", other)
	eventually(t, "nothing in the service table", func() bool {
		reply, err := oldest.Services(t.Context(), wire.ServicesRequest{})
		must(t, err)
		return !slices.ContainsFunc(reply.Items, func(it wire.ServiceItem) bool { return it.Key == wire.ItemIngress+"default/ours" })
	})
}
