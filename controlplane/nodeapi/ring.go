package nodeapi

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
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
// a rotation stands is in the Secret, so a new leader goes on with it.
const (
	// ringStep is how long members have to take a step: the nudge, the pull and
	// the Keeper's look take seconds.
	ringStep = 10 * time.Second
	// ringOverlap is how long the previous key is understood when nobody is to
	// be kept out: nodes that are away come back to the pool meanwhile.
	ringOverlap = time.Hour
)

// RotateKeyring gives a site new gossip keys. With banned, somebody who holds
// the ones of now is out as soon as all others have the new ones.
func (s *Server) RotateKeyring(ctx context.Context, zone string, banned bool) error {
	if s.cfg.Site != nil {
		return nil
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

// stepRing takes the next step if it is due, and says when the one after it is;
// 0 is never.
func stepRing(data map[string][]byte, now time.Time) (wait time.Duration) {
	if len(data[ringNext]) == 0 && len(data[ringOld]) == 0 {
		return 0
	}
	after := ringStep
	if len(data[ringNext]) == 0 && len(data[ringBanned]) == 0 {
		after = ringOverlap
	}
	// A step of the future was written by another clock.
	if at, err := time.Parse(time.RFC3339, string(data[ringRotated])); err == nil && !now.Before(at.Add(-ringStep)) && now.Before(at.Add(after)) {
		return at.Add(after).Sub(now)
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

// stepRings takes all steps that are due, and says when the next one is; 0 is
// never.
func (s *Server) stepRings(ctx context.Context) (next time.Duration) {
	var names []string
	s.cfg.Store.Reader(secretGK).Snapshot().Range(secretGK.String(), tokenNamespace, state.Key{}, func(r *state.Record) bool {
		if strings.HasPrefix(r.Header.Key.Name, ringPrefix) {
			names = append(names, r.Header.Key.Name)
		}
		return true
	})
	for _, name := range names {
		obj, err := s.cfg.Store.Get(secretGK, tokenNamespace, name)
		sec, ok := obj.(*corev1.Secret)
		if err != nil || !ok {
			continue
		}
		data := maps.Clone(sec.Data)
		wait := stepRing(data, s.cfg.Clock.Now())
		if string(data[ringRotated]) != string(sec.Data[ringRotated]) {
			err := s.changeRing(ctx, name, func(data map[string][]byte) { wait = stepRing(data, s.cfg.Clock.Now()) })
			if err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
				s.warn("secret", name, "gossip keys: the next step of their rotation", err)
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
