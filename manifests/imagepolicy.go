package manifests

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ImagePolicyAnnotation of a Namespace says which images its pods may run.
const ImagePolicyAnnotation = "dunlin.dev/image-policy"

// ImagePolicy is a Namespace's. An image that no rule is for is refused.
type ImagePolicy struct {
	Rules []ImageRule `yaml:"rules"`
}

// ImageRule is for images whose name, without tag and digest, is one of the
// patterns ('*' is anything, also '/').
type ImageRule struct {
	Images []string `yaml:"images"`
	// Keys are public keys in PEM form, as cosign.pub; a signature by one of
	// them is enough.
	Keys string `yaml:"keys"`
	// Allow lets them run without a signature.
	Allow bool `yaml:"allow"`

	keys []crypto.PublicKey
}

// SignedBy are the keys of which one must have signed; none when the rule
// allows.
func (r *ImageRule) SignedBy() []crypto.PublicKey { return r.keys }

// ParseImagePolicy reads the annotation.
func ParseImagePolicy(text string) (*ImagePolicy, error) {
	d := yaml.NewDecoder(bytes.NewReader([]byte(text)))
	d.KnownFields(true)
	p := &ImagePolicy{}
	if err := d.Decode(p); err != nil && !errors.Is(err, io.EOF) {
		return nil, errors.New(strings.ReplaceAll(err.Error(), "\n", ""))
	}
	for i := range p.Rules {
		r := &p.Rules[i]
		if len(r.Images) == 0 || slices.Contains(r.Images, "") {
			return nil, fmt.Errorf("rules[%d]: images: patterns of names are wanted, such as registry.example/team/*", i)
		}
		if r.Allow == (r.Keys != "") {
			return nil, fmt.Errorf("rules[%d]: either keys or allow: true is wanted", i)
		}
		var err error
		if r.keys, err = publicKeys(r.Keys); err != nil {
			return nil, fmt.Errorf("rules[%d]: keys: %w", i, err)
		}
	}
	return p, nil
}

func publicKeys(text string) (out []crypto.PublicKey, err error) {
	rest := []byte(text)
	for len(bytes.TrimSpace(rest)) > 0 {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			return nil, errors.New("PEM blocks are wanted (BEGIN PUBLIC KEY), as in cosign.pub")
		}
		if b.Type != "PUBLIC KEY" {
			return nil, fmt.Errorf("a block of type %q is not a public key", b.Type)
		}
		k, err := x509.ParsePKIXPublicKey(b.Bytes)
		if err != nil {
			return nil, fmt.Errorf("it is not a public key: %w", err)
		}
		switch k := k.(type) {
		case *ecdsa.PublicKey, ed25519.PublicKey:
		case *rsa.PublicKey:
			if k.N.BitLen() < 2048 {
				return nil, fmt.Errorf("an RSA key of %d bits is too short", k.N.BitLen())
			}
		default:
			return nil, fmt.Errorf("keys of type %T are not supported", k)
		}
		out = append(out, k)
	}
	return out, nil
}

// Rule is the first one for an image, by any of its names; nil is none.
func (p *ImagePolicy) Rule(names ...string) *ImageRule {
	for i := range p.Rules {
		for _, pattern := range p.Rules[i].Images {
			if slices.ContainsFunc(names, func(n string) bool { return wildcard(pattern, n) }) {
				return &p.Rules[i]
			}
		}
	}
	return nil
}

func wildcard(pattern, s string) bool {
	first, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == s
	}
	s, ok := strings.CutPrefix(s, first)
	for ok && strings.Contains(rest, "*") {
		var part string
		part, rest, _ = strings.Cut(rest, "*")
		_, s, ok = strings.Cut(s, part)
	}
	return ok && strings.HasSuffix(s, rest)
}
