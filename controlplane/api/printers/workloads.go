package printers

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// containers lists names and images of a template.
func containers(list []corev1.Container) (names, images string) {
	n, i := make([]string, len(list)), make([]string, len(list))
	for k := range list {
		n[k], i[k] = list[k].Name, list[k].Image
	}
	return strings.Join(n, ","), strings.Join(i, ",")
}

func replicas(p *int32) int64 {
	if p == nil {
		return 1 // the default of every kind that has replicas
	}
	return int64(*p)
}

// templateColumns end the tables of what makes pods.
func templateColumns(selector string) []metav1.TableColumnDefinition {
	return []metav1.TableColumnDefinition{
		wide(column("Containers", "Names of each container in the template.")),
		wide(column("Images", "Images referenced by each container in the template.")),
		wide(column("Selector", selector)),
	}
}

func replicaColumns(spec, status map[string]string) []metav1.TableColumnDefinition {
	return append([]metav1.TableColumnDefinition{
		nameColumn(),
		typed("integer", column("Desired", spec["replicas"])),
		typed("integer", column("Current", status["replicas"])),
		typed("integer", column("Ready", status["readyReplicas"])),
		ageColumn(),
	}, templateColumns(spec["selector"])...)
}

// addWorkloads registers what makes pods.
func addWorkloads(m map[reflect.Type]*printer) {
	add(m, replicaColumns(corev1.ReplicationControllerSpec{}.SwaggerDoc(), corev1.ReplicationControllerStatus{}.SwaggerDoc()),
		func(o *corev1.ReplicationController, now time.Time) []any {
			var names, images string
			if o.Spec.Template != nil {
				names, images = containers(o.Spec.Template.Spec.Containers)
			}
			return []any{
				o.Name, replicas(o.Spec.Replicas), int64(o.Status.Replicas), int64(o.Status.ReadyReplicas), age(o.CreationTimestamp, now),
				names, images, labels.FormatLabels(o.Spec.Selector),
			}
		})
	add(m, replicaColumns(appsv1.ReplicaSetSpec{}.SwaggerDoc(), appsv1.ReplicaSetStatus{}.SwaggerDoc()),
		func(o *appsv1.ReplicaSet, now time.Time) []any {
			names, images := containers(o.Spec.Template.Spec.Containers)
			return []any{
				o.Name, replicas(o.Spec.Replicas), int64(o.Status.Replicas), int64(o.Status.ReadyReplicas), age(o.CreationTimestamp, now),
				names, images, metav1.FormatLabelSelector(o.Spec.Selector),
			}
		})
	status := appsv1.DeploymentStatus{}.SwaggerDoc()
	add(m, append([]metav1.TableColumnDefinition{
		nameColumn(),
		column("Ready", "Number of the pod with ready state"),
		column("Up-to-date", status["updatedReplicas"]),
		column("Available", status["availableReplicas"]),
		ageColumn(),
	}, templateColumns(appsv1.DeploymentSpec{}.SwaggerDoc()["selector"])...),
		func(o *appsv1.Deployment, now time.Time) []any {
			names, images := containers(o.Spec.Template.Spec.Containers)
			selector := "<invalid>"
			if s, err := metav1.LabelSelectorAsSelector(o.Spec.Selector); err == nil {
				selector = s.String()
			}
			return []any{
				o.Name, fmt.Sprintf("%d/%d", o.Status.ReadyReplicas, replicas(o.Spec.Replicas)), int64(o.Status.UpdatedReplicas),
				int64(o.Status.AvailableReplicas), age(o.CreationTimestamp, now), names, images, selector,
			}
		})
	addNodeAndSetWorkloads(m)
	revision := appsv1.ControllerRevision{}.SwaggerDoc()
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Controller", "Controller of the object"),
		column("Revision", revision["revision"]),
		ageColumn(),
	}, func(o *appsv1.ControllerRevision, now time.Time) []any {
		controller := none
		if ref := metav1.GetControllerOf(o); ref != nil {
			gk := schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind).GroupKind()
			controller = ref.Name
			if !gk.Empty() {
				controller = strings.ToLower(gk.String()) + "/" + ref.Name
			}
		}
		return []any{o.Name, controller, o.Revision, age(o.CreationTimestamp, now)}
	})
	add(m, []metav1.TableColumnDefinition{
		column("Name", metav1.ObjectMeta{}.SwaggerDoc()["name"]),
		typed("integer", column("Desired", autoscalingv1.ScaleSpec{}.SwaggerDoc()["replicas"])),
		typed("integer", column("Available", autoscalingv1.ScaleStatus{}.SwaggerDoc()["replicas"])),
		ageColumn(),
	}, func(o *autoscalingv1.Scale, now time.Time) []any {
		return []any{o.Name, int64(o.Spec.Replicas), int64(o.Status.Replicas), age(o.CreationTimestamp, now)}
	})
}

// addNodeAndSetWorkloads registers DaemonSet and StatefulSet.
func addNodeAndSetWorkloads(m map[reflect.Type]*printer) {
	status := appsv1.DaemonSetStatus{}.SwaggerDoc()
	add(m, append([]metav1.TableColumnDefinition{
		nameColumn(),
		typed("integer", column("Desired", status["desiredNumberScheduled"])),
		typed("integer", column("Current", status["currentNumberScheduled"])),
		typed("integer", column("Ready", status["numberReady"])),
		typed("integer", column("Up-to-date", status["updatedNumberScheduled"])),
		typed("integer", column("Available", status["numberAvailable"])),
		column("Node Selector", corev1.PodSpec{}.SwaggerDoc()["nodeSelector"]),
		ageColumn(),
	}, templateColumns(appsv1.DaemonSetSpec{}.SwaggerDoc()["selector"])...),
		func(o *appsv1.DaemonSet, now time.Time) []any {
			names, images := containers(o.Spec.Template.Spec.Containers)
			return []any{
				o.Name, int64(o.Status.DesiredNumberScheduled), int64(o.Status.CurrentNumberScheduled), int64(o.Status.NumberReady),
				int64(o.Status.UpdatedNumberScheduled), int64(o.Status.NumberAvailable), labels.FormatLabels(o.Spec.Template.Spec.NodeSelector),
				age(o.CreationTimestamp, now), names, images, metav1.FormatLabelSelector(o.Spec.Selector),
			}
		})
	add(m, append([]metav1.TableColumnDefinition{
		nameColumn(), column("Ready", "Number of the pod with ready state"), ageColumn(),
	}, templateColumns("")[:2]...),
		func(o *appsv1.StatefulSet, now time.Time) []any {
			names, images := containers(o.Spec.Template.Spec.Containers)
			return []any{
				o.Name, fmt.Sprintf("%d/%d", o.Status.ReadyReplicas, replicas(o.Spec.Replicas)), age(o.CreationTimestamp, now), names, images,
			}
		})
}
