package registry

import (
	"fmt"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// fieldOf reads one selectable field of a decoded object.
type fieldOf func(runtime.Object) string

// selectable lists the fields of each stored kind that selectors may name,
// besides metadata.name and metadata.namespace: upstream's list.
var selectable = map[string]map[string]fieldOf{
	"Pod": {
		"spec.nodeName":            nil, // header
		"status.phase":             nil, // header
		"spec.restartPolicy":       pod(func(p *corev1.Pod) string { return string(p.Spec.RestartPolicy) }),
		"spec.schedulerName":       pod(func(p *corev1.Pod) string { return p.Spec.SchedulerName }),
		"spec.serviceAccountName":  pod(func(p *corev1.Pod) string { return p.Spec.ServiceAccountName }),
		"spec.hostNetwork":         pod(func(p *corev1.Pod) string { return strconv.FormatBool(p.Spec.HostNetwork) }),
		"status.podIP":             pod(func(p *corev1.Pod) string { return p.Status.PodIP }),
		"status.podIPs":            pod(firstPodIP),
		"status.nominatedNodeName": pod(func(p *corev1.Pod) string { return p.Status.NominatedNodeName }),
	},
	"Event": {
		"involvedObject.kind":            event(func(e *corev1.Event) string { return e.InvolvedObject.Kind }),
		"involvedObject.namespace":       event(func(e *corev1.Event) string { return e.InvolvedObject.Namespace }),
		"involvedObject.name":            event(func(e *corev1.Event) string { return e.InvolvedObject.Name }),
		"involvedObject.uid":             event(func(e *corev1.Event) string { return string(e.InvolvedObject.UID) }),
		"involvedObject.apiVersion":      event(func(e *corev1.Event) string { return e.InvolvedObject.APIVersion }),
		"involvedObject.resourceVersion": event(func(e *corev1.Event) string { return e.InvolvedObject.ResourceVersion }),
		"involvedObject.fieldPath":       event(func(e *corev1.Event) string { return e.InvolvedObject.FieldPath }),
		"reason":                         event(func(e *corev1.Event) string { return e.Reason }),
		"reportingComponent":             event(func(e *corev1.Event) string { return e.ReportingController }),
		"source": event(func(e *corev1.Event) string {
			if e.Source.Component != "" {
				return e.Source.Component
			}
			return e.ReportingController
		}),
		"type": event(func(e *corev1.Event) string { return e.Type }),
	},
	"Node": {
		"spec.unschedulable": func(o runtime.Object) string {
			n, ok := o.(*corev1.Node)
			return strconv.FormatBool(ok && n.Spec.Unschedulable)
		},
	},
	"Namespace": {
		"status.phase": nil, // header
		"name":         nil,
	},
	"Secret": {
		"type": func(o runtime.Object) string {
			if s, ok := o.(*corev1.Secret); ok {
				return string(s.Type)
			}
			return ""
		},
	},
	"Service": {
		"spec.clusterIP": service(func(s *corev1.Service) string { return s.Spec.ClusterIP }),
		"spec.type":      service(func(s *corev1.Service) string { return string(s.Spec.Type) }),
	},
	"ReplicationController": {
		"status.replicas": func(o runtime.Object) string {
			if r, ok := o.(*corev1.ReplicationController); ok {
				return strconv.Itoa(int(r.Status.Replicas))
			}
			return ""
		},
	},
	"Job.batch": {
		"status.successful": func(o runtime.Object) string {
			if j, ok := o.(*batchv1.Job); ok {
				return strconv.Itoa(int(j.Status.Succeeded))
			}
			return ""
		},
	},
	"ReplicaSet.apps": {
		"status.replicas": func(o runtime.Object) string {
			if r, ok := o.(*appsv1.ReplicaSet); ok {
				return strconv.Itoa(int(r.Status.Replicas))
			}
			return ""
		},
	},
}

// renamed are the selectable fields of a projection, in the names of what is
// stored.
var renamed = map[string]string{
	"regarding.kind": "involvedObject.kind", "regarding.namespace": "involvedObject.namespace",
	"regarding.name": "involvedObject.name", "regarding.uid": "involvedObject.uid",
	"regarding.apiVersion": "involvedObject.apiVersion", "regarding.resourceVersion": "involvedObject.resourceVersion",
	"regarding.fieldPath": "involvedObject.fieldPath", "reportingController": "reportingComponent",
	"reason": "reason", "type": "type",
}

func pod(f func(*corev1.Pod) string) fieldOf {
	return func(o runtime.Object) string {
		if p, ok := o.(*corev1.Pod); ok {
			return f(p)
		}
		return ""
	}
}

func event(f func(*corev1.Event) string) fieldOf {
	return func(o runtime.Object) string {
		if e, ok := o.(*corev1.Event); ok {
			return f(e)
		}
		return ""
	}
}

func service(f func(*corev1.Service) string) fieldOf {
	return func(o runtime.Object) string {
		if s, ok := o.(*corev1.Service); ok {
			return f(s)
		}
		return ""
	}
}

func firstPodIP(p *corev1.Pod) string {
	if len(p.Status.PodIPs) > 0 {
		return p.Status.PodIPs[0].IP
	}
	return p.Status.PodIP
}

// Matcher selects records of one kind by label and field. Labels, names,
// nodes and phases are read from headers; other fields cost a decode.
type Matcher struct {
	labels labels.Selector
	fields []requirement
	name   string // metadata.name equal to, for a direct look-up
}

type requirement struct {
	field, value string
	equal        bool
	read         fieldOf // nil: from the header
}

// NewMatcher checks the selectors. Nil selectors select everything. A field
// that the kind does not offer is a 400, as upstream words it.
func NewMatcher(k *manifests.Kind, l labels.Selector, f fields.Selector) (*Matcher, error) {
	m := &Matcher{labels: l}
	if l != nil && l.Empty() {
		m.labels = nil
	}
	if f == nil || f.Empty() {
		return m, nil
	}
	for _, r := range f.Requirements() {
		req := requirement{field: r.Field, value: r.Value, equal: r.Operator != selection.NotEquals}
		if k.GVK.Group == eventsv1.GroupName {
			if to, ok := renamed[r.Field]; ok {
				req.field = to
			} else if r.Field != "metadata.name" && r.Field != "metadata.namespace" {
				return nil, notSelectable(k, r.Field)
			}
		}
		switch req.field {
		case "metadata.name":
			if req.equal {
				m.name = req.value
			}
		case "metadata.namespace":
		default:
			read, ok := selectable[k.StorageKind()][req.field]
			if !ok {
				return nil, notSelectable(k, r.Field)
			}
			req.read = read
		}
		m.fields = append(m.fields, req)
	}
	return m, nil
}

// notSelectable has upstream's two wordings: kinds that offer fields of
// their own have one, all others the other.
func notSelectable(k *manifests.Kind, field string) error {
	if selectable[k.StorageKind()] == nil {
		return apierrors.NewBadRequest(fmt.Sprintf("%q is not a known field selector: only %q, %q", field, "metadata.name", "metadata.namespace"))
	}
	return apierrors.NewBadRequest("field label not supported: " + field)
}

// Everything says whether the matcher selects every record.
func (m *Matcher) Everything() bool { return m.labels == nil && len(m.fields) == 0 }

// Name is the only name that can match, or "".
func (m *Matcher) Name() string { return m.name }

// Matches says whether a record is selected.
func (m *Matcher) Matches(d interface {
	Decode(*state.Record) (runtime.Object, error)
}, rec *state.Record) (bool, error) {
	if m.labels != nil && !m.labels.Matches(labels.Set(rec.Header.Labels)) {
		return false, nil
	}
	for i := range m.fields {
		req := &m.fields[i]
		var v string
		if req.read == nil {
			v = headerField(&rec.Header, req.field)
		} else {
			obj, err := d.Decode(rec)
			if err != nil {
				return false, fmt.Errorf("field selector: %w", err)
			}
			v = req.read(obj)
		}
		if (v == req.value) != req.equal {
			return false, nil
		}
	}
	return true, nil
}

func headerField(h *state.Header, field string) string {
	switch field {
	case "metadata.name", "name":
		return h.Key.Name
	case "metadata.namespace":
		return h.Key.Namespace
	case "spec.nodeName":
		return h.NodeName
	case "status.phase":
		return h.Phase
	}
	return ""
}
