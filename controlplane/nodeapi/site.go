package nodeapi

import (
	"context"
	"crypto/rand"
	"fmt"
	"hash/fnv"
	"net"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/wire"
)

// Gossip keys are Secrets in kube-system, one for each site: random, never
// derived from anything, handed out with the assignment over the node's
// connection.
const (
	ringPrefix                       = "gossip-keyring-"
	SecretTypeRing corev1.SecretType = "dunlin.dev/gossip-keyring"
	ringZone                         = "zone"
	ringPrimary                      = "primary"
	ringNext                         = "next"     // understood, not used yet
	ringOld                          = "previous" // still understood
	ringRotated                      = "rotated"  // when the last step was, RFC 3339
	ringBanned                       = "banned"   // somebody who is out holds the previous key
	seedCount                        = 5
)

// ringName is the Secret's name: zones are label values, which may have
// capitals and underscores.
func ringName(zone string) string {
	clean := CleanName(zone)
	if clean == zone && len(zone) <= 40 {
		return ringPrefix + clean
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(zone))
	return ringPrefix + suffixed(clean[:min(len(clean), 40)]+"x", strconv.FormatUint(uint64(h.Sum32()), 36))
}

func (s *Server) site(zone string) Site {
	if s.cfg.Site != nil {
		return s.cfg.Site(zone)
	}
	obj, err := s.cfg.Store.Get(secretGK, tokenNamespace, ringName(zone))
	if err != nil {
		return Site{}
	}
	sec, ok := obj.(*corev1.Secret)
	if !ok || sec.Type != SecretTypeRing || len(sec.Data[ringPrimary]) == 0 {
		return Site{}
	}
	out := Site{Keyring: [][]byte{sec.Data[ringPrimary]}}
	for _, name := range []string{ringNext, ringOld} {
		if k := sec.Data[name]; len(k) > 0 {
			out.Keyring = append(out.Keyring, k)
		}
	}
	return out
}

// Keyring returns a site's gossip keys, making them if there are none. The
// servers' own agent and pool use it too.
func (s *Server) Keyring(ctx context.Context, zone string) ([][]byte, error) {
	if ring := s.site(zone).Keyring; len(ring) > 0 || s.cfg.Site != nil {
		return ring, nil
	}
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		return nil, fmt.Errorf("nodeapi: random: %w", err)
	}
	_, err := s.cfg.Store.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: tokenNamespace, Name: ringName(zone)},
		Type:       SecretTypeRing,
		Data:       map[string][]byte{ringZone: []byte(zone), ringPrimary: key},
	}, registry.WriteOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("nodeapi: keep gossip keys of zone %s: %w", zone, err)
	}
	return s.site(zone).Keyring, nil
}

// seeds are gossip addresses of some nodes of a zone, of those that are
// connected here.
func (s *Server) seeds(zone, except string) []string { return s.addresses(zone, except, s.Connected) }

// addresses are gossip addresses of this server and of some nodes of a zone.
func (s *Server) addresses(zone, except string, who func(node string) bool) []string {
	if s.cfg.Site != nil {
		return s.cfg.Site(zone).Seeds
	}
	var out []string
	if s.cfg.Members != nil {
		if site, addrs := s.cfg.Members(); site == zone {
			out = append(out, addrs[:min(len(addrs), seedCount)]...)
		}
	}
	s.cfg.Store.Reader(nodeGK).Snapshot().Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		if len(out) >= seedCount {
			return false
		}
		z := r.Header.Labels[corev1.LabelTopologyZone]
		if z == "" {
			z = DefaultZone
		}
		if z != zone || r.Header.Key.Name == except || !who(r.Header.Key.Name) {
			return true
		}
		if n, err := s.getNode(r.Header.Key.Name); err == nil {
			if a := n.Annotations[wire.AnnotationGossip]; a != "" {
				out = append(out, a)
				return true
			}
			for _, a := range n.Status.Addresses {
				if a.Type == corev1.NodeInternalIP {
					out = append(out, net.JoinHostPort(a.Address, strconv.Itoa(gossipPort)))
					break
				}
			}
		}
		return true
	})
	slices.Sort(out)
	out = slices.Compact(out)
	return out
}

// Seeds are gossip addresses of a site. A server that does not lead has no
// nodes connected: it takes what they last said of themselves.
func (s *Server) Seeds(zone string) []string {
	out := s.seeds(zone, "")
	if len(out) > 1 {
		return out // more than its own
	}
	return s.addresses(zone, "", func(string) bool { return true })
}

const gossipPort = 7946
