package store

import (
	"os"

	"github.com/prometheus/client_golang/prometheus"
)

// figures describe what Collect reads.
var figures = struct{ commits, written, size *prometheus.Desc }{
	commits: prometheus.NewDesc("dunlin_agent_store_writes_total", "Transactions that the node's database committed, each with a sync, since the agent started.", nil, nil),
	written: prometheus.NewDesc("dunlin_agent_store_written_bytes_total", "Bytes of the pages that they wrote.", nil, nil),
	size:    prometheus.NewDesc("dunlin_agent_store_bytes", "Size of the node's database.", nil, nil),
}

// Describe implements prometheus.Collector.
func (b *Bolt) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{figures.commits, figures.written, figures.size} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. bbolt counts pages as it takes
// them for a transaction; every commit writes a meta page besides.
func (b *Bolt) Collect(ch chan<- prometheus.Metric) {
	commits := b.commits.Load()
	stats := b.db.Stats()
	written := uint64(stats.TxStats.GetPageAlloc()) + commits*uint64(b.pageSize)
	ch <- prometheus.MustNewConstMetric(figures.commits, prometheus.CounterValue, float64(commits))
	ch <- prometheus.MustNewConstMetric(figures.written, prometheus.CounterValue, float64(written))
	if info, err := os.Stat(b.db.Path()); err == nil {
		ch <- prometheus.MustNewConstMetric(figures.size, prometheus.GaugeValue, float64(info.Size()))
	}
}
