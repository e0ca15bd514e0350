package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/node/network"
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
	name   string // another one than Wasm's

	usage     map[string]workload.Stats // by pod uid
	onUsage   func() workload.Stats
	onPull    func(ctx context.Context, image, policy string) error
	onRequest func(ctx context.Context, req workload.ImageRequest) error
	tells     []string // what it says while it prepares
	compiles  bool     // tells so
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

func (r *stubRuntime) Name() string { return cmp.Or(r.name, wasmHandler) }

func (r *stubRuntime) Prepare(ctx context.Context, req workload.ImageRequest, progress workload.Progress) (workload.ImageState, error) {
	if r.compiles {
		progress(workload.Compiling)
	}
	for _, m := range r.tells {
		progress(m)
	}
	if r.onRequest != nil {
		if err := r.onRequest(ctx, req); err != nil {
			return workload.ImageState{}, err
		}
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

type (
	networkAllocation = network.Allocation
	eventReport       = wire.EventReport
)

func mustQuantity(s string) resource.Quantity { return resource.MustParse(s) }
func uidOf(s string) types.UID                { return types.UID(s) }
