package auth

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// fakeClock is a clock that tests move.
type fakeClock struct{ now time.Time }

func (c *fakeClock) Now() time.Time { return c.now }

func newClock() *fakeClock { return &fakeClock{time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)} }

// objects is a reader over a map.
type objects map[string]runtime.Object

func key(kind, namespace, name string) string { return kind + "/" + namespace + "/" + name }

func (o objects) Get(gk schema.GroupKind, namespace, name string) (runtime.Object, error) {
	if obj, ok := o[key(gk.Kind, namespace, name)]; ok {
		return obj, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: strings.ToLower(gk.Kind) + "s"}, name)
}

func account(uid string) *corev1.ServiceAccount {
	return &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "robot", UID: types.UID(uid)}}
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func newIssuer(t testing.TB, clk *fakeClock, verify ...*ecdsa.PublicKey) *Issuer {
	t.Helper()
	is, err := NewIssuer(IssuerConfig{Key: newKey(t), Verify: verify, Clock: clk})
	if err != nil {
		t.Fatal(err)
	}
	return is
}

func issue(t testing.TB, is *Issuer, bound runtime.Object, audiences ...string) string {
	t.Helper()
	token, _, err := is.Issue(account("u1"), bound, nil, audiences, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func TestServiceAccountToken(t *testing.T) {
	clk := newClock()
	is := newIssuer(t, clk)
	store := objects{key("ServiceAccount", "d", "robot"): account("u1")}
	check := ServiceAccountTokens(is, store)
	token, expires, err := is.Issue(account("u1"), nil, nil, nil, 90*time.Minute)
	if err != nil || !expires.Equal(clk.now.Add(90*time.Minute)) {
		t.Fatalf("%v, %v", expires, err)
	}
	u, good, ok, err := check.AuthenticateToken(token, nil)
	if err != nil || !ok {
		t.Fatalf("%v %v", ok, err)
	}
	if u.Name != "system:serviceaccount:d:robot" || u.UID != "u1" || !slices.Equal(good, []string{DefaultAudience}) ||
		!slices.Equal(u.Groups, []string{"system:serviceaccounts", "system:serviceaccounts:d", "system:authenticated"}) {
		t.Errorf("%+v %v", u, good)
	}
	if id := u.Extra[ExtraCredentialID]; len(id) != 1 || !strings.HasPrefix(id[0], "JTI=") {
		t.Errorf("extra %v", u.Extra)
	}
	if ns, name, ok := ServiceAccountOf(u.Name); !ok || ns != "d" || name != "robot" {
		t.Errorf("%s %s %v", ns, name, ok)
	}
}

func TestServiceAccountTokenRefusals(t *testing.T) {
	clk := newClock()
	is := newIssuer(t, clk)
	token := issue(t, is, nil)
	store := objects{key("ServiceAccount", "d", "robot"): account("u1")}
	for _, c := range []struct {
		name  string
		token string
		at    time.Duration
		aud   []string
		store objects
		want  error // nil with wantOK false: not ours
		ok    bool
	}{
		{name: "good", token: token, store: store, ok: true},
		{name: "just expired, within the leeway", token: token, at: time.Hour + 59*time.Second, store: store, ok: true},
		{name: "expired", token: token, at: time.Hour + time.Minute, store: store, want: ErrTokenExpired},
		{name: "clock went back a little", token: token, at: -59 * time.Second, store: store, ok: true},
		{name: "from the future", token: token, at: -2 * time.Minute, store: store, want: ErrTokenNotYet},
		{name: "account is gone", token: token, store: objects{}, want: ErrTokenRevoked},
		{name: "account was replaced", token: token, store: objects{key("ServiceAccount", "d", "robot"): account("u2")}, want: ErrTokenRevoked},
		{name: "other audience asked", token: token, aud: []string{"vault"}, store: store, want: ErrTokenAudience},
		{name: "one of the audiences", token: token, aud: []string{"vault", DefaultAudience}, store: store, ok: true},
		{name: "other audience given", token: issue(t, is, nil, "vault"), store: store, want: ErrTokenAudience},
		{name: "another key, same issuer", token: issue(t, newIssuer(t, clk), nil), store: store, want: ErrTokenSignature},
		{name: "no token at all", token: "abc", store: store},
		{name: "three empty parts", token: "..", store: store},
		{name: "garbage", token: "a.b.c", store: store},
		{name: "too long", token: strings.Repeat("a", maxToken+1), store: store},
	} {
		t.Run(c.name, func(t *testing.T) {
			clk.now = newClock().now.Add(c.at)
			_, _, ok, err := ServiceAccountTokens(is, c.store).AuthenticateToken(c.token, c.aud)
			if ok != c.ok || (c.want == nil) != (err == nil) || (c.want != nil && !errors.Is(err, c.want)) {
				t.Errorf("got %v, %v; want %v, %v", ok, err, c.ok, c.want)
			}
		})
	}
}

// TestForgedTokens: every change of header or claims without the key fails.
func TestForgedTokens(t *testing.T) {
	clk := newClock()
	is := newIssuer(t, clk)
	token := issue(t, is, nil)
	parts := strings.Split(token, ".")
	enc := base64.RawURLEncoding.EncodeToString
	claims := Claims{Issuer: DefaultIssuer, Subject: "system:serviceaccount:kube-system:admin", Audience: []string{DefaultAudience}, Expiry: clk.now.Add(time.Hour).Unix()}
	body, err := json.Marshal(claims)
	if err != nil {
		t.Fatal(err)
	}
	store := objects{key("ServiceAccount", "d", "robot"): account("u1")}
	check := ServiceAccountTokens(is, store)
	for name, forged := range map[string]string{
		"no algorithm":     enc([]byte(`{"alg":"none","kid":"`+is.kid+`"}`)) + "." + enc(body) + ".",
		"HS256":            enc([]byte(`{"alg":"HS256","kid":"`+is.kid+`"}`)) + "." + enc(body) + "." + parts[2],
		"other claims":     parts[0] + "." + enc(body) + "." + parts[2],
		"zero signature":   parts[0] + "." + parts[1] + "." + enc(make([]byte, 64)),
		"short signature":  parts[0] + "." + parts[1] + "." + enc(make([]byte, 63)),
		"unknown key id":   enc([]byte(`{"alg":"ES256","kid":"x"}`)) + "." + parts[1] + "." + parts[2],
		"critical header":  enc([]byte(`{"alg":"ES256","kid":"`+is.kid+`","crit":["b64"]}`)) + "." + parts[1] + "." + parts[2],
		"header exchanged": enc([]byte(`{"kid":"`+is.kid+`","alg":"ES256"}`)) + "." + parts[1] + "." + parts[2],
	} {
		if u, _, ok, err := check.AuthenticateToken(forged, nil); ok || !errors.Is(err, ErrTokenSignature) {
			t.Errorf("%s: %v %v %v", name, u, ok, err)
		}
	}
}

func TestKeyRotation(t *testing.T) {
	clk := newClock()
	old := newIssuer(t, clk)
	token := issue(t, old, nil)
	store := objects{key("ServiceAccount", "d", "robot"): account("u1")}
	next := newIssuer(t, clk, &old.key.PublicKey)
	if _, _, ok, err := ServiceAccountTokens(next, store).AuthenticateToken(token, nil); !ok {
		t.Errorf("a token by the former key: %v", err)
	}
	var set struct{ Keys []map[string]string }
	if err := json.Unmarshal(next.JWKS(), &set); err != nil || len(set.Keys) != 2 || set.Keys[0]["alg"] != "ES256" || set.Keys[0]["kid"] != next.kid {
		t.Errorf("%s: %v", next.JWKS(), err)
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewIssuer(IssuerConfig{Key: p384, Clock: clk}); err == nil {
		t.Error("a P-384 key was taken")
	}
	if _, err := NewIssuer(IssuerConfig{Key: old.key, Verify: []*ecdsa.PublicKey{&p384.PublicKey}, Clock: clk}); err == nil {
		t.Error("a P-384 key was taken for checking")
	}
}

// TestIssuerDiscovery: who knows the issuer's address only can check a token.
func TestIssuerDiscovery(t *testing.T) {
	is := newIssuer(t, newClock())
	address := "10.0.0.9:6443"
	h := is.Discovery(func() string { return address })
	address = "10.0.0.1:6443" // the server moved
	get := func(path, contentType string, into any) {
		t.Helper()
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, path, nil))
		if rec.Code != http.StatusOK || rec.Header().Get("Content-Type") != contentType || rec.Header().Get("Cache-Control") != "public, max-age=3600" {
			t.Fatalf("%s: HTTP %d %v %s", path, rec.Code, rec.Header(), rec.Body)
		}
		if err := json.Unmarshal(rec.Body.Bytes(), into); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	var conf map[string]any
	get("/.well-known/openid-configuration/", "application/json", &conf)
	get("/.well-known/openid-configuration", "application/json", &conf)
	if got := fmt.Sprint(conf); got != "map[id_token_signing_alg_values_supported:[ES256] issuer:"+DefaultIssuer+
		" jwks_uri:https://10.0.0.1:6443/openid/v1/jwks response_types_supported:[id_token] subject_types_supported:[public]]" {
		t.Errorf("configuration: %s", got)
	}
	var set struct{ Keys []map[string]string }
	get("/openid/v1/jwks", "application/jwk-set+json", &set)
	parts := strings.Split(issue(t, is, nil), ".")
	var head struct{ Kid string }
	dec := func(s string) []byte {
		b, err := base64.RawURLEncoding.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if err := json.Unmarshal(dec(parts[0]), &head); err != nil || len(set.Keys) != 1 || set.Keys[0]["kid"] != head.Kid || set.Keys[0]["crv"] != "P-256" {
		t.Fatalf("keys %v, the token names %q: %v", set.Keys, head.Kid, err)
	}
	key, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), slices.Concat([]byte{4}, dec(set.Keys[0]["x"]), dec(set.Keys[0]["y"])))
	if err != nil {
		t.Fatal(err)
	}
	sum, sig := sha256.Sum256([]byte(parts[0]+"."+parts[1])), dec(parts[2])
	if !ecdsa.Verify(key, sum[:], new(big.Int).SetBytes(sig[:32]), new(big.Int).SetBytes(sig[32:])) {
		t.Error("the token is not signed by the published key")
	}
	rec := httptest.NewRecorder()
	if h.ServeHTTP(rec, httptest.NewRequest(http.MethodPost, "/openid/v1/jwks", nil)); rec.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", rec.Code)
	}
}

func TestBoundTokens(t *testing.T) {
	clk := newClock()
	is := newIssuer(t, clk)
	meta := metav1.ObjectMeta{Namespace: "d", Name: "x", UID: "x1"}
	deleting := func(ago time.Duration) *metav1.Time { t := metav1.NewTime(clk.now.Add(-ago)); return &t }
	with := func(extra ...runtime.Object) objects {
		o := objects{key("ServiceAccount", "d", "robot"): account("u1")}
		for _, e := range extra {
			switch e := e.(type) {
			case *corev1.Pod:
				o[key("Pod", "d", e.Name)] = e
			case *corev1.Secret:
				o[key("Secret", "d", e.Name)] = e
			case *corev1.Node:
				o[key("Node", "", e.Name)] = e
			}
		}
		return o
	}
	marked := func(ago time.Duration) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: meta}
		p.DeletionTimestamp = deleting(ago)
		return p
	}
	replaced := meta
	replaced.UID = "x2"
	for _, c := range []struct {
		name  string
		bound runtime.Object
		store objects
		ok    bool
	}{
		{"pod lives", &corev1.Pod{ObjectMeta: meta}, with(&corev1.Pod{ObjectMeta: meta}), true},
		{"pod is gone", &corev1.Pod{ObjectMeta: meta}, with(), false},
		{"pod was replaced", &corev1.Pod{ObjectMeta: meta}, with(&corev1.Pod{ObjectMeta: replaced}), false},
		{"pod is just being deleted", &corev1.Pod{ObjectMeta: meta}, with(marked(30 * time.Second)), true},
		{"pod is long being deleted", &corev1.Pod{ObjectMeta: meta}, with(marked(2 * time.Minute)), false},
		{"secret lives", &corev1.Secret{ObjectMeta: meta}, with(&corev1.Secret{ObjectMeta: meta}), true},
		{"secret is gone", &corev1.Secret{ObjectMeta: meta}, with(), false},
		{"node lives", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "n1"}}, with(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "n1"}}), true},
		{"node is gone", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "n1"}}, with(), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, _, ok, err := ServiceAccountTokens(is, c.store).AuthenticateToken(issue(t, is, c.bound), nil)
			if ok != c.ok || (!ok && !errors.Is(err, ErrTokenRevoked)) {
				t.Errorf("%v %v", ok, err)
			}
		})
	}
	pod := &corev1.Pod{ObjectMeta: meta}
	token, _, err := is.Issue(account("u1"), pod, &Ref{Name: "n", UID: "n1"}, nil, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	u, _, _, err := ServiceAccountTokens(is, with(pod)).AuthenticateToken(token, nil)
	if err != nil || u.Extra[ExtraPodName][0] != "x" || u.Extra[ExtraPodUID][0] != "x1" || u.Extra[ExtraNodeName][0] != "n" || u.Extra[ExtraNodeUID][0] != "n1" {
		t.Errorf("%v %v", u, err)
	}
	if _, _, err := is.Issue(account("u1"), &corev1.ConfigMap{}, nil, nil, time.Hour); err == nil {
		t.Error("a token was bound to a ConfigMap")
	}
}

func TestTokenFile(t *testing.T) {
	hash := HashToken("s3cret")
	list, err := ParseTokenFile([]byte("# admins\n\n" + hash + " alice system:masters,ops\n" + HashToken("other") + " bob\n"))
	if err != nil || len(list) != 2 || list[0].User != "alice" || !slices.Equal(list[0].Groups, []string{"system:masters", "ops"}) {
		t.Fatalf("%v %v", list, err)
	}
	check := StaticTokens(list)
	u, _, ok, err := check.AuthenticateToken("s3cret", nil)
	if err != nil || !ok || u.Name != "alice" || !u.InGroup(AdminsGroup) || !u.Authenticated() {
		t.Errorf("%v %v %v", u, ok, err)
	}
	if _, _, ok, err := check.AuthenticateToken(hash, nil); ok || err != nil {
		t.Errorf("the hash itself is no token: %v %v", ok, err)
	}
	if _, _, ok, err := check.AuthenticateToken("s3cret", []string{"vault"}); ok || err == nil {
		t.Error("a static token answered for a foreign audience")
	}
	for _, bad := range []string{"s3cret alice", "sha256:zz alice", "sha256:abcd alice", hash, hash + " a b c"} {
		if _, err := ParseTokenFile([]byte("\n" + bad)); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func clientCert(cn string, from, to time.Time, usage x509.ExtKeyUsage, groups ...string) *tls.ConnectionState {
	return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{
		Subject: pkix.Name{CommonName: cn, Organization: groups}, NotBefore: from, NotAfter: to, ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}}}
}

func TestAuthenticators(t *testing.T) {
	clk := newClock()
	is := newIssuer(t, clk)
	store := objects{key("ServiceAccount", "d", "robot"): account("u1")}
	list, err := ParseTokenFile([]byte(HashToken("s3cret") + " alice system:masters"))
	if err != nil {
		t.Fatal(err)
	}
	all := Union(ClientCertificates(clk), BearerTokens(StaticTokens(list), ServiceAccountTokens(is, store)), Anonymous())
	day := 24 * time.Hour
	valid := clientCert("system:node:n1", clk.now.Add(-day), clk.now.Add(day), x509.ExtKeyUsageClientAuth, NodesGroup)
	for _, c := range []struct {
		name   string
		tls    *tls.ConnectionState
		header string
		user   string // "" is refused
	}{
		{"nothing", nil, "", AnonymousUser},
		{"TLS without a certificate", &tls.ConnectionState{}, "", AnonymousUser},
		{"certificate", valid, "", "system:node:n1"},
		{"certificate before token", valid, "Bearer s3cret", "system:node:n1"},
		{"expired certificate", clientCert("a", clk.now.Add(-2*day), clk.now.Add(-day), x509.ExtKeyUsageClientAuth), "", ""},
		{"certificate of tomorrow", clientCert("a", clk.now.Add(day), clk.now.Add(2*day), x509.ExtKeyUsageClientAuth), "", ""},
		{"server certificate", clientCert("a", clk.now.Add(-day), clk.now.Add(day), x509.ExtKeyUsageServerAuth), "", ""},
		{"nameless certificate", clientCert("", clk.now.Add(-day), clk.now.Add(day), x509.ExtKeyUsageClientAuth), "", ""},
		{"expired certificate, good token", clientCert("a", clk.now.Add(-2*day), clk.now.Add(-day), x509.ExtKeyUsageClientAuth), "Bearer s3cret", "alice"},
		{"static token", nil, "Bearer s3cret", "alice"},
		{"lower-case scheme", nil, "bearer  s3cret ", "alice"},
		{"service account", nil, "Bearer " + issue(t, is, nil), "system:serviceaccount:d:robot"},
		{"unknown token is not anonymous", nil, "Bearer nope", ""},
		{"bad service account token", nil, "Bearer " + issue(t, is, nil, "vault"), ""},
		{"basic auth is not ours", nil, "Basic YTpi", AnonymousUser},
		{"empty token", nil, "Bearer ", AnonymousUser},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.TLS = c.tls
			if c.header != "" {
				r.Header.Set("Authorization", c.header)
			}
			u, ok, err := all.Authenticate(r)
			if c.user == "" {
				if ok || err == nil {
					t.Errorf("accepted as %v", u)
				}
				return
			}
			if !ok || err != nil || u.Name != c.user {
				t.Fatalf("got %v %v %v", u, ok, err)
			}
			if (u.Name == AnonymousUser) == u.Authenticated() {
				t.Errorf("groups %v", u.Groups)
			}
			if r.Header.Get("Authorization") != "" {
				t.Error("the credential is still in the request")
			}
		})
	}
}

func TestUserInContext(t *testing.T) {
	if _, ok := UserFrom(t.Context()); ok {
		t.Error("an empty context has a user")
	}
	if _, ok := UserFrom(WithUser(t.Context(), nil)); ok {
		t.Error("a nil user counts")
	}
	u, ok := UserFrom(WithUser(context.Background(), &User{Name: "a"}))
	if !ok || u.Name != "a" {
		t.Error("lost")
	}
	for user, node := range map[*User]string{
		{Name: "system:node:n1", Groups: []string{NodesGroup}}: "n1",
		{Name: "system:node:n1"}:                               "",
		{Name: "system:node:", Groups: []string{NodesGroup}}:   "",
		{Name: "n1", Groups: []string{NodesGroup}}:             "",
	} {
		if name, ok := user.NodeName(); name != node && ok {
			t.Errorf("%v is node %q", user, name)
		}
	}
}

func FuzzTokens(f *testing.F) {
	clk := newClock()
	is := newIssuer(f, clk)
	good := issue(f, is, nil)
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add("a.b.c")
	f.Add("")
	f.Add("eyJhbGciOiJub25lIn0.e30.")
	check := ServiceAccountTokens(is, objects{key("ServiceAccount", "d", "robot"): account("u1")})
	f.Fuzz(func(t *testing.T, token string) {
		u, _, ok, _ := check.AuthenticateToken(token, nil)
		if ok && token != good && u.Name != "system:serviceaccount:d:robot" {
			t.Errorf("%q is %v", token, u)
		}
	})
}

func FuzzTokenFile(f *testing.F) {
	f.Add([]byte(HashToken("x") + " a b,c\n# y\n"))
	f.Add([]byte("sha256: \x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := ParseTokenFile(data)
		if err == nil {
			for _, e := range list {
				if e.User == "" {
					t.Error("an entry without a user")
				}
			}
		}
	})
}
