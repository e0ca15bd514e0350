package manifests

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"strings"
	"testing"
)

// TestImagePolicy: patterns, the first rule, and what is refused.
func TestImagePolicy(t *testing.T) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(k.Public())
	if err != nil {
		t.Fatal(err)
	}
	key := strings.ReplaceAll("\n"+string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})), "\n", "\n    ")
	p, err := ParseImagePolicy("rules:\n- images: [registry.k8s.io/pause, '*/team/*/web']\n  allow: true\n- images: [registry.example/*, hello.wasm]\n  keys: |" + key + "\n")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{
		"registry.k8s.io/pause": 0, "registry.k8s.io/pause2": -1, "any.example/team/a/b/web": 0, "any.example/team/web": -1, "any.example/team/a/web2": -1,
		"registry.example/x/y": 1, "registry.example": -1, "hello.wasm": 1, "evil.example/registry.example/x": -1, "": -1,
	} {
		got := -1
		for i := range p.Rules {
			if p.Rule(name) == &p.Rules[i] {
				got = i
			}
		}
		if got != want {
			t.Errorf("%q: rule %d, want %d", name, got, want)
		}
	}
	if keys := p.Rules[1].SignedBy(); len(keys) != 1 || !k.PublicKey.Equal(keys[0]) || len(p.Rules[0].SignedBy()) != 0 {
		t.Errorf("keys %v", keys)
	}
	for text, want := range map[string]string{
		"rules: [{images: [a]}]":                           "either keys or allow",
		"rules: [{images: [a], allow: true, keys: x}]":     "either keys or allow",
		"rules: [{allow: true}]":                           "patterns of names",
		"rules: [{images: [a], keys: hello}]":              "PEM blocks",
		"rules: [{images: [a], key: x}]":                   "field key not found",
		"rules: [{images: [a], keys: '-----BEGIN X-----']": "did not find expected",
		"rules: [{images: [a], keys: \"-----BEGIN PUBLIC KEY-----\\nAAAA\\n-----END PUBLIC KEY-----\\n\"}]": "not a public key",
	} {
		if _, err := ParseImagePolicy(text); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
	if p, err := ParseImagePolicy(""); err != nil || p.Rule("anything") != nil {
		t.Errorf("an empty policy: %v, %v", p, err)
	}
}
