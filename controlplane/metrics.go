package controlplane

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
)

// planeMetrics reads Raft's and the leases' figures when it is scraped, so
// that nothing is counted twice and an unscraped server pays nothing.
type planeMetrics struct {
	s     *Server
	raft  *consensus.Node
	nodes *nodeapi.Server

	term, leading, last, committed, applied, snapshot                                 *prometheus.Desc
	proposals, entries, queue, logBytes, stateBytes, syncs, diskBytes, syncP99, fault *prometheus.Desc
	connected, leaseAge, leaseExpired                                                 *prometheus.Desc
	members, feature, clockTrusted, clockOffset, gossip                               *prometheus.Desc
}

// newCommitLatency is told by Raft how long each entry took.
func newCommitLatency() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "dunlin_raft_commit_seconds", Help: "From an entry's proposal on this leader until it was applied here.",
		Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10},
	})
}

func (s *Server) registerMetrics() error {
	if s.cfg.Metrics == nil {
		return nil
	}
	for _, c := range []prometheus.Collector{newPlaneMetrics(s), s.commits} {
		if err := s.cfg.Metrics.Register(c); err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
	}
	return nil
}

func newPlaneMetrics(s *Server) *planeMetrics {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("dunlin_"+name, help, labels, nil)
	}
	return &planeMetrics{
		s: s, raft: s.raft, nodes: s.nodes,
		term:         d("raft_term", "Term that this server leads, or the newest that it knows."),
		leading:      d("raft_leading", "1 when this server leads."),
		last:         d("raft_last_index", "Index of the last entry in the log."),
		committed:    d("raft_commit_index", "Index of the last entry known to be committed."),
		applied:      d("raft_applied_index", "Index of the last entry applied here."),
		snapshot:     d("raft_snapshot_index", "Index of the last entry in the newest snapshot."),
		proposals:    d("raft_proposals_total", "Proposals made by this server."),
		entries:      d("raft_entries_total", "Raft entries that carried them: the fewer, the better the grouping."),
		queue:        d("raft_queue", "Proposals that wait for the entry before them."),
		logBytes:     d("raft_log_bytes", "Size of the log on disk."),
		stateBytes:   d("state_bytes", "Size of the state in memory."),
		syncs:        d("disk_syncs_total", "fsyncs of the state folder."),
		diskBytes:    d("disk_written_bytes_total", "Bytes written to the state folder."),
		syncP99:      d("disk_sync_p99_seconds", "99th percentile of recent fsyncs."),
		fault:        d("disk_fault", "1 while the state folder cannot be written."),
		connected:    d("nodes_connected", "Nodes that are connected to this server."),
		leaseAge:     d("node_lease_age_seconds", "Time since the node's last renewal.", "node"),
		leaseExpired: d("node_lease_expired", "1 when the node's lease has run out.", "node"),
		members:      d("raft_members", "Servers of the cluster, by what they do: voter or non-voter.", "role"),
		feature:      d("cluster_feature_level", "The cluster's feature level."),
		clockTrusted: d("clock_trusted", "0 while this server's clock is not believed: it jumped or differs from the others' (CronJobs, TTLs, deadlines and certificates wait), is behind what is known, or was never set."),
		clockOffset:  d("clock_offset_seconds", "On the leader, how far its clock is ahead of the median of the voters."),
		gossip:       d("gossip_members", "Members of this server's pool, itself included; 0 without one."),
	}
}

// Describe implements prometheus.Collector.
func (p *planeMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		p.term, p.leading, p.last, p.committed, p.applied, p.snapshot, p.proposals, p.entries, p.queue, p.logBytes, p.stateBytes,
		p.syncs, p.diskBytes, p.syncP99, p.fault, p.connected, p.leaseAge, p.leaseExpired,
		p.members, p.feature, p.clockTrusted, p.clockOffset, p.gossip,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (p *planeMetrics) Collect(ch chan<- prometheus.Metric) {
	s := p.raft.Stats()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v uint64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v))
	}
	gauge(p.term, float64(s.Term))
	gauge(p.leading, number(s.Leading))
	gauge(p.last, float64(s.LastIndex))
	gauge(p.committed, float64(s.CommitIndex))
	gauge(p.applied, float64(s.AppliedIndex))
	gauge(p.snapshot, float64(s.SnapshotIndex))
	count(p.proposals, s.Proposals)
	count(p.entries, s.Entries)
	gauge(p.queue, float64(s.Queue))
	gauge(p.logBytes, float64(s.LogBytes))
	gauge(p.stateBytes, float64(s.StateBytes))
	count(p.syncs, s.Disk.Syncs)
	count(p.diskBytes, s.Disk.Bytes)
	gauge(p.syncP99, s.Disk.SyncP99.Seconds())
	gauge(p.fault, number(s.Fault != nil))
	gauge(p.connected, float64(p.nodes.Sessions()))
	for node, l := range p.nodes.Leases().Snapshot() {
		gauge(p.leaseAge, l.Age.Seconds(), node)
		gauge(p.leaseExpired, number(l.Expired), node)
	}
	roles := map[string]int{"voter": 0, "non-voter": 0}
	if members, _, err := p.raft.Members(); err == nil {
		for _, m := range members {
			if m.Voter {
				roles["voter"]++
			} else {
				roles["non-voter"]++
			}
		}
	}
	for role, n := range roles {
		gauge(p.members, float64(n), role)
	}
	gauge(p.feature, float64(p.raft.State().Facts().Feature))
	gauge(p.clockTrusted, number(p.s.clockDoubt() == nil))
	off, _ := p.s.clocks.get()
	gauge(p.clockOffset, off.Seconds())
	n := 0
	if p.s.cfg.Gossip != nil {
		n = len(p.s.cfg.Gossip.Members())
	}
	gauge(p.gossip, float64(n))
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
