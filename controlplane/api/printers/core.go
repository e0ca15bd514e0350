package printers

import (
	"fmt"
	"maps"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
)

// addCore registers what lives in a namespace and runs nothing by itself.
func addCore(m map[reflect.Type]*printer) {
	m[reflect.TypeFor[corev1.Pod]()] = &printer{columns: podColumns(), row: func(obj runtime.Object, now time.Time) ([]any, []metav1.TableRowCondition) {
		return podRow(obj.(*corev1.Pod), now)
	}}
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Containers", "Names of each container in the template."),
		column("Images", "Images referenced by each container in the template."),
		column("Pod Labels", "The labels for the pod template."),
	}, func(o *corev1.PodTemplate, _ time.Time) []any {
		names, images := containers(o.Template.Spec.Containers)
		return []any{o.Name, names, images, labels.FormatLabels(o.Template.Labels)}
	})
	add(m, []metav1.TableColumnDefinition{
		nameColumn(), column("Data", corev1.ConfigMap{}.SwaggerDoc()["data"]), ageColumn(),
	}, func(o *corev1.ConfigMap, now time.Time) []any {
		return []any{o.Name, int64(len(o.Data) + len(o.BinaryData)), age(o.CreationTimestamp, now)}
	})
	add(m, []metav1.TableColumnDefinition{
		nameColumn(), column("Type", corev1.Secret{}.SwaggerDoc()["type"]), column("Data", corev1.Secret{}.SwaggerDoc()["data"]), ageColumn(),
	}, func(o *corev1.Secret, now time.Time) []any {
		return []any{o.Name, string(o.Type), int64(len(o.Data)), age(o.CreationTimestamp, now)}
	})
	add(m, []metav1.TableColumnDefinition{nameColumn(), ageColumn()},
		func(o *corev1.ServiceAccount, now time.Time) []any {
			return []any{o.Name, age(o.CreationTimestamp, now)}
		})
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		typed("date", column("Created At", metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"])),
	}, func(o *corev1.LimitRange, _ time.Time) []any {
		return []any{o.Name, o.CreationTimestamp.UTC().Format(time.RFC3339)}
	})
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Request", "Request represents a minimum amount of cpu/memory that a container may consume."),
		column("Limit", "Limits control the maximum amount of cpu/memory that a container may use independent of contention on the node."),
		ageColumn(),
	}, resourceQuotaRow)
	addServices(m)
	addEvents(m)
}

// addServices registers Services and what is behind them.
func addServices(m map[reflect.Type]*printer) {
	spec := corev1.ServiceSpec{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(), column("Type", spec["type"]), column("Cluster-IP", spec["clusterIP"]),
		column("External-IP", spec["externalIPs"]), column("Port(s)", spec["ports"]), ageColumn(), wide(column("Selector", spec["selector"])),
	}, func(o *corev1.Service, now time.Time) []any {
		ip := orNone(o.Spec.ClusterIP)
		if len(o.Spec.ClusterIPs) > 0 {
			ip = o.Spec.ClusterIPs[0]
		}
		return []any{
			o.Name, string(o.Spec.Type), ip, externalIP(o), servicePorts(o.Spec.Ports),
			age(o.CreationTimestamp, now), labels.FormatLabels(o.Spec.Selector),
		}
	})
	add(m, []metav1.TableColumnDefinition{
		nameColumn(), column("Endpoints", corev1.Endpoints{}.SwaggerDoc()["subsets"]), ageColumn(),
	}, func(o *corev1.Endpoints, now time.Time) []any {
		return []any{o.Name, endpoints(o), age(o.CreationTimestamp, now)}
	})
	slice := discoveryv1.EndpointSlice{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(), column("AddressType", slice["addressType"]), column("Ports", slice["ports"]), column("Endpoints", slice["endpoints"]), ageColumn(),
	}, func(o *discoveryv1.EndpointSlice, now time.Time) []any {
		var ports, addresses []string
		for _, p := range o.Ports {
			switch {
			case p.Port != nil:
				ports = append(ports, strconv.Itoa(int(*p.Port)))
			case p.Name != nil:
				ports = append(ports, *p.Name)
			default:
				ports = append(ports, "*")
			}
		}
		for _, e := range o.Endpoints {
			addresses = append(addresses, e.Addresses...)
		}
		return []any{o.Name, string(o.AddressType), firstThree(ports, "<unset>"), firstThree(addresses, "<unset>"), age(o.CreationTimestamp, now)}
	})
}

// firstThree joins a list that may be long.
func firstThree(list []string, empty string) string {
	const most = 3
	switch {
	case len(list) == 0:
		return empty
	case len(list) <= most:
		if s := strings.Join(list, ","); s != "" {
			return s
		}
		return empty
	}
	return strings.Join(list[:most], ",") + fmt.Sprintf(" + %d more...", len(list)-most)
}

func endpoints(o *corev1.Endpoints) string {
	if len(o.Subsets) == 0 {
		return none
	}
	var list []string
	for i := range o.Subsets {
		s := &o.Subsets[i]
		for _, a := range s.Addresses {
			if len(s.Ports) == 0 { // a headless service may have none
				list = append(list, a.IP)
			}
		}
		for _, p := range s.Ports {
			for _, a := range s.Addresses {
				list = append(list, net.JoinHostPort(a.IP, strconv.Itoa(int(p.Port))))
			}
		}
	}
	return firstThree(list, "")
}

func externalIP(o *corev1.Service) string {
	switch o.Spec.Type {
	case corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort:
		return orNone(strings.Join(o.Spec.ExternalIPs, ","))
	case corev1.ServiceTypeExternalName:
		return o.Spec.ExternalName
	case corev1.ServiceTypeLoadBalancer:
		set := map[string]bool{}
		for _, in := range o.Status.LoadBalancer.Ingress {
			if in.IP != "" {
				set[in.IP] = true
			} else if in.Hostname != "" {
				set[in.Hostname] = true
			}
		}
		list := append(slices.Sorted(maps.Keys(set)), o.Spec.ExternalIPs...)
		if len(list) == 0 {
			return "<pending>"
		}
		return strings.Join(list, ",")
	}
	return unknown
}

func servicePorts(ports []corev1.ServicePort) string {
	var list []string
	for _, p := range ports {
		s := strconv.Itoa(int(p.Port))
		if p.NodePort > 0 {
			s += ":" + strconv.Itoa(int(p.NodePort))
		}
		list = append(list, s+"/"+string(p.Protocol))
	}
	return orNone(strings.Join(list, ","))
}

func resourceQuotaRow(o *corev1.ResourceQuota, now time.Time) []any {
	var requests, limits []string
	for _, name := range slices.Sorted(maps.Keys(o.Status.Hard)) {
		hard, used := o.Status.Hard[name], o.Status.Used[name]
		cell := fmt.Sprintf("%s: %s/%s", name, used.String(), hard.String())
		if strings.HasPrefix(string(name), "limits.") {
			limits = append(limits, cell)
		} else {
			requests = append(requests, cell)
		}
	}
	return []any{o.Name, strings.Join(requests, ", "), strings.Join(limits, ", "), age(o.CreationTimestamp, now)}
}

// addEvents registers both projections of Event, with the same columns.
func addEvents(m map[reflect.Type]*printer) {
	doc := corev1.Event{}.SwaggerDoc()
	columns := []metav1.TableColumnDefinition{
		column("Last Seen", doc["lastTimestamp"]), column("Type", doc["type"]), column("Reason", doc["reason"]), column("Object", doc["involvedObject"]),
		wide(column("Subobject", corev1.ObjectReference{}.SwaggerDoc()["fieldPath"])),
		wide(column("Source", doc["source"])), column("Message", doc["message"]), wide(column("First Seen", doc["firstTimestamp"])),
		wide(column("Count", doc["count"])), wide(nameColumn()),
	}
	add(m, columns, func(o *corev1.Event, now time.Time) []any {
		e := eventCells{
			first: o.FirstTimestamp.Time, last: o.LastTimestamp.Time, count: o.Count,
			component: o.Source.Component, host: o.Source.Host, message: o.Message, kind: o.Type, reason: o.Reason, name: o.Name,
			about: o.InvolvedObject,
		}
		if e.first.IsZero() {
			e.first = o.EventTime.Time
		}
		if o.Series != nil {
			e.last, e.count, e.series = o.Series.LastObservedTime.Time, o.Series.Count, true
		}
		return e.cells(now, o.ReportingController, o.ReportingInstance)
	})
	add(m, columns, func(o *eventsv1.Event, now time.Time) []any {
		e := eventCells{
			first: o.DeprecatedFirstTimestamp.Time, last: o.DeprecatedLastTimestamp.Time, count: o.DeprecatedCount,
			component: o.DeprecatedSource.Component, host: o.DeprecatedSource.Host, message: o.Note, kind: o.Type, reason: o.Reason, name: o.Name,
			about: o.Regarding,
		}
		if e.first.IsZero() {
			e.first = o.EventTime.Time
		}
		if o.Series != nil {
			e.last, e.count, e.series = o.Series.LastObservedTime.Time, o.Series.Count, true
		}
		return e.cells(now, o.ReportingController, o.ReportingInstance)
	})
}

// eventCells is what both projections have in common.
type eventCells struct {
	first, last                 time.Time
	count                       int32
	series                      bool
	component, host             string
	message, kind, reason, name string
	about                       corev1.ObjectReference
}

func (e *eventCells) cells(now time.Time, controller, instance string) []any {
	first, last := since(e.first, now), since(e.last, now)
	if e.last.IsZero() && !e.series {
		last = first
	}
	if e.count == 0 && !e.series {
		e.count = 1 // a single event of the newer API has no count
	}
	if e.component == "" {
		e.component = controller
	}
	if e.host == "" {
		e.host = instance
	}
	source := e.component
	if e.host != "" {
		source += ", " + e.host
	}
	object := strings.ToLower(e.about.Kind)
	if e.about.Name != "" {
		object += "/" + e.about.Name
	}
	return []any{
		last, e.kind, e.reason, object, e.about.FieldPath, source, strings.TrimSpace(e.message), first, int64(e.count), e.name,
	}
}
