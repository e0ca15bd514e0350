package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

// stubRuntime keeps attempts in memory. One func field a method overrides
// what it does; onStart decides how a started container goes on.
type stubRuntime struct {
	mu     sync.Mutex
	states map[workload.ID]*workload.State
	specs  map[workload.ID]workload.Spec
	starts []workload.ID
	stops  map[workload.ID]time.Duration
	killed []workload.ID
	exits  chan workload.ID
	pid    int

	usage     map[string]workload.Stats // by pod uid
	onUsage   func() workload.Stats
	onPull    func(ctx context.Context, image, policy string) error
	compiles  bool // tells so
	onPrepare func(image string) (workload.ImageState, error)
	onStart   func(s workload.Spec, st *workload.State) error
	// onStop says how long it takes to end; more than grace is killed.
	onStop func(id workload.ID) time.Duration
}

func newStubRuntime() *stubRuntime {
	return &stubRuntime{
		states: map[workload.ID]*workload.State{}, specs: map[workload.ID]workload.Spec{},
		stops: map[workload.ID]time.Duration{}, exits: make(chan workload.ID, 64),
	}
}

func (r *stubRuntime) Name() string { return wasmHandler }

func (r *stubRuntime) Prepare(ctx context.Context, req workload.ImageRequest, progress workload.Progress) (workload.ImageState, error) {
	if r.compiles {
		progress(workload.Compiling)
	}
	if r.onPull != nil {
		if err := r.onPull(ctx, req.Image, req.Policy); err != nil {
			return workload.ImageState{}, err
		}
	}
	if r.onPrepare != nil {
		return r.onPrepare(req.Image)
	}
	return workload.ImageState{Digest: "sha256:" + req.Image}, nil
}

func (r *stubRuntime) Start(_ context.Context, s workload.Spec) (workload.State, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if st, ok := r.states[s.ID]; ok && st.Phase != workload.Created {
		return *st, nil
	}
	r.pid++
	st := &workload.State{ID: s.ID, Phase: workload.Running, PID: r.pid, StartedAt: time.Now(), Digest: s.Digest, LogPath: s.LogPath}
	if r.onStart != nil {
		if err := r.onStart(s, st); err != nil {
			return workload.State{}, err
		}
	}
	r.states[s.ID], r.specs[s.ID] = st, s
	r.starts = append(r.starts, s.ID)
	return *st, nil
}

// Stats implements workload.StatsReader.
func (r *stubRuntime) Stats(_ context.Context, id workload.ID) (workload.Stats, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if st := r.states[id]; st == nil || st.Phase != workload.Running {
		return workload.Stats{}, os.ErrNotExist
	}
	if r.onUsage != nil {
		return r.onUsage(), nil
	}
	return r.usage[id.PodUID], nil
}

func (r *stubRuntime) State(_ context.Context, id workload.ID) (workload.State, bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	st, ok := r.states[id]
	if !ok {
		return workload.State{}, false, nil
	}
	return *st, true, nil
}

// end makes a running attempt end now.
func (r *stubRuntime) end(id workload.ID, code int, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	st := r.states[id]
	if st == nil || st.Phase == workload.Exited {
		return
	}
	st.Phase, st.ExitCode, st.Reason, st.FinishedAt = workload.Exited, code, reason, time.Now()
	select {
	case r.exits <- id:
	default:
	}
}

func (r *stubRuntime) Stop(ctx context.Context, id workload.ID, grace time.Duration) error {
	r.mu.Lock()
	r.stops[id] = grace
	wait := time.Duration(0)
	if r.onStop != nil {
		wait = r.onStop(id)
	}
	r.mu.Unlock()
	code := 0
	if wait > grace {
		wait, code = grace, 137
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	r.end(id, code, "")
	return nil
}

func (r *stubRuntime) Kill(_ context.Context, id workload.ID) error {
	r.mu.Lock()
	r.killed = append(r.killed, id)
	r.mu.Unlock()
	r.end(id, 137, "")
	return nil
}

func (r *stubRuntime) Remove(_ context.Context, id workload.ID) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if st := r.states[id]; st != nil && st.Phase == workload.Running {
		return errors.New("it runs")
	}
	delete(r.states, id)
	return nil
}

func (r *stubRuntime) List(context.Context) ([]workload.State, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []workload.State
	for _, st := range r.states {
		out = append(out, *st)
	}
	return out, nil
}

func (r *stubRuntime) Exits() <-chan workload.ID { return r.exits }
func (r *stubRuntime) Close() error              { return nil }

func (r *stubRuntime) started() []workload.ID {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.starts)
}

func (r *stubRuntime) running() (names []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, st := range r.states {
		if st.Phase == workload.Running {
			names = append(names, fmt.Sprintf("%s/%s/%d", id.PodUID, id.Container, id.Attempt))
		}
	}
	slices.Sort(names)
	return names
}

// stubNetwork gives addresses and answers probes.
type stubNetwork struct {
	mu    sync.Mutex
	next  byte
	pods  map[string]network.Allocation
	cidrs []string
	dial  func(port int32) error
	conns int
}

// Connections implements network.ConnectionCounter.
func (n *stubNetwork) Connections(network.Allocation, []int32) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.conns, nil
}

// connect sets how many connections are open to every pod.
func (n *stubNetwork) connect(conns int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.conns = conns
}

func (n *stubNetwork) Setup(_ context.Context, uid string, host bool, prev *network.Allocation) (network.Allocation, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if prev != nil {
		n.pods[uid] = *prev
		return *prev, nil
	}
	if a, ok := n.pods[uid]; ok {
		return a, nil
	}
	n.next++
	ip := netip.AddrFrom4([4]byte{10, 42, 0, n.next})
	a := network.Allocation{IP: ip, IPs: []netip.Addr{ip}, HostNetwork: host}
	n.pods[uid] = a
	return a, nil
}

func (n *stubNetwork) Listen(_ context.Context, a *network.Allocation, port, _ int32, protocol string) ([]*os.File, error) {
	if protocol == "UDP" {
		return nil, network.ErrUDP
	}
	return nil, nil
}

func (n *stubNetwork) Dial(ctx context.Context, _ network.Allocation, _ string, port int32) (net.Conn, error) {
	n.mu.Lock()
	f := n.dial
	n.mu.Unlock()
	if f != nil {
		if err := f(port); err != nil {
			return nil, err
		}
	}
	c, s := net.Pipe()
	_ = s.Close()
	return c, nil
}

func (n *stubNetwork) Forward(ctx context.Context, a network.Allocation, port int32) (net.Conn, error) {
	return n.Dial(ctx, a, "tcp", port)
}

func (n *stubNetwork) Teardown(_ context.Context, uid string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.pods, uid)
	return nil
}

func (n *stubNetwork) SetCIDRs(c []string) error { n.cidrs = c; return nil }
func (n *stubNetwork) NodeIPs() []netip.Addr     { return []netip.Addr{netip.MustParseAddr("192.0.2.1")} }

// stubVolumes records who has volumes.
type stubVolumes struct {
	mu      sync.Mutex
	pods    map[string]bool
	prepare func(pod *corev1.Pod, src volumes.Source) error
}

func (v *stubVolumes) Prepare(_ context.Context, pod *corev1.Pod, src volumes.Source, _ volumes.Facts) (map[string]string, error) {
	if v.prepare != nil {
		if err := v.prepare(pod, src); err != nil {
			return nil, err
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.pods[string(pod.UID)] = true
	paths := map[string]string{}
	for _, vol := range pod.Spec.Volumes {
		paths[vol.Name] = "/volumes/" + vol.Name
	}
	return paths, nil
}

func (v *stubVolumes) Teardown(_ context.Context, uid string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.pods, uid)
	return nil
}

func (v *stubVolumes) List() ([]string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Collect(maps.Keys(v.pods)), nil
}

// stubLink is the control plane: it holds the assignment and what was
// reported.
type stubLink struct {
	mu      sync.Mutex
	asg     wire.Assignment
	cut     bool
	hints   chan struct{}
	pulls   int
	reports []*wire.Report
	status  map[string]corev1.PodStatus
	history map[string][]string // of phases and readiness
	gone    map[string]bool
	unknown map[string]bool
	node    *corev1.Node
	events  []wire.EventReport
	mirrors map[string]*corev1.Pod
	rv      uint64
}

func newStubLink() *stubLink {
	return &stubLink{
		hints: make(chan struct{}, 1), status: map[string]corev1.PodStatus{}, history: map[string][]string{},
		gone: map[string]bool{}, unknown: map[string]bool{}, mirrors: map[string]*corev1.Pod{},
		asg: wire.Assignment{Epoch: 1, Generation: 1, PodCIDRs: []string{"10.42.0.0/24"}},
	}
}

var errCut = errors.New("offline")

func (l *stubLink) Pull(_ context.Context, r wire.PullRequest) (*wire.Assignment, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, errCut
	}
	l.pulls++
	if r.Generation == l.asg.Generation {
		return &wire.Assignment{Epoch: l.asg.Epoch, Unchanged: true}, nil
	}
	out := l.asg
	out.Objects, out.Keep = nil, nil
	for _, o := range l.asg.Objects {
		if r.Have[o.UID] == o.ResourceVersion {
			out.Keep = append(out.Keep, o.UID)
		} else {
			out.Objects = append(out.Objects, o)
		}
	}
	return &out, nil
}

func (l *stubLink) Report(_ context.Context, r *wire.Report) (*wire.ReportReply, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, errCut
	}
	l.reports = append(l.reports, r)
	reply := &wire.ReportReply{Seq: r.Seq}
	for _, p := range r.Pods {
		if l.unknown[p.UID] {
			reply.Unknown = append(reply.Unknown, p.UID)
			continue
		}
		if len(p.Status) > 0 {
			var st corev1.PodStatus
			if err := direct.Unmarshal(p.Status, &st); err != nil {
				return nil, err
			}
			l.status[p.UID] = st
			l.history[p.UID] = append(l.history[p.UID], short(st))
		}
		if p.Gone {
			l.gone[p.UID] = true
		}
		if len(p.Mirror) > 0 {
			m := &corev1.Pod{}
			if err := direct.Unmarshal(p.Mirror, m); err != nil {
				return nil, err
			}
			l.mirrors[p.UID] = m
		}
		reply.Committed = append(reply.Committed, p.UID)
	}
	if r.Node != nil {
		l.node = &corev1.Node{}
		if err := direct.Unmarshal(r.Node, l.node); err != nil {
			return nil, err
		}
	}
	l.events = append(l.events, r.Events...)
	return reply, nil
}

func short(st corev1.PodStatus) string {
	s := string(st.Phase)
	if condition(st, corev1.PodReady) == corev1.ConditionTrue {
		s += "+Ready"
	}
	return s
}

func condition(st corev1.PodStatus, t corev1.PodConditionType) corev1.ConditionStatus {
	for _, c := range st.Conditions {
		if c.Type == t {
			return c.Status
		}
	}
	return ""
}

func (l *stubLink) Hints() <-chan struct{} { return l.hints }
func (l *stubLink) Connected() bool        { l.mu.Lock(); defer l.mu.Unlock(); return !l.cut }

func (l *stubLink) setCut(cut bool) {
	l.mu.Lock()
	l.cut = cut
	l.mu.Unlock()
	if !cut {
		l.hint()
	}
}

func (l *stubLink) hint() {
	select {
	case l.hints <- struct{}{}:
	default:
	}
}

// put adds or replaces an object of the assignment.
func (l *stubLink) put(kind string, o metav1.Object) {
	l.mu.Lock()
	l.rv++
	o.SetResourceVersion(fmt.Sprint(l.rv))
	data, err := direct.Marshal(o)
	if err != nil {
		panic(err)
	}
	obj := wire.Object{Ref: wire.Ref{Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName()}, UID: string(o.GetUID()), ResourceVersion: l.rv, Data: data}
	l.asg.Objects = slices.DeleteFunc(slices.Clone(l.asg.Objects), func(x wire.Object) bool { return x.UID == obj.UID })
	l.asg.Objects = append(l.asg.Objects, obj)
	l.asg.Generation++
	l.mu.Unlock()
	l.hint()
}

func (l *stubLink) drop(uid string) {
	l.mu.Lock()
	l.asg.Objects = slices.DeleteFunc(slices.Clone(l.asg.Objects), func(x wire.Object) bool { return x.UID == uid })
	l.asg.Generation++
	l.mu.Unlock()
	l.hint()
}

func (l *stubLink) statusOf(uid string) corev1.PodStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status[uid]
}

type stubMachine struct {
	mu sync.Mutex
	f  MachineFacts
}

func (m *stubMachine) Facts() MachineFacts {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.f
}

// bed is a node on a stub machine.
type bed struct {
	t       *testing.T
	c       Config
	rt      *stubRuntime
	net     *stubNetwork
	vols    *stubVolumes
	link    *stubLink
	db      *store.Memory
	agent   *Agent
	cancel  context.CancelFunc
	stopped chan struct{}
	offset  time.Duration // of the wall clock
}

func newBed(t *testing.T) *bed {
	b := &bed{
		t: t, rt: newStubRuntime(), net: &stubNetwork{pods: map[string]network.Allocation{}},
		vols: &stubVolumes{pods: map[string]bool{}}, link: newStubLink(), db: store.NewMemory(),
	}
	b.c = Config{
		NodeName: "n1", MachineBoot: "boot-1", Link: b.link, Store: b.db,
		Runtimes: map[string]workload.Runtime{wasmHandler: b.rt}, Network: b.net, Volumes: b.vols,
		Machine: &stubMachine{f: MachineFacts{CPUMilli: 2000, Memory: 1 << 30, Storage: 1 << 33, Addresses: []string{"192.0.2.1"}}},
		Clock:   clock.Func(func() time.Time { return time.Now().Add(b.offset) }),
		Logger:  slog.New(slog.NewTextHandler(testWriter{t}, nil)), StateDir: t.TempDir(),
		Jitter: func(d time.Duration) time.Duration { return d },
	}
	return b
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", p)
	return len(p), nil
}

func (b *bed) start() {
	b.t.Helper()
	c := b.c
	c.BootID = ""
	a, err := New(c)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.t.Context())
	b.agent, b.cancel, b.stopped = a, cancel, make(chan struct{})
	go func() {
		defer close(b.stopped)
		if err := a.Run(ctx); err != nil {
			b.t.Error(err)
		}
	}()
}

func (b *bed) stop() {
	b.cancel()
	<-b.stopped
	b.db.Reopen()
}

// after lets virtual time pass. What the test read before happens before what
// the stubs write then: that is what the locks say.
func (b *bed) after(d time.Duration) {
	for _, mu := range []*sync.Mutex{&b.rt.mu, &b.net.mu, &b.vols.mu, &b.link.mu} {
		mu.Lock()
		mu.Unlock()
	}
	time.Sleep(d)
	synctest.Wait()
}

func (b *bed) want(uid, phase string) corev1.PodStatus {
	b.t.Helper()
	st := b.link.statusOf(uid)
	if got := short(st); got != phase {
		b.t.Fatalf("pod %s is %q, want %q: %+v", uid, got, phase, st)
	}
	return st
}

func wasmPod(name string, edit ...func(*corev1.Pod)) *corev1.Pod {
	class := "wasm"
	grace := int64(30)
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name), Generation: 1},
		Spec: corev1.PodSpec{
			RuntimeClassName: &class, NodeName: "n1", RestartPolicy: corev1.RestartPolicyAlways, TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{Name: "main", Image: "app.wasm"}},
		},
	}
	for _, f := range edit {
		f(p)
	}
	return p
}

func deleted(p *corev1.Pod, grace int64) *corev1.Pod {
	p = p.DeepCopy()
	now := metav1.Now()
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &now, &grace
	return p
}

type (
	networkAllocation = network.Allocation
	eventReport       = wire.EventReport
)

func mustQuantity(s string) resource.Quantity { return resource.MustParse(s) }
func uidOf(s string) types.UID                { return types.UID(s) }
