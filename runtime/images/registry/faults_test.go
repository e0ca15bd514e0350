package registry

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// secure is a registry whose certificate is its own authority, good until
// then; it returns its host and the file of the authority.
func secure(t *testing.T, until time.Time) (host, ca string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: until.Add(-time.Hour), NotAfter: until, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	ca = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return strings.TrimPrefix(s.URL, "https://"), ca
}

// TestTLSFaults: what is wrong with a certificate, and in which file to say
// what about it.
func TestTLSFaults(t *testing.T) {
	good, goodCA := secure(t, time.Now().Add(time.Hour))
	late, lateCA := secure(t, time.Now().Add(-time.Minute))
	_, otherCA := secure(t, time.Now().Add(time.Hour))
	for _, c := range []struct{ name, host, ca, want, hint string }{
		{"known", good, goodCA, "", ""},
		{"unknown", good, "", "an authority that this node does not know", "registries.yaml: configs, " + good + ", tls, ca_file"},
		{"another's", good, otherCA, "an authority that this node does not know", "registries.yaml: configs, " + good + ", tls, ca_file"},
		{"another name", strings.Replace(good, "127.0.0.1", "localhost", 1), goodCA, "its certificate is for another host", ""},
		{"expired", late, lateCA, "is not valid", "it has expired, or this node's clock is wrong"},
	} {
		text := fmt.Sprintf("mirrors: {%[1]q: {endpoint: [\"https://%[1]s\"]}}\n", c.host)
		if c.ca != "" {
			text += fmt.Sprintf("configs: {%q: {tls: {ca_file: %s}}}\n", c.host, c.ca)
		}
		config, err := ParseConfig([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		client := New(config, "test")
		_, err = client.Open(c.host, "app", nil).Head(t.Context(), "1")
		client.Close()
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		var re *Error
		if !errors.As(err, &re) || re.Answered() || !strings.Contains(err.Error(), c.want) || !strings.Contains(re.Hint(), c.hint) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestStalledRegistry: a connection on which nothing comes any more ends, and
// the rest is asked for by its range.
func TestStalledRegistry(t *testing.T) {
	blob := []byte(strings.Repeat("0123456789", 1000))
	half := len(blob) / 2
	leave := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Range") != "" {
			http.ServeContent(w, r, "", time.Time{}, strings.NewReader(string(blob)))
			return
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(blob)))
		_, _ = w.Write(blob[:half])
		_ = http.NewResponseController(w).Flush()
		select {
		case <-leave:
		case <-r.Context().Done():
		}
	}))
	defer s.Close()
	defer close(leave)
	client := New(Config{}, "test")
	client.stall = 100 * time.Millisecond
	defer client.Close()
	session := client.Open(strings.TrimPrefix(s.URL, "http://"), "app", nil)
	digest := fmt.Sprintf("sha256:%x", sha256.Sum256(blob))
	b, err := session.Blob(t.Context(), digest, 0, int64(len(blob)))
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(b)
	_ = b.Close()
	if err == nil || len(got) != half {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if b, err = session.Blob(t.Context(), digest, int64(half), int64(len(blob))); err != nil || b.Offset != int64(half) {
		t.Fatalf("%+v, %v", b, err)
	}
	rest, err := io.ReadAll(b)
	_ = b.Close()
	if err != nil || string(got)+string(rest) != string(blob) {
		t.Errorf("%d and %d bytes, %v", len(got), len(rest), err)
	}
}
