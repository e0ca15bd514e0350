package manifests

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// newEvent holds the fields that both forms of an Event have, for the rules
// that both share once eventTime is set.
type newEvent struct {
	namespace, regardingNamespace string
	controllerField               string
	controller, instance          string
	action, reason, message       string
	eventTimeSet                  bool
}

// shared is the check that every Event passes, of either form.
func (p *problems) shared(e newEvent) {
	namespace := field.NewPath("involvedObject", "namespace")
	if !e.eventTimeSet {
		defaulted := e.regardingNamespace == "" && (e.namespace == "" || e.namespace == metav1.NamespaceDefault)
		if e.regardingNamespace != e.namespace && !defaulted {
			p.invalid(namespace, e.regardingNamespace, "does not match event.namespace")
		}
		return
	}
	if e.regardingNamespace == "" && e.namespace != metav1.NamespaceDefault && e.namespace != metav1.NamespaceSystem {
		p.invalid(namespace, e.regardingNamespace, "does not match event.namespace")
	}
	if e.controller == "" {
		p.required(field.NewPath(e.controllerField), "")
	}
	p.qualifiedName(field.NewPath(e.controllerField), e.controller)
	text := func(name, v string, limit int, required bool) {
		if v == "" && required {
			p.required(field.NewPath(name), "")
		}
		if len(v) > limit {
			p.invalid(field.NewPath(name), "", fmt.Sprintf("can have at most %v characters", limit))
		}
	}
	text("reportingInstance", e.instance, 128, true)
	text("action", e.action, 128, true)
	text("reason", e.reason, 128, true)
	text("message", e.message, 1024, false)
}

func (p *problems) coreEvent(e *corev1.Event) {
	p.shared(newEvent{
		namespace: e.Namespace, regardingNamespace: e.InvolvedObject.Namespace, controllerField: "reportingComponent",
		controller: e.ReportingController, instance: e.ReportingInstance, action: e.Action, reason: e.Reason,
		message: e.Message, eventTimeSet: !e.EventTime.IsZero(),
	})
}

func (p *problems) event(e *eventsv1.Event, create bool) {
	p.shared(newEvent{
		namespace: e.Namespace, regardingNamespace: e.Regarding.Namespace, controllerField: "reportingController",
		controller: e.ReportingController, instance: e.ReportingInstance, action: e.Action, reason: e.Reason,
		message: e.Note, eventTimeSet: !e.EventTime.IsZero(),
	})
	if !create {
		return
	}
	p.series(e)
	if e.EventTime.IsZero() {
		p.required(field.NewPath("eventTime"), "")
	}
	if e.Type != corev1.EventTypeNormal && e.Type != corev1.EventTypeWarning {
		p.invalid(field.NewPath("type"), "", fmt.Sprintf("has invalid value: %v", e.Type))
	}
	for name, set := range map[string]bool{
		"firstTimestamp": !e.DeprecatedFirstTimestamp.IsZero(), "lastTimestamp": !e.DeprecatedLastTimestamp.IsZero(),
		"count": e.DeprecatedCount != 0, "source": e.DeprecatedSource != (corev1.EventSource{}),
	} {
		if set {
			p.invalid(field.NewPath(name), "", "needs to be unset")
		}
	}
}

func (p *problems) series(e *eventsv1.Event) {
	if e.Series == nil {
		return
	}
	if e.Series.Count < 2 {
		p.invalid(field.NewPath("series.count"), "", "should be at least 2")
	}
	if e.Series.LastObservedTime.IsZero() {
		p.required(field.NewPath("series.lastObservedTime"), "")
	}
}

func (p *problems) eventUpdate(e, old *eventsv1.Event) {
	if !equality.Semantic.DeepEqual(e.Series, old.Series) {
		p.series(e)
	}
	for _, f := range []struct {
		name        string
		now, before any
	}{
		{"involvedObject", e.Regarding, old.Regarding},
		{"reason", e.Reason, old.Reason},
		{"message", e.Note, old.Note},
		{"source", e.DeprecatedSource, old.DeprecatedSource},
		{"firstTimestamp", e.DeprecatedFirstTimestamp, old.DeprecatedFirstTimestamp},
		{"lastTimestamp", e.DeprecatedLastTimestamp, old.DeprecatedLastTimestamp},
		{"count", e.DeprecatedCount, old.DeprecatedCount},
		{"type", e.Type, old.Type},
		{"action", e.Action, old.Action},
		{"related", e.Related, old.Related},
		{"reportingController", e.ReportingController, old.ReportingController},
		{"reportingInstance", e.ReportingInstance, old.ReportingInstance},
	} {
		p.immutable(field.NewPath(f.name), f.now, f.before)
	}
	if !e.EventTime.Truncate(time.Microsecond).Equal(old.EventTime.Truncate(time.Microsecond)) {
		p.immutable(field.NewPath("eventTime"), e.EventTime, old.EventTime)
	}
}
