// Package metrics scrapes a real server after some work, as an operator's
// Prometheus does.
package metrics

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

var quiet = slog.New(slog.DiscardHandler)

// startServer runs a control plane on a port of its own until the test ends.
func startServer(t *testing.T) (*controlplane.Server, *client.Client) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	kubeconfig := filepath.Join(dir, "admin.kubeconfig")
	s, err := controlplane.New(t.Context(), controlplane.Config{
		StateDir: filepath.Join(dir, "server"), Listener: l, Advertise: []string{l.Addr().String()}, Fallback: "192.0.2.1", AdminKubeconfig: kubeconfig,
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.43.0.0/16")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.42.0.0/16")},
		Version: "test", Clock: clock.System, Log: quiet, Metrics: prometheus.NewRegistry(),
	})
	if err != nil {
		t.Fatal(err)
	}
	run(t, s.Run)
	if err := s.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(kubeconfig, "test")
	if err != nil {
		t.Fatal(err)
	}
	return s, c
}

// run runs f until the test ends, and waits for it.
func run(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// joinNode makes a node that is Ready and renews its lease, and runs nothing.
func joinNode(t *testing.T, s *controlplane.Server) {
	t.Helper()
	id, err := pki.OpenNodeIdentity(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "a join line", func() error {
		line, err := s.JoinLine(t.Context(), nodeapi.TokenOptions{})
		if err != nil {
			return err // kube-system may not exist in the first moment
		}
		return link.Join(t.Context(), link.JoinConfig{Line: line, Identity: id, Name: "n1", BootID: "b"})
	})
	a, err := link.New(link.Config{Identity: id, BootID: "b", Log: quiet, Metrics: func(w io.Writer) error {
		_, err := io.WriteString(w, "dunlin_agent_connected 1\n")
		return err
	}})
	if err != nil {
		t.Fatal(err)
	}
	run(t, a.Run)
	room := corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("1Gi"), "pods": resource.MustParse("110")}
	says, err := direct.Marshal(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux", "dunlin.dev/runtime.wazero": "true"}},
		Status:     corev1.NodeStatus{Capacity: room, Allocatable: room, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "AgentReady"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node reports", func() error {
		_, err := a.Report(t.Context(), &wire.Report{BootID: "b", Seq: 1, Node: says})
		return err
	})
}

func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	deadline := time.After(60 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("%s: %v", what, err)
		case <-tick.C:
		}
	}
}

type families map[string]*dto.MetricFamily

func scrape(t *testing.T, c *client.Client, path string) families {
	t.Helper()
	body, err := c.Do(t.Context(), client.Request{Method: http.MethodGet, Path: path, Accept: "*/*"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = body.Close() }()
	p := expfmt.NewTextParser(model.UTF8Validation)
	f, err := p.TextToMetricFamilies(body)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// sum adds up the series of a family that have all the labels ("name=value");
// a histogram counts its observations.
func (f families) sum(name string, labels ...string) (total float64, series int) {
	for _, m := range f[name].GetMetric() {
		var have []string
		for _, l := range m.GetLabel() {
			have = append(have, l.GetName()+"="+l.GetValue())
		}
		if slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(have, l) }) {
			continue
		}
		series++
		total += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	return total, series
}

const deployment = `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web","namespace":"default"},"spec":{"replicas":3,
"selector":{"matchLabels":{"app":"web"}},"template":{"metadata":{"labels":{"app":"web"}},"spec":{"runtimeClassName":"wasm","containers":[{"name":"main","image":"web.wasm"}]}}}}`

// TestServerFigures wants every figure that an operator steers by (bind
// conflicts, reconcile rate and latency, depth of each queue, API latency,
// Raft, ages of leases), with a value that can be true.
func TestServerFigures(t *testing.T) {
	s, c := startServer(t)
	joinNode(t, s)
	post := func(path, body string) {
		t.Helper()
		eventually(t, "POST "+path, func() error { // a namespace may still be made
			return c.JSON(t.Context(), client.Request{Method: http.MethodPost, Path: path, ContentType: client.JSON, Body: []byte(body)}, nil)
		})
	}
	post("/apis/apps/v1/namespaces/default/deployments", deployment)
	post("/api/v1/namespaces/default/pods", `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"big"},"spec":{"runtimeClassName":"wasm","containers":[{"name":"main","image":"big.wasm","resources":{"requests":{"cpu":"64"}}}]}}`)
	eventually(t, "all pods but one are bound", func() error {
		var l corev1.PodList
		if err := c.JSON(t.Context(), client.Request{Method: http.MethodGet, Path: "/api/v1/pods"}, &l); err != nil {
			return err
		}
		bound := 0
		for i := range l.Items {
			if l.Items[i].Spec.NodeName == "n1" {
				bound++
			}
		}
		if bound != 3 {
			return fmt.Errorf("%d of %d pods are bound", bound, len(l.Items))
		}
		return nil
	})
	eventually(t, "one pod waits", func() error {
		if n, _ := scrape(t, c, "/metrics").sum("dunlin_scheduler_pending_pods", "queue=unschedulable"); n != 1 {
			return fmt.Errorf("%v wait", n)
		}
		return nil
	})
	f := scrape(t, c, "/metrics")
	for _, w := range []struct {
		name        string
		labels      []string
		least, most float64
	}{
		{"bind_conflicts_total", nil, 0, 100},
		{"dunlin_scheduler_bound_total", nil, 3, 3},
		{"dunlin_scheduler_decide_seconds", nil, 1, 1e4},
		{"dunlin_scheduler_bind_seconds", nil, 1, 1e4},
		{"dunlin_scheduler_pending_pods", []string{"queue=active"}, 0, 0},
		{"dunlin_scheduler_unschedulable_total", nil, 1, 1e3},
		{"dunlin_controller_reconcile_total", []string{"controller=deployment"}, 1, 1e4},
		{"dunlin_controller_reconcile_total", []string{"controller=replicaset", "outcome=done"}, 1, 1e4},
		{"dunlin_controller_reconcile_seconds", []string{"controller=replicaset"}, 1, 1e4},
		{"dunlin_controller_queue_depth", []string{"controller=deployment"}, 0, 1e3},
		{"dunlin_controller_queue_depth", []string{"controller=resource-quota"}, 0, 0}, // has never had a key
		{"dunlin_controller_queue_delayed", []string{"controller=bootstrap"}, 0, 1},
		{"dunlin_api_requests_total", []string{"verb=create", "resource=deployments", "code=201"}, 1, 1},
		{"dunlin_api_request_duration_seconds", []string{"verb=list", "resource=pods"}, 1, 1e5},
		{"dunlin_api_inflight", []string{"kind=requests"}, 1, 10}, // this one
		{"dunlin_api_panics_total", nil, 0, 0},
		{"dunlin_raft_term", nil, 1, 1e3},
		{"dunlin_raft_leading", nil, 1, 1},
		{"dunlin_raft_members", []string{"role=voter"}, 1, 1},
		{"dunlin_raft_members", []string{"role=non-voter"}, 0, 0},
		{"dunlin_cluster_feature_level", nil, 1, 1},
		{"dunlin_clock_trusted", nil, 1, 1},
		{"dunlin_clock_offset_seconds", nil, 0, 0},
		{"dunlin_gossip_members", nil, 0, 0}, // there is no pool here
		{"dunlin_raft_last_index", nil, 10, 1e5},
		{"dunlin_raft_commit_index", nil, 10, 1e5},
		{"dunlin_raft_applied_index", nil, 10, 1e5},
		{"dunlin_raft_snapshot_index", nil, 0, 1e5},
		{"dunlin_raft_proposals_total", nil, 10, 1e5},
		{"dunlin_raft_entries_total", nil, 10, 1e5},
		{"dunlin_raft_commit_seconds", nil, 10, 1e5},
		{"dunlin_raft_queue", nil, 0, 1e3},
		{"dunlin_raft_log_bytes", nil, 1e3, 1e9},
		{"dunlin_state_bytes", nil, 1e3, 1e8},
		{"dunlin_disk_syncs_total", nil, 10, 1e5},
		{"dunlin_disk_written_bytes_total", nil, 1e3, 1e9},
		{"dunlin_disk_fault", nil, 0, 0},
		{"dunlin_nodes_connected", nil, 1, 1},
		{"dunlin_node_lease_age_seconds", []string{"node=n1"}, 0, 60},
		{"dunlin_node_lease_expired", []string{"node=n1"}, 0, 0},
	} {
		got, series := f.sum(w.name, w.labels...)
		if series == 0 || got < w.least || got > w.most {
			t.Errorf("%s %v: %v in %d series, want %v to %v", w.name, w.labels, got, series, w.least, w.most)
		}
	}
	// Latencies are those of this work, not of another unit.
	for _, name := range []string{"dunlin_controller_reconcile_seconds", "dunlin_api_request_duration_seconds", "dunlin_raft_commit_seconds", "dunlin_scheduler_bind_seconds"} {
		for _, m := range f[name].GetMetric() {
			h := m.GetHistogram()
			if mean := h.GetSampleSum() / float64(h.GetSampleCount()); mean <= 0 || mean > 60 {
				t.Errorf("%s: %v s on average: %v", name, mean, m)
			}
		}
	}
	// Names and help texts are for people.
	for name, family := range f {
		if family.GetHelp() == "" || !strings.HasPrefix(name, "dunlin_") && name != "bind_conflicts_total" {
			t.Errorf("%s: %q", name, family.GetHelp())
		}
	}
}

// TestNodeFiguresThroughTheServer: an administrator reads a node's figures
// where the node itself cannot be reached.
func TestNodeFiguresThroughTheServer(t *testing.T) {
	s, c := startServer(t)
	joinNode(t, s)
	const path = "/api/v1/nodes/n1/proxy/metrics"
	var last error
	eventually(t, "the node is connected", func() error {
		body, err := c.Do(t.Context(), client.Request{Method: http.MethodGet, Path: path, Accept: "*/*"})
		if err == nil {
			defer func() { _ = body.Close() }()
			var b bytes.Buffer
			if _, err = b.ReadFrom(body); err == nil && b.String() != "dunlin_agent_connected 1\n" {
				err = fmt.Errorf("got %q", b.String())
			}
		}
		last = err
		return err
	})
	if last != nil {
		t.Fatal(last)
	}
	if n, _ := scrape(t, c, "/metrics").sum("dunlin_api_requests_total", "resource=nodes", "subresource=proxy", "code=200"); n < 1 {
		t.Errorf("%v requests counted", n)
	}
}
