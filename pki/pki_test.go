package pki

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"github.com/dunlin-project/dunlin/wire/memnet"

	"github.com/dunlin-project/dunlin/internal/clock"
)

type wall struct {
	mu sync.Mutex
	t  time.Time
}

func (w *wall) Now() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.t
}

func (w *wall) set(t time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.t = t
}

func at(s string) time.Time {
	t, err := time.Parse(time.DateOnly, s)
	if err != nil {
		panic(err)
	}
	return t
}

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

const uid = "0123456789abcdef0123456789abcdef"

func newCA(t *testing.T, id, now string) (*CA, *wall) {
	t.Helper()
	w := &wall{t: at(now)}
	return must[*CA](t)(NewCA(id, w)), w
}

func node(t *testing.T, ca *CA) (*NodeIdentity, *x509.Certificate) {
	t.Helper()
	n := must[*NodeIdentity](t)(OpenNodeIdentity(t.TempDir()))
	return n, must[*x509.Certificate](t)(ca.IssueNode(must[[]byte](t)(n.CSR()), "n1", uid))
}

func connected(c ...*x509.Certificate) tls.ConnectionState {
	return tls.ConnectionState{PeerCertificates: c}
}

func TestPeer(t *testing.T) {
	ca, w := newCA(t, "c1", "2026-06-01")
	other, _ := newCA(t, "c1", "2026-06-01") // same name, another key
	_, leaf := node(t, ca)
	_, foreign := node(t, other)
	user, _, err := ca.IssueUser("alice", []string{MastersGroup}, AdminLife)
	if err != nil {
		t.Fatal(err)
	}
	key := must[*Serving](t)(NewServing(ca, "s1", nil))
	server := must[*tls.Certificate](t)(key.get()).Leaf
	v := &Verifier{Roots: []*x509.Certificate{ca.Cert}, Clock: w}
	for _, tc := range []struct {
		name, now string
		cert      *x509.Certificate
		kind      PeerKind
		limited   bool
		err       error
	}{
		{"node", "2026-06-10", leaf, NodePeer, false, nil},
		{"node, clock behind within the back-dating", "2026-04-10", leaf, NodePeer, false, nil},
		{"node, expired", "2027-06-10", leaf, NodePeer, true, nil},
		{"node, not yet valid", "1970-01-01", leaf, NodePeer, true, nil},
		{"node of another authority", "2026-06-10", foreign, 0, false, ErrUntrusted},
		{"user", "2026-06-10", user, UserPeer, false, nil},
		{"user, expired", "2028-06-10", user, 0, false, ErrExpired},
		{"server", "2026-06-10", server, ServerPeer, false, nil},
		{"server, expired", "2027-06-10", server, ServerPeer, true, nil},
		{"the authority itself", "2026-06-10", ca.Cert, 0, false, ErrUntrusted},
	} {
		w.set(at(tc.now))
		p, err := v.Peer(connected(tc.cert))
		if !errors.Is(err, tc.err) || p.Kind != tc.kind || p.Limited != tc.limited {
			t.Errorf("%s: %+v %v", tc.name, p, err)
		}
	}
	if p, err := v.Peer(connected()); err != nil || p.Kind != Anonymous {
		t.Errorf("nobody: %+v %v", p, err)
	}
	w.set(at("2026-06-10"))
	v.Revoked = func(u, _ string) bool { return u == uid }
	if _, err := v.Peer(connected(leaf)); !errors.Is(err, ErrRevoked) {
		t.Errorf("revoked: %v", err)
	}
	// During rotation both authorities are trusted.
	v = &Verifier{Roots: []*x509.Certificate{ca.Cert, other.Cert}, Clock: w}
	if p, err := v.Peer(connected(foreign)); err != nil || p.UID != uid || p.Name != "n1" {
		t.Errorf("other root: %+v %v", p, err)
	}
}

// A board without a battery makes its cluster in 1970: what is back-dated
// then begins before the authority does.
func TestClusterMadeIn1970(t *testing.T) {
	ca, w := newCA(t, "c1", "1970-01-01")
	_, leaf := node(t, ca)
	v := &Verifier{Roots: []*x509.Certificate{ca.Cert}, Clock: w}
	if p, err := v.Peer(connected(leaf)); err != nil || p.Limited {
		t.Errorf("in 1970: %+v, %v", p, err)
	}
	w.set(at("2026-12-01"))
	if p, err := v.Peer(connected(leaf)); err != nil || !p.Limited {
		t.Errorf("the time arrived; it may renew only: %+v, %v", p, err)
	}
	if _, leaf = node(t, ca); NeedsRenewal(leaf, w.Now()) {
		t.Error("a certificate of today is due")
	}
}

func TestVerifyConnection(t *testing.T) {
	ca, w := newCA(t, "c1", "2026-06-01")
	other, _ := newCA(t, "c2", "2026-06-01")
	_, leaf := node(t, ca)
	_, foreign := node(t, other)
	user, _, err := ca.IssueUser("alice", nil, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	w.set(at("2026-09-01"))
	check := (&Verifier{Roots: []*x509.Certificate{ca.Cert}, Clock: w}).VerifyConnection(func(p string) bool { return p == "ours" })
	for _, tc := range []struct {
		name, proto string
		cert        *x509.Certificate
		ok          bool
	}{
		{"expired node, ours: limited later", "ours", leaf, true},
		{"expired user on the API: answered there", "h2", user, true},
		{"expired user, ours", "ours", user, false},
		{"another authority on the API", "h2", foreign, false},
		{"another authority, ours", "ours", foreign, false},
	} {
		cs := connected(tc.cert)
		cs.NegotiatedProtocol = tc.proto
		if err := check(cs); (err == nil) != tc.ok {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

// A real handshake with a wrong clock, a resumed one, and impostors.
func TestHandshakes(t *testing.T) {
	ca, w := newCA(t, "c1", "2026-06-01")
	impostor, _ := newCA(t, "c1", "2026-06-01")
	id, leaf := node(t, ca)
	cert := &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: id.Key(), Leaf: leaf}
	serving := must[*Serving](t)(NewServing(ca, "s1", nil))
	false1 := must[*Serving](t)(NewServing(impostor, "s1", nil))
	revoked := false
	v := &Verifier{Roots: []*x509.Certificate{ca.Cert}, Clock: w, Revoked: func(string, string) bool { return revoked }}
	server := func(s *Serving) *tls.Config {
		return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: s.GetCertificate, ClientAuth: tls.RequestClientCert, Time: w.Now,
			VerifyConnection: v.VerifyConnection(func(string) bool { return true })}
	}
	good := server(serving)
	cache := tls.NewLRUClientSessionCache(4)
	client := func(verify func(tls.ConnectionState) error) *tls.Config {
		return &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, VerifyConnection: verify, ServerName: "x", Time: w.Now,
			Certificates: []tls.Certificate{*cert}, ClientSessionCache: cache}
	}
	roots := VerifyServer([]*x509.Certificate{ca.Cert})
	w.set(at("1970-01-02"))
	if _, err := shake(good, client(roots)); err != nil {
		t.Fatalf("clock of 1970: %v", err)
	}
	w.set(at("2026-06-02"))
	if _, err := shake(good, client(roots)); err != nil {
		t.Fatal(err)
	}
	cs, err := shake(good, client(roots))
	if err != nil || !cs.DidResume {
		t.Fatalf("resumption: %v %v", cs.DidResume, err)
	}
	revoked = true
	if _, err := shake(good, client(roots)); err == nil {
		t.Fatal("a revoked node resumed its session")
	}
	revoked = false
	if _, err := shake(server(false1), client(roots)); !errors.Is(err, ErrUntrusted) {
		t.Fatalf("impostor: %v", err)
	}
	var found *x509.Certificate
	cache = tls.NewLRUClientSessionCache(4)
	if _, err := shake(good, client(VerifyPin(ca.Pin(), func(c *x509.Certificate) { found = c }))); err != nil || found == nil {
		t.Fatalf("pin: %v", err)
	}
	cache = tls.NewLRUClientSessionCache(4)
	if _, err := shake(server(false1), client(VerifyPin(ca.Pin(), func(*x509.Certificate) {}))); !errors.Is(err, ErrUntrusted) {
		t.Fatalf("pin of an impostor: %v", err)
	}
	// The serving certificate also satisfies an ordinary client.
	pool := x509.NewCertPool()
	pool.AddCert(ca.Cert)
	w.set(time.Now())
	if _, err := shake(good, &tls.Config{RootCAs: pool, ServerName: "localhost"}); err != nil {
		t.Fatalf("ordinary client: %v", err)
	}
}

func shake(s, c *tls.Config) (tls.ConnectionState, error) {
	a, b := memnet.Pipe("server", "client") // buffered: alerts must not wait for their reader
	defer func() { _ = a.Close(); _ = b.Close() }()
	errs := make(chan error, 1)
	go func() {
		t := tls.Server(a, s)
		err := t.Handshake()
		if err == nil {
			_, err = t.Write([]byte("x"))
		}
		_ = t.Close()
		errs <- err
	}()
	t := tls.Client(b, c)
	err := t.Handshake()
	if err == nil {
		_, err = io.ReadFull(t, make([]byte, 1)) // the server's verdict comes after the client's handshake
	}
	_ = b.Close()
	serr := <-errs
	return t.ConnectionState(), errors.Join(err, serr)
}

func TestServingRenewsItself(t *testing.T) {
	ca, w := newCA(t, "c1", "1970-01-01") // a board without a clock makes the cluster
	s := must[*Serving](t)(NewServing(ca, "s1", []string{"10.0.0.1", "Host.Example."}))
	first := must[*tls.Certificate](t)(s.GetCertificate(nil))
	w.set(at("2026-06-01"))
	second := must[*tls.Certificate](t)(s.GetCertificate(nil))
	if first == second || outsideDates(second.Leaf, w.Now()) != "" {
		t.Fatal("not renewed after the clock was set")
	}
	if outsideDates(ca.Cert, w.Now()) != "" || outsideDates(ca.Cert, at("2050-01-01")) != "" {
		t.Fatal("the authority is out of its dates")
	}
	if third := must[*tls.Certificate](t)(s.GetCertificate(nil)); third != second {
		t.Fatal("renewed for nothing")
	}
	for _, h := range []string{"10.0.0.1", "host.example", "localhost", "127.0.0.1", "::1", "kubernetes.default.svc"} {
		if err := second.Leaf.VerifyHostname(h); err != nil {
			t.Error(err)
		}
	}
	s.SetNames([]string{"10.9.9.9"})
	if err := must[*tls.Certificate](t)(s.GetCertificate(nil)).Leaf.VerifyHostname("10.9.9.9"); err != nil {
		t.Error(err)
	}
}

// TestServingFollowsTheMachine: a clock that was years ahead and is put right
// is not believed for a while, and clients judge by theirs meanwhile.
func TestServingFollowsTheMachine(t *testing.T) {
	ca, _ := newCA(t, "c1", "2028-09-30")
	s := must[*Serving](t)(NewServing(ca, "s1", nil))
	wall := at("2028-09-30")
	s.Follow(clock.Func(func() time.Time { return wall }))
	first := must[*tls.Certificate](t)(s.GetCertificate(nil))
	wall = at("2026-09-30")
	second := must[*tls.Certificate](t)(s.GetCertificate(nil))
	for _, now := range []string{"2026-09-30", "2028-09-30"} {
		if why := outsideDates(second.Leaf, at(now)); first == second || why != "" {
			t.Fatalf("at %s: %s", now, why)
		}
	}
	for _, now := range []string{"2026-09-30", "2026-10-01", "2028-09-30"} {
		wall = at(now)
		if must[*tls.Certificate](t)(s.GetCertificate(nil)) != second {
			t.Fatalf("at %s: renewed for nothing", now)
		}
	}
}

func TestRenewAt(t *testing.T) {
	ca, w := newCA(t, "c1", "2026-06-01")
	_, leaf := node(t, ca)
	if got := RenewAt(leaf).Sub(w.Now()); got != NodeLife*2/3 {
		t.Fatalf("renewed after %v", got)
	}
	for now, want := range map[string]bool{"2026-06-02": false, "2026-06-25": true, "2027-01-01": true, "2020-01-01": true} {
		if NeedsRenewal(leaf, at(now)) != want {
			t.Errorf("%s: want %v", now, want)
		}
	}
}

func TestIssueRefuses(t *testing.T) {
	ca, _ := newCA(t, "c1", "2026-06-01")
	n := must[*NodeIdentity](t)(OpenNodeIdentity(t.TempDir()))
	csr := must[[]byte](t)(n.CSR())
	broken := append([]byte(nil), csr...)
	broken[len(broken)-5] ^= 1
	for what, try := range map[string]func() error{
		"garbage":       func() error { _, err := ca.IssueNode([]byte("x"), "n", uid); return err },
		"bad signature": func() error { _, err := ca.IssueNode(broken, "n", uid); return err },
		"bad name":      func() error { _, err := ca.IssueNode(csr, "N 1", uid); return err },
		"bad uid":       func() error { _, err := ca.IssueNode(csr, "n", "a/b"); return err },
		"empty name":    func() error { _, err := ca.IssueNode(csr, "", uid); return err },
		"node as user":  func() error { _, _, err := ca.IssueUser(NodePrefix+"n", nil, 1); return err },
		"server group":  func() error { _, _, err := ca.IssueUser("u", []string{ServersGroup}, 1); return err },
	} {
		if try() == nil {
			t.Errorf("%s was signed", what)
		}
	}
}

// The rule as a regular expression, which costs too much memory to keep.
func TestNameOK(t *testing.T) {
	rule := regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)
	long := strings.Repeat("a", 252)
	for _, s := range []string{"", "a", "-", "a-", "-a", ".a", "a.", "a.b", "A", "a\n", "é", long + "a", long + "aa", long + "."} {
		if nameOK(s) != rule.MatchString(s) {
			t.Errorf("%q: %t", s, nameOK(s))
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.StringOfN(rapid.SampledFrom([]rune("az09-.Zé_")), 0, 260, -1).Draw(t, "name")
		if nameOK(s) != rule.MatchString(s) {
			t.Fatalf("%q: %t", s, nameOK(s))
		}
	})
}

// Every damage that a power cut leaves in one copy is repaired from the other.
func TestCAFiles(t *testing.T) {
	w := &wall{t: at("2026-06-01")}
	for _, name := range []string{caCertFile, caKeyFile, caCertFile + ".copy", caKeyFile + ".copy"} {
		for what, damage := range map[string]func(string) error{
			"missing":   os.Remove,
			"empty":     func(p string) error { return os.Truncate(p, 0) },
			"half":      func(p string) error { return os.Truncate(p, 60) },
			"NULs":      func(p string) error { return os.WriteFile(p, make([]byte, 300), 0o600) },
			"too short": func(p string) error { return os.Truncate(p, 3) },
		} {
			dir := t.TempDir()
			ca := must[*CA](t)(LoadOrCreateCA(dir, "c1", w))
			if err := damage(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
			again, err := LoadOrCreateCA(dir, "c1", w)
			if err != nil || again.Pin() != ca.Pin() {
				t.Errorf("%s %s: %v", name, what, err)
			}
			fi, err := os.Stat(filepath.Join(dir, name))
			if err != nil || fi.Mode().Perm() != 0o600 || fi.Size() < 100 {
				t.Errorf("%s %s: not repaired: %v %v", name, what, fi, err)
			}
		}
	}
	dir := t.TempDir()
	must[*CA](t)(LoadOrCreateCA(dir, "c1", w))
	for _, n := range []string{caKeyFile, caKeyFile + ".copy"} {
		if err := os.Truncate(filepath.Join(dir, n), 0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := LoadOrCreateCA(dir, "c1", w); err == nil || !strings.Contains(err.Error(), "backup") {
		t.Errorf("both copies lost: %v", err)
	}
}

func TestNodeIdentityFiles(t *testing.T) {
	ca, _ := newCA(t, "c1", "2026-06-01")
	dir := t.TempDir()
	n := must[*NodeIdentity](t)(OpenNodeIdentity(dir))
	leaf := must[*x509.Certificate](t)(ca.IssueNode(must[[]byte](t)(n.CSR()), "n1", uid))
	grant := func(g *Grant) {
		g.ClusterID, g.NodeName, g.NodeUID, g.CA, g.Cert = "c1", "n1", uid, [][]byte{ca.Cert.Raw}, leaf.Raw
	}
	if err := n.Update(grant); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{nodeKeyFile, nodeGrantFile} {
		if err := os.Truncate(filepath.Join(dir, f), 0); err != nil {
			t.Fatal(err)
		}
		again := must[*NodeIdentity](t)(OpenNodeIdentity(dir))
		if !again.Joined() || again.Grant().NodeUID != uid || !again.Key().Equal(n.Key()) {
			t.Fatalf("%s: identity lost", f)
		}
		if err := again.Update(func(g *Grant) { g.Epoch++ }); err != nil {
			t.Fatal(err)
		}
	}
	// Both copies of the key gone: the certificate is nobody's, it joins again.
	lost := t.TempDir()
	for _, f := range []string{nodeGrantFile, nodeGrantFile + ".copy"} {
		b := must[[]byte](t)(os.ReadFile(filepath.Join(dir, f)))
		if err := os.WriteFile(filepath.Join(lost, f), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if again := must[*NodeIdentity](t)(OpenNodeIdentity(lost)); again.Joined() || again.Key().Equal(n.Key()) {
			t.Error("a certificate without its key was taken")
		}
	}
	if _, err := os.Stat(filepath.Join(lost, nodeGrantFile+".damaged")); err != nil {
		t.Errorf("the certificate without its key is not set aside: %v", err)
	}
	// Both copies of the key damaged: what the error names is enough.
	damaged := filepath.Join(t.TempDir(), "identity")
	must[*NodeIdentity](t)(OpenNodeIdentity(damaged))
	key := filepath.Join(damaged, nodeKeyFile)
	for _, f := range []string{key, key + ".copy"} {
		if err := os.Truncate(f, 0); err != nil {
			t.Fatal(err)
		}
	}
	_, err := OpenNodeIdentity(damaged)
	if err == nil || !strings.Contains(err.Error(), "remove "+key+" and "+key+".copy, or run 'dunlin agent reset'") {
		t.Fatalf("both keys damaged: %v", err)
	}
	for _, f := range []string{key, key + ".copy"} {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	if again := must[*NodeIdentity](t)(OpenNodeIdentity(damaged)); again.Joined() || again.Key() == nil {
		t.Error("no new key")
	}
	// Both copies of the grant gone: same key, joins again.
	for _, f := range []string{nodeGrantFile, nodeGrantFile + ".copy"} {
		if err := os.WriteFile(filepath.Join(dir, f), make([]byte, 500), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	again := must[*NodeIdentity](t)(OpenNodeIdentity(dir))
	if again.Joined() || !again.Key().Equal(n.Key()) {
		t.Fatal("a damaged grant must leave the key and no grant")
	}
	other := must[*NodeIdentity](t)(OpenNodeIdentity(t.TempDir()))
	if err := other.Update(grant); err == nil {
		t.Fatal("a certificate for another key was taken")
	}
}

func TestJoinLine(t *testing.T) {
	ca, _ := newCA(t, "c1", "2026-06-01")
	j := must[JoinLine](t)(NewJoinLine(ca.Pin(), []string{"10.0.0.1:6443", "[fd00::1]:7000"}))
	got := must[JoinLine](t)(ParseJoinLine("  " + j.String() + "\n"))
	if got.ID != j.ID || got.Secret != j.Secret || got.Pin != j.Pin || len(got.Servers) != 2 || got.Servers[1] != "[fd00::1]:7000" {
		t.Fatalf("%+v", got)
	}
	s := j.String()
	at := strings.Index(s, "@")
	for _, bad := range []string{"", "hello", s[:at], s[:20], s[:at-1] + s[at:], strings.Replace(s, "dunlin1", "dunlin2", 1),
		strings.Replace(s, j.Secret, j.Secret[1:]+"a", 1), s[:at+1], s[:at] + "@:6443", s[:at] + "@a b:1:2"} {
		if _, err := ParseJoinLine(bad); !errors.Is(err, ErrBadToken) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	rapid.Check(t, func(t *rapid.T) { _, _ = ParseJoinLine(rapid.String().Draw(t, "line")) })
	// One wrong character anywhere before the addresses is found.
	head := s[:at]
	rapid.Check(t, func(t *rapid.T) {
		i := rapid.IntRange(len("dunlin1."), len(head)-1).Draw(t, "at")
		c := rapid.SampledFrom([]byte("abcdefgh234567")).Draw(t, "to")
		if head[i] == c {
			return
		}
		if _, err := ParseJoinLine(head[:i] + string(c) + head[i+1:] + s[at:]); err == nil {
			t.Fatalf("a wrong character at %d was not noticed", i)
		}
	})
}

func TestWithPort(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1": "10.0.0.1:6443", "10.0.0.1:7": "10.0.0.1:7", "host": "host:6443", "host:9": "host:9", "fd00::1": "[fd00::1]:6443",
		"[fd00::1]": "[fd00::1]:6443", "[fd00::1]:5": "[fd00::1]:5", "https://h:1/x": "h:1", " h ": "h:6443", "": "", "a:b:c": "", ":1": "",
		"fe80::1%eth0": "[fe80::1%eth0]:6443", "[fe80::1%eth0]": "[fe80::1%eth0]:6443", "[fe80::1%eth0]:7": "[fe80::1%eth0]:7", "https://[fe80::1%25eth0]:7": "[fe80::1%eth0]:7",
		"::ffff:10.0.0.1": "10.0.0.1:6443", "[fd00::1": "", "fd00::1]": "", "[]": "",
	} {
		if got, err := WithPort(in); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q %v", in, got, err)
		}
	}
}

// TestKubeconfigOfAnotherCluster: it is left as it is; one's own and rubbish
// are written anew.
func TestKubeconfigOfAnotherCluster(t *testing.T) {
	one, _ := newCA(t, "c1", "2026-06-01")
	two, _ := newCA(t, "c2", "2026-06-01")
	path := filepath.Join(t.TempDir(), "admin.kubeconfig")
	for range 2 {
		if err := one.WriteAdminKubeconfig(path, "https://10.0.0.1:6443"); err != nil {
			t.Fatal(err)
		}
	}
	before := must[[]byte](t)(os.ReadFile(path))
	var other *OtherClusterError
	if err := two.WriteAdminKubeconfig(path, "https://10.0.0.1:6443"); !errors.As(err, &other) || other.Path != path || !strings.Contains(err.Error(), "--config-dir") {
		t.Fatalf("another cluster's file: %v", err)
	}
	if after := must[[]byte](t)(os.ReadFile(path)); !bytes.Equal(before, after) {
		t.Fatal("it was changed")
	}
	cut := string(before[:bytes.Index(before, []byte("server:"))-40]) // in the middle of the certificate
	cut = cut[:len(cut)-len(cut)%4]
	for _, rubbish := range []string{"", "\x00", "clusters: 1", "clusters: []", cut, "clusters: [{cluster: {certificate-authority-data: AAAA}}]"} {
		if err := os.WriteFile(path, []byte(rubbish), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := two.WriteAdminKubeconfig(path, "https://10.0.0.1:6443"); err != nil {
			t.Errorf("over %q: %v", rubbish, err)
		}
	}
}

func TestKubeconfig(t *testing.T) {
	ca, _ := newCA(t, "c1", "2026-06-01")
	path := filepath.Join(t.TempDir(), "sub", "admin.kubeconfig")
	if err := ca.WriteAdminKubeconfig(path, "https://10.0.0.1:6443"); err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", fi, err)
	}
	b := must[[]byte](t)(os.ReadFile(path))
	var k struct {
		Current  string `json:"current-context"`
		Clusters []struct {
			Name    string
			Cluster struct {
				Server string
				CA     []byte `json:"certificate-authority-data"`
			}
		}
		Users []struct {
			User struct {
				Cert []byte `json:"client-certificate-data"`
				Key  []byte `json:"client-key-data"`
			}
		}
	}
	if err := yaml.Unmarshal(b, &k); err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(k.Users[0].User.Cert, k.Users[0].User.Key)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := pair.PrivateKey.(*ecdsa.PrivateKey); !ok || k.Clusters[0].Cluster.Server != "https://10.0.0.1:6443" || k.Current != k.Clusters[0].Name {
		t.Fatalf("%s", b)
	}
	if certs := must[[]*x509.Certificate](t)(DecodeCerts(k.Clusters[0].Cluster.CA)); PinOf(certs[0]) != ca.Pin() {
		t.Fatal("another CA")
	}
}
