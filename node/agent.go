package node

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

// BootID makes the id under which the agent's reports count. It differs after
// every start of the agent, also where the count of them says nothing: the
// database was lost, or is a copy on a machine that shares the kernel.
func BootID(machineBoot string, s store.Store) string {
	return machineBoot + "-" + strconv.FormatUint(s.Boots(), 10) + "." + rand.Text()[:8]
}

// Agent is the node. New and Run once; what runs on the machine goes on
// when Run returns.
//
// Goroutines: the main loop owns the set of workers; each pod has one
// worker, which alone touches that pod; the pull loop writes the assignment;
// the report loop sends. The database is written by the pull loop
// (assignment) and by each worker (its pod).
type Agent struct {
	c       Config
	log     *slog.Logger
	reports *reports
	fig     *figures
	slots   chan struct{}  // containers being prepared from here, or started
	pulls   chan struct{}  // modules being taken from files and names
	group   sync.WaitGroup // everything Run started

	mu      sync.RWMutex // guards what follows
	asg     store.Assignment
	index   map[wire.Ref]string // of asg.Objects: uid
	statics []*corev1.Pod
	machine MachineFacts
	alloc   corev1.ResourceList
	pressed []corev1.NodeConditionType // pressures that are told
	known   map[string]podInfo         // by uid: what status and logs need to be asked
	// When a server last answered a pull, and acknowledged a report.
	pulledAt, reportedAt time.Time

	refsSerial uint64 // rises when something that pods refer to changes

	stopped  atomic.Bool   // the cluster's pods shall not run here
	changed  chan struct{} // 1: look at assignment and static pods again
	assigned chan struct{} // the assignment is another one
	quiet    silences
	answered atomic.Uint64 // the newest pull that was; 0 once the workers know
	untold   atomic.Bool   // a start waits for an answered pull
	pullNow  chan struct{} // 1: beside the link's hints
	heldNews chan struct{} // 1: what HeldPods tells may be another
	finished chan string   // uids of workers that ended
	unknown  chan unknownPods

	// Owned by the main loop.
	workers map[string]*worker
	gones   map[string]store.Gone // tombstones
	goneMu  sync.Mutex
	strays  map[string]uint64 // unknown uids: generation in which they were said to be
	found   map[string][]found
	recs    map[string]*store.Pod // of pods that have no worker yet
	swept   bool

	volumesIn   inUse           // guarded by mu
	unlimited   map[string]bool // volumes without a limit that were told of; guarded by mu
	volumesNews chan struct{}   // 1: look at the volumes that are to go

	usageMu sync.Mutex
	usage   usageSample // the last that was asked for

	nodeSent   []byte     // owned by whoever runs updateMachine: Run, then machineLoop
	pressures  *pressures // likewise
	leaving    leaving    // likewise
	nodeConds  []corev1.NodeCondition
	refused    complain      // of the report loop
	staticErrs []string      // owned by whoever runs scanStatic
	quit       chan struct{} // closed when Run is asked to end
	imagesTold listedImages  // as nodeSent
	collectAt  time.Time     // no images are collected before; machine loop
	look       chan struct{} // the machine loop shall look now
}

// unknownPods are uids that the cluster does not know, in its epoch.
type unknownPods struct {
	uids  []string
	epoch uint64
}

// podInfo is what others may ask about a pod.
type podInfo struct {
	worker   *worker
	assigned *corev1.Pod // as handed to the worker last
	version  uint64      // resourceVersion of assigned
	inactive bool        // takes nothing of the node: rejected or ended
	pod      *corev1.Pod // as the worker published it
	status   *corev1.PodStatus
	alloc    *network.Allocation // nil: it has no address
	holds    bool                // it has volumes or containers that are to be removed
}

// New checks the configuration and reads the database.
func New(c Config) (*Agent, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	a := &Agent{
		c: c, log: c.Logger.With("node", c.NodeName), reports: newReports(), fig: newFigures(),
		slots: make(chan struct{}, c.Starts), pulls: make(chan struct{}, c.Starts), quit: make(chan struct{}), look: make(chan struct{}, 1),
		known: map[string]podInfo{}, changed: make(chan struct{}, 1), assigned: make(chan struct{}, 1), heldNews: make(chan struct{}, 1), pullNow: make(chan struct{}, 1),
		finished: make(chan string), unknown: make(chan unknownPods),
		pressures: newPressures(c.Eviction), volumesIn: newInUse(), unlimited: map[string]bool{}, volumesNews: make(chan struct{}, 1),
		workers: map[string]*worker{}, gones: map[string]store.Gone{}, strays: map[string]uint64{},
	}
	asg, err := c.Store.Assignment()
	if err != nil {
		return nil, fmt.Errorf("read assignment: %w", err)
	}
	if len(asg.Lost) > 0 {
		a.log.Warn("what this node kept under seal does not open: its board or sealing key is another one; it is fetched again", "objects", len(asg.Lost))
	}
	a.setAssignment(asg)
	if text := heldText(&asg, c.NodeName); text != "" {
		a.log.Warn("still held: "+text, "epoch", asg.Epoch)
	}
	gones, err := c.Store.Gones()
	if err != nil {
		return nil, fmt.Errorf("read tombstones: %w", err)
	}
	for _, g := range gones {
		a.gones[g.UID] = g
		if !g.Acked {
			a.reports.pod(report{namespace: g.Namespace, name: g.Name, uid: g.UID, status: g.Status, terminal: true, gone: true})
		}
	}
	return a, nil
}

// Servers are the control plane's addresses as last told.
func (a *Agent) Servers() []string {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.asg.Servers
}

// Gossip is what the node's site needs: keys, name, addresses.
func (a *Agent) Gossip() (keyring [][]byte, site string, seeds []string) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.asg.Keyring, a.asg.Site, a.asg.Seeds
}

// Refresh makes the agent look now at what it says of its machine, when a
// caller knows that something changed.
func (a *Agent) Refresh() {
	select {
	case a.look <- struct{}{}:
	default:
	}
}

// Assigned is signalled when the node was assigned something else, for one
// reader.
func (a *Agent) Assigned() <-chan struct{} { return a.assigned }

// Generation is that of the assignment held, for the lease.
func (a *Agent) Generation() uint64 {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.asg.Generation
}

// Epoch is the highest recovery epoch that the node has seen.
func (a *Agent) Epoch() uint64 {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.asg.Epoch
}

// Run works until ctx ends. Workloads go on after it.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		close(a.quit)
		a.group.Wait()
	}()
	a.updateMachine() // what is short is told; nothing is evicted before all is taken up again
	a.scanStatic()
	if err := a.boot(ctx); err != nil {
		return err
	}
	pull, push := make(chan struct{}, 1), make(chan struct{}, 1)
	a.group.Go(func() { a.hintLoop(ctx, pull, push) })
	a.group.Go(func() { a.pullLoop(ctx, pull) })
	a.group.Go(func() { a.reportLoop(ctx, push) })
	a.group.Go(func() { a.machineLoop(ctx) })
	a.group.Go(func() { a.volumeLoop(ctx) })
	if a.c.Contact != nil {
		a.group.Go(func() { a.contactLoop(ctx) })
	}
	if a.c.Static != nil {
		a.group.Go(func() { a.staticLoop(ctx) })
	}
	for _, rt := range a.c.Runtimes {
		a.group.Go(func() { a.exitLoop(ctx, rt) })
	}
	a.mainLoop(ctx)
	return nil
}

// mainLoop keeps one worker for each pod that there shall be, or that is
// still on its way out.
func (a *Agent) mainLoop(ctx context.Context) {
	a.reconcile(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.changed:
		case uid := <-a.finished:
			delete(a.workers, uid)
		case said := <-a.unknown:
			a.noteUnknown(said)
		}
		pull := a.answered.Swap(0)
		a.reconcile(ctx)
		a.settled(pull)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// hintLoop passes the link's hints to both loops that act on them.
func (a *Agent) hintLoop(ctx context.Context, to ...chan struct{}) {
	if a.c.Link == nil {
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case _, ok := <-a.c.Link.Hints():
			if !ok {
				return
			}
			for _, c := range to {
				signal(c)
			}
		}
	}
}

// exitLoop passes a runtime's hints to the workers.
func (a *Agent) exitLoop(ctx context.Context, rt workload.Runtime) {
	for {
		select {
		case <-ctx.Done():
			return
		case id, ok := <-rt.Exits():
			if !ok {
				return
			}
			a.mu.RLock()
			w := a.known[id.PodUID]
			a.mu.RUnlock()
			if w.worker != nil {
				w.worker.box.tell(func(m *mailbox) { m.look = true })
			}
		}
	}
}

func acquire(ctx context.Context, slots chan struct{}) error {
	select {
	case slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// remember keeps a pod's newest object, status and addresses for those who ask.
func (a *Agent) remember(uid string, s *podState, st *corev1.PodStatus) {
	a.mu.Lock()
	defer a.mu.Unlock()
	i := a.known[uid]
	serves := servesAs(s.pod, st)
	news := a.asg.Held[uid].Kind == store.HoldPod || i.status == nil || serves != servesAs(i.pod, i.status)
	i.pod, i.status, i.alloc, i.holds = s.pod, st, nil, s.holdsSpace()
	if s.rec.Allocation != nil {
		al := *s.rec.Allocation
		i.alloc = &al
	}
	a.known[uid] = i
	if news {
		signal(a.heldNews)
	}
}

// serving is what Services ask of a pod.
type serving struct {
	ready, leaves bool
	phase         corev1.PodPhase
}

func servesAs(pod *corev1.Pod, st *corev1.PodStatus) serving {
	return serving{leaves: pod != nil && pod.DeletionTimestamp != nil, phase: st.Phase, ready: slices.ContainsFunc(st.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})}
}

// podGone is the worker's last call: the record becomes a tombstone, and the
// server is told.
func (a *Agent) podGone(w *worker) {
	s := &w.state
	st := s.status(a.statusFacts(w.rt), a.now())
	enc, err := direct.Marshal(&st)
	if err != nil {
		a.log.Error("pod status cannot be encoded", "uid", w.uid, "err", err)
	}
	if s.rec.Static || w.mute {
		enc = nil // the cluster knows only the mirror, or knows it better
	}
	g := store.Gone{UID: w.uid, Namespace: s.rec.Namespace, Name: s.rec.Name, Status: enc}
	for {
		if err = a.c.Store.DeletePod(w.uid, &g); err == nil {
			break
		}
		if w.due(time.Now()) {
			w.log.Error("the pod's end cannot be saved", "err", err)
		}
		t := time.NewTimer(persistRetry)
		select {
		case <-t.C:
		case <-w.closing:
			t.Stop()
			return
		}
	}
	a.setGone(g)
	signal(a.heldNews)
	a.dropVolumes(w.uid)
	a.reports.pod(report{namespace: g.Namespace, name: g.Name, uid: g.UID, status: enc, terminal: true, gone: true})
	w.log.Info("pod removed")
}

func (a *Agent) setGone(g store.Gone) {
	a.goneMu.Lock()
	defer a.goneMu.Unlock()
	a.gones[g.UID] = g
}

func (a *Agent) isGone(uid string) bool {
	a.goneMu.Lock()
	defer a.goneMu.Unlock()
	_, ok := a.gones[uid]
	return ok
}

// acknowledged takes the server's word on what was reported.
func (a *Agent) acknowledged(gone, unknown []string, epoch uint64) {
	a.goneMu.Lock()
	for _, uid := range gone {
		if g, ok := a.gones[uid]; ok && !g.Acked {
			g.Acked = true
			a.gones[uid] = g
		}
	}
	a.goneMu.Unlock()
	if len(gone) > 0 {
		signal(a.changed) // the tombstone may go
	}
	if len(unknown) > 0 {
		select {
		case a.unknown <- unknownPods{unknown, epoch}:
		case <-a.quit:
		}
	}
}
