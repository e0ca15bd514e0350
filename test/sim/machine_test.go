package sim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// What a container does is in the name of its image.
const (
	imageOK      = "ok"      // runs, answers its probe after a moment
	imageCrash   = "crash"   // ends with 1 after a second
	imageUnready = "unready" // runs, never answers
	imageMissing = "missing" // cannot be found
	imageSlow    = "slow"    // answers after 20 s
	imageJob     = "job"     // ends with 0 after a while
	imageSolo    = "solo"    // as ok; it may stop by itself and be started again
)

func image(behaviour string, version int) string {
	return fmt.Sprintf("file:///%s-%d.wasm", behaviour, version)
}

func behaviour(image string) string {
	b, _, _ := strings.Cut(strings.TrimPrefix(image, "file:///"), "-")
	return b
}

// machine is a node's hardware with what runs on it: it outlives the agent,
// and loses its processes with its power. It stands for runtime, network and
// volumes, whose real ones need processes and sockets.
type machine struct {
	w    *world
	name string
	ip   netip.Addr

	mu     sync.Mutex
	boot   int
	procs  map[workload.ID]*process
	exits  chan workload.ID
	pods   map[string]network.Allocation
	byIP   map[netip.Addr]string
	vols   map[string]bool
	cidr   netip.Prefix
	lastIP netip.Addr
	starts map[string]int // of (pod uid, container) since the machine's boot
}

type process struct {
	st    workload.State
	image string
	pod   string
	until *time.Timer
	stop  *time.Timer // its stop deadline; nil is none
}

// still ends its timers.
func (p *process) still() {
	for _, t := range []*time.Timer{p.until, p.stop} {
		if t != nil {
			t.Stop()
		}
	}
}

func newMachine(w *world, name string, ip netip.Addr) *machine {
	return &machine{w: w, name: name, ip: ip, boot: 1, procs: map[workload.ID]*process{}, exits: make(chan workload.ID, 256),
		pods: map[string]network.Allocation{}, byIP: map[netip.Addr]string{}, vols: map[string]bool{}, starts: map[string]int{}}
}

// powerCut ends every process without a trace.
func (m *machine) powerCut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boot++
	for id, p := range m.procs {
		p.still()
		m.w.only.end(p.pod, id.PodUID, m.name)
	}
	m.procs, m.starts = map[workload.ID]*process{}, map[string]int{}
	m.pods, m.byIP = map[string]network.Allocation{}, map[netip.Addr]string{}
	m.lastIP = netip.Addr{}
}

func (m *machine) bootID() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return fmt.Sprintf("%s-boot-%d", m.name, m.boot)
}

// running lists "pod uid/container" of what runs.
func (m *machine) running() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for id, p := range m.procs {
		if p.st.Phase == workload.Running {
			out = append(out, id.PodUID+"/"+id.Container)
		}
	}
	slices.Sort(out)
	return out
}

// left lists everything that is kept for pods other than those.
func (m *machine) left(but map[string]bool) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for id := range m.procs {
		if !but[id.PodUID] {
			out = append(out, "container of "+id.PodUID)
		}
	}
	for uid := range m.pods {
		if !but[uid] {
			out = append(out, "address of "+uid)
		}
	}
	for uid := range m.vols {
		if !but[uid] {
			out = append(out, "volumes of "+uid)
		}
	}
	slices.Sort(out)
	return out
}

// Name implements workload.Runtime.
func (m *machine) Name() string { return "wazero" }

// Prepare implements workload.Runtime.
func (m *machine) Prepare(ctx context.Context, req workload.ImageRequest, _ workload.Progress) (workload.ImageState, error) {
	if err := pause(ctx, 20*time.Millisecond); err != nil {
		return workload.ImageState{}, err
	}
	if behaviour(req.Image) == imageMissing {
		return workload.ImageState{}, &workload.StartError{Reason: "ErrImagePull", Message: "no such module"}
	}
	return workload.ImageState{Digest: "sha256:" + req.Image}, nil
}

// Start implements workload.Runtime.
func (m *machine) Start(ctx context.Context, s workload.Spec) (workload.State, error) {
	if err := pause(ctx, 5*time.Millisecond); err != nil {
		return workload.State{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if p, ok := m.procs[s.ID]; ok {
		return p.st, nil
	}
	for id, p := range m.procs {
		if id.PodUID == s.ID.PodUID && id.Container == s.ID.Container && p.st.Phase == workload.Running {
			m.w.violated("%s: attempts %d and %d of %s (%s) run at once", m.name, id.Attempt, s.ID.Attempt, s.PodName, id.PodUID)
		}
	}
	p := &process{st: workload.State{ID: s.ID, Phase: workload.Running, PID: 1000 + len(m.procs), StartedAt: time.Now(), Digest: s.Digest, LogPath: s.LogPath}, image: s.Image, pod: s.PodName}
	m.procs[s.ID] = p
	m.w.only.begin(m.w, s.PodName, s.ID.PodUID, m.name)
	key := s.ID.PodUID + "/" + s.ID.Container
	m.starts[key]++
	m.w.say("%s: starts %s attempt %d, %s (uid %s)", m.name, s.PodName, s.ID.Attempt, s.Image, s.ID.PodUID)
	if s.StopDeadline > 0 {
		p.stop = time.AfterFunc(s.StopDeadline, func() {
			m.w.say("%s: %s stops by itself", m.name, s.PodName)
			m.end(s.ID, 137, "DeadlineExceeded")
		})
	}
	switch behaviour(s.Image) {
	case imageSolo:
	case imageCrash:
		p.until = time.AfterFunc(time.Second, func() { m.end(s.ID, 1, "Error") })
	case imageJob:
		p.until = time.AfterFunc(jobTime, func() { m.end(s.ID, 0, "Completed") })
	default:
		if m.starts[key] > 1 {
			m.w.violated("%s: healthy pod %s (%s) was started again, attempt %d", m.name, s.PodName, s.ID.PodUID, s.ID.Attempt)
		}
	}
	return p.st, nil
}

func (m *machine) end(id workload.ID, code int, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.procs[id]
	if p == nil || p.st.Phase == workload.Exited {
		return
	}
	p.still()
	m.w.only.end(p.pod, id.PodUID, m.name)
	p.st.Phase, p.st.ExitCode, p.st.Reason, p.st.FinishedAt = workload.Exited, code, reason, time.Now()
	select {
	case m.exits <- id:
	default: // a hint
	}
}

// Extend implements workload.Extender.
func (m *machine) Extend(_ context.Context, id workload.ID, until time.Duration) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.procs[id]; p != nil && p.stop != nil && p.st.Phase == workload.Running {
		p.stop.Reset(until)
	}
	return nil
}

// State implements workload.Runtime.
func (m *machine) State(_ context.Context, id workload.ID) (workload.State, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p, ok := m.procs[id]
	if !ok {
		return workload.State{}, false, nil
	}
	return p.st, true, nil
}

// Stop implements workload.Runtime. The stop goes on when the agent dies in
// the middle, as a host process keeps its own deadline.
func (m *machine) Stop(ctx context.Context, id workload.ID, grace time.Duration) error {
	m.asked(id, "stop")
	d := min(200*time.Millisecond, grace)
	time.AfterFunc(d, func() { m.end(id, 0, "Completed") })
	return pause(ctx, d+time.Millisecond)
}

// Kill implements workload.Runtime.
func (m *machine) Kill(_ context.Context, id workload.ID) error {
	m.asked(id, "kill")
	m.end(id, 137, "Error")
	return nil
}

// asked checks that who ends a running, healthy pod was told to.
func (m *machine) asked(id workload.ID, verb string) {
	m.mu.Lock()
	p := m.procs[id]
	running := p != nil && p.st.Phase == workload.Running
	m.mu.Unlock()
	if running && behaviour(p.image) != imageCrash && m.w.wanted(id.PodUID) {
		m.w.violated("%s: %s of pod %s (%s) that nobody deleted", m.name, verb, p.pod, id.PodUID)
	}
	if running {
		m.w.say("%s: %s %s (%s)", m.name, verb, p.pod, id.PodUID)
	}
}

// Remove implements workload.Runtime.
func (m *machine) Remove(_ context.Context, id workload.ID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.procs[id]; p != nil && p.st.Phase == workload.Running {
		return errors.New("it runs")
	}
	delete(m.procs, id)
	return nil
}

// List implements workload.Runtime.
func (m *machine) List(context.Context) ([]workload.State, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []workload.State
	for _, p := range m.procs {
		out = append(out, p.st)
	}
	return out, nil
}

// Exits implements workload.Runtime.
func (m *machine) Exits() <-chan workload.ID { return m.exits }

// Close implements workload.Runtime.
func (m *machine) Close() error { return nil }

// Setup implements network.Network.
func (m *machine) Setup(_ context.Context, uid string, host bool, prev *network.Allocation) (network.Allocation, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a, ok := m.pods[uid]; ok {
		return a, nil
	}
	if prev != nil {
		if other := m.byIP[prev.IP]; other != "" && other != uid {
			m.w.violated("%s: pods %s and %s have the same address %s", m.name, other, uid, prev.IP)
		}
		m.pods[uid], m.byIP[prev.IP] = *prev, uid
		return *prev, nil
	}
	if !m.cidr.IsValid() {
		return network.Allocation{}, network.ErrNoRange
	}
	ip := m.lastIP
	if !m.cidr.Contains(ip) {
		ip = m.cidr.Addr().Next()
	}
	for range 254 {
		ip = ip.Next()
		if !m.cidr.Contains(ip) {
			ip = m.cidr.Addr().Next()
		}
		if m.byIP[ip] == "" {
			m.lastIP = ip
			a := network.Allocation{IP: ip, IPs: []netip.Addr{ip}, HostNetwork: host}
			m.pods[uid], m.byIP[ip] = a, uid
			return a, nil
		}
	}
	return network.Allocation{}, network.ErrExhausted
}

// Listen implements network.Network.
func (m *machine) Listen(context.Context, *network.Allocation, int32, int32, string) ([]*os.File, error) {
	return nil, nil
}

// Forward implements network.Network.
func (m *machine) Forward(ctx context.Context, a network.Allocation, port int32) (net.Conn, error) {
	return m.Dial(ctx, a, "tcp", port)
}

// Dial implements network.Network: who answers is in the image's name.
func (m *machine) Dial(_ context.Context, a network.Allocation, _ string, _ int32) (net.Conn, error) {
	m.mu.Lock()
	uid, up := m.byIP[a.IP], false
	for id, p := range m.procs {
		if id.PodUID != uid || p.st.Phase != workload.Running {
			continue
		}
		age := time.Since(p.st.StartedAt)
		switch behaviour(p.image) {
		case imageOK, imageCrash, imageSolo:
			up = age > 50*time.Millisecond
		case imageSlow:
			up = age > 20*time.Second
		}
	}
	m.mu.Unlock()
	if !up {
		return nil, errors.New("connection refused")
	}
	c, s := net.Pipe()
	_ = s.Close()
	return c, nil
}

// Teardown implements network.Network.
func (m *machine) Teardown(_ context.Context, uid string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a, ok := m.pods[uid]; ok && m.byIP[a.IP] == uid {
		delete(m.byIP, a.IP)
	}
	delete(m.pods, uid)
	return nil
}

// SetCIDRs implements network.Network.
func (m *machine) SetCIDRs(c []string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cidr = netip.Prefix{}
	if len(c) > 0 {
		m.cidr = netip.MustParsePrefix(c[0])
	}
	return nil
}

// NodeIPs implements network.Network.
func (m *machine) NodeIPs() []netip.Addr { return []netip.Addr{m.ip} }

// Facts implements node.Machine.
func (m *machine) Facts() node.MachineFacts {
	return node.MachineFacts{Hostname: m.name, CPUMilli: 4000, Memory: 4 << 30, Storage: 8 << 30, Addresses: []string{m.ip.String()}}
}

// diskVolumes are the machine's volumes: they survive its power.
type diskVolumes struct{ m *machine }

// Prepare implements node.Volumes.
func (v diskVolumes) Prepare(_ context.Context, pod *corev1.Pod, src volumes.Source, _ volumes.Facts) (map[string]string, error) {
	if err := v.m.w.disks.use(v.m.w, v.m.name, pod, src); err != nil {
		return nil, err
	}
	v.m.mu.Lock()
	defer v.m.mu.Unlock()
	v.m.vols[string(pod.UID)] = true
	paths := map[string]string{}
	for _, vol := range pod.Spec.Volumes {
		paths[vol.Name] = "/volumes/" + vol.Name
	}
	return paths, nil
}

// Teardown implements node.Volumes.
func (v diskVolumes) Teardown(_ context.Context, uid string) error {
	v.m.mu.Lock()
	defer v.m.mu.Unlock()
	delete(v.m.vols, uid)
	return nil
}

// List implements node.Volumes.
func (v diskVolumes) List() ([]string, error) {
	v.m.mu.Lock()
	defer v.m.mu.Unlock()
	var out []string
	for uid := range v.m.vols {
		out = append(out, uid)
	}
	slices.Sort(out)
	return out, nil
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
