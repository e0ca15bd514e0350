package nodeapi

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// New gossip keys come in three steps, each of which the members of the site
// take one after the other without losing each other: all understand the new
// key, then all use it, then nobody understands the one before any more. Where
// a rotation stands is in the Secret, so a new leader goes on with it. A step
// waits for the nodes that are connected to hold the one before, but not for
// ever: one that is stuck must not keep a key alive that a thief holds.
const (
	// ringStep is how long members have to take a step at least: the nudge, the
	// pull and the Keeper's look take seconds.
	ringStep = 10 * time.Second
	// ringPatience is how long a connected node that lacks the step before holds
	// up the next one; with somebody to keep out, ringBannedPatience.
	ringPatience       = 10 * time.Minute
	ringBannedPatience = time.Minute
	// ringOverlap is how long the previous key is understood when nobody is to
	// be kept out: nodes that are away come back to the pool meanwhile.
	ringOverlap = time.Hour
)

// ErrNoSite says that no node was ever in a site.
var ErrNoSite = errors.New("there is no such site")

// RotateKeyring gives a site new gossip keys. With banned, somebody who holds
// the ones of now is out as soon as all others have the new ones.
func (s *Server) RotateKeyring(ctx context.Context, zone string, banned bool) error {
	if s.cfg.Site != nil {
		return nil
	}
	if !banned && len(s.site(zone).Keyring) == 0 {
		return fmt.Errorf("%w: %q (a node's is its label %s, %q where it has none)", ErrNoSite, zone, corev1.LabelTopologyZone, DefaultZone)
	}
	if _, err := s.Keyring(ctx, zone); err != nil {
		return err
	}
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		return fmt.Errorf("nodeapi: random: %w", err)
	}
	err := s.changeRing(ctx, ringName(zone), func(data map[string][]byte) { beginRing(data, key, banned, s.cfg.Clock.Now()) })
	if err != nil {
		return fmt.Errorf("nodeapi: rotate gossip keys of zone %s: %w", zone, err)
	}
	select {
	case s.rings <- struct{}{}:
	default:
	}
	return nil
}

// beginRing is the first step. A key that was to be next may be known to who
// is banned now, so it is replaced, never used.
func beginRing(data map[string][]byte, key []byte, banned bool, now time.Time) {
	data[ringNext] = key
	data[ringRotated] = []byte(now.UTC().Format(time.RFC3339))
	if banned {
		data[ringBanned] = []byte("true")
	}
}

// stepRing takes the next step if it is due, and says when to look again; 0 is
// never. late says that a node that is connected does not hold the keys of now.
func stepRing(data map[string][]byte, late bool, now time.Time) (wait time.Duration) {
	if len(data[ringNext]) == 0 && len(data[ringOld]) == 0 {
		return 0
	}
	after, patience := ringStep, ringPatience
	if len(data[ringBanned]) > 0 {
		patience = ringBannedPatience
	} else if len(data[ringNext]) == 0 {
		after = ringOverlap
	}
	// A step of the future was written by another clock.
	at, err := time.Parse(time.RFC3339, string(data[ringRotated]))
	if err == nil && !now.Before(at.Add(-ringStep)) {
		if now.Before(at.Add(after)) {
			return at.Add(after).Sub(now)
		}
		if late && now.Before(at.Add(after+patience)) {
			return ringAgain
		}
	}
	data[ringRotated] = []byte(now.UTC().Format(time.RFC3339))
	if len(data[ringNext]) == 0 {
		delete(data, ringOld)
		delete(data, ringBanned)
		return 0
	}
	data[ringOld], data[ringPrimary] = data[ringPrimary], data[ringNext]
	delete(data, ringNext)
	if len(data[ringBanned]) > 0 {
		return ringStep
	}
	return ringOverlap
}

// Rotation is where the new gossip keys of a site stand.
type Rotation struct {
	Site string `json:"site"`
	// Step is 1 while members learn the new key, 2 while they use it and still
	// understand the one before.
	Step int `json:"step"`
	// Since is when the step was taken.
	Since time.Time `json:"since"`
	// Missing are nodes that are connected and do not hold the step yet: the
	// next one waits for them, but not for ever.
	Missing []string `json:"missing,omitempty"`
}

// Rotations lists those under way. On the leader, to which the nodes are
// connected.
func (s *Server) Rotations() (out []Rotation) {
	for _, sec := range s.ringSecrets() {
		r := Rotation{Site: string(sec.Data[ringZone]), Step: 2}
		switch {
		case len(sec.Data[ringNext]) > 0:
			r.Step = 1
		case len(sec.Data[ringOld]) == 0:
			continue
		}
		r.Since, _ = time.Parse(time.RFC3339, string(sec.Data[ringRotated]))
		r.Missing = s.lackRing(r.Site)
		out = append(out, r)
	}
	return out
}

// lackRing lists the nodes of a site that are connected, or were a moment ago
// (to the leader before this one), and have not said that they hold its keys of
// now.
func (s *Server) lackRing(zone string) (names []string) {
	ring := ringSum(s.site(zone).Keyring)
	for name, l := range s.leases.Snapshot() {
		sess := s.sessionOfNode(name)
		if (sess == nil && l.Expired) || zoneOf(s, name) != zone {
			continue
		}
		if sess == nil || sess.holding() != ring {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// ringID stands for gossip keys, in their order.
type ringID [sha256.Size]byte

func ringSum(keys [][]byte) ringID {
	h := sha256.New()
	for _, k := range keys {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(k))))
		h.Write(k)
	}
	return ringID(h.Sum(nil))
}

// holds notes which generation a node says that it holds: with it, it holds the
// gossip keys that it was sent along.
func (sess *session) holds(generation uint64) {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	if generation != 0 && generation == sess.sentGen {
		sess.ring = sess.sentRing
	}
}

func (sess *session) holding() ringID {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	return sess.ring
}

// sent notes what goes to a node.
func (sess *session) sent(generation uint64, keys [][]byte) {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	sess.sentGen, sess.sentRing = generation, ringSum(keys)
}

func (s *Server) changeRing(ctx context.Context, name string, change func(data map[string][]byte)) error {
	_, err := s.cfg.Store.Update(ctx, secretGK, tokenNamespace, name, registry.Main, func(o runtime.Object) (runtime.Object, error) {
		sec, ok := o.(*corev1.Secret)
		if !ok || sec.Data == nil {
			return nil, fmt.Errorf("nodeapi: gossip keys are a %T", o)
		}
		change(sec.Data)
		return sec, nil
	}, registry.WriteOptions{})
	if err != nil {
		return fmt.Errorf("nodeapi: keep gossip keys: %w", err)
	}
	return nil
}

// ringSecrets are those of all sites.
func (s *Server) ringSecrets() (out []*corev1.Secret) {
	var names []string
	s.cfg.Store.Reader(secretGK).Snapshot().Range(secretGK.String(), tokenNamespace, state.Key{}, func(r *state.Record) bool {
		if strings.HasPrefix(r.Header.Key.Name, ringPrefix) {
			names = append(names, r.Header.Key.Name)
		}
		return true
	})
	for _, name := range names {
		obj, err := s.cfg.Store.Get(secretGK, tokenNamespace, name)
		if sec, ok := obj.(*corev1.Secret); err == nil && ok && sec.Type == SecretTypeRing {
			out = append(out, sec)
		}
	}
	return out
}

// stepRings takes all steps that are due, and says when to look again; 0 is
// never.
func (s *Server) stepRings(ctx context.Context) (next time.Duration) {
	for _, sec := range s.ringSecrets() {
		if len(sec.Data[ringNext]) == 0 && len(sec.Data[ringOld]) == 0 {
			continue
		}
		missing := s.lackRing(string(sec.Data[ringZone]))
		late := len(missing) > 0
		data := maps.Clone(sec.Data)
		wait := stepRing(data, late, s.cfg.Clock.Now())
		if string(data[ringRotated]) != string(sec.Data[ringRotated]) {
			if late {
				s.log.Warn("gossip keys: the next step of their rotation is taken without nodes that do not hold the one before; they find back over TCP once they do", "site", string(sec.Data[ringZone]), "nodes", missing)
			}
			err := s.changeRing(ctx, sec.Name, func(data map[string][]byte) { wait = stepRing(data, late, s.cfg.Clock.Now()) })
			if err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
				s.warn("secret", sec.Name, "gossip keys: the next step of their rotation", err)
				wait = ringStep
			}
		}
		if wait > 0 && (next == 0 || wait < next) {
			next = wait
		}
	}
	return next
}

// ringLook is how often a server looks whether it leads, and has rotations to
// go on with; ringMost is how often the one that leads does.
const (
	ringLook = 5 * time.Second
	ringMost = 10 * time.Minute
	// ringAgain is how often it looks at a node that holds up a step.
	ringAgain = 2 * time.Second
)

// rotations keeps rotations going, on the server that leads.
func (s *Server) rotations(ctx context.Context) {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.rings:
		case <-t.C:
		}
		wait := ringLook
		if _, leading := s.cfg.Leadership.Leadership(); leading {
			if wait = s.stepRings(ctx); wait == 0 || wait > ringMost {
				wait = ringMost
			}
		}
		t.Reset(wait)
	}
}
