package controlplane

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
)

// planeMetrics reads Raft's and the leases' figures when it is scraped, so
// that nothing is counted twice and an unscraped server pays nothing.
type planeMetrics struct {
	raft   *consensus.Node
	leases *nodeapi.Leases

	term, leading, applied, commits, entries, queue, logBytes, stateBytes, syncs, diskBytes, syncP99, fault *prometheus.Desc
	leaseAge, leaseExpired                                                                                  *prometheus.Desc
}

func newPlaneMetrics(raft *consensus.Node, leases *nodeapi.Leases) *planeMetrics {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("dunlin_"+name, help, labels, nil)
	}
	return &planeMetrics{
		raft: raft, leases: leases,
		term:         d("raft_term", "Term that this server leads; 0 when it does not."),
		leading:      d("raft_leading", "1 when this server leads."),
		applied:      d("raft_applied_index", "Index of the last entry applied here."),
		commits:      d("raft_proposals_total", "Proposals made by this server."),
		entries:      d("raft_entries_total", "Raft entries that carried them: the fewer, the better the grouping."),
		queue:        d("raft_queue", "Proposals that wait for the entry before them."),
		logBytes:     d("raft_log_bytes", "Size of the log on disk."),
		stateBytes:   d("state_bytes", "Size of the state in memory."),
		syncs:        d("disk_syncs_total", "fsyncs of the state folder."),
		diskBytes:    d("disk_written_bytes_total", "Bytes written to the state folder."),
		syncP99:      d("disk_sync_p99_seconds", "99th percentile of recent fsyncs."),
		fault:        d("disk_fault", "1 while the state folder cannot be written."),
		leaseAge:     d("node_lease_age_seconds", "Time since the node's last renewal.", "node"),
		leaseExpired: d("node_lease_expired", "1 when the node's lease has run out.", "node"),
	}
}

// Describe implements prometheus.Collector.
func (p *planeMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{p.term, p.leading, p.applied, p.commits, p.entries, p.queue, p.logBytes, p.stateBytes, p.syncs, p.diskBytes, p.syncP99, p.fault, p.leaseAge, p.leaseExpired} {
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
	gauge(p.applied, float64(s.AppliedIndex))
	count(p.commits, s.Proposals)
	count(p.entries, s.Entries)
	gauge(p.queue, float64(s.Queue))
	gauge(p.logBytes, float64(s.LogBytes))
	gauge(p.stateBytes, float64(s.StateBytes))
	count(p.syncs, s.Disk.Syncs)
	count(p.diskBytes, s.Disk.Bytes)
	gauge(p.syncP99, s.Disk.SyncP99.Seconds())
	gauge(p.fault, number(s.Fault != nil))
	for node, l := range p.leases.Snapshot() {
		gauge(p.leaseAge, l.Age.Seconds(), node)
		gauge(p.leaseExpired, number(l.Expired), node)
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
