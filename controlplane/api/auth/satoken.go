package auth

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/internal/clock"
)

// DefaultIssuer and DefaultAudience stand in ServiceAccount tokens unless
// configured otherwise; both are upstream's usual in-cluster name.
const (
	DefaultIssuer   = "https://kubernetes.default.svc"
	DefaultAudience = "https://kubernetes.default.svc"
)

// leeway is how far clocks may differ when a token's dates are checked, and
// how long a token outlives the deletion mark of what it is bound to.
const leeway = time.Minute

// maxToken bounds a presented token, bytes.
const maxToken = 16 << 10

// Ref names an object that a token is bound to.
type Ref struct {
	Name string `json:"name,omitempty"`
	UID  string `json:"uid,omitempty"`
}

// Claims are what a ServiceAccount token says, in upstream's layout
// (RFC 7519 plus the "kubernetes.io" private claim of KEP-1205).
type Claims struct {
	Audience   []string        `json:"aud"`
	Expiry     int64           `json:"exp"` // Unix seconds, like all dates here
	IssuedAt   int64           `json:"iat"`
	Issuer     string          `json:"iss"`
	ID         string          `json:"jti,omitempty"`
	Kubernetes KubernetesClaim `json:"kubernetes.io"`
	NotBefore  int64           `json:"nbf"`
	Subject    string          `json:"sub"`
}

// KubernetesClaim names the ServiceAccount and what the token is bound to.
type KubernetesClaim struct {
	Namespace      string `json:"namespace"`
	ServiceAccount Ref    `json:"serviceaccount"`
	Pod            *Ref   `json:"pod,omitempty"`
	Secret         *Ref   `json:"secret,omitempty"`
	Node           *Ref   `json:"node,omitempty"`
}

// IssuerConfig is what an Issuer needs.
type IssuerConfig struct {
	// Key signs. It must be on P-256.
	Key *ecdsa.PrivateKey
	// Verify are further keys whose signatures are accepted, so that a key
	// can be changed without invalidating tokens at once.
	Verify []*ecdsa.PublicKey
	// Issuer is the "iss" claim; DefaultIssuer if empty.
	Issuer string
	// Audiences are the API server's own names, the first of which is given
	// to tokens that ask for none; DefaultAudience if empty.
	Audiences []string
	Clock     clock.Clock
}

// Issuer signs and checks ServiceAccount tokens. It keeps no state.
type Issuer struct {
	key       *ecdsa.PrivateKey
	kid       string
	keys      map[string]*ecdsa.PublicKey
	kids      []string
	issuer    string
	audiences []string
	clock     clock.Clock
}

// NewIssuer checks the configuration.
func NewIssuer(cfg IssuerConfig) (*Issuer, error) {
	if cfg.Key == nil || cfg.Key.Curve != elliptic.P256() {
		return nil, errors.New("auth: the ServiceAccount token key must be an ECDSA key on P-256")
	}
	if cfg.Clock == nil {
		return nil, errors.New("auth: the token issuer needs a clock")
	}
	is := &Issuer{key: cfg.Key, issuer: cfg.Issuer, audiences: slices.Clone(cfg.Audiences), clock: cfg.Clock, keys: map[string]*ecdsa.PublicKey{}}
	if is.issuer == "" {
		is.issuer = DefaultIssuer
	}
	if len(is.audiences) == 0 {
		is.audiences = []string{DefaultAudience}
	}
	for _, k := range append([]*ecdsa.PublicKey{&cfg.Key.PublicKey}, cfg.Verify...) {
		kid, err := keyID(k)
		if err != nil {
			return nil, err
		}
		if _, have := is.keys[kid]; !have {
			is.keys[kid] = k
			is.kids = append(is.kids, kid)
		}
	}
	is.kid = is.kids[0]
	return is, nil
}

// Audiences are the API server's own.
func (is *Issuer) Audiences() []string { return slices.Clone(is.audiences) }

// URL is the "iss" claim.
func (is *Issuer) URL() string { return is.issuer }

// keyID is the RFC 7638 thumbprint of a public key.
func keyID(k *ecdsa.PublicKey) (string, error) {
	x, y, err := coordinates(k)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(`{"crv":"P-256","kty":"EC","x":"` + x + `","y":"` + y + `"}`))
	return base64.RawURLEncoding.EncodeToString(sum[:]), nil
}

func coordinates(k *ecdsa.PublicKey) (x, y string, err error) {
	if k == nil || k.Curve != elliptic.P256() {
		return "", "", errors.New("auth: ServiceAccount token keys must be on P-256")
	}
	raw, err := k.Bytes() // 4 || x || y
	if err != nil {
		return "", "", fmt.Errorf("auth: ServiceAccount token key: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(raw[1:33]), base64.RawURLEncoding.EncodeToString(raw[33:]), nil
}

// JWKS is the key set (RFC 7517) by which others check the tokens.
func (is *Issuer) JWKS() []byte {
	type jwk struct {
		Use string `json:"use"`
		Kty string `json:"kty"`
		Kid string `json:"kid"`
		Crv string `json:"crv"`
		Alg string `json:"alg"`
		X   string `json:"x"`
		Y   string `json:"y"`
	}
	var set struct {
		Keys []jwk `json:"keys"`
	}
	for _, kid := range is.kids {
		x, y, err := coordinates(is.keys[kid])
		if err != nil {
			continue // NewIssuer accepted every key
		}
		set.Keys = append(set.Keys, jwk{Use: "sig", Kty: "EC", Kid: kid, Crv: "P-256", Alg: "ES256", X: x, Y: y})
	}
	b, err := json.Marshal(set)
	if err != nil {
		return nil // strings only: cannot happen
	}
	return b
}

// Issue signs a token for the ServiceAccount. bound is the Pod, Secret or
// Node it is bound to, or nil; node, when bound is a pod, is the pod's node.
// lifetime is rounded down to seconds.
func (is *Issuer) Issue(sa *corev1.ServiceAccount, bound runtime.Object, node *Ref, audiences []string, lifetime time.Duration) (string, time.Time, error) {
	now := is.clock.Now().Truncate(time.Second)
	exp := now.Add(lifetime.Truncate(time.Second))
	if len(audiences) == 0 {
		audiences = is.audiences[:1]
	}
	c := Claims{
		Issuer: is.issuer, Subject: ServiceAccountUser(sa.Namespace, sa.Name), Audience: audiences,
		IssuedAt: now.Unix(), NotBefore: now.Unix(), Expiry: exp.Unix(), ID: uuid.NewString(),
		Kubernetes: KubernetesClaim{Namespace: sa.Namespace, ServiceAccount: Ref{Name: sa.Name, UID: string(sa.UID)}},
	}
	switch o := bound.(type) {
	case nil:
	case *corev1.Pod:
		c.Kubernetes.Pod, c.Kubernetes.Node = &Ref{Name: o.Name, UID: string(o.UID)}, node
	case *corev1.Secret:
		c.Kubernetes.Secret = &Ref{Name: o.Name, UID: string(o.UID)}
	case *corev1.Node:
		c.Kubernetes.Node = &Ref{Name: o.Name, UID: string(o.UID)}
	default:
		return "", time.Time{}, fmt.Errorf("auth: a token cannot be bound to a %T", bound)
	}
	token, err := is.sign(c)
	return token, exp, err
}

func (is *Issuer) sign(c Claims) (string, error) {
	body, err := json.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("auth: token claims: %w", err)
	}
	head := `{"alg":"ES256","kid":"` + is.kid + `"}`
	text := base64.RawURLEncoding.EncodeToString([]byte(head)) + "." + base64.RawURLEncoding.EncodeToString(body)
	sum := sha256.Sum256([]byte(text))
	r, s, err := ecdsa.Sign(rand.Reader, is.key, sum[:])
	if err != nil {
		return "", fmt.Errorf("auth: sign token: %w", err)
	}
	sig := make([]byte, 64) // RFC 7518 section 3.4: r || s, 32 bytes each
	r.FillBytes(sig[:32])
	s.FillBytes(sig[32:])
	return text + "." + base64.RawURLEncoding.EncodeToString(sig), nil
}

// Errors of token checks.
var (
	ErrTokenExpired   = errors.New("auth: the service account token has expired")
	ErrTokenNotYet    = errors.New("auth: the service account token is not valid yet (check the clocks)")
	ErrTokenSignature = errors.New("auth: the service account token's signature is wrong or by an unknown key")
	ErrTokenAudience  = errors.New("auth: the service account token is for another audience")
	ErrTokenRevoked   = errors.New("auth: what the service account token belongs to is gone")
)

// parse checks signature and dates. ours is false for text that is no token
// of this issuer at all.
func (is *Issuer) parse(token string) (c Claims, ours bool, err error) {
	if len(token) > maxToken {
		return c, false, nil
	}
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return c, false, nil
	}
	var head struct {
		Alg  string   `json:"alg"`
		Kid  string   `json:"kid"`
		Crit []string `json:"crit"`
	}
	rawHead, err1 := base64.RawURLEncoding.DecodeString(parts[0])
	body, err2 := base64.RawURLEncoding.DecodeString(parts[1])
	sig, err3 := base64.RawURLEncoding.DecodeString(parts[2])
	if err1 != nil || err2 != nil || err3 != nil || json.Unmarshal(rawHead, &head) != nil || json.Unmarshal(body, &c) != nil {
		return Claims{}, false, nil
	}
	if c.Issuer != is.issuer {
		return Claims{}, false, nil
	}
	key, known := is.keys[head.Kid]
	if head.Alg != "ES256" || !known || len(sig) != 64 || len(head.Crit) > 0 {
		return Claims{}, true, ErrTokenSignature
	}
	sum := sha256.Sum256([]byte(parts[0] + "." + parts[1]))
	if !ecdsa.Verify(key, sum[:], new(big.Int).SetBytes(sig[:32]), new(big.Int).SetBytes(sig[32:])) {
		return Claims{}, true, ErrTokenSignature
	}
	now := is.clock.Now()
	if !now.Before(time.Unix(c.Expiry, 0).Add(leeway)) {
		return Claims{}, true, ErrTokenExpired
	}
	if now.Add(leeway).Before(time.Unix(c.NotBefore, 0)) || now.Add(leeway).Before(time.Unix(c.IssuedAt, 0)) {
		return Claims{}, true, ErrTokenNotYet
	}
	return c, true, nil
}

// Getter reads one object (shared, read-only).
type Getter interface {
	Get(gk schema.GroupKind, namespace, name string) (runtime.Object, error)
}

type serviceAccountTokens struct {
	issuer  *Issuer
	objects Getter
}

// ServiceAccountTokens checks ServiceAccount tokens: signature, dates,
// audience, and that the ServiceAccount and whatever the token is bound to
// still exist with the same uid.
func ServiceAccountTokens(issuer *Issuer, objects Getter) Tokens {
	return &serviceAccountTokens{issuer: issuer, objects: objects}
}

// AuthenticateToken implements Tokens.
func (t *serviceAccountTokens) AuthenticateToken(token string, audiences []string) (*User, []string, bool, error) {
	c, ours, err := t.issuer.parse(token)
	if err != nil || !ours {
		return nil, nil, false, err
	}
	wanted := audiences
	if len(wanted) == 0 {
		wanted = t.issuer.audiences
	}
	var good []string
	for _, a := range wanted {
		if slices.Contains(c.Audience, a) {
			good = append(good, a)
		}
	}
	if len(good) == 0 {
		return nil, nil, false, fmt.Errorf("%w: it names %q", ErrTokenAudience, c.Audience)
	}
	k := c.Kubernetes
	if c.Subject != ServiceAccountUser(k.Namespace, k.ServiceAccount.Name) {
		return nil, nil, false, fmt.Errorf("%w: subject and claims disagree", ErrTokenSignature)
	}
	if err := t.exists("ServiceAccount", k.Namespace, k.ServiceAccount); err != nil {
		return nil, nil, false, err
	}
	u := serviceAccount(k.Namespace, k.ServiceAccount.Name, k.ServiceAccount.UID)
	u.Extra = map[string][]string{}
	if c.ID != "" {
		u.Extra[ExtraCredentialID] = []string{"JTI=" + c.ID}
	}
	if k.Secret != nil {
		if err := t.exists("Secret", k.Namespace, *k.Secret); err != nil {
			return nil, nil, false, err
		}
	}
	if k.Pod != nil {
		if err := t.exists("Pod", k.Namespace, *k.Pod); err != nil {
			return nil, nil, false, err
		}
		u.Extra[ExtraPodName], u.Extra[ExtraPodUID] = []string{k.Pod.Name}, []string{k.Pod.UID}
	}
	if k.Node != nil {
		// A pod's node only informs; a token bound to the node dies with it.
		if k.Pod == nil {
			if err := t.exists("Node", "", *k.Node); err != nil {
				return nil, nil, false, err
			}
		}
		u.Extra[ExtraNodeName] = []string{k.Node.Name}
		if k.Node.UID != "" {
			u.Extra[ExtraNodeUID] = []string{k.Node.UID}
		}
	}
	return u, good, true, nil
}

// exists checks that the object lives, with the uid, and was not marked for
// deletion longer than the leeway ago.
func (t *serviceAccountTokens) exists(kind, namespace string, ref Ref) error {
	obj, err := t.objects.Get(schema.GroupKind{Kind: kind}, namespace, ref.Name)
	if err != nil {
		return fmt.Errorf("%w: %s %s/%s: %w", ErrTokenRevoked, kind, namespace, ref.Name, err)
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return fmt.Errorf("auth: %s %s/%s: %w", kind, namespace, ref.Name, err)
	}
	if string(m.GetUID()) != ref.UID {
		return fmt.Errorf("%w: %s %s/%s was replaced", ErrTokenRevoked, kind, namespace, ref.Name)
	}
	if d := m.GetDeletionTimestamp(); d != nil && d.Add(leeway).Before(t.issuer.clock.Now()) {
		return fmt.Errorf("%w: %s %s/%s is being deleted", ErrTokenRevoked, kind, namespace, ref.Name)
	}
	return nil
}
