package printers

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/manifests"
)

// addCluster registers nodes, namespaces, classes and leases.
func addCluster(m map[reflect.Type]*printer) {
	info, status := corev1.NodeSystemInfo{}.SwaggerDoc(), corev1.NodeStatus{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Status", "The status of the node"),
		column("Roles", "The roles of the node"),
		ageColumn(),
		column("Version", info["kubeletVersion"]),
		wide(column("Internal-IP", status["addresses"])),
		wide(column("External-IP", status["addresses"])),
		wide(column("OS-Image", info["osImage"])),
		wide(column("Kernel-Version", info["kernelVersion"])),
		wide(column("Container-Runtime", info["containerRuntimeVersion"])),
	}, nodeRow)
	add(m, []metav1.TableColumnDefinition{nameColumn(), column("Status", "The status of the namespace"), ageColumn()},
		func(o *corev1.Namespace, now time.Time) []any {
			return []any{o.Name, string(o.Status.Phase), age(o.CreationTimestamp, now)}
		})
	add(m, []metav1.TableColumnDefinition{nameColumn(), column("Holder", coordinationv1.LeaseSpec{}.SwaggerDoc()["holderIdentity"]), ageColumn()},
		func(o *coordinationv1.Lease, now time.Time) []any {
			holder := ""
			if o.Spec.HolderIdentity != nil {
				holder = *o.Spec.HolderIdentity
			}
			return []any{o.Name, holder, age(o.CreationTimestamp, now)}
		})
	priority := schedulingv1.PriorityClass{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		typed("integer", column("Value", priority["value"])),
		typed("boolean", column("Global-Default", priority["globalDefault"])),
		ageColumn(),
		column("PreemptionPolicy", priority["preemptionPolicy"]),
	}, func(o *schedulingv1.PriorityClass, now time.Time) []any {
		policy := ""
		if o.PreemptionPolicy != nil {
			policy = string(*o.PreemptionPolicy)
		}
		return []any{o.Name, int64(o.Value), o.GlobalDefault, age(o.CreationTimestamp, now), policy}
	})
	add(m, []metav1.TableColumnDefinition{
		nameColumn(), column("Handler", nodev1.RuntimeClass{}.SwaggerDoc()["handler"]), ageColumn(),
	}, func(o *nodev1.RuntimeClass, now time.Time) []any {
		return []any{o.Name, o.Handler, age(o.CreationTimestamp, now)}
	})
	addIngress(m)
	doc := metav1.Status{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{column("Status", doc["status"]), column("Reason", doc["reason"]), column("Message", doc["message"])},
		func(o *metav1.Status, _ time.Time) []any {
			return []any{o.Status, string(o.Reason), o.Message}
		})
}

// wantsHand are our conditions of what needs somebody's hand.
var wantsHand = []corev1.NodeConditionType{manifests.ConditionDead, manifests.ConditionRevoked, "DuplicateIdentity", manifests.ConditionHeldAfterRestore}

func nodeRow(o *corev1.Node, now time.Time) []any {
	status := "Unknown"
	for i := range o.Status.Conditions {
		if c := &o.Status.Conditions[i]; c.Type == corev1.NodeReady {
			status = "NotReady"
			if c.Status == corev1.ConditionTrue {
				status = "Ready"
			}
		}
	}
	if o.Spec.Unschedulable {
		status += ",SchedulingDisabled"
	}
	for i := range o.Status.Conditions {
		c := &o.Status.Conditions[i]
		if slices.Contains(wantsHand, c.Type) && c.Status == corev1.ConditionTrue {
			status += "," + string(c.Type)
		}
	}
	info := o.Status.NodeInfo
	kernel := orUnknown(info.KernelVersion)
	if info.Architecture != "" {
		kernel += " (" + info.Architecture + ")"
	}
	return []any{
		o.Name, status, orNone(strings.Join(nodeRoles(o.Labels), ",")), age(o.CreationTimestamp, now), info.KubeletVersion,
		nodeAddress(o, corev1.NodeInternalIP), nodeAddress(o, corev1.NodeExternalIP),
		orUnknown(info.OSImage), kernel, orUnknown(info.ContainerRuntimeVersion),
	}
}

// nodeRoles are the labels node-role.kubernetes.io/<role> and
// kubernetes.io/role=<role>.
func nodeRoles(labels map[string]string) []string {
	set := map[string]bool{}
	for k, v := range labels {
		if role, ok := strings.CutPrefix(k, "node-role.kubernetes.io/"); ok && role != "" {
			set[role] = true
		}
		if k == "kubernetes.io/role" && v != "" {
			set[v] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}

func nodeAddress(o *corev1.Node, t corev1.NodeAddressType) string {
	for _, a := range o.Status.Addresses {
		if a.Type == t {
			return a.Address
		}
	}
	return none
}
