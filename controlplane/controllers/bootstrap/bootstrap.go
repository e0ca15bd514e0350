// Package bootstrap ensures what every cluster has from the first start: the
// system namespaces, RuntimeClasses, PriorityClasses, the IngressClass, the
// StorageClass of local volumes, and the Services default/kubernetes, with the API's addresses, and kube-system/kube-dns.
//
// Owned fields: the existence of these objects, and the addresses of
// default/kubernetes. What a user changed in an existing object stays.
package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// apiPort is the one port of a server.
const apiPort = 6443

// look is how often the servers' addresses are compared; it reads only.
const look = 15 * time.Second

// Config of the bootstrap controller.
type Config struct {
	// ServiceCIDR's first address becomes default/kubernetes; the zero value
	// leaves the Service out.
	ServiceCIDR netip.Prefix
	// DNS becomes kube-system/kube-dns, which every node serves itself; the
	// zero value leaves it out.
	DNS netip.Addr
	// Servers returns the API's addresses; nil or empty leaves the Endpoints
	// as they are.
	Servers func() []netip.AddrPort
}

type controller struct {
	env loop.Env
	cfg Config
}

// object is one thing that must exist; update, if set, mends what is ours.
type object struct {
	gk     schema.GroupKind
	obj    runtime.Object
	update func(current runtime.Object) bool // false: right already
}

// New makes the controller; its one key stands for everything.
func New(env loop.Env, cfg Config) *loop.Controller {
	c := &controller{env: env, cfg: cfg}
	names := map[state.Key]bool{}
	kinds := map[string]bool{}
	for _, o := range c.objects() {
		k := keyOf(o)
		names[k], kinds[k.Kind] = true, true
	}
	everything := state.Key{Name: "cluster"}
	var sources []loop.Source
	for kind := range kinds {
		sources = append(sources, loop.Source{Kind: kind, Keys: func(ev state.Event, add func(state.Key)) {
			if names[ev.Record.Header.Key] && ev.Type != state.Added {
				add(everything)
			}
		}})
	}
	return &loop.Controller{
		Name: "bootstrap", Sources: sources,
		Background: func(ctx context.Context, add func(state.Key)) error {
			add(everything) // an empty store has no events
			<-ctx.Done()
			return nil
		},
		Reconcile: func(ctx context.Context, _ state.Key) (time.Duration, error) { return look, c.reconcile(ctx) },
	}
}

// Ensure makes everything once, before anything else runs.
func Ensure(ctx context.Context, env loop.Env, cfg Config) error {
	return (&controller{env: env, cfg: cfg}).reconcile(ctx)
}

func keyOf(o object) state.Key {
	m, err := meta.Accessor(o.obj)
	if err != nil {
		return state.Key{Kind: o.gk.String()} // cannot be: all are API objects
	}
	return state.Key{Kind: o.gk.String(), Namespace: m.GetNamespace(), Name: m.GetName()}
}

func (c *controller) reconcile(ctx context.Context) error {
	var failed error
	for _, o := range c.objects() {
		if err := c.ensure(ctx, o); err != nil {
			failed = errors.Join(failed, fmt.Errorf("ensure %s: %w", loop.KeyString(keyOf(o)), err))
		}
	}
	return failed
}

func (c *controller) ensure(ctx context.Context, o object) error {
	k := keyOf(o)
	cur, err := c.env.Store.Get(o.gk, k.Namespace, k.Name)
	if apierrors.IsNotFound(err) {
		_, err = c.env.Store.Create(ctx, o.obj, c.env.Write())
		if apierrors.IsAlreadyExists(err) {
			err = nil
		}
		return err
	}
	if err != nil || o.update == nil || !o.update(cur.DeepCopyObject()) {
		return err
	}
	_, err = c.env.Store.Update(ctx, o.gk, k.Namespace, k.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		o.update(cur)
		return cur, nil
	}, c.env.Write())
	return err
}

// objects lists everything in the order in which it is made.
func (c *controller) objects() []object {
	var list []object
	for _, n := range []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease} {
		list = append(list, object{gk: schema.GroupKind{Kind: "Namespace"}, obj: &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n}}})
	}
	for name, handler := range map[string]string{"oci": "runc", "wasm": "wazero"} {
		list = append(list, object{gk: schema.GroupKind{Group: nodev1.GroupName, Kind: "RuntimeClass"},
			obj: &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Handler: handler}})
	}
	list = append(list, object{gk: schema.GroupKind{Group: networkingv1.GroupName, Kind: "IngressClass"}, obj: &networkingv1.IngressClass{
		ObjectMeta: metav1.ObjectMeta{Name: manifests.IngressClassName, Annotations: map[string]string{networkingv1.AnnotationIsDefaultIngressClass: "true"}},
		Spec:       networkingv1.IngressClassSpec{Controller: manifests.IngressController},
	}})
	for name, p := range map[string]struct {
		value int32
		text  string
	}{
		"system-cluster-critical": {2000000000, "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary."},
		"system-node-critical":    {2000001000, "Used for system critical pods that must not be moved from their current node."},
	} {
		preempt := corev1.PreemptLowerPriority
		list = append(list, object{gk: schema.GroupKind{Group: schedulingv1.GroupName, Kind: "PriorityClass"},
			obj: &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: p.value, Description: p.text, PreemptionPolicy: &preempt}})
	}
	list = append(list, localClass())
	slices.SortStableFunc(list[4:], func(a, b object) int { return compareKeys(keyOf(a), keyOf(b)) })
	if c.cfg.ServiceCIDR.IsValid() {
		list = append(list, c.service())
		if c.cfg.DNS.IsValid() {
			list = append(list, c.dns())
		}
		if c.cfg.Servers != nil {
			if servers := c.cfg.Servers(); len(servers) > 0 {
				list = append(list, endpoints(servers), slice(servers))
			}
		}
	}
	return list
}

func compareKeys(a, b state.Key) int {
	if a.Kind != b.Kind {
		if a.Kind < b.Kind {
			return -1
		}
		return 1
	}
	if a.Name < b.Name {
		return -1
	}
	return 1
}

// localClass is the class of claims that name none: a folder on the node that
// runs the first pod of the claim.
func localClass() object {
	remove, wait, expand := corev1.PersistentVolumeReclaimDelete, storagev1.VolumeBindingWaitForFirstConsumer, true
	return object{gk: schema.GroupKind{Group: storagev1.GroupName, Kind: "StorageClass"}, obj: &storagev1.StorageClass{
		ObjectMeta:  metav1.ObjectMeta{Name: manifests.LocalClass, Annotations: map[string]string{manifests.AnnotationDefaultClass: "true"}},
		Provisioner: manifests.LocalProvisioner, ReclaimPolicy: &remove, VolumeBindingMode: &wait, AllowVolumeExpansion: &expand,
	}}
}

const kubernetes = "kubernetes"

func (c *controller) service() object {
	ip := c.cfg.ServiceCIDR.Masked().Addr().Next().String()
	single := corev1.IPFamilyPolicySingleStack
	return object{gk: schema.GroupKind{Kind: "Service"}, obj: &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: kubernetes,
			Labels: map[string]string{"component": "apiserver", "provider": "kubernetes"}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilyPolicy: &single,
			SessionAffinity: corev1.ServiceAffinityNone,
			Ports:           []corev1.ServicePort{{Name: "https", Protocol: corev1.ProtocolTCP, Port: 443, TargetPort: intstr.FromInt32(apiPort)}},
		},
	}}
}

// dns is the Service behind which clients look for DNS. It has no endpoints:
// each node answers at its address.
func (c *controller) dns() object {
	ip := c.cfg.DNS.String()
	single := corev1.IPFamilyPolicySingleStack
	return object{gk: schema.GroupKind{Kind: "Service"}, obj: &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "kube-dns",
			Labels: map[string]string{"k8s-app": "kube-dns", "kubernetes.io/name": "DNS"}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilyPolicy: &single,
			SessionAffinity: corev1.ServiceAffinityNone,
			Ports: []corev1.ServicePort{
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53, TargetPort: intstr.FromInt32(53)},
				{Name: "dns-tcp", Protocol: corev1.ProtocolTCP, Port: 53, TargetPort: intstr.FromInt32(53)},
			},
		},
	}}
}

func endpoints(servers []netip.AddrPort) object {
	var subsets []corev1.EndpointSubset
	for _, s := range servers {
		port := corev1.EndpointPort{Name: "https", Port: int32(s.Port()), Protocol: corev1.ProtocolTCP}
		address := corev1.EndpointAddress{IP: s.Addr().String()}
		if n := len(subsets); n > 0 && subsets[n-1].Ports[0] == port {
			subsets[n-1].Addresses = append(subsets[n-1].Addresses, address)
			continue
		}
		subsets = append(subsets, corev1.EndpointSubset{Addresses: []corev1.EndpointAddress{address}, Ports: []corev1.EndpointPort{port}})
	}
	want := &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: kubernetes,
			Labels: map[string]string{discoveryv1.LabelSkipMirror: "true"}},
		Subsets: subsets,
	}
	return object{gk: schema.GroupKind{Kind: "Endpoints"}, obj: want, update: func(cur runtime.Object) bool {
		e, ok := cur.(*corev1.Endpoints)
		if !ok || apiequality.Semantic.DeepEqual(e.Subsets, subsets) {
			return false
		}
		e.Subsets = subsets
		return true
	}}
}

func slice(servers []netip.AddrPort) object {
	family := discoveryv1.AddressTypeIPv4
	if servers[0].Addr().Is6() {
		family = discoveryv1.AddressTypeIPv6
	}
	ready, name, protocol, port := true, "https", corev1.ProtocolTCP, int32(servers[0].Port())
	var list []discoveryv1.Endpoint
	for _, s := range servers {
		if s.Addr().Is6() == servers[0].Addr().Is6() && s.Port() == servers[0].Port() {
			list = append(list, discoveryv1.Endpoint{Addresses: []string{s.Addr().String()}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}})
		}
	}
	ports := []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}}
	want := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: kubernetes,
			Labels: map[string]string{discoveryv1.LabelServiceName: kubernetes}},
		AddressType: family, Endpoints: list, Ports: ports,
	}
	return object{gk: schema.GroupKind{Group: discoveryv1.GroupName, Kind: "EndpointSlice"}, obj: want, update: func(cur runtime.Object) bool {
		s, ok := cur.(*discoveryv1.EndpointSlice)
		if !ok || s.AddressType != family || (apiequality.Semantic.DeepEqual(s.Endpoints, list) && apiequality.Semantic.DeepEqual(s.Ports, ports)) {
			return false
		}
		s.Endpoints, s.Ports = list, ports
		return true
	}}
}
