package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// optimisticLock is upstream's message; clients and people search for it.
const optimisticLock = "the object has been modified; please apply your changes to the latest version and try again"

var errModified = errors.New(optimisticLock)

func notFound(k *manifests.Kind, name string) error { return apierrors.NewNotFound(gr(k), name) }

func conflict(k *manifests.Kind, name string, err error) error {
	return apierrors.NewConflict(gr(k), name, err)
}

func uidConflict(k *manifests.Kind, name, want, got string) error {
	return conflict(k, name, fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v", want, got))
}

func versionConflict(k *manifests.Kind, name, want, got string) error {
	return conflict(k, name, fmt.Errorf("Precondition failed: ResourceVersion in precondition: %v, ResourceVersion in object meta: %v", want, got))
}

// terminating refuses content for a namespace that is being deleted.
func terminating(k *manifests.Kind, namespace, name string) error {
	err := apierrors.NewForbidden(gr(k), name, fmt.Errorf("unable to create new content in namespace %s because it is being terminated", namespace))
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{
		Type:    corev1.NamespaceTerminatingCause,
		Message: fmt.Sprintf("namespace %s is being terminated", namespace),
		Field:   "metadata.namespace",
	})
	return err
}

// proposeError maps what went wrong with the commit itself. The outcome of
// the write is unknown to the client, as after any timeout.
func proposeError(err error) error {
	switch {
	case errors.Is(err, state.ErrNoQuorum):
		return unavailable("no quorum of servers in reach: the write may not have been made; 'dunlin net check' says whom this server reaches: mend the link, or bring back enough servers", err)
	case errors.Is(err, state.ErrNotLeader):
		return unavailable("the leader of the control plane changed: try again", err)
	case errors.Is(err, state.ErrDiskFull):
		return unavailable("the state folder is full or read-only: free space on the server, or make its file system writable again", errors.New(strings.ReplaceAll(err.Error(), state.ErrDiskFull.Error()+": ", "")))
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return apierrors.NewTimeoutError("request did not complete within the allotted timeout", 1)
	}
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return err
	}
	return apierrors.NewInternalError(err)
}

func unavailable(hint string, err error) error {
	e := apierrors.NewServiceUnavailable(fmt.Sprintf("%s (%v)", hint, err))
	e.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
	return e
}

// claimed is the refusal of a value that another object holds, and obj asked for.
func claimed(k *manifests.Kind, obj any, name, claim string) error {
	what, value, _ := strings.Cut(claim, "/")
	svc, _ := obj.(*corev1.Service)
	var errs field.ErrorList
	switch what {
	case "clusterip":
		errs = field.ErrorList{field.Invalid(claimedIP(svc, value), []string{value},
			fmt.Sprintf("failed to allocate IP %s: provided IP is already allocated", value))}
	case "nodeport":
		errs = field.ErrorList{field.Invalid(claimedPort(svc, value), value, "provided port is already allocated")}
	case "podcidr":
		errs = field.ErrorList{field.Invalid(field.NewPath("spec", "podCIDR"), value, "another node has this range")}
	default:
		errs = field.ErrorList{field.Invalid(field.NewPath("spec"), claim, "another object holds this value")}
	}
	return apierrors.NewInvalid(k.GVK.GroupKind(), name, errs)
}

func claimedIP(svc *corev1.Service, value string) *field.Path {
	path := field.NewPath("spec", "clusterIPs")
	if svc == nil {
		return path
	}
	return path.Index(max(slices.Index(svc.Spec.ClusterIPs, value), 0))
}

// claimedPort is where a Service names a node port: the health check's is one.
func claimedPort(svc *corev1.Service, value string) *field.Path {
	if svc == nil {
		return field.NewPath("spec", "ports")
	}
	for i := range svc.Spec.Ports {
		if fmt.Sprint(svc.Spec.Ports[i].NodePort) == value {
			return field.NewPath("spec", "ports").Index(i).Child("nodePort")
		}
	}
	return field.NewPath("spec", "healthCheckNodePort")
}

// refused maps the state machine's refusal of an op on one object.
func refused(k *manifests.Kind, namespace, name string, res state.Result) error {
	switch res.Reason {
	case state.ReasonExists:
		return apierrors.NewAlreadyExists(gr(k), name)
	case state.ReasonNotFound:
		return notFound(k, name)
	case state.ReasonUID:
		if res.Record != nil {
			return uidConflict(k, name, "the object that was read", res.Record.Header.UID)
		}
		return conflict(k, name, errModified)
	case state.ReasonConflict, state.ReasonFinalizers:
		return conflict(k, name, errModified)
	case state.ReasonNamespace:
		if res.Record != nil && res.Record.Header.Key.Kind == "Namespace" {
			return terminating(k, namespace, name)
		}
		return apierrors.NewNotFound(corev1.Resource("namespaces"), namespace)
	case state.ReasonClaim:
		return claimed(k, nil, name, res.Detail)
	case state.ReasonTerm:
		return unavailable("this server no longer leads: try again", state.ErrNotLeader)
	case state.ReasonBound:
		return conflict(k, name, fmt.Errorf("pod %v is already assigned to node %q", name, boundTo(res)))
	case state.ReasonDeleting:
		return conflict(k, name, fmt.Errorf("pod %s is being deleted, cannot be assigned to a host", name))
	case state.ReasonGated:
		return conflict(k, name, fmt.Errorf("pod %v has non-empty .spec.schedulingGates", name))
	case state.ReasonNoNode:
		return apierrors.NewNotFound(corev1.Resource("nodes"), res.Detail)
	case state.ReasonNoFit:
		return conflict(k, name, fmt.Errorf("the node has no room: %s", res.Detail))
	case state.ReasonHostPort:
		return conflict(k, name, fmt.Errorf("a host port is taken: %s", res.Detail))
	default:
		return &apierrors.StatusError{ErrStatus: metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError,
			Message: fmt.Sprintf("the state machine refused the write (reason %d, %s): this is a defect, please report it", res.Reason, res.Detail),
		}}
	}
}

func boundTo(res state.Result) string {
	if res.Record == nil {
		return ""
	}
	return res.Record.Header.NodeName
}
