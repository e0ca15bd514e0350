// Package view is what one node tells on its own socket: health, figures and
// a read-only view of what it runs, from the agent's own memory. It works
// without any server, also after a boot that never saw one. The paths of
// objects are those of the Kubernetes API, so that clients of it need no
// other words; nothing can be changed.
package view

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/dunlin-project/dunlin/node"
)

// Source is what there is to tell; implemented by *node.Agent.
type Source interface {
	node.StreamServer
	Pods() []*corev1.Pod
	Node() *corev1.Node
	WaitingEvents() []corev1.Event
}

// maxLogs bounds the logs that are read at the same time.
const maxLogs = 32

// Config of a Handler.
type Config struct {
	Source  Source
	Metrics prometheus.Gatherer
	Status  func() Status
	// NetCheck writes whom this node reaches, as JSON; nil is none.
	NetCheck func(ctx context.Context, w io.Writer) error
}

type server struct {
	Config
	slots chan struct{}
}

// Handler serves GET requests; nothing else has a meaning here.
func Handler(c Config) http.Handler {
	s := &server{Config: c, slots: make(chan struct{}, maxLogs)}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { answer(w, s.Status()) })
	mux.HandleFunc("GET /metrics", s.metrics)
	if c.NetCheck != nil {
		mux.HandleFunc("GET /net-check", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = c.NetCheck(r.Context(), w) // who asked is gone
		})
	}
	mux.HandleFunc("GET /api/v1/pods", s.pods)
	mux.HandleFunc("GET /api/v1/pods/{name}", s.pod)
	mux.HandleFunc("GET /api/v1/pods/{name}/log", s.logs)
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/pods", s.pods)
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/pods/{name}", s.pod)
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/pods/{name}/log", s.logs)
	mux.HandleFunc("GET /api/v1/nodes", s.nodes)
	mux.HandleFunc("GET /api/v1/nodes/{name}", s.node)
	mux.HandleFunc("GET /api/v1/events", s.events)
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/events", s.events)
	return mux
}

// WriteMetrics writes what g gathers in the Prometheus text format.
func WriteMetrics(w io.Writer, g prometheus.Gatherer) error {
	families, err := g.Gather()
	if err != nil && len(families) == 0 {
		return fmt.Errorf("gather metrics: %w", err)
	}
	enc := expfmt.NewEncoder(w, expfmt.NewFormat(expfmt.TypeTextPlain))
	for _, f := range families {
		if err := enc.Encode(f); err != nil {
			return fmt.Errorf("write metrics: %w", err)
		}
	}
	return nil
}

func (s *server) metrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", string(expfmt.NewFormat(expfmt.TypeTextPlain)))
	_ = WriteMetrics(w, s.Metrics) // who asked is gone
}

// selection is what a list request leaves out.
type selection struct {
	namespace string
	labels    labels.Selector
	fields    fields.Selector
}

func selectionOf(r *http.Request) (selection, error) {
	s := selection{namespace: r.PathValue("namespace")}
	q := r.URL.Query()
	if q.Has("watch") {
		return s, apierrors.NewBadRequest("an agent does not serve watches")
	}
	var err error
	if s.labels, err = labels.Parse(q.Get("labelSelector")); err != nil {
		return s, apierrors.NewBadRequest("labelSelector: " + err.Error())
	}
	if s.fields, err = fields.ParseSelector(q.Get("fieldSelector")); err != nil {
		return s, apierrors.NewBadRequest("fieldSelector: " + err.Error())
	}
	return s, nil
}

// has says whether an object is selected; f are the fields that can be asked
// for.
func (s selection) has(m *metav1.ObjectMeta, f fields.Set) bool {
	f["metadata.name"], f["metadata.namespace"] = m.Name, m.Namespace
	return (s.namespace == "" || s.namespace == m.Namespace) && s.labels.Matches(labels.Set(m.Labels)) && s.fields.Matches(f)
}

// known refuses fields that nothing could match.
func (s selection) known(names ...string) error {
	for _, r := range s.fields.Requirements() {
		if r.Field != "metadata.name" && r.Field != "metadata.namespace" && !slices.Contains(names, r.Field) {
			return apierrors.NewBadRequest(fmt.Sprintf("field label not supported: %s (here: metadata.name, metadata.namespace, %s)", r.Field, strings.Join(names, ", ")))
		}
	}
	return nil
}

func (s *server) pods(w http.ResponseWriter, r *http.Request) {
	sel, err := selectionOf(r)
	if err == nil {
		err = sel.known("spec.nodeName", "status.phase")
	}
	if err != nil {
		fail(w, err)
		return
	}
	l := corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Items: []corev1.Pod{}}
	for _, p := range s.Source.Pods() {
		if sel.has(&p.ObjectMeta, fields.Set{"spec.nodeName": p.Spec.NodeName, "status.phase": string(p.Status.Phase)}) {
			l.Items = append(l.Items, *p)
		}
	}
	answer(w, l)
}

// find looks a pod up; without a namespace the name must be unique here.
func (s *server) find(r *http.Request) (*corev1.Pod, error) {
	name, namespace := r.PathValue("name"), r.PathValue("namespace")
	var found []*corev1.Pod
	var in []string
	for _, p := range s.Source.Pods() {
		if p.Name == name && (namespace == "" || p.Namespace == namespace) {
			found, in = append(found, p), append(in, p.Namespace)
		}
	}
	switch {
	case len(found) == 0:
		return nil, apierrors.NewNotFound(corev1.Resource("pods"), name)
	case namespace == "" && slices.ContainsFunc(in, func(n string) bool { return n != in[0] }):
		return nil, apierrors.NewBadRequest(fmt.Sprintf("pods named %s are in the namespaces %s: choose one", name, strings.Join(in, ", ")))
	}
	return found[len(found)-1], nil
}

func (s *server) pod(w http.ResponseWriter, r *http.Request) {
	p, err := s.find(r)
	if err != nil {
		fail(w, err)
		return
	}
	answer(w, p)
}

func (s *server) nodes(w http.ResponseWriter, r *http.Request) {
	sel, err := selectionOf(r)
	if err == nil {
		err = sel.known("spec.unschedulable")
	}
	if err != nil {
		fail(w, err)
		return
	}
	l := corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, Items: []corev1.Node{}}
	if n := s.Source.Node(); sel.has(&n.ObjectMeta, fields.Set{"spec.unschedulable": fmt.Sprint(n.Spec.Unschedulable)}) {
		l.Items = append(l.Items, *n)
	}
	answer(w, l)
}

func (s *server) node(w http.ResponseWriter, r *http.Request) {
	n := s.Source.Node()
	if n.Name != r.PathValue("name") {
		err := apierrors.NewNotFound(corev1.Resource("nodes"), r.PathValue("name"))
		err.ErrStatus.Message += "; this one is " + n.Name
		fail(w, err)
		return
	}
	answer(w, n)
}

func (s *server) events(w http.ResponseWriter, r *http.Request) {
	sel, err := selectionOf(r)
	if err == nil {
		err = sel.known("involvedObject.kind", "involvedObject.name", "involvedObject.namespace", "involvedObject.uid", "reason", "type")
	}
	if err != nil {
		fail(w, err)
		return
	}
	l := corev1.EventList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "EventList"}, Items: []corev1.Event{}}
	for _, e := range s.Source.WaitingEvents() {
		o := e.InvolvedObject
		if sel.has(&e.ObjectMeta, fields.Set{
			"involvedObject.kind": o.Kind, "involvedObject.name": o.Name, "involvedObject.namespace": o.Namespace, "involvedObject.uid": string(o.UID),
			"reason": e.Reason, "type": e.Type,
		}) {
			l.Items = append(l.Items, e)
		}
	}
	answer(w, l)
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // who asked is gone
}

func fail(w http.ResponseWriter, err error) {
	st := metav1.Status{Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError, Message: err.Error()}
	var as apierrors.APIStatus
	if errors.As(err, &as) {
		st = as.Status()
	}
	st.APIVersion, st.Kind = "v1", "Status"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(st.Code))
	_ = json.NewEncoder(w).Encode(st)
}

// Status is the agent in a few words and figures.
type Status struct {
	Node      string        `json:"node"`
	Version   string        `json:"version"`
	Uptime    time.Duration `json:"uptimeNanos"`
	Connected bool          `json:"connected"`
	// Server is the one connected to, or the last one.
	Server string `json:"server,omitempty"`
	// Relayed: the server that leads cannot be reached from here, and Server
	// passes everything on to it.
	Relayed bool `json:"relayed,omitempty"`
	// Reason is why there is no connection.
	Reason   string   `json:"reason,omitempty"`
	Servers  []string `json:"servers"`
	Connects uint64   `json:"connects"`
	// Ages of the last acknowledged lease, of the last pull that was answered
	// and of the last acknowledged report; absent when there was none since
	// the agent started.
	LeaseAge      *time.Duration `json:"leaseAgeNanos,omitempty"`
	AssignmentAge *time.Duration `json:"assignmentAgeNanos,omitempty"`
	ReportAge     *time.Duration `json:"reportAgeNanos,omitempty"`
	Generation    uint64         `json:"generation"`
	Epoch         uint64         `json:"epoch"`
	BytesIn       uint64         `json:"bytesIn"`
	BytesOut      uint64         `json:"bytesOut"`
	Gossip        Gossip         `json:"gossip"`
}

// Gossip is where and with whom the node gossips.
type Gossip struct {
	Running     bool     `json:"running"`
	ID          string   `json:"id,omitempty"`
	Address     string   `json:"address,omitempty"`
	Site        string   `json:"site,omitempty"`
	Members     []string `json:"members,omitempty"`
	LeasesByUDP uint64   `json:"leasesByUDP"`
}
