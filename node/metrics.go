package node

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// figures are what the agent counts as things happen. Everything that can be
// read from what it knows is read when somebody asks (Collect). No label
// holds a name of a user's: the series are as many with one pod as with a
// hundred.
type figures struct {
	podStart       prometheus.Histogram
	containerStart prometheus.Histogram
	starts         prometheus.Counter
	restarts       prometheus.Counter
	exits          *prometheus.CounterVec
	probes         *prometheus.CounterVec
	prepares       *prometheus.CounterVec
	pulls          *prometheus.CounterVec
	reports        *prometheus.CounterVec
}

// Results as labels.
const (
	resultOK        = "ok"
	resultUnchanged = "unchanged"
	resultError     = "error"
	resultRefused   = "refused"
	resultFailure   = "failure"
)

func newFigures() *figures {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "dunlin_agent_" + name, Help: help})
	}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dunlin_agent_" + name, Help: help}, labels)
	}
	f := &figures{
		podStart: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "dunlin_agent_pod_start_seconds", Help: "From a pod's first sight on this node to all its containers running.",
			Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 15, 60, 300},
		}),
		containerStart: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "dunlin_agent_container_start_seconds", Help: "Time the runtime took to start a container.",
			Buckets: []float64{.0025, .005, .01, .025, .05, .1, .25, .5, 1, 5},
		}),
		starts:   counter("container_starts_total", "Containers started, restarts included."),
		restarts: counter("container_restarts_total", "Containers started again after an end."),
		exits:    vec("container_exits_total", "Containers that ended, by reason.", "reason"),
		probes:   vec("probes_total", "Probes run, by kind and result.", "probe", "result"),
		prepares: vec("image_prepares_total", "Images fetched, verified and compiled for a container, by result.", "result"),
		pulls:    vec("assignment_pulls_total", "Assignments asked for, by result: ok (a new one), unchanged, error.", "result"),
		reports:  vec("reports_total", "Reports to the servers, by result: ok, refused, error.", "result"),
	}
	// What never happened is 0, and not absent.
	for _, r := range exitReasons {
		f.exits.WithLabelValues(r)
	}
	for k := probeStartup; k <= probeReadiness; k++ {
		f.probes.WithLabelValues(lower(k), resultOK)
		f.probes.WithLabelValues(lower(k), resultFailure)
	}
	f.prepares.WithLabelValues(resultOK)
	f.prepares.WithLabelValues(resultError)
	for _, r := range []string{resultOK, resultUnchanged, resultError} {
		f.pulls.WithLabelValues(r)
	}
	for _, r := range []string{resultOK, resultRefused, resultError} {
		f.reports.WithLabelValues(r)
	}
	return f
}

func (f *figures) all() []prometheus.Collector {
	return []prometheus.Collector{f.podStart, f.containerStart, f.starts, f.restarts, f.exits, f.probes, f.prepares, f.pulls, f.reports}
}

// exitReasons are those that have a series of their own.
var exitReasons = []string{"Completed", "Error", "OOMKilled", "Trap", "other"}

// ended counts an attempt that ended.
func (f *figures) ended(reason string) {
	for _, r := range exitReasons {
		if r == reason {
			f.exits.WithLabelValues(r).Inc()
			return
		}
	}
	f.exits.WithLabelValues("other").Inc()
}

func (f *figures) started(attempt int, took time.Duration) {
	f.containerStart.Observe(took.Seconds())
	f.starts.Inc()
	if attempt > 0 {
		f.restarts.Inc()
	}
}

func (f *figures) probed(k probeKind, ok bool) {
	result := resultOK
	if !ok {
		result = resultFailure
	}
	f.probes.WithLabelValues(lower(k), result).Inc()
}

func (f *figures) prepared(err error) {
	result := resultOK
	if err != nil {
		result = resultError
	}
	f.prepares.WithLabelValues(result).Inc()
}

// described are what Collect reads.
var described = struct {
	pods, containers, restarts, pullAge, reportAge, unreported, events, dropped *prometheus.Desc
	images, imageBytes, compiledBytes, memory, cpu                              *prometheus.Desc
}{
	pods:          desc("pods", "Pods of this node by phase.", "phase"),
	containers:    desc("containers", "Containers of this node's pods, init containers included, by state.", "state"),
	restarts:      desc("pod_restarts", "Restarts that the pods of this node count together, since they came here."),
	pullAge:       desc("assignment_age_seconds", "Time since a server last said what this node shall run; absent when none did since the agent started."),
	reportAge:     desc("report_age_seconds", "Time since a server last acknowledged a report; absent when none did since the agent started."),
	unreported:    desc("unreported_pods", "Pods whose newest status no server has acknowledged."),
	events:        desc("events_waiting", "Events that were not reported yet."),
	dropped:       desc("events_dropped_total", "Events dropped: an object spoke too often, or too many waited."),
	images:        desc("image_store_images", "Images (modules) kept on this node.", "runtime"),
	imageBytes:    desc("image_store_bytes", "Bytes of the images kept on this node.", "runtime"),
	compiledBytes: desc("image_compiled_bytes", "Bytes of machine code made of them.", "runtime"),
	memory:        desc("cgroup_memory_bytes", "Memory of the control group that the agent runs in: usage without inactive file pages."),
	cpu:           desc("cgroup_cpu_seconds_total", "Processor time of the control group that the agent runs in."),
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("dunlin_agent_"+name, help, labels, nil)
}

// Describe implements prometheus.Collector.
func (a *Agent) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range a.fig.all() {
		c.Describe(ch)
	}
	d := &described
	for _, x := range []*prometheus.Desc{d.pods, d.containers, d.restarts, d.pullAge, d.reportAge, d.unreported, d.events, d.dropped, d.images, d.imageBytes, d.compiledBytes, d.memory, d.cpu} {
		ch <- x
	}
}

// Collect implements prometheus.Collector.
func (a *Agent) Collect(ch chan<- prometheus.Metric) {
	for _, c := range a.fig.all() {
		c.Collect(ch)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v float64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v)
	}
	c := a.census()
	for _, p := range []corev1.PodPhase{corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded, corev1.PodFailed, corev1.PodUnknown} {
		gauge(described.pods, float64(c.phases[p]), string(p))
	}
	gauge(described.containers, float64(c.waiting), "waiting")
	gauge(described.containers, float64(c.running), "running")
	gauge(described.containers, float64(c.terminated), "terminated")
	gauge(described.restarts, float64(c.restarts))
	pull, report := a.Ages()
	if pull >= 0 {
		gauge(described.pullAge, pull.Seconds())
	}
	if report >= 0 {
		gauge(described.reportAge, report.Seconds())
	}
	w := a.reports.waiting()
	gauge(described.unreported, float64(w.pods))
	gauge(described.events, float64(w.events))
	count(described.dropped, float64(w.dropped))
	for name, rt := range a.c.Runtimes {
		x, ok := rt.(workload.ImageCounter)
		if !ok {
			continue
		}
		u, err := x.Images()
		if err != nil {
			a.log.Debug("image store cannot be sized", "runtime", name, "err", err)
			continue
		}
		gauge(described.images, float64(u.Images), name)
		gauge(described.imageBytes, float64(u.Bytes), name)
		gauge(described.compiledBytes, float64(u.CompiledBytes), name)
	}
	if st, err := cgroup.Own(); err == nil {
		gauge(described.memory, float64(st.MemoryBytes))
		count(described.cpu, float64(st.CPUNanos)/1e9)
	}
}

// census is what the pods of the node are, added up.
type census struct {
	phases                       map[corev1.PodPhase]int
	waiting, running, terminated int
	restarts                     int64
}

func (a *Agent) census() census {
	c := census{phases: map[corev1.PodPhase]int{}}
	a.mu.RLock()
	defer a.mu.RUnlock()
	for _, i := range a.known {
		st := i.status
		if st == nil {
			if i.pod == nil {
				continue
			}
			st = &i.pod.Status
		}
		phase := st.Phase
		if phase == "" {
			phase = corev1.PodPending
		}
		c.phases[phase]++
		for _, list := range [][]corev1.ContainerStatus{st.InitContainerStatuses, st.ContainerStatuses} {
			for j := range list {
				c.restarts += int64(list[j].RestartCount)
				switch s := &list[j].State; {
				case s.Running != nil:
					c.running++
				case s.Terminated != nil:
					c.terminated++
				default:
					c.waiting++
				}
			}
		}
	}
	return c
}

// Ages are how long ago a server last gave this node its assignment, and
// acknowledged a report; negative when none did since the agent started.
func (a *Agent) Ages() (pull, report time.Duration) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return since(a.pulledAt), since(a.reportedAt)
}

func since(t time.Time) time.Duration {
	if t.IsZero() {
		return -1
	}
	return time.Since(t)
}

// pulled counts a pull.
func (a *Agent) pulled(result string) {
	a.fig.pulls.WithLabelValues(result).Inc()
	if result == resultError {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pulledAt = time.Now()
}

// reported counts a report.
func (a *Agent) reported(result string) {
	a.fig.reports.WithLabelValues(result).Inc()
	if result != resultOK {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reportedAt = time.Now()
}
