// Package grpc has a real gRPC client and server meet through the service
// proxy and through an Ingress. It is a module of its own, so that nothing of
// gRPC is in the product's.
package grpc

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/dunlin-project/dunlin/node/ingress"
	"github.com/dunlin-project/dunlin/node/proxy"
	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

func TestMain(m *testing.M) {
	proxy.MaybeRun() // the test binary is its own proxy and ingress
	ingress.MaybeRun()
	os.Exit(m.Run())
}

func item(t *testing.T, r *wire.ServicesReply, key string, v any) {
	t.Helper()
	b, err := wire.EncodeItem(v)
	if err != nil {
		t.Fatal(err)
	}
	r.Items = append(r.Items, wire.ServiceItem{Key: key, Data: b})
	r.Digest += wire.ItemDigest(key, b)
}

// run runs a supervisor until the test ends, then its process.
func run(t *testing.T, supervise func(context.Context) error, stop func(context.Context, string) error, dir string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- supervise(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
		if err := stop(context.Background(), dir); err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
}

func short(t *testing.T) string { // sun_path has 108 bytes
	t.Helper()
	dir, err := os.MkdirTemp("", "dnlg")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); <-time.After(20 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

func certificate(t *testing.T, host string) (ingress.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{host}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	crt := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	pool.AppendCertsFromPEM(crt)
	return ingress.Certificate{Cert: crt, Key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: k})}, pool
}

func TestRealClient(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv, state := grpc.NewServer(), health.NewServer()
	healthpb.RegisterHealthServer(srv, state)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(srv.Stop)
	backend := netip.MustParseAddrPort(l.Addr().String())

	table, reply := services.NewTable(), &wire.ServicesReply{Generation: 1, Full: true}
	item(t, reply, wire.ItemService+"d/g", &wire.Service{ClusterIPs: []string{"10.43.0.7"}, Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80, H2C: true}}})
	item(t, reply, wire.ItemSlice+"d/g-1", &wire.Slice{Service: "g", Ports: []wire.SlicePort{{Name: "p", Protocol: "TCP", Port: backend.Port()}},
		Endpoints: []wire.Endpoint{{Address: backend.Addr().AsSlice(), State: wire.EndpointReady | wire.EndpointServing, Node: "n"}}})
	item(t, reply, wire.ItemIngressNodes, &wire.IngressNodes{Nodes: []string{"n"}})
	item(t, reply, wire.ItemIngress+"d/i", &wire.Ingress{TLS: []wire.IngressTLS{{Hosts: []string{"g.example"}, Secret: "cert"}},
		Rules: []wire.IngressRule{{Host: "g.example", Paths: []wire.IngressPath{{Path: "/", Backend: wire.IngressBackend{Service: "g", Port: 80}}}}}})
	if _, err := table.Apply(reply); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)

	pdir := short(t)
	p := &proxy.Supervisor{Dir: pdir, Table: table, Log: log, Settings: func() (proxy.Settings, bool) {
		return proxy.Settings{Node: "n", Zone: "default", Resolv: "/nonexistent"}, true
	}}
	run(t, p.Run, proxy.Stop, pdir)
	var addr string
	eventually(t, "the Service has an address", func() error {
		st, err := proxy.Ask(pdir)
		if err == nil {
			if addr = st.Ports["d/g:p/tcp"]; addr == "" {
				err = fmt.Errorf("%+v", st)
			}
		}
		return err
	})
	t.Run("service", func(t *testing.T) { speak(t, state, addr, insecure.NewCredentials()) })

	cert, pool := certificate(t, "g.example")
	idir, https := short(t), unused.Port(t).String()
	i := &ingress.Supervisor{Dir: idir, Table: table, Log: log, Changed: make(chan struct{}),
		Secrets:  func(ns, name string) (ingress.Certificate, bool) { return cert, ns+"/"+name == "d/cert" },
		Settings: func() ingress.Settings { return ingress.Settings{Node: "n", Zone: "default", HTTPS: https} }}
	run(t, i.Run, ingress.Stop, idir)
	eventually(t, "the Ingress listens", func() error {
		c, err := tls.Dial("tcp", https, &tls.Config{RootCAs: pool, ServerName: "g.example"})
		if err == nil {
			_ = c.Close()
		}
		return err
	})
	t.Run("ingress", func(t *testing.T) {
		speak(t, state, https, credentials.NewTLS(&tls.Config{RootCAs: pool, ServerName: "g.example"}))
	})
}

// speak makes a call, one that fails with a code, and a stream.
func speak(t *testing.T, state *health.Server, addr string, creds credentials.TransportCredentials) {
	c, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cl := healthpb.NewHealthClient(c)
	state.SetServingStatus("x", healthpb.HealthCheckResponse_NOT_SERVING)
	if r, err := cl.Check(ctx, &healthpb.HealthCheckRequest{Service: "x"}); err != nil || r.Status != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Fatalf("a call: %v %v", r, err)
	}
	if _, err := cl.Check(ctx, &healthpb.HealthCheckRequest{Service: "nowhere"}); status.Code(err) != codes.NotFound {
		t.Errorf("a call that fails says %v", err)
	}
	w, err := cl.Watch(ctx, &healthpb.HealthCheckRequest{Service: "x"})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []healthpb.HealthCheckResponse_ServingStatus{healthpb.HealthCheckResponse_NOT_SERVING, healthpb.HealthCheckResponse_SERVING, healthpb.HealthCheckResponse_NOT_SERVING} {
		state.SetServingStatus("x", want)
		if r, err := w.Recv(); err != nil || r.Status != want {
			t.Fatalf("a stream: %v %v, want %v", r, err, want)
		}
	}
}
