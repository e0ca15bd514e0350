package registry

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net/netip"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/manifests"
)

// Config of a Registry. Durable, Proposer, Soft and SoftProposer are
// required; the rest has defaults.
type Config struct {
	Durable  state.Reader
	Proposer state.Proposer
	// Soft holds Events and node Leases: the leader's memory. SoftProposer
	// writes it (on a follower: through the leader).
	Soft         state.Reader
	SoftProposer state.Proposer

	Admission admission.Chain
	Clock     clock.Clock // nil is the machine's
	Random    io.Reader   // nil is crypto/rand: uids, generated names, first guess of addresses
	Log       *slog.Logger

	// Sealer seals Secrets before they are proposed. Nil stores them in clear:
	// for tests only.
	Sealer *Sealer

	// ServiceCIDRs are the ranges of cluster addresses, the primary family
	// first; at most one of each family. Default 10.43.0.0/16.
	ServiceCIDRs []netip.Prefix
	// NodePortMin and NodePortMax bound allocated node ports, both included.
	// Default 30000 to 32767.
	NodePortMin, NodePortMax int32

	// CacheBytes bounds the decoded-object cache, estimated from the encoded
	// bytes. Default 24 MiB.
	CacheBytes int
}

// Registry implements Store. Owner and goroutines: none of its own; every
// method runs in the caller's. It keeps no state but the decoded-object
// cache and whose turn it is, so any number of registries over one store agree.
type Registry struct {
	cfg     Config
	codec   *Codec
	cache   *cache
	writers writers
}

// New returns a Registry. It fails only on a configuration that cannot work.
func New(cfg Config) (*Registry, error) {
	if cfg.Durable == nil || cfg.Proposer == nil || cfg.Soft == nil || cfg.SoftProposer == nil {
		return nil, errors.New("registry: a durable and a soft store with their proposers are required")
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.System
	}
	if cfg.Random == nil {
		cfg.Random = rand.Reader
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if len(cfg.ServiceCIDRs) == 0 {
		cfg.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.43.0.0/16")}
	}
	if len(cfg.ServiceCIDRs) > 2 || (len(cfg.ServiceCIDRs) == 2 && cfg.ServiceCIDRs[0].Addr().Is4() == cfg.ServiceCIDRs[1].Addr().Is4()) {
		return nil, errors.New("registry: at most one service range of each address family")
	}
	if cfg.NodePortMin == 0 && cfg.NodePortMax == 0 {
		cfg.NodePortMin, cfg.NodePortMax = 30000, 32767
	}
	if cfg.NodePortMin < 1 || cfg.NodePortMax > 65535 || cfg.NodePortMin > cfg.NodePortMax {
		return nil, fmt.Errorf("registry: node port range %d-%d is not valid", cfg.NodePortMin, cfg.NodePortMax)
	}
	if cfg.CacheBytes == 0 {
		cfg.CacheBytes = 24 << 20
	}
	return &Registry{cfg: cfg, codec: NewCodec(cfg.Sealer), cache: newCache(cfg.CacheBytes)}, nil
}

var _ Store = (*Registry)(nil)

// kindOfKey finds the stored kind of a Key.Kind.
func kindOfKey(s string) *manifests.Kind { return manifests.ByGroupKind(schema.ParseGroupKind(s)) }

// resolve finds a served kind and the kind that its objects are stored as
// (another one for projections).
func resolve(gk schema.GroupKind) (served, stored *manifests.Kind, err error) {
	served = manifests.ByGroupKind(gk)
	if served == nil {
		return nil, nil, &meta.NoKindMatchError{GroupKind: gk}
	}
	stored = served
	if served.AliasOf != (schema.GroupKind{}) {
		if stored = manifests.ByGroupKind(served.AliasOf); stored == nil {
			return nil, nil, &meta.NoKindMatchError{GroupKind: served.AliasOf}
		}
	}
	return served, stored, nil
}

func gr(k *manifests.Kind) schema.GroupResource { return k.GVR().GroupResource() }

// Reader implements Store. Leases are durable except in
// manifests.NodeLeaseNamespace: see ReaderFor.
func (r *Registry) Reader(gk schema.GroupKind) state.Reader { return r.ReaderFor(gk, "") }

// ReaderFor is Reader for the objects of one namespace.
func (r *Registry) ReaderFor(gk schema.GroupKind, namespace string) state.Reader {
	if _, stored, err := resolve(gk); err == nil && manifests.IsSoft(stored, namespace) {
		return r.cfg.Soft
	}
	return r.cfg.Durable
}

func (r *Registry) proposer(k *manifests.Kind, namespace string) state.Proposer {
	if manifests.IsSoft(k, namespace) {
		return r.cfg.SoftProposer
	}
	return r.cfg.Proposer
}

func (r *Registry) find(k *manifests.Kind, namespace, name string) (*state.Record, bool) {
	reader := r.cfg.Durable
	if manifests.IsSoft(k, namespace) {
		reader = r.cfg.Soft
	}
	return reader.Snapshot().Get(keyOf(k, namespace, name))
}

func keyOf(k *manifests.Kind, namespace, name string) state.Key {
	return state.Key{Kind: k.StorageKind(), Namespace: namespace, Name: name}
}

// Get implements Store.
func (r *Registry) Get(gk schema.GroupKind, namespace, name string) (runtime.Object, error) {
	served, stored, err := resolve(gk)
	if err != nil {
		return nil, err
	}
	rec, ok := r.find(stored, namespace, name)
	if !ok {
		return nil, notFound(served, name)
	}
	return r.DecodeAs(served, rec)
}

// Decode implements Store.
func (r *Registry) Decode(rec *state.Record) (runtime.Object, error) {
	if obj, ok := r.cache.get(rec); ok {
		return obj, nil
	}
	obj, err := r.codec.Decode(rec)
	if err != nil {
		return nil, err
	}
	r.cache.put(rec, obj)
	return obj, nil
}

// DecodeAs is Decode, projected to the kind as which it is served.
func (r *Registry) DecodeAs(served *manifests.Kind, rec *state.Record) (runtime.Object, error) {
	obj, err := r.Decode(rec)
	if err != nil {
		return nil, err
	}
	return toServed(served, obj)
}

// List implements Store.
func (r *Registry) List(gk schema.GroupKind, namespace string, sel labels.Selector, f fields.Selector) ([]runtime.Object, error) {
	served, stored, err := resolve(gk)
	if err != nil {
		return nil, err
	}
	m, err := NewMatcher(served, sel, f)
	if err != nil {
		return nil, err
	}
	var out []runtime.Object
	var failed error
	for _, reader := range r.readers(stored, namespace) {
		reader.Snapshot().Range(stored.StorageKind(), namespace, state.Key{}, func(rec *state.Record) bool {
			ok, err := m.Matches(r, rec)
			if err == nil && ok {
				var obj runtime.Object
				if obj, err = r.DecodeAs(served, rec); err == nil {
					out = append(out, obj)
				}
			}
			failed = err
			return err == nil
		})
		if failed != nil {
			return nil, failed
		}
	}
	return out, nil
}

// readers are the stores that a list of the kind covers: Leases of all
// namespaces are in both.
func (r *Registry) readers(k *manifests.Kind, namespace string) []state.Reader {
	if manifests.IsSoft(k, namespace) {
		return []state.Reader{r.cfg.Soft}
	}
	if namespace == "" && k.Namespaced && manifests.IsSoft(k, manifests.NodeLeaseNamespace) {
		return []state.Reader{r.cfg.Durable, r.cfg.Soft}
	}
	return []state.Reader{r.cfg.Durable}
}

// propose commits one op and turns its refusal into a Kubernetes error.
func (r *Registry) propose(ctx context.Context, stored *manifests.Kind, namespace string, op state.Op) (state.Result, error) {
	res, err := awaited(ctx, r.proposer(stored, namespace), []state.Op{op})
	if err != nil {
		return state.Result{}, proposeError(err)
	}
	if len(res) != 1 {
		return state.Result{}, fmt.Errorf("registry: one op proposed, %d results", len(res))
	}
	return res[0], nil
}

func (r *Registry) now() metav1.Time {
	return metav1.NewTime(r.cfg.Clock.Now().Truncate(time.Second))
}

// uid is a random (version 4) uuid, RFC 9562.
func (r *Registry) uid() (string, error) {
	var b [16]byte
	if _, err := io.ReadFull(r.cfg.Random, b[:]); err != nil {
		return "", fmt.Errorf("registry: random source: %w", err)
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:]), nil
}

// Generated names: upstream's alphabet (no vowels, no look-alikes), suffix
// and limit.
const (
	nameAlphabet  = "bcdfghjklmnpqrstvwxz2456789"
	nameSuffix    = 5
	maxNameLength = 63
)

func (r *Registry) generateName(base string) (string, error) {
	if len(base) > maxNameLength-nameSuffix {
		base = base[:maxNameLength-nameSuffix]
	}
	var b strings.Builder
	b.WriteString(base)
	for range nameSuffix {
		n, err := r.below(len(nameAlphabet))
		if err != nil {
			return "", err
		}
		b.WriteByte(nameAlphabet[n])
	}
	return b.String(), nil
}

// below is a uniform random number in [0, n).
func (r *Registry) below(n int) (int, error) {
	v, err := rand.Int(r.cfg.Random, big.NewInt(int64(n)))
	if err != nil {
		return 0, fmt.Errorf("registry: random source: %w", err)
	}
	return int(v.Int64()), nil
}
