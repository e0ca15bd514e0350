// Package ingress says which Ingresses are ours, which nodes serve them, and
// what those nodes need. The service table, assignments and the controller
// that fills in the status all go by it. Everything is a pure function.
package ingress

import (
	"slices"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

// GroupKinds of what this is about.
var (
	GK      = schema.GroupKind{Group: networkingv1.GroupName, Kind: "Ingress"}
	ClassGK = schema.GroupKind{Group: networkingv1.GroupName, Kind: "IngressClass"}
)

// Kinds as they are in the store.
var (
	Kind      = GK.String()
	ClassKind = ClassGK.String()
)

// annotationClass is what spec.ingressClassName replaced; many charts still
// write it.
const annotationClass = "kubernetes.io/ingress.class"

// ClassOf names the class of an Ingress; "" is none.
func ClassOf(ing *networkingv1.Ingress) string {
	if ing.Spec.IngressClassName != nil {
		return *ing.Spec.IngressClassName
	}
	return ing.Annotations[annotationClass]
}

// Ours says whether nodes serve the Ingress. class finds an IngressClass, nil
// if there is none of the name.
func Ours(ing *networkingv1.Ingress, class func(name string) *networkingv1.IngressClass) bool {
	name := ClassOf(ing)
	if name == "" || ing.DeletionTimestamp != nil {
		return false
	}
	c := class(name)
	return c != nil && c.Spec.Controller == manifests.IngressController
}

// Node is what choosing needs to know of one.
type Node struct {
	Name     string
	Labelled bool // manifests.LabelIngress
	Dead     bool // declared dead
	Created  int64
}

// NodeOf reads it from a Node's record.
func NodeOf(rec *state.Record) Node {
	h := &rec.Header
	_, dead := h.Labels[manifests.LabelDead]
	return Node{Name: h.Key.Name, Labelled: h.Labels[manifests.LabelIngress] == "true", Dead: dead || h.Deleted != 0, Created: h.Created}
}

// Choose names the nodes that serve Ingresses, sorted: those with the label,
// or, where none has it, the oldest node alone, since each one that serves
// gets the private keys.
func Choose(nodes []Node) []string {
	var out []string
	var oldest *Node
	for i := range nodes {
		n := &nodes[i]
		switch {
		case n.Dead:
			continue
		case n.Labelled:
			out = append(out, n.Name)
		case oldest == nil || n.Created < oldest.Created || (n.Created == oldest.Created && n.Name < oldest.Name):
			oldest = n
		}
	}
	if len(out) == 0 && oldest != nil {
		out = append(out, oldest.Name)
	}
	slices.Sort(out)
	return out
}

// Chosen is Choose over a snapshot.
func Chosen(snap state.Snapshot) []string {
	var list []Node
	snap.Range("Node", "", state.Key{}, func(rec *state.Record) bool {
		list = append(list, NodeOf(rec))
		return true
	})
	return Choose(list)
}

// MayChange says whether an event of a Node can change who is chosen.
func MayChange(e *state.Event) bool {
	return e.Type != state.Modified || e.Prev == nil || NodeOf(e.Prev) != NodeOf(e.Record)
}

// Item is an Ingress as nodes need it.
func Item(ing *networkingv1.Ingress) *wire.Ingress {
	out := &wire.Ingress{Created: ing.CreationTimestamp.Unix(), Redirect: ing.Annotations[manifests.AnnotationSSLRedirect] == "true"}
	if d, err := time.ParseDuration(ing.Annotations[manifests.AnnotationBackendTimeout]); err == nil {
		out.Timeout = d.Milliseconds()
	}
	if b := ing.Spec.DefaultBackend; b != nil {
		it := backend(b)
		out.Default = &it
	}
	for i := range ing.Spec.Rules {
		r := &ing.Spec.Rules[i]
		rule := wire.IngressRule{Host: r.Host}
		if r.HTTP != nil {
			for j := range r.HTTP.Paths {
				p := &r.HTTP.Paths[j]
				path := p.Path
				if path == "" {
					path = "/"
				}
				rule.Paths = append(rule.Paths, wire.IngressPath{Path: path, Exact: p.PathType != nil && *p.PathType == networkingv1.PathTypeExact, Backend: backend(&p.Backend)})
			}
		}
		out.Rules = append(out.Rules, rule)
	}
	for i := range ing.Spec.TLS {
		out.TLS = append(out.TLS, wire.IngressTLS{Hosts: ing.Spec.TLS[i].Hosts, Secret: ing.Spec.TLS[i].SecretName})
	}
	return out
}

func backend(b *networkingv1.IngressBackend) wire.IngressBackend {
	if b.Service == nil {
		return wire.IngressBackend{}
	}
	return wire.IngressBackend{Service: b.Service.Name, Port: uint16(b.Service.Port.Number), Name: b.Service.Port.Name}
}

// Secrets names the Secrets of an Ingress, in its namespace.
func Secrets(ing *networkingv1.Ingress) []string {
	var out []string
	for i := range ing.Spec.TLS {
		if s := ing.Spec.TLS[i].SecretName; s != "" && !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// Older says whether a comes before b: by age, then by name. It is the order
// in which nodes give away hosts and paths, too.
func Older(a, b *networkingv1.Ingress) bool {
	if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return a.CreationTimestamp.Before(&b.CreationTimestamp)
	}
	return a.Namespace+"/"+a.Name < b.Namespace+"/"+b.Name
}
