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
	// Transport to the other servers, whose local address is the server id.
	// nil is an in-memory one, which suits a single voter.
	Transport raft.Transport
	Log       *slog.Logger
	Disk      *Disk         // nil is the real disk
	Machine   state.Options // of the state machine
	// Feature is the feature level of a new cluster; 0 is 1.
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
	notify    chan bool     // from Raft

	faults   faults
	haltOnce sync.Once
	halted   chan struct{}
	haltErr  error

	proposals, entries atomic.Uint64
	closeOnce          sync.Once
	closeErr           error
}

var _ state.Proposer = (*Node)(nil)

// baseTimeout is the heartbeat and election time-out on a fast disk.
const baseTimeout = time.Second

// Open opens or makes the state folder and starts Raft. It returns when the
// state is restored from snapshot and this server takes part; a single voter
// leads within milliseconds, see WaitLeading. Errors are one line that names
// the file and what to do: ErrLocked, ErrNewerVersion, ErrOtherCluster,
// ErrDamaged, state.ErrDiskFull.
func Open(ctx context.Context, cfg Config) (*Node, error) {
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
		queue: make(chan *proposal, 1024), snapshots: make(chan struct{}, 1), notify: make(chan bool),
		halted: make(chan struct{}),
	}
	n.lead.init()
	n.barriers.init()
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
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

func (n *Node) open() error {
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
	return n.openRaft()
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
	return n.identity.save(identity{Cluster: n.cfg.ClusterID, Server: n.cfg.ServerID})
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
		disk: n.disk, dir: filepath.Join(n.cfg.Dir, "log"), segment: n.cfg.SegmentBytes,
		logger: newRaftLogger(n.log, "log"), kept: n.snaps.kept, fault: n.faults.set,
	}
	report, err := n.logs.open()
	if err != nil {
		return err
	}
	if err := n.disk.syncDir(n.cfg.Dir); err != nil {
		return err
	}
	return n.openStable(report)
}

// openStable loads term and vote and judges, with the log and the snapshots,
// whether something acknowledged is missing.
func (n *Node) openStable(report *salvageReport) error {
	n.stable = &stableStore{
		slots: &slots{disk: n.disk, path: filepath.Join(n.cfg.Dir, "stable")},
		last:  n.logs.last.Load, gate: n.logs.healthy, fault: n.faults.set, ctx: n.ctx,
	}
	n.trans = n.cfg.Transport
	if n.trans == nil {
		_, n.trans = raft.NewInmemTransport(raft.ServerAddress(n.identity.id.Server))
	}
	n.stable.self = n.trans.EncodePeer(raft.ServerID(n.identity.id.Server), n.trans.LocalAddr())
	found, err := n.stable.load()
	_, newest := n.snaps.kept()
	last := max(n.logs.last.Load(), newest)
	switch {
	case errors.Is(err, ErrDamaged), err == nil && !found && last > 0:
		if err := n.rebuildStable(last); err != nil {
			return err
		}
	case err != nil:
		return err
	}
	if err := n.stable.slots.prepare(); err != nil {
		return err
	}
	if first := n.logs.first.Load(); first > newest+1 {
		return fmt.Errorf("%s: %w: the log starts at entry %d and no usable snapshot reaches it; restore a backup", n.cfg.Dir, ErrDamaged, first)
	}
	lost := last < n.stable.disk.LastIndex || report != nil && report.Gap
	if report != nil && (lost || last > 0) { // otherwise the very first write was cut short
		n.log.Warn("log damaged: good entries copied, the old log moved aside", "first", report.First, "last", report.Last,
			"acknowledged", n.stable.disk.LastIndex, "moved", report.Quarantine, "err", report.Cause)
	}
	if !lost {
		return nil
	}
	return n.acceptLoss(last)
}

// rebuildStable makes a new record when both copies are gone. Alone, a server
// risks nothing by it: nobody else could have got its vote.
func (n *Node) rebuildStable(last uint64) error {
	sole, err := n.soleVoter()
	if err != nil {
		return err
	}
	if !sole {
		return fmt.Errorf("%s: %w: term and vote are lost, and this server is not the only voter; remove it from the cluster and join again", n.stable.slots.path, ErrDamaged)
	}
	if last > 0 { // otherwise the very first write was cut short
		n.log.Warn("stable store damaged, moved aside; term taken from the log", "path", n.stable.slots.path)
	}
	if err := n.stable.slots.quarantine(); err != nil {
		return err
	}
	term, err := n.lastTerm()
	if err != nil {
		return err
	}
	return n.stable.forget(last, term+1)
}

// acceptLoss goes on from what is left where that endangers nobody else, in a
// new recovery epoch.
func (n *Node) acceptLoss(last uint64) error {
	known := n.stable.disk.LastIndex
	sole, err := n.soleVoter()
	if err != nil {
		return err
	}
	switch {
	case last == 0:
		return fmt.Errorf("%s: %w: the log is lost (it held %d entries) and there is no snapshot; restore a backup, or remove the folder to start an empty cluster", n.cfg.Dir, ErrDamaged, known)
	case !sole:
		return fmt.Errorf("%s: %w: entries %d to %d are lost, and this server is not the only voter; remove it from the cluster and join again", n.cfg.Dir, ErrDamaged, last+1, known)
	}
	n.log.Error("acknowledged changes are lost; going on from the last good one in a new recovery epoch", "last", last, "acknowledged", known)
	id := n.identity.id
	id.Recover = true
	if err := n.identity.save(id); err != nil {
		return err
	}
	term, err := n.lastTerm()
	if err != nil {
		return err
	}
	return n.stable.forget(last, term+1)
}

// lastTerm returns the highest term that the log or a snapshot shows.
func (n *Node) lastTerm() (uint64, error) {
	var term uint64
	if metas, _ := n.snaps.List(); len(metas) > 0 {
		term = metas[0].Term
	}
	if last := n.logs.last.Load(); last > 0 {
		var e raft.Log
		if err := n.logs.GetLog(last, &e); err != nil {
			return 0, err
		}
		term = max(term, e.Term)
	}
	return term, nil
}

// soleVoter reads the newest configuration from log and snapshots.
func (n *Node) soleVoter() (bool, error) {
	var c raft.Configuration
	if metas, _ := n.snaps.List(); len(metas) > 0 {
		c = metas[0].Configuration
	}
	if first := n.logs.first.Load(); first > 0 {
		for i := first; i <= n.logs.last.Load(); i++ {
			var e raft.Log
			if err := n.logs.GetLog(i, &e); err != nil {
				return false, err
			}
			if e.Type == raft.LogConfiguration {
				c = raft.DecodeConfiguration(e.Data)
			}
		}
	}
	voters := 0
	for _, s := range c.Servers {
		if s.Suffrage == raft.Voter {
			voters++
		}
	}
	return voters <= 1, nil
}

func (n *Node) openRaft() error {
	conf := raft.DefaultConfig()
	conf.LocalID = raft.ServerID(n.identity.id.Server)
	conf.HeartbeatTimeout, conf.ElectionTimeout, conf.LeaderLeaseTimeout = baseTimeout, baseTimeout, baseTimeout/2
	conf.Logger = newRaftLogger(n.log, "raft")
	conf.NotifyCh = n.notify
	conf.NoLegacyTelemetry = true
	// The keeper takes snapshots, by bytes; Raft counts entries.
	conf.SnapshotThreshold, conf.SnapshotInterval, conf.TrailingLogs = 1<<62, 24*time.Hour, 0
	_, newest := n.snaps.kept()
	if n.logs.last.Load() == 0 && newest == 0 {
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
	n.fsm = &fsm{machine: n.machine, halt: n.halt, grown: n.grown}
	r, err := raft.NewRaft(conf, n.fsm, n.logs, n.stable, n.snaps, n.trans)
	if err != nil {
		return fmt.Errorf("start raft: %w", err)
	}
	n.raft = r
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
		voters = []string{n.identity.id.Server}
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
	if n.cfg.Transport == nil {
		n.wg.Go(n.standForElection)
	}
}

// standForElection makes a lone server a candidate at once, instead of after
// a heartbeat time-out in which nobody could have called.
func (n *Node) standForElection() {
	self := n.trans.LocalAddr()
	_, caller := raft.NewInmemTransport(raft.ServerAddress("start"))
	caller.Connect(self, n.trans)
	defer func() { _ = caller.Close() }()
	req := &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}}
	if err := caller.TimeoutNow(raft.ServerID(n.identity.id.Server), self, req, &raft.TimeoutNowResponse{}); err != nil {
		n.log.Debug("first election waits for the time-out", "err", err)
	}
}

// State returns the state machine, for reading.
func (n *Node) State() *state.Machine { return n.machine }

// ClusterID returns the id that the folder is of.
func (n *Node) ClusterID() string { return n.identity.id.Cluster }

// ServerID returns this server's id.
func (n *Node) ServerID() string { return n.identity.id.Server }

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
		n.log.Error("this server stops taking part; its state can still be read", "err", err)
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
		if err := n.raft.Shutdown().Error(); err != nil {
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
	if n.identity != nil {
		_ = n.identity.slots.close()
	}
	if n.lock != nil {
		n.lock.release()
	}
}
