// Package nodelink tests both ends of the node protocol against each other:
// controlplane/nodeapi behind controlplane/listener, and node/link.
package nodelink

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/pki"
)

var (
	podGK   = schema.GroupKind{Kind: "Pod"}
	nodeGK  = schema.GroupKind{Kind: "Node"}
	classGK = schema.GroupKind{Group: "networking.k8s.io", Kind: "IngressClass"}
)

// wall is a wall clock that tests move.
type wall struct {
	mu  sync.Mutex
	off time.Duration
}

func (w *wall) Now() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Now().Add(w.off)
}

func (w *wall) jump(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.off += d
}

type sink struct {
	mu  sync.Mutex
	got []events.Entry
}

func (s *sink) Add(e events.Entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, e)
}

func (s *sink) has(reason string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.got {
		if e.Reason == reason {
			return true
		}
	}
	return false
}

// server is a control plane without Raft, on a listener.
type server struct {
	t       *testing.T
	addr    string
	clock   *wall
	machine *state.Machine
	local   *state.Local
	store   *registry.Registry
	ca      *pki.CA
	api     *nodeapi.Server
	events  *sink
	stop    func()
}

// store is what survives a restart of the server.
type stored struct {
	machine *state.Machine
	ca      *pki.CA
	clock   *wall
}

type options struct {
	listen net.Listener
	keep   *stored
	epoch  uint64
	tokens nodeapi.TokenIssuer
	ns     bool
	// gossipID is the server's in its pool; "" is no leases by UDP.
	gossipID string
	// change has the last word on the server's configuration.
	change func(*nodeapi.Config)
}

func discard() *slog.Logger {
	if os.Getenv("DUNLIN_TEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return slog.New(slog.DiscardHandler)
}

func start(t *testing.T, o options) *server {
	t.Helper()
	s := &server{t: t, events: &sink{}}
	if o.keep == nil {
		c := &wall{}
		ca, err := pki.NewCA("c-test", c)
		must(t, err)
		o.keep = &stored{machine: state.NewMachine(state.Options{}), ca: ca, clock: c}
	}
	s.clock, s.ca, s.machine = o.keep.clock, o.keep.ca, o.keep.machine
	s.local = state.NewLocal(s.machine)
	soft := state.NewSoft(1, state.SoftOptions{})
	var err error
	s.store, err = registry.New(registry.Config{Durable: s.machine, Proposer: s.local, Soft: soft,
		SoftProposer: registry.LocalSoft(soft, s.local), Clock: s.clock})
	must(t, err)
	if o.listen == nil {
		o.listen, err = net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
	}
	s.addr = o.listen.Addr().String()
	nc := nodeapi.Config{
		Store: s.store, Leadership: s.local, CA: s.ca, ClusterID: "c-test", Epoch: func() uint64 { return max(o.epoch, 1) }, Events: s.events, Tokens: o.tokens,
		GossipID: func() string { return o.gossipID }, Servers: func() []string { return []string{s.addr} }, Clock: s.clock, Log: discard(),
		Site: func(string) nodeapi.Site { return nodeapi.Site{Keyring: [][]byte{[]byte("0123456789abcdef")}} },
	}
	if o.change != nil {
		o.change(&nc)
	}
	s.api, err = nodeapi.New(nc)
	must(t, err)
	serving, err := pki.NewServing(s.ca, "s1", nil)
	must(t, err)
	lis, err := listener.New(listener.Config{
		Listener: o.listen, GetCertificate: serving.GetCertificate, Log: discard(),
		Verifier: &pki.Verifier{Roots: serverRoots(s.ca), Clock: s.clock, Revoked: s.api.Revoked},
		Handlers: s.api.Handlers(),
	})
	must(t, err)
	mux := http.NewServeMux()
	mux.Handle(listener.UpgradePath, lis.Upgrade())
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Proto) })
	hs := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = lis.Run(ctx) })
	wg.Go(func() { _ = s.api.Run(ctx) })
	wg.Go(func() { _ = hs.Serve(lis.HTTP()) })
	s.stop = sync.OnceFunc(func() { cancel(); _ = hs.Close(); wg.Wait() })
	t.Cleanup(s.stop)
	if o.ns {
		for _, n := range []string{"kube-system", "default", "kube-node-lease"} {
			_, err := s.store.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n}}, registry.WriteOptions{})
			must(t, err)
		}
	}
	return s
}

func (s *server) keep() *stored { return &stored{machine: s.machine, ca: s.ca, clock: s.clock} }

// agent is a joined node's link, running.
type agent struct {
	*link.Link
	id   *pki.NodeIdentity
	stop func()
	gen  *uint64
	mu   *sync.Mutex
}

func (s *server) join(name string) *pki.NodeIdentity {
	s.t.Helper()
	id, err := pki.OpenNodeIdentity(s.t.TempDir())
	must(s.t, err)
	line, err := s.api.CreateToken(s.t.Context(), nodeapi.TokenOptions{}, nil)
	must(s.t, err)
	parsed, err := pki.ParseJoinLine(line.String())
	must(s.t, err)
	must(s.t, link.Join(s.t.Context(), link.JoinConfig{Line: parsed, Identity: id, Name: name, BootID: "b1"}))
	return id
}

func runLink(t *testing.T, id *pki.NodeIdentity, change func(*link.Config)) *agent {
	t.Helper()
	a := &agent{id: id, gen: new(uint64), mu: &sync.Mutex{}}
	c := link.Config{Identity: id, BootID: "boot-1", Log: discard(), Generation: func() uint64 {
		a.mu.Lock()
		defer a.mu.Unlock()
		return *a.gen
	}}
	if change != nil {
		change(&c)
	}
	var err error
	a.Link, err = link.New(c)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = a.Run(ctx) }()
	a.stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(a.stop)
	return a
}

func (a *agent) set(g uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	*a.gen = g
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually polls until f is true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("never: %s", what)
		}
	}
}

func (s *server) create(objs ...runtime.Object) {
	s.t.Helper()
	for _, o := range objs {
		_, err := s.store.Create(s.t.Context(), o, registry.WriteOptions{})
		must(s.t, err)
	}
}

func (s *server) pod(name string) *corev1.Pod {
	s.t.Helper()
	o, err := s.store.Get(podGK, "default", name)
	must(s.t, err)
	p, _ := o.(*corev1.Pod)
	return p
}

func (s *server) node(name string) *corev1.Node {
	s.t.Helper()
	o, err := s.store.Get(nodeGK, "", name)
	must(s.t, err)
	n, _ := o.(*corev1.Node)
	return n
}

func boundPod(name, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.PodSpec{
			NodeName: node,
			Containers: []corev1.Container{{Name: "c", Image: "file:///x.wasm", EnvFrom: []corev1.EnvFromSource{
				{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "cfg"}}},
			}}},
			Volumes: []corev1.Volume{{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "top"}}}},
		},
	}
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := direct.Marshal(v)
	must(t, err)
	return b
}

func nodeSays() *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"kubernetes.io/arch": "arm64", "node-role.kubernetes.io/master": "yes", "dunlin.dev/can": "wasm"}},
		Status: corev1.NodeStatus{
			Capacity:    corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("1Gi"), "pods": resource.MustParse("110")},
			Allocatable: corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("1Gi"), "pods": resource.MustParse("110")},
			Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "AgentReady"}},
		},
	}
}

// logs answers log requests.
type logs struct{}

func (logs) Logs(ctx context.Context, ns, pod, uid string, o *corev1.PodLogOptions, w io.Writer) error {
	if pod == "missing" {
		return fmt.Errorf("no log: %w", os.ErrNotExist)
	}
	_, err := fmt.Fprintf(w, "%s/%s %s %s\n%s", ns, pod, uid, o.Container, strings.Repeat("x", 100_000))
	if err == nil && o.Follow {
		<-ctx.Done()
		return ctx.Err()
	}
	return err
}
