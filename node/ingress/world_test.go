package ingress

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

func TestMain(m *testing.M) {
	MaybeRun() // the test binary is its own ingress
	os.Exit(m.Run())
}

// world is a service table, and an ingress process that is fed with it.
type world struct {
	t     testing.TB
	dir   string
	table *services.Table
	gen   uint64
	items map[string][]byte
	set   Settings
	tag   string
	stop  func()

	mu      sync.Mutex
	secrets map[string]Certificate
	changed chan struct{}
}

func newWorld(t testing.TB) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "dnli") // short: sun_path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: dir, table: services.NewTable(), items: map[string][]byte{}, secrets: map[string]Certificate{}, changed: make(chan struct{}, 1),
		set: Settings{Node: "n", Zone: "default", HTTP: unused.Port(t).String(), HTTPS: unused.Port(t).String()}}
	t.Cleanup(func() {
		if t.Failed() {
			b, _ := os.ReadFile(dir + "/log")
			t.Logf("log of the process: %s", b)
		}
		if err := Stop(context.Background(), dir); err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	w.item(wire.ItemIngressNodes, &wire.IngressNodes{Nodes: []string{"n"}})
	w.supervise()
	return w
}

// supervise runs an agent's part until stop.
func (w *world) supervise() {
	s := w.supervisor()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	w.t.Cleanup(w.stop)
}

func (w *world) supervisor() *Supervisor {
	return &Supervisor{Dir: w.dir, Table: w.table, Log: slog.New(slog.DiscardHandler), tag: w.tag, Changed: w.changed,
		Settings: func() Settings { return w.set },
		Secrets: func(ns, name string) (Certificate, bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			c, ok := w.secrets[ns+"/"+name]
			return c, ok
		}}
}

func (w *world) item(key string, v any) {
	w.t.Helper()
	b, err := wire.EncodeItem(v)
	if err != nil {
		w.t.Fatal(err)
	}
	w.items[key] = b
}

// publish gives the table what item set.
func (w *world) publish() {
	w.t.Helper()
	w.gen++
	r := &wire.ServicesReply{Generation: w.gen, Full: true}
	for k, v := range w.items {
		r.Items = append(r.Items, wire.ServiceItem{Key: k, Data: v})
		r.Digest += wire.ItemDigest(k, v)
	}
	if _, err := w.table.Apply(r); err != nil {
		w.t.Fatal(err)
	}
}

// service sets a Service whose endpoints are the addresses.
func (w *world) service(name string, h2c bool, eps ...string) {
	w.t.Helper()
	for k := range w.items {
		if strings.HasPrefix(k, wire.ItemSlice+"d/"+name+"-") {
			delete(w.items, k)
		}
	}
	w.item(wire.ItemService+"d/"+name, &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80, H2C: h2c}}})
	for i, ep := range eps {
		state := wire.EndpointReady | wire.EndpointServing
		if rest, ok := strings.CutPrefix(ep, "ending "); ok {
			ep, state = rest, wire.EndpointTerminating|wire.EndpointServing
		}
		a := netip.MustParseAddrPort(ep)
		w.item(fmt.Sprintf("%sd/%s-%d", wire.ItemSlice, name, i), &wire.Slice{Service: name, Ports: []wire.SlicePort{{Name: "p", Protocol: "TCP", Port: a.Port()}},
			Endpoints: []wire.Endpoint{{Address: a.Addr().AsSlice(), State: state, Node: "n"}}})
	}
}

// rule leads a host and path to a Service, in an Ingress of their own.
func (w *world) rule(name, host, path, service string, set ...func(*wire.Ingress)) {
	w.t.Helper()
	ing := &wire.Ingress{Rules: []wire.IngressRule{{Host: host, Paths: []wire.IngressPath{{Path: path, Backend: wire.IngressBackend{Service: service, Port: 80}}}}}}
	for _, f := range set {
		f(ing)
	}
	w.item(wire.ItemIngress+"d/"+name, ing)
}

func (w *world) secret(name string, c Certificate) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.secrets["d/"+name] = c
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// eventually polls; nothing depends on how long it takes.
func (w *world) eventually(what string, f func() error) {
	w.t.Helper()
	var err error
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); <-time.After(20 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	w.t.Fatalf("%s: %v", what, err)
}

// client reaches the process whatever host a URL names, and trusts what
// certificate makes.
func (w *world) client() *http.Client {
	tr := &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: pool}, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		to := w.set.HTTP
		if strings.HasSuffix(addr, ":443") {
			to = w.set.HTTPS
		}
		return (&net.Dialer{}).DialContext(ctx, network, to)
	}}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// get asks, and returns status and body.
func get(c *http.Client, u string) (int, string, error) {
	r, err := c.Get(u)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	return r.StatusCode, strings.TrimSpace(string(b)), err
}

// expect waits until a URL is answered so.
func (w *world) expect(c *http.Client, u string, status int, body string) {
	w.t.Helper()
	w.eventually(u, func() error {
		s, b, err := get(c, u)
		if err == nil && (s != status || !strings.Contains(b, body)) {
			err = fmt.Errorf("%d %q, want %d %q", s, b, status, body)
		}
		return err
	})
}

func backend(t testing.TB, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

func says(name string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, name) }
}

// ca signs the certificates of these tests.
var ca, caKey, pool = newCA()

func newCA() (*x509.Certificate, *ecdsa.PrivateKey, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	if c, err = x509.ParseCertificate(der); err != nil {
		panic(err)
	}
	p := x509.NewCertPool()
	p.AddCert(c)
	return c, key, p
}

var serial int64 = 1

func certificate(t testing.TB, hosts ...string) Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial++
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(serial), DNSNames: hosts, NotAfter: time.Now().Add(time.Hour)}, ca, &key.PublicKey, caKey)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return Certificate{Cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), Key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: k})}
}

// serialOf is the certificate that a name is shown now.
func (w *world) serialOf(name string) (int64, error) {
	c, err := tls.Dial("tcp", w.set.HTTPS, &tls.Config{RootCAs: pool, ServerName: name})
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }()
	return c.ConnectionState().PeerCertificates[0].SerialNumber.Int64(), nil
}

var errThere = errors.New("it is there")
