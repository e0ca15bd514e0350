package consensus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/spare"
)

// Config of a Node. Dir and Log are required; for a new folder also
// ClusterID and ServerID, which the folder then keeps.
type Config struct {
	// Dir is the server's state folder; made if missing.
	Dir string
	// ClusterID is the random id that a new cluster gets.
	ClusterID string
	// ServerID names this server for ever. Raft addresses are server ids;
	// the transport resolves them (see Peers).
	ServerID string
	// ExpectClusterID, if set, refuses a folder of another cluster.
	ExpectClusterID string
	// Voters are the server ids of a new cluster; nil is this server alone.
	Voters []string
	// Join says, for a new folder, that the cluster exists already: this server
	// waits until its leader adds it, and makes none of its own. The folder
	// remembers it.
	Join bool
	// Epoch is the recovery epoch that a new folder starts from; 0 is 1.
	Epoch uint64
	// Transport to the other servers, whose local address is the server id.
	// nil is an in-memory one, which suits a single voter.
	Transport raft.Transport
	Log       *slog.Logger
	Disk      *Disk         // nil is the real disk
	Machine   state.Options // of the state machine
	// Feature is the feature level of a new cluster; 0 is 1. Older servers than
	// that cannot join it.
	Feature uint32

	// SegmentBytes is the size of a log segment; 0 is 2 MiB.
	SegmentBytes int
	// SnapshotBytes is the least size of the log, since the last snapshot,
	// that causes the next; 0 is 16 MiB. The state's size counts if larger.
	SnapshotBytes int64
	// ReserveBytes is the free space below which writes are refused with
	// ErrDiskFull, so that the log can still be compacted; 0 is two segments
	// and twice the state's size. Deletions go on while one more segment fits.
	// Negative is no reserve.
	ReserveBytes int64
	// Committed, if set, is told how long each Raft entry took from its
	// proposal until it was applied here. It must not block.
	Committed func(time.Duration)
	// Roomy, if set, asks the other voters and returns the ids of those that say
	// that their disks have room, within seconds. A leader whose own is full
	// hands leadership to one of them.
	Roomy func(ctx context.Context) []string
}

// Node is one server's share of the replicated state. It implements
// state.Proposer. Safe for concurrent use.
type Node struct {
	cfg     Config
	log     *slog.Logger
	disk    *Disk
	machine *state.Machine

	lock     *folderLock
	identity *identityFile
	stable   *stableStore
	bound    *boundFile // once it runs, keepBound's
	logs     *logStore
	snaps    *snapshotStore
	trans    raft.Transport
	fsm      *fsm
	raft     *raft.Raft

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	lead      leadership
	queue     chan *proposal
	barriers  barriers
	snapshots chan struct{} // the log may have grown enough
	committed chan struct{} // the bound may be raised
	notify    chan bool     // from Raft

	applied  signal // an entry was applied, or a snapshot restored
	leads    signal // another leader, or none
	faults   faults
	spare    *spare.File // for deletions on a full disk; nil: none
	relief   relief
	haltOnce sync.Once
	halted   chan struct{}
	down     chan struct{} // closed once Raft has stopped
	downOnce sync.Once
	asked    atomic.Int64  // futures of Raft that are waited for
	begun    atomic.Uint64 // newest term of which an entry was seen committed
	haltErr  error

	proposals, entries atomic.Uint64
	pace               pace
	closeOnce          sync.Once
	closeErr           error
}

var _ state.Proposer = (*Node)(nil)

// Open opens or makes the state folder and starts Raft. It returns when the
// state is restored from snapshot and this server takes part; a single voter
// leads within milliseconds, see WaitLeading. Errors are one line that names
// the file and what to do: ErrLocked, ErrNewerVersion, ErrOtherCluster,
// ErrDamaged, state.ErrDiskFull.
func Open(ctx context.Context, cfg Config) (*Node, error) {
	n, err := newNode(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := n.open(); err != nil {
		n.cancel()
		n.closeFiles()
		if diskFault(err) {
			err = fmt.Errorf("%w: %w", state.ErrDiskFull, err)
		}
		return nil, fmt.Errorf("open state folder: %w", err)
	}
	n.start()
	return n, nil
}

// newNode fills in the defaults; nothing is opened yet.
func newNode(ctx context.Context, cfg Config) (*Node, error) {
	if cfg.Dir == "" || cfg.Log == nil {
		return nil, errors.New("consensus: Dir and Log are required")
	}
	if cfg.Disk == nil {
		cfg.Disk = &Disk{}
	}
	if cfg.SegmentBytes == 0 {
		cfg.SegmentBytes = defaultSegment
	}
	if cfg.SnapshotBytes == 0 {
		cfg.SnapshotBytes = 16 << 20
	}
	if cfg.Feature == 0 {
		cfg.Feature = 1
	}
	n := &Node{
		cfg: cfg, log: cfg.Log, disk: cfg.Disk, machine: state.NewMachine(cfg.Machine),
		queue: make(chan *proposal, 1024), snapshots: make(chan struct{}, 1), committed: make(chan struct{}, 1), notify: make(chan bool),
		halted: make(chan struct{}), down: make(chan struct{}), relief: newRelief(),
	}
	n.applied.init()
	n.leads.init()
	n.lead.init(n.leads.fire)
	n.barriers.init()
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return n, nil
}

func (n *Node) open() error {
	if err := n.openFiles(); err != nil {
		return err
	}
	return n.openRaft()
}

func (n *Node) openFiles() error {
	if err := os.MkdirAll(n.cfg.Dir, 0o700); err != nil {
		return fmt.Errorf("make folder: %w", err)
	}
	var err error
	if n.lock, err = lockFolder(n.cfg.Dir); err != nil {
		return err
	}
	if err := n.openIdentity(); err != nil {
		return err
	}
	if err := n.openStores(); err != nil {
		return err
	}
	if n.cfg.ReserveBytes >= 0 {
		n.spare = spare.Open(filepath.Join(n.cfg.Dir, "spare"), 2*int64(n.cfg.SegmentBytes))
	}
	return nil
}

// openIdentity checks whose folder this is, or makes it ours.
func (n *Node) openIdentity() error {
	n.identity = &identityFile{slots: &slots{disk: n.disk, path: filepath.Join(n.cfg.Dir, "identity")}}
	found, err := n.identity.load()
	started := n.started()
	if errors.Is(err, ErrDamaged) && !started {
		err = nil // the very first write was cut short
	}
	if err != nil {
		return fmt.Errorf("%w; restore it from a backup of the folder", err)
	}
	if found {
		if want := n.cfg.ExpectClusterID; want != "" && want != n.identity.id.Cluster {
			return fmt.Errorf("%s: %w: is of cluster %s, expected %s; name another folder", n.cfg.Dir, ErrOtherCluster, n.identity.id.Cluster, want)
		}
		return n.identity.repair()
	}
	if started {
		return fmt.Errorf("%s: %w: it holds a log but no identity; restore it from a backup of the folder", n.cfg.Dir, ErrDamaged)
	}
	if n.cfg.ClusterID == "" || n.cfg.ServerID == "" {
		return fmt.Errorf("%s is a new state folder: ClusterID and ServerID are required", n.cfg.Dir)
	}
	if err := n.disk.syncDir(filepath.Dir(filepath.Clean(n.cfg.Dir))); err != nil {
		return err
	}
	return n.identity.save(identity{Cluster: n.cfg.ClusterID, Server: n.cfg.ServerID, Joined: n.cfg.Join, Epoch: n.cfg.Epoch})
}

// started says whether the folder ever held a log.
func (n *Node) started() bool {
	entries, err := os.ReadDir(filepath.Join(n.cfg.Dir, "log"))
	return err == nil && len(entries) > 0
}

func (n *Node) openStores() error {
	n.snaps = &snapshotStore{disk: n.disk, dir: filepath.Join(n.cfg.Dir, "snapshots"), log: n.log}
	if err := n.snaps.open(); err != nil {
		return err
	}
	n.logs = &logStore{
		ctx: n.ctx, disk: n.disk, dir: filepath.Join(n.cfg.Dir, "log"), segment: n.cfg.SegmentBytes,
		logger: newRaftLogger(n.log, "log"), kept: n.snaps.kept, fault: n.faults.set,
		well: n.faults.clearWrite, // a server that follows learns only here that its disk is well again
	}
	report, err := n.logs.open()
	if err != nil {
		return err
	}
	if err := n.disk.syncDir(n.cfg.Dir); err != nil {
		return err
	}
	n.bound = &boundFile{disk: n.disk, path: filepath.Join(n.cfg.Dir, "bound")}
	n.bound.load()
	return n.openStable(report)
}

func (n *Node) raftConfig() *raft.Config {
	conf := raft.DefaultConfig()
	conf.LocalID = raft.ServerID(n.identity.id.Server)
	conf.HeartbeatTimeout, conf.ElectionTimeout, conf.LeaderLeaseTimeout = baseTimeout, baseTimeout, baseTimeout/2
	conf.Logger = newRaftLogger(n.log, "raft")
	conf.NotifyCh = n.notify
	conf.NoLegacyTelemetry = true
	// The keeper takes snapshots, by bytes; Raft counts entries.
	conf.SnapshotThreshold, conf.SnapshotInterval, conf.TrailingLogs = 1<<62, 24*time.Hour, 0
	return conf
}

func (n *Node) openRaft() error {
	conf := n.raftConfig()
	_, newest := n.snaps.kept()
	if n.logs.last.Load() == 0 && newest == 0 && !n.identity.id.Joined {
		if err := n.bootstrap(); err != nil {
			return fmt.Errorf("bootstrap: %w", err)
		}
	}
	if last := n.logs.last.Load(); last > 0 && newest > last {
		// The log ends before the newest snapshot (its end was damaged): the
		// next entry would not connect.
		if err := n.logs.DeleteRange(n.logs.first.Load(), last); err != nil {
			return err
		}
	}
	n.fsm = &fsm{machine: n.machine, halt: n.halt, grown: n.grown, advanced: n.applied.fire}
	r, err := raft.NewRaft(conf, n.fsm, n.logs, n.stable, n.snaps, n.trans)
	if err != nil {
		return fmt.Errorf("start raft: %w", err)
	}
	n.raft = r
	n.observeLeaders()
	return nil
}

// bootstrap writes the first entry: who the servers are. A crash in between
// finds an empty log again and repeats it.
func (n *Node) bootstrap() error {
	if err := n.stable.SetUint64([]byte(keyCurrentTerm), max(1, n.stable.term)); err != nil {
		return err
	}
	voters := n.cfg.Voters
	if voters == nil {
		voters = []string{n.ServerID()}
	}
	var c raft.Configuration
	for _, v := range voters {
		c.Servers = append(c.Servers, raft.Server{Suffrage: raft.Voter, ID: raft.ServerID(v), Address: raft.ServerAddress(v)})
	}
	return n.logs.StoreLog(&raft.Log{Index: 1, Term: 1, Type: raft.LogConfiguration, Data: raft.EncodeConfiguration(c)})
}

func (n *Node) start() {
	n.wg.Go(n.watchLeadership)
	n.wg.Go(n.batch)
	n.wg.Go(n.verify)
	n.wg.Go(n.keep)
	n.wg.Go(n.keepBound)
	n.wg.Go(n.watchPace)
	if c := n.raft.GetConfiguration(); c.Error() == nil && soleVoter(c.Configuration(), n.ServerID()) {
		n.wg.Go(n.standForElection)
	}
}

// standForElection makes a lone server a candidate at once, instead of after
// a heartbeat time-out in which nobody could have called.
func (n *Node) standForElection() {
	self, caller := n.trans.LocalAddr(), n.trans
	if in, ok := n.trans.(*raft.InmemTransport); ok { // which does not reach itself
		_, other := raft.NewInmemTransport(raft.ServerAddress("start"))
		other.Connect(self, in)
		defer func() { _ = other.Close() }()
		caller = other
	}
	req := &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}}
	if err := caller.TimeoutNow(raft.ServerID(n.ServerID()), self, req, &raft.TimeoutNowResponse{}); err != nil {
		n.log.Debug("first election waits for the time-out", "err", err)
	}
	if c, ok := caller.(interface{ CloseStreams() }); ok {
		c.CloseStreams() // its buffers are half a MiB
	}
}

// State returns the state machine, for reading.
func (n *Node) State() *state.Machine { return n.machine }

// ClusterID returns the id that the folder is of.
func (n *Node) ClusterID() string { return n.identity.shown.Load().Cluster }

// ServerID returns this server's id.
func (n *Node) ServerID() string { return n.identity.shown.Load().Server }

// Epoch returns the recovery epoch, as every handshake says it. Before the
// log is replayed the folder remembers it, and a recovery that is still to be
// written to the state counts already.
func (n *Node) Epoch() uint64 {
	e := max(n.identity.epoch.Load(), n.machine.Facts().Epoch, 1)
	if n.identity.recovering.Load() {
		e++
	}
	return e
}

// noteEpoch keeps an epoch that the log brought, for the next start.
func (n *Node) noteEpoch() {
	e := n.machine.Facts().Epoch
	if e <= max(n.identity.epoch.Load(), 1) {
		return
	}
	if err := n.identity.update(func(id *identity) { id.Epoch = max(id.Epoch, e) }); err != nil {
		n.log.Warn("recovery epoch not kept", "epoch", e, "err", err)
	}
}

// Halted is closed when this server met something that it must not go past:
// an entry of a newer version. Err says what. Reading still works.
func (n *Node) Halted() <-chan struct{} { return n.halted }

// Err returns why the Node halted, or nil.
func (n *Node) Err() error {
	select {
	case <-n.halted:
		return n.haltErr
	default:
		return nil
	}
}

// Halt stops this server's part in the cluster for good, when a caller knows
// that it must not write any more.
func (n *Node) Halt(err error) { n.halt(err) }

func (n *Node) halt(err error) {
	n.haltOnce.Do(func() {
		n.log.Error("this server stops taking part", "err", err)
		n.haltErr = fmt.Errorf("%w: %w", ErrHalted, err)
		n.lead.lose()
		close(n.halted) // watchLeadership stops Raft: this may be Raft's own goroutine
	})
}

// Close stops everything, waits for it, and gives the folder back.
func (n *Node) Close() error {
	n.closeOnce.Do(func() {
		n.lead.lose()
		n.cancel()
		n.settle()
		if err := n.stopRaft(); err != nil {
			n.closeErr = fmt.Errorf("stop raft: %w", err)
		}
		n.wg.Wait()
		if err := n.stable.note(); err != nil && !diskFault(err) {
			n.closeErr = errors.Join(n.closeErr, err)
		}
		n.closeFiles()
	})
	return n.closeErr
}

func (n *Node) closeFiles() {
	if n.cfg.Transport == nil {
		if c, ok := n.trans.(raft.WithClose); ok {
			_ = c.Close()
		}
	}
	if n.logs != nil {
		n.logs.close()
	}
	if n.stable != nil {
		_ = n.stable.close()
	}
	if n.bound != nil {
		n.bound.close()
	}
	if n.identity != nil {
		_ = n.identity.slots.close()
	}
	if n.lock != nil {
		n.lock.release()
	}
}
