package nodelink

import (
	"bytes"
	"io"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/node/view"
)

// TestFiguresOverTheLink: what a node counts reaches a server's client over
// the node's own connection, whole, and not without end.
func TestFiguresOverTheLink(t *testing.T) {
	s := start(t, options{ns: true})
	id := s.join("n1")
	reg := prometheus.NewRegistry()
	sends := func(w io.Writer) error { return view.WriteMetrics(w, reg) }
	a := runLink(t, id, func(c *link.Config) { c.Metrics = func(w io.Writer) error { return sends(w) } })
	reg.MustRegister(a.Link)
	eventually(t, "lease acknowledged", a.Connected)
	var out bytes.Buffer
	must(t, s.api.Metrics(t.Context(), "n1", &out))
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(&out)
	must(t, err)
	value := func(name string, labels ...string) float64 {
		t.Helper()
		for _, m := range families[name].GetMetric() {
			var have []string
			for _, l := range m.GetLabel() {
				have = append(have, l.GetValue())
			}
			if slices.Equal(have, labels) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
		t.Errorf("no %s %v", name, labels)
		return -1
	}
	if value("dunlin_agent_connected") != 1 || value("dunlin_agent_connects_total") != 1 || value("dunlin_agent_leases_acknowledged_total", "tcp") < 1 ||
		value("dunlin_agent_leases_acknowledged_total", "udp") != 0 || value("dunlin_agent_leases_sent_total") < 1 || value("dunlin_agent_streams") != 1 {
		t.Errorf("%v", families)
	}
	if age := value("dunlin_agent_lease_age_seconds"); age < 0 || age > 60 {
		t.Errorf("age %v", age)
	}
	if in, sent := value("dunlin_agent_link_bytes_total", "in"), value("dunlin_agent_link_bytes_total", "out"); in < 500 || sent < 500 {
		t.Errorf("%v in, %v out", in, sent)
	}
	sends = func(w io.Writer) error {
		for {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				return err
			}
		}
	}
	if err := s.api.Metrics(t.Context(), "n1", io.Discard); err == nil {
		t.Error("an endless answer was taken")
	}
}
