package nodeapi

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/dunlin-project/dunlin/controlplane/ingress"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Nodes that serve Ingresses get the Secrets of spec.tls with their
// assignment: no other node ever does.

// servingNodes are those nodes; a.mu is held.
func (a *assigner) servingNodes() map[string]bool {
	if a.serving == nil {
		a.serving = map[string]bool{}
		for _, n := range ingress.Chosen(a.s.cfg.Store.Reader(nodeGK).Snapshot()) {
			a.serving[n] = true
		}
	}
	return a.serving
}

// forgetServing makes it be found out anew: events were missed.
func (a *assigner) forgetServing() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.serving = nil
}

// choose finds out anew who serves, and marks those for whom that changed;
// a.mu is held.
func (a *assigner) choose(mark func(string)) {
	before := a.serving
	a.serving = nil
	now := a.servingNodes()
	if maps.Equal(before, now) {
		return
	}
	for n := range before {
		mark(n)
	}
	for n := range now {
		mark(n)
	}
}

// tlsRefs are the keys of the Secrets that a node needs for the Ingresses that
// it serves, sorted.
func (a *assigner) tlsRefs(snap state.Snapshot, node string) []state.Key {
	a.mu.Lock()
	serves := a.servingNodes()[node]
	a.mu.Unlock()
	if !serves {
		return nil
	}
	var out []state.Key
	snap.Range(ingress.Kind, "", state.Key{}, func(rec *state.Record) bool {
		obj, err := a.s.cfg.Store.Decode(rec)
		if err != nil {
			return true // the service table warns
		}
		if i, ok := obj.(*networkingv1.Ingress); ok && ingress.Ours(i, a.s.ingressClass) {
			for _, name := range ingress.Secrets(i) {
				out = append(out, state.Key{Kind: secretGK.Kind, Namespace: i.Namespace, Name: name})
			}
		}
		return true
	})
	slices.SortFunc(out, compareKeys)
	return slices.Compact(out)
}

// certificate says whether a Secret holds a certificate: an Ingress that names
// another one does not bring it to a node.
func (a *assigner) certificate(rec *state.Record) bool {
	obj, err := a.s.cfg.Store.Decode(rec)
	if err != nil {
		return false
	}
	sec, ok := obj.(*corev1.Secret)
	return ok && len(sec.Data[corev1.TLSCertKey]) > 0 && len(sec.Data[corev1.TLSPrivateKeyKey]) > 0
}
