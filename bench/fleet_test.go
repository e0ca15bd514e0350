//go:build bench

package bench

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// The fleet is a process of its own, so that nothing of it is counted as the
// server's: this test binary once more, with these variables.
const (
	fleetSize = "DUNLIN_FLEET_SIZE"
	fleetLine = "DUNLIN_FLEET_LINE"
)

func TestMain(m *testing.M) {
	if n, err := strconv.Atoi(os.Getenv(fleetSize)); err == nil {
		if err := runFleet(n, os.Getenv(fleetLine)); err != nil {
			fmt.Fprintln(os.Stderr, "fleet:", err)
			os.Exit(1)
		}
		return
	}
	if line := os.Getenv(returnLine); line != "" {
		away, _ := strconv.Atoi(os.Getenv(returnAway))
		stay, _ := strconv.Atoi(os.Getenv(returnStay))
		if err := runHollow(away, stay, line); err != nil {
			fmt.Fprintln(os.Stderr, "agents:", err)
			os.Exit(1)
		}
		return
	}
	if at := os.Getenv(floodAt); at != "" {
		runFlood(at, os.Getenv(floodToken), os.Getenv(floodKind), os.Getenv(floodBurn))
		return
	}
	os.Exit(m.Run())
}

// counts are what the fleet says of itself, once a second.
type counts struct {
	Joined    int64 // have an identity
	Connected int64
	Running   int64 // pods reported as running, and acknowledged
	Leases    int64 // renewals acknowledged
	Late      int64 // renewals not acknowledged within 900 ms, as the agent counts
	Lost      int64 // connections that ended
	SlowestMS int64 // acknowledgement, since the line before
	Error     string
}

type fleetState struct {
	line  pki.JoinLine
	slots chan struct{} // joins and handshakes at once

	joined, connected, running, leases, late, lost, slowest atomic.Int64
	lastErr                                                 atomic.Value
}

// runFleet plays n nodes until standard input ends.
func runFleet(n int, line string) error {
	f := &fleetState{slots: make(chan struct{}, 32)}
	var err error
	if f.line, err = pki.ParseJoinLine(line); err != nil {
		return err
	}
	f.lastErr.Store("")
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { (&simNode{f: f, i: i}).live(ctx) })
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	enc := json.NewEncoder(os.Stdout)
	for ctx.Err() == nil {
		<-tick.C
		c := counts{f.joined.Load(), f.connected.Load(), f.running.Load(), f.leases.Load(), f.late.Load(), f.lost.Load(), f.slowest.Swap(0) / 1e6, f.lastErr.Load().(string)}
		if err := enc.Encode(c); err != nil {
			cancel()
		}
	}
	wg.Wait()
	return nil
}

// simNode speaks the node protocol as an agent does, and runs nothing.
type simNode struct {
	f    *fleetState
	i    int
	cert tls.Certificate
	id   *wire.JoinReply
	boot string

	counter, seq atomic.Uint64
	hint         chan struct{}

	mu   sync.Mutex
	gen  uint64
	have map[string]uint64 // objects, by uid
	pods map[string]bool   // acknowledged as running, by uid
}

func (s *simNode) live(ctx context.Context) {
	s.have, s.pods, s.hint = map[string]uint64{}, map[string]bool{}, make(chan struct{}, 1)
	s.boot = fmt.Sprintf("boot-%d", s.i)
	for ctx.Err() == nil {
		err := s.session(ctx)
		if ctx.Err() != nil {
			return
		}
		s.f.lastErr.Store(fmt.Sprintf("node %d: %v", s.i, err))
		select {
		case <-ctx.Done():
		case <-time.After(time.Second + time.Duration(mrand.IntN(1000))*time.Millisecond):
		}
	}
}

// enter waits for a slot: the cores are shared with the server, and a herd
// would measure its time-outs.
func (s *simNode) enter(ctx context.Context) (leave func(), err error) {
	select {
	case s.f.slots <- struct{}{}:
		return func() { <-s.f.slots }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *simNode) dial(ctx context.Context, alpn string, verify func(tls.ConnectionState) error) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	d := net.Dialer{KeepAlive: -1}
	raw, err := d.DialContext(ctx, "tcp", s.f.line.Servers[0])
	if err != nil {
		return nil, err
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, VerifyConnection: verify, NextProtos: []string{alpn}}
	if s.cert.Certificate != nil {
		cfg.Certificates = []tls.Certificate{s.cert}
	}
	c := tls.Client(raw, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, err
	}
	return c, nil
}

func (s *simNode) join(ctx context.Context) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return err
	}
	c, err := s.dial(ctx, wire.ALPNJoin, pki.VerifyPin(s.f.line.Pin, func(*x509.Certificate) {}))
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	proof, err := pki.JoinProof(pki.TokenKey(s.f.line.Secret), c.ConnectionState(), csr)
	if err != nil {
		return err
	}
	if err := wire.WriteMessage(c, &wire.JoinRequest{TokenID: s.f.line.ID, Proof: proof, CSR: csr, NodeName: fmt.Sprintf("node-%05d", s.i), BootID: s.boot}); err != nil {
		return err
	}
	reply := new(wire.JoinReply)
	if err := wire.ReadMessage(c, reply); err != nil {
		return err
	}
	if reply.Refused != "" {
		return errors.New(reply.Refused)
	}
	s.cert = tls.Certificate{Certificate: [][]byte{reply.Cert}, PrivateKey: key}
	s.id = reply
	s.f.joined.Add(1)
	return nil
}

func (s *simNode) session(ctx context.Context) error {
	wc, err := s.connect(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { s.work(ctx, wc) })
	wg.Go(func() { s.renew(ctx, wc) })
	s.f.connected.Add(1)
	s.wake()
	err = wc.Run(ctx)
	cancel()
	wg.Wait()
	s.f.connected.Add(-1)
	s.f.lost.Add(1)
	return err
}

func (s *simNode) connect(ctx context.Context) (*wire.Conn, error) {
	leave, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	if s.id == nil {
		if err := s.join(ctx); err != nil {
			return nil, fmt.Errorf("join: %w", err)
		}
	}
	ca, err := x509.ParseCertificate(s.id.CA)
	if err != nil {
		return nil, err
	}
	c, err := s.dial(ctx, wire.ALPNNode, pki.VerifyServer([]*x509.Certificate{ca}))
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	err = wire.WriteMessage(c, &wire.Hello{ClusterID: s.id.ClusterID, Epoch: s.id.Epoch, Feature: feature.Level, NodeName: s.id.NodeName, NodeUID: s.id.NodeUID, BootID: s.boot})
	hello := new(wire.Hello)
	if err == nil {
		err = wire.ReadMessage(c, hello)
	}
	if err == nil && hello.Refused != "" {
		err = errors.New(hello.Refused)
	}
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("hello: %w", err)
	}
	_ = c.SetDeadline(time.Time{})
	return wire.NewConn(c, wire.HandlerFunc(func(context.Context, wire.Type, []byte) (wire.Message, error) {
		s.wake() // a nudge: nothing else is accepted
		return nil, nil
	}), wire.Options{Initiator: true, Accept: []wire.Type{wire.TypeNudge}}), nil
}

func (s *simNode) wake() {
	select {
	case s.hint <- struct{}{}:
	default:
	}
}

// renew is the agent's pace: every 2 s, and again after 900 ms without an
// answer.
func (s *simNode) renew(ctx context.Context, wc *wire.Conn) {
	wait := time.Duration(mrand.IntN(2000)) * time.Millisecond
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		sent := time.Now()
		cctx, cancel := context.WithTimeout(ctx, 900*time.Millisecond)
		reply := new(wire.LeaseReply)
		err := wc.Call(cctx, &wire.LeaseRequest{Counter: s.counter.Add(1)}, reply)
		cancel()
		took := time.Since(sent)
		if err != nil || reply.Refused != "" {
			s.f.late.Add(1)
			wait = max(900*time.Millisecond-took, 0)
			continue
		}
		s.f.leases.Add(1)
		for old := s.f.slowest.Load(); int64(took) > old && !s.f.slowest.CompareAndSwap(old, int64(took)); old = s.f.slowest.Load() {
		}
		wait = 2*time.Second - took
		s.mu.Lock()
		stale := reply.Generation != 0 && reply.Generation != s.gen
		s.mu.Unlock()
		if stale {
			s.wake()
		}
	}
}

// work reports the node, then pulls and reports whenever there is news.
func (s *simNode) work(ctx context.Context, wc *wire.Conn) {
	said := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.hint:
		}
		err := error(nil)
		if !said {
			if err = s.report(ctx, wc, &wire.Report{Node: s.describe()}); err == nil {
				said = true
			}
		}
		if err == nil {
			err = s.pull(ctx, wc)
		}
		if err != nil && ctx.Err() == nil {
			s.f.lastErr.Store(fmt.Sprintf("node %d: %v", s.i, err))
			time.AfterFunc(time.Second, s.wake)
		}
	}
}

func (s *simNode) report(ctx context.Context, wc *wire.Conn, r *wire.Report) error {
	r.BootID, r.Seq = s.boot, s.seq.Add(1)
	reply := new(wire.ReportReply)
	if err := wc.Call(ctx, r, reply); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	if reply.Refused != "" {
		return fmt.Errorf("report refused: %s", reply.Refused)
	}
	if len(reply.Retry) > 0 {
		return fmt.Errorf("report: %d pods to say again", len(reply.Retry))
	}
	return nil
}

func (s *simNode) pull(ctx context.Context, wc *wire.Conn) error {
	a := new(wire.Assignment)
	if err := wc.Call(ctx, &wire.PullRequest{Generation: s.gen, Have: s.have}, a); err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	if a.Unchanged {
		return nil
	}
	have, pods := map[string]uint64{}, map[string]bool{}
	for _, uid := range a.Keep {
		have[uid] = s.have[uid]
		if s.pods[uid] {
			pods[uid] = true
		}
	}
	r := &wire.Report{}
	for _, o := range a.Objects {
		have[o.UID] = o.ResourceVersion
		if o.Ref.Kind != "Pod" {
			continue
		}
		p := wire.PodReport{Namespace: o.Ref.Namespace, Name: o.Ref.Name, UID: o.UID}
		var meta corev1.Pod
		if err := direct.Unmarshal(o.Data, &meta); err != nil {
			return err
		}
		switch {
		case meta.DeletionTimestamp != nil:
			p.Gone = true
		case s.pods[o.UID]:
			pods[o.UID] = true
			continue
		default:
			var err error
			if p.Status, err = direct.Marshal(s.running(o.Ref.Name)); err != nil {
				return err
			}
		}
		r.Pods = append(r.Pods, p)
	}
	if len(r.Pods) > 0 {
		if err := s.report(ctx, wc, r); err != nil {
			return err
		}
	}
	for _, p := range r.Pods {
		if !p.Gone {
			pods[p.UID] = true
		}
	}
	s.f.running.Add(int64(len(pods) - len(s.pods)))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gen, s.have, s.pods = a.Generation, have, pods
	return nil
}

func (s *simNode) ip() string { return fmt.Sprintf("10.99.%d.%d", s.i/250, s.i%250+1) }

// describe is what an agent says of its node.
func (s *simNode) describe() []byte {
	now := metav1.Now().Rfc3339Copy()
	cond := func(t, reason, message string, st corev1.ConditionStatus) corev1.NodeCondition {
		return corev1.NodeCondition{Type: corev1.NodeConditionType(t), Status: st, Reason: reason, Message: message, LastHeartbeatTime: now, LastTransitionTime: now}
	}
	n := node(s.i)
	alloc := corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("3800Mi"), "pods": resource.MustParse("110"), "ephemeral-storage": resource.MustParse("28Gi")}
	n.Labels["kubernetes.io/os"] = "linux"
	n.Status = corev1.NodeStatus{
		Capacity: alloc, Allocatable: alloc,
		Conditions: []corev1.NodeCondition{
			cond("Ready", "AgentReady", "The agent runs pods.", corev1.ConditionTrue),
			cond("MemoryPressure", "EnoughMemory", "There is enough memory.", corev1.ConditionFalse),
			cond("DiskPressure", "EnoughSpace", "There is enough space.", corev1.ConditionFalse),
			cond("PIDPressure", "EnoughPIDs", "There are enough process ids.", corev1.ConditionFalse),
		},
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: s.ip()}, {Type: corev1.NodeHostName, Address: n.Name}},
		NodeInfo: corev1.NodeSystemInfo{MachineID: s.id.NodeUID, BootID: s.boot, KernelVersion: "6.12.0-rpi", OSImage: "Debian GNU/Linux 13", ContainerRuntimeVersion: "dunlin://dev",
			KubeletVersion: "v1.37.0-dunlin", OperatingSystem: "linux", Architecture: "arm64"},
	}
	b, err := direct.Marshal(n)
	if err != nil {
		panic(err) // a constant shape
	}
	return b
}

func (s *simNode) running(name string) *corev1.PodStatus {
	now := metav1.Now().Rfc3339Copy()
	var conds []corev1.PodCondition
	for _, t := range []corev1.PodConditionType{corev1.PodInitialized, corev1.PodReadyToStartContainers, corev1.ContainersReady, corev1.PodReady} {
		conds = append(conds, corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, LastTransitionTime: now})
	}
	id, _ := rand.Int(rand.Reader, big.NewInt(1<<62))
	ip, yes := fmt.Sprintf("10.128.%d.%d", s.i%250, mrand.IntN(250)), true
	return &corev1.PodStatus{
		Phase: corev1.PodRunning, Conditions: conds, HostIP: s.ip(), PodIP: ip, StartTime: &now,
		ContainerStatuses: []corev1.ContainerStatus{{Name: "main", Ready: true, Started: &yes, Image: name, ImageID: "sha256:" + fmt.Sprintf("%064x", id), ContainerID: fmt.Sprintf("wazero://%016x", id),
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}}},
	}
}

// fleet is the process, seen from the test.
type fleet struct {
	cmd *exec.Cmd
	mu  sync.Mutex
	now counts
}

func startFleet(t *testing.T, n int, line string) *fleet {
	t.Helper()
	f := &fleet{cmd: exec.Command(os.Args[0])}
	f.cmd.Env = append(os.Environ(), fleetSize+"="+strconv.Itoa(n), fleetLine+"="+line)
	f.cmd.Stderr = os.Stderr
	in, err := f.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := f.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for sc := bufio.NewScanner(out); sc.Scan(); {
			var c counts
			if json.Unmarshal(sc.Bytes(), &c) == nil {
				f.mu.Lock()
				f.now = c
				f.mu.Unlock()
			}
		}
	}()
	t.Cleanup(func() {
		_ = in.Close()
		<-done
		_ = f.cmd.Wait()
	})
	return f
}

func (f *fleet) counts() counts {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now
}
