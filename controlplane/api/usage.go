package api

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

// NodeUsage tells what a node and its pods use now. Errors are
// *apierrors.StatusError.
type NodeUsage interface {
	Usage(ctx context.Context, node string) (*wire.NodeUsage, error)
}

// metricsGV is where upstream's metrics-server serves usage
// (k8s.io/metrics v1beta1, whose fields these are).
var metricsGV = schema.GroupVersion{Group: "metrics.k8s.io", Version: "v1beta1"}

type usageMeta struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Timestamp         metav1.Time     `json:"timestamp"`
	Window            metav1.Duration `json:"window"`
}

type nodeMetrics struct {
	usageMeta `json:",inline"`
	Usage     corev1.ResourceList `json:"usage"`
}

type podMetrics struct {
	usageMeta  `json:",inline"`
	Containers []containerMetrics `json:"containers"`
}

type containerMetrics struct {
	Name  string              `json:"name"`
	Usage corev1.ResourceList `json:"usage"`
}

type metricsList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`
	Items           []any `json:"items"`
}

// serveUsage answers metrics.k8s.io/v1beta1: what is listed are the objects
// of the core group that match, with what their nodes say when asked. Those
// of which nothing is known, since their node is away or they do not run, are
// left out, as upstream's are.
func (s *Server) serveUsage(rq *request) error {
	in := &rq.info
	kinds := map[string]string{"nodes": "Node", "pods": "Pod"}
	kind := manifests.ByGroupKind(schema.GroupKind{Kind: kinds[in.gvr.Resource]})
	pods := in.gvr.Resource == "pods"
	if kind == nil || in.gvr.Version != metricsGV.Version || in.subresource != "" || !pods && in.namespace != "" || pods && in.namespace == "" && pathName(rq) != "" {
		return pathNotFound()
	}
	if in.verb != "get" && in.verb != "list" {
		return methodNotAllowed(in)
	}
	rq.kind = kind
	q, err := parseListQuery(rq)
	if err != nil {
		return err
	}
	objs, err := s.usageObjects(rq, q)
	if err != nil {
		return err
	}
	nodes := map[string]*wire.NodeUsage{}
	for _, o := range objs {
		switch o := o.(type) {
		case *corev1.Node:
			nodes[o.Name] = nil
		case *corev1.Pod:
			if o.Spec.NodeName != "" {
				nodes[o.Spec.NodeName] = nil
			}
		}
	}
	s.askUsages(rq.Context(), nodes)
	if rq.Context().Err() != nil {
		return rq.Context().Err()
	}
	out := []any{}
	for _, o := range objs {
		if m := usageOf(o, nodes); m != nil {
			out = append(out, m)
		}
	}
	if in.verb == "get" {
		if len(out) == 0 {
			return apierrors.NewNotFound(metricsGV.WithResource(in.gvr.Resource).GroupResource(), in.name)
		}
		return s.answerJSON(rq, out[0])
	}
	return s.answerJSON(rq, &metricsList{TypeMeta: metav1.TypeMeta{APIVersion: metricsGV.String(), Kind: kind.GVK.Kind + "MetricsList"}, Items: out})
}

// usageObjects are the nodes or pods that are asked about, by name.
func (s *Server) usageObjects(rq *request, q *listQuery) (out []runtime.Object, err error) {
	name := pathName(rq)
	s.cfg.Registry.Reader(rq.kind.GroupKind()).Snapshot().Range(rq.kind.StorageKind(), rq.info.namespace, state.Key{}, func(r *state.Record) bool {
		if name != "" && r.Header.Key.Name != name {
			return true
		}
		var ok bool
		if ok, err = q.match.Matches(s.cfg.Registry, r); err != nil || !ok {
			return err == nil
		}
		var obj runtime.Object
		if obj, err = s.cfg.Registry.Decode(r); err == nil {
			out = append(out, obj)
		}
		return err == nil
	})
	if err == nil && name != "" && len(out) == 0 {
		err = apierrors.NewNotFound(metricsGV.WithResource(rq.info.gvr.Resource).GroupResource(), name)
	}
	return out, err
}

// askUsages asks all nodes together. What does not answer stays nil.
func (s *Server) askUsages(ctx context.Context, nodes map[string]*wire.NodeUsage) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		wg.Go(func() {
			u, err := s.cfg.Usage.Usage(ctx, name)
			if err != nil {
				s.cfg.Log.Debug("usage of a node is not known", "node", name, "err", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			nodes[name] = u
		})
	}
	wg.Wait()
}

// usageOf is one object's; nil when nothing is known.
func usageOf(o runtime.Object, nodes map[string]*wire.NodeUsage) any {
	meta := func(kind string, m *metav1.ObjectMeta, u *wire.NodeUsage) usageMeta {
		at := metav1.NewTime(time.UnixMilli(u.UnixMilli).UTC().Truncate(time.Second))
		return usageMeta{
			TypeMeta:   metav1.TypeMeta{APIVersion: metricsGV.String(), Kind: kind},
			ObjectMeta: metav1.ObjectMeta{Name: m.Name, Namespace: m.Namespace, Labels: m.Labels, CreationTimestamp: at},
			Timestamp:  at, Window: metav1.Duration{Duration: time.Duration(u.WindowMillis) * time.Millisecond},
		}
	}
	switch o := o.(type) {
	case *corev1.Node:
		u := nodes[o.Name]
		if u == nil {
			return nil
		}
		return &nodeMetrics{usageMeta: meta("NodeMetrics", &o.ObjectMeta, u), Usage: usageList(u.CPUNanos, u.MemoryBytes)}
	case *corev1.Pod:
		u := nodes[o.Spec.NodeName]
		if u == nil {
			return nil
		}
		uid := string(o.UID)
		if hash, ok := o.Annotations[corev1.MirrorPodAnnotationKey]; ok {
			uid = hash // what the node calls its static pod
		}
		i := slices.IndexFunc(u.Pods, func(p wire.PodUsage) bool { return p.UID == uid })
		if i < 0 {
			return nil
		}
		m := &podMetrics{usageMeta: meta("PodMetrics", &o.ObjectMeta, u), Containers: []containerMetrics{}}
		for _, c := range u.Pods[i].Containers {
			m.Containers = append(m.Containers, containerMetrics{c.Name, usageList(c.CPUNanos, c.MemoryBytes)})
		}
		return m
	}
	return nil
}

func usageList(cpuNanos, memoryBytes uint64) corev1.ResourceList {
	cpu := resource.NewScaledQuantity(int64(cpuNanos), resource.Nano)
	memory := resource.NewQuantity(int64(memoryBytes)&^1023, resource.BinarySI)
	return corev1.ResourceList{corev1.ResourceCPU: *cpu, corev1.ResourceMemory: *memory}
}

// answerJSON writes what has no other form.
func (s *Server) answerJSON(rq *request, obj any) error {
	if a := rq.Header.Get("Accept"); a != "" && !strings.Contains(a, "json") && !strings.Contains(a, "*/*") && !strings.Contains(a, "application/*") {
		return apierrors.NewGenericServerResponse(http.StatusNotAcceptable, rq.info.verb, metricsGV.WithResource(rq.info.gvr.Resource).GroupResource(), "", "only application/json is served here", 0, false)
	}
	b, err := json.Marshal(obj)
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	rq.writeWarnings()
	rq.w.Header().Set("Content-Type", "application/json")
	rq.w.WriteHeader(http.StatusOK)
	_, err = rq.w.Write(append(b, '\n'))
	return ignoreWrite(err)
}
