package nodeapi

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// build brings n up to the newest snapshot; n.mu is held.
func (a *assigner) build(n *nodeState) error {
	snap := a.s.cfg.Store.Reader(podGK).Snapshot()
	old := make(map[*state.Record]*entry, len(n.order))
	for i := range n.order {
		old[n.order[i].rec] = &n.order[i]
	}
	order := make([]entry, 0, len(n.order)+1)
	var refs []state.Key
	take := func(rec *state.Record) error {
		var e entry
		if known := old[rec]; known != nil {
			e = *known
		} else {
			var err error
			if e, err = a.describe(rec); err != nil {
				return fmt.Errorf("%s %s/%s: %w", rec.Header.Key.Kind, rec.Header.Key.Namespace, rec.Header.Key.Name, err)
			}
			if len(order) > 0 && slices.Equal(order[len(order)-1].refs, e.refs) {
				e.refs = order[len(order)-1].refs
			}
		}
		if !e.skip {
			refs = append(refs, e.refs...)
		}
		order = append(order, e)
		return nil
	}
	var failed error
	snap.PodsOnNode(n.name, func(rec *state.Record) bool {
		failed = take(rec)
		return failed == nil
	})
	if failed != nil {
		return failed
	}
	slices.SortFunc(refs, compareKeys)
	refs = slices.Compact(refs)
	ofPods := len(refs)
	of := slices.Clone(append(refs, a.tlsRefs(snap, n.name)...))
	refs = nil // what those refer to in their turn: claims to their volumes
	for i, k := range of {
		if i >= ofPods {
			if _, had := slices.BinarySearchFunc(of[:ofPods], k, compareKeys); had {
				continue
			}
		}
		if rec, ok := snap.Get(k); ok && (i < ofPods || a.certificate(rec)) {
			if err := take(rec); err != nil {
				return err
			}
		}
	}
	further := slices.Concat(refs, a.doomedOn(n.name))
	slices.SortFunc(further, compareKeys)
	further = slices.Compact(further)
	for _, k := range further {
		if rec, ok := snap.Get(k); ok {
			if err := take(rec); err != nil {
				return err
			}
		}
	}
	refs = slices.Concat(of, further)
	n.cidrs, n.site = nil, DefaultZone
	if rec, ok := snap.Get(state.Key{Kind: "Node", Name: n.name}); ok {
		if err := take(rec); err != nil {
			return err
		}
		n.cidrs = cidrsOf(rec)
		if z := rec.Header.Labels[corev1.LabelTopologyZone]; z != "" {
			n.site = z
		}
	}
	n.order = order
	a.register(n, refs)
	a.refreshTokens(n)
	n.gen = n.hash(a.s)
	return nil
}

// DefaultZone is the site of nodes and servers without a zone label.
const DefaultZone = "default"

func cidrsOf(rec *state.Record) []string {
	var out []string
	for _, c := range rec.Header.Claims {
		if len(c) > len("podcidr/") && c[:len("podcidr/")] == "podcidr/" {
			out = append(out, c[len("podcidr/"):])
		}
	}
	return out
}

func compareKeys(a, b state.Key) int {
	return cmpStrings(a.Kind, b.Kind, a.Namespace, b.Namespace, a.Name, b.Name)
}

func cmpStrings(pairs ...string) int {
	for i := 0; i+1 < len(pairs); i += 2 {
		switch {
		case pairs[i] < pairs[i+1]:
			return -1
		case pairs[i] > pairs[i+1]:
			return 1
		}
	}
	return 0
}

// register makes events of the referenced objects, also of missing ones,
// reach the node.
func (a *assigner) register(n *nodeState, refs []state.Key) {
	if slices.Equal(refs, n.missing) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unregister(n)
	n.missing = refs
	if a.nodes[n.name] != n {
		return // disconnected meanwhile
	}
	for _, k := range refs {
		if a.refs[k] == nil {
			a.refs[k] = map[string]bool{}
		}
		a.refs[k][n.name] = true
	}
}

// hash is the generation: never 0.
func (n *nodeState) hash(s *Server) uint64 {
	h := sha256.New()
	var size [4]byte
	part := func(p []byte) {
		binary.BigEndian.PutUint32(size[:], uint32(len(p)))
		h.Write(size[:])
		h.Write(p)
	}
	field := func(parts ...string) {
		for _, p := range parts {
			part([]byte(p))
		}
		h.Write([]byte{0xff})
	}
	type line struct {
		uid     string
		version uint64
	}
	lines := make([]line, 0, len(n.order)+len(n.tokens))
	for i := range n.order {
		if e := &n.order[i]; !e.skip {
			lines = append(lines, line{e.uid(), e.version})
		}
	}
	for uid, expires := range n.tokens {
		lines = append(lines, line{uid, uint64(expires)})
	}
	slices.SortFunc(lines, func(a, b line) int { return strings.Compare(a.uid, b.uid) })
	var buf []byte
	for _, l := range lines {
		buf = strconv.AppendUint(append(append(buf[:0], l.uid...), '='), l.version, 10)
		part(buf)
	}
	h.Write([]byte{0xff})
	field(n.cidrs...)
	field(n.site)
	field(s.cfg.Servers()...)
	for _, k := range s.site(n.site).Keyring {
		field(string(k))
	}
	if g := binary.BigEndian.Uint64(h.Sum(nil)); g != 0 {
		return g
	}
	return 1
}
