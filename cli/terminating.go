package cli

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/manifests"
)

// deletedFor is how long ago it was deleted, and how much of its grace is
// left: the timestamp is when grace ends.
func deletedFor(u *unstructured.Unstructured, now time.Time) string {
	end, grace := u.GetDeletionTimestamp().Time, time.Duration(0)
	switch s, _, _ := unstructured.NestedFieldNoCopy(u.Object, "metadata", "deletionGracePeriodSeconds"); s := s.(type) {
	case int64:
		grace = time.Duration(s) * time.Second
	case float64: // as encoding/json reads it
		grace = time.Duration(s) * time.Second
	}
	since, left := max(now.Sub(end.Add(-grace)), 0), end.Sub(now)
	switch {
	case left > 0 && grace == 0: // it was not said when it began
		return "ends within " + duration.HumanDuration(left)
	case left > 0:
		return fmt.Sprintf("for %s, ends within %s", duration.HumanDuration(since), duration.HumanDuration(left))
	case grace > 0:
		return fmt.Sprintf("for %s (it had %s to stop)", duration.HumanDuration(since), grace)
	}
	return "for " + duration.HumanDuration(since)
}

// waitsOn says what to do about something that stays Terminating.
func (a *app) waitsOn(ctx context.Context, c *client.Client, u *unstructured.Unstructured) string {
	if len(u.GetFinalizers()) > 0 {
		return "whoever set the finalizers removes them when its work is done"
	}
	node, _, _ := unstructured.NestedString(u.Object, "spec", "nodeName")
	if u.GetKind() != "Pod" || node == "" {
		return ""
	}
	n, err := c.Object(ctx, "/api/v1/nodes/"+url.PathEscape(node))
	switch {
	case client.IsNotFound(err):
		if owner := metav1.GetControllerOf(u); owner != nil && owner.Kind == "StatefulSet" && u.GetAnnotations()[manifests.AnnotationStopDeadline] == "" {
			return fmt.Sprintf("node %s was deleted, and not declared dead: the pod may run there still, and keeps its name until the node is back; if that machine is off for good, 'dunlin delete pod -n %s %s --force' frees it", node, u.GetNamespace(), u.GetName())
		}
		return "node " + node + " no longer exists: the pod is removed by itself, after a minute or when its stop deadline is surely over"
	case err != nil:
		return ""
	}
	if cond := condition(n, "Ready"); cond["status"] != "True" {
		// Never --force: the pod may run there still, and a set would start its second.
		return fmt.Sprintf("node %s is not Ready (%v): bring it back, or 'dunlin node declare-dead %s' if it never returns, which frees the pod's name", node, cond["reason"], node)
	}
	return ""
}

func waitsFor(u *unstructured.Unstructured) string {
	if f := u.GetFinalizers(); len(f) > 0 {
		return "finalizers " + strings.Join(f, ", ")
	}
	if u.GetKind() == "Pod" {
		node, _, _ := unstructured.NestedString(u.Object, "spec", "nodeName")
		if c := condition(u, string(manifests.ConditionDraining)); c["status"] == "True" {
			return fmt.Sprintf("node %s to stop it: %v", node, c["message"])
		}
		return "node " + node + " to stop it"
	}
	if u.GetKind() == "Namespace" {
		return remaining(u)
	}
	return "its dependents"
}

// remaining is what a namespace's conditions say of its contents.
func remaining(u *unstructured.Unstructured) string {
	var all []string
	for _, t := range []corev1.NamespaceConditionType{corev1.NamespaceDeletionContentFailure, corev1.NamespaceContentRemaining, corev1.NamespaceFinalizersRemaining} {
		if c := condition(u, string(t)); c["status"] == "True" {
			all = append(all, fmt.Sprint(c["message"]))
		}
	}
	if len(all) == 0 {
		return "its contents"
	}
	return "its contents: " + strings.Join(all, "; ")
}
