package ingress

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/ingress"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

func prefix(path, service string, port int32) networkingv1.HTTPIngressPath {
	kind := networkingv1.PathTypePrefix
	return networkingv1.HTTPIngressPath{Path: path, PathType: &kind, Backend: networkingv1.IngressBackend{
		Service: &networkingv1.IngressServiceBackend{Name: service, Port: networkingv1.ServiceBackendPort{Number: port}}}}
}

func ing(name, class, host string, paths ...networkingv1.HTTPIngressPath) *networkingv1.Ingress {
	return &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: networkingv1.IngressSpec{
		IngressClassName: &class,
		Rules:            []networkingv1.IngressRule{{Host: host, IngressRuleValue: networkingv1.IngressRuleValue{HTTP: &networkingv1.HTTPIngressRuleValue{Paths: paths}}}},
	}}
}

func classOf(name, controller string) *networkingv1.IngressClass {
	return &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.IngressClassSpec{Controller: controller}}
}

func addNode(w *fixture.World, name, ip string) {
	w.AddNode(name, func(n *corev1.Node) {
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}
	})
}

func addressesOf(w *fixture.World, name string) (out []string) {
	for _, i := range fixture.Get[*networkingv1.Ingress](w, ingress.GK, "default", name).Status.LoadBalancer.Ingress {
		out = append(out, i.IP)
	}
	return out
}

// certificate is a self-signed one.
func certificate(t *testing.T, until time.Time, hosts ...string) map[string][]byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "x"}, DNSNames: hosts,
		NotBefore: until.Add(-time.Hour), NotAfter: until}, &x509.Certificate{SerialNumber: big.NewInt(1)}, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]byte{
		corev1.TLSCertKey:       pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: k}),
	}
}

func said(w *fixture.World, reason, object, part string) int {
	n := 0
	for _, e := range w.Events.With(reason) {
		if e.About.Name == object && strings.Contains(e.Message, part) {
			n++
		}
	}
	return n
}

// The status has the chosen nodes' addresses: the oldest node's until one is
// labelled.
func TestAddressesAreTheChosenNodes(t *testing.T) {
	w := fixture.New(t)
	addNode(w, "b", "192.0.2.2")
	w.Advance(time.Second)
	addNode(w, "a", "192.0.2.1")
	w.Create(classOf("dunlin", manifests.IngressController))
	w.Create(classOf("other", "example.com/other"))
	w.Create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}})
	w.Create(ing("i", "dunlin", "a.example", prefix("/", "web", 80)))
	w.Create(ing("foreign", "other", "a.example", prefix("/", "web", 80)))
	w.Create(ing("lost", "nobody", "a.example", prefix("/", "web", 80)))
	c := New(w.Env())
	w.Settle(c)
	want := func(name string, ips ...string) {
		t.Helper()
		if got := addressesOf(w, name); !slices.Equal(got, ips) {
			t.Fatalf("%s has %v, want %v", name, got, ips)
		}
	}
	want("i", "192.0.2.2")
	want("foreign")
	want("lost")
	if said(w, "UnknownClass", "lost", `no IngressClass "nobody"`) != 1 || said(w, "UnknownClass", "foreign", "") != 0 || said(w, "Conflict", "i", "") != 0 {
		t.Fatal("events")
	}
	fixture.Change(w, fixture.Node, "", "a", registry.Main, func(n *corev1.Node) { n.Labels[manifests.LabelIngress] = "true" })
	w.Settle(c)
	want("i", "192.0.2.1")
	fixture.Change(w, fixture.Node, "", "a", registry.Status, func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionFalse })
	w.Settle(c)
	want("i")
	before := w.Machine.Snapshot().ResourceVersion()
	w.Settle(c)
	if w.Machine.Snapshot().ResourceVersion() != before {
		t.Fatal("idle writes")
	}
}

// Everything that keeps a request from its backend is told once, and again
// only after it was mended and broke anew.
func TestFaultsAreTold(t *testing.T) {
	w := fixture.New(t)
	addNode(w, "a", "192.0.2.1")
	w.Create(classOf("dunlin", manifests.IngressController))
	i := ing("i", "dunlin", "a.example", prefix("/", "web", 80), prefix("/p", "web", 81), prefix("/e", "ext", 80))
	i.Spec.DefaultBackend = &networkingv1.IngressBackend{Resource: &corev1.TypedLocalObjectReference{Kind: "Bucket", Name: "b"}}
	i.Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"a.example"}, SecretName: "cert"}, {Hosts: []string{"b.example"}}}
	w.Create(i)
	c := New(w.Env())
	w.Settle(c)
	expect := func(reason, part string, n int) {
		t.Helper()
		if got := said(w, reason, "i", part); got != n {
			t.Errorf("%s %q: %d events, want %d: %v", reason, part, got, n, w.Events.With(reason))
		}
	}
	expect("NoSuchService", "spec.rules[0].http.paths[0].backend: there is no Service default/web", 1)
	expect("NotImplemented", "spec.defaultBackend.resource", 1)
	expect("NoSuchSecret", "there is no Secret default/cert: HTTPS for a.example is refused", 1)
	expect("NoSecret", "spec.tls[1].secretName is missing", 1)
	w.Create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}})
	w.Create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "ext"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "x.example"}})
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "cert"}, Data: map[string][]byte{corev1.TLSCertKey: []byte("x")}}
	w.Create(secret)
	w.Settle(c)
	expect("NoSuchPort", "Service default/web has no port 81, but http/80", 1)
	expect("NotImplemented", "ExternalName", 1)
	expect("BadCertificate", "Secret default/cert has no tls.key", 1)
	put := func(data map[string][]byte) {
		fixture.Change(w, schema.GroupKind{Kind: "Secret"}, "default", "cert", registry.Main, func(s *corev1.Secret) { s.Data = data })
		w.Settle(c)
	}
	good := certificate(t, w.Now().Add(24*time.Hour), "a.example")
	mixed := certificate(t, w.Now().Add(24*time.Hour), "a.example")
	mixed[corev1.TLSPrivateKeyKey] = good[corev1.TLSPrivateKeyKey]
	put(mixed)
	expect("BadCertificate", "private key does not match", 1)
	expect("BadCertificate", "HTTPS for a.example is refused, but by nodes that were given a good certificate before", 1)
	put(certificate(t, w.Now().Add(24*time.Hour), "c.example"))
	expect("WrongHost", "is not for a.example, but for c.example", 1)
	put(certificate(t, w.Now().Add(-24*time.Hour), "a.example"))
	expect("Expired", "", 1)
	put(good)
	put(mixed)
	expect("BadCertificate", "private key does not match", 2)
	expect("BadCertificate", "nodes go on with the last good certificate for a.example, which is valid until "+w.Now().Add(24*time.Hour).UTC().Format(time.RFC3339), 1)
	put(map[string][]byte{corev1.TLSCertKey: []byte("x")})
	expect("BadCertificate", "has no tls.key: HTTPS for a.example is refused", 2)
	put(mixed)
	expect("BadCertificate", "HTTPS for a.example is refused, but by nodes", 2)
	expect("NoSuchService", "", 3) // each place once
}

// Of two Ingresses with the same host and path the older one keeps it.
func TestOlderKeepsThePath(t *testing.T) {
	w := fixture.New(t)
	addNode(w, "a", "192.0.2.1")
	w.Create(classOf("dunlin", manifests.IngressController))
	w.Create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}})
	w.Create(ing("z-first", "dunlin", "a.example", prefix("/x/", "web", 80)))
	w.Advance(time.Second)
	w.Create(ing("a-second", "dunlin", "a.example", prefix("/x", "web", 80), prefix("/y", "web", 80)))
	c := New(w.Env())
	w.Settle(c)
	if said(w, "Conflict", "a-second", `host "a.example" path /x is that of the older Ingress default/z-first`) != 1 || len(w.Events.With("Conflict")) != 1 {
		t.Fatalf("%v", w.Events.With("Conflict"))
	}
}
