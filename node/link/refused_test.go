package link

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"strings"
	"testing"
)

// TestRefusedCertificateIsExplained with a real handshake: the text of TLS
// alone says neither whose certificate nor what to do.
func TestRefusedCertificateIsExplained(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1)}, &x509.Certificate{SerialNumber: big.NewInt(1)}, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAnyClientCert,
			VerifyConnection: func(tls.ConnectionState) error { return errors.New("revoked") }})
		_ = s.Handshake()
		_, _ = io.Copy(io.Discard, c) // the client reads the alert before the end
		_ = c.Close()
	}()
	c, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{Certificates: []tls.Certificate{cert}, InsecureSkipVerify: true})
	if err == nil {
		defer func() { _ = c.Close() }()
		_, err = c.Read(make([]byte, 1))
	}
	got := explained(err)
	if !errors.Is(got, errCertificate) || !errors.Is(got, err) || !strings.Contains(got.Error(), "revoked") || !strings.Contains(got.Error(), "new --join line") {
		t.Fatalf("%v", got)
	}
	if other := errors.New("remote error: tls: bad certificate"); !errors.Is(explained(other), other) || explained(other).Error() != other.Error() {
		t.Fatal("only what TLS itself says counts")
	}
	if explained(nil) != nil {
		t.Fatal("nothing was refused")
	}
}
