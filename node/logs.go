package node

import (
	"context"
	"fmt"
	"io"
	"os"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node/logs"
)

// LogError is a refusal with the HTTP status that the API answers with.
type LogError struct {
	Code    int32
	Message string
}

// Error implements error.
func (e *LogError) Error() string { return e.Message }

// HTTPStatus is the status code for the API's answer.
func (e *LogError) HTTPStatus() int32 { return e.Code }

// Logs implements StreamServer.
func (a *Agent) Logs(ctx context.Context, namespace, name, uid string, o *corev1.PodLogOptions, w io.Writer) error {
	a.mu.RLock()
	info, ok := a.known[uid]
	if !ok { // static pods are known to the cluster under the mirror's uid
		for _, i := range a.known {
			if i.pod != nil && i.pod.Namespace == namespace && i.pod.Name == name && (uid == "" || isStatic(i.pod)) {
				info, ok, uid = i, true, string(i.pod.UID)
			}
		}
	}
	a.mu.RUnlock()
	if !ok || info.pod == nil {
		return &LogError{Code: 404, Message: fmt.Sprintf("pod %s/%s is not on node %s", namespace, name, a.c.NodeName)}
	}
	container := o.Container
	if container == "" && len(info.pod.Spec.Containers) == 1 {
		container = info.pod.Spec.Containers[0].Name
	}
	st := containerStatusOf(info.status, container)
	if st == nil {
		return &LogError{Code: 400, Message: fmt.Sprintf("container %s is not valid for pod %s", container, name)}
	}
	attempt := int(st.RestartCount)
	switch {
	case o.Previous:
		if attempt--; st.LastTerminationState.Terminated == nil {
			return &LogError{Code: 400, Message: fmt.Sprintf("previous terminated container %q in pod %q not found", container, name)}
		}
		if st.State.Waiting != nil && st.State.Waiting.Reason == "CrashLoopBackOff" {
			attempt++ // the ended attempt is the newest
		}
	case st.State.Waiting != nil && st.LastTerminationState.Terminated == nil:
		return &LogError{Code: 400, Message: fmt.Sprintf("container %q in pod %q is waiting to start: %s", container, name, st.State.Waiting.Reason)}
	case st.State.Waiting != nil && st.State.Waiting.Reason != "CrashLoopBackOff" && attempt > 0:
		if _, err := os.Stat(a.logPath(namespace, name, uid, container, attempt)); err != nil {
			attempt-- // the new attempt has not begun
		}
	}
	ended := func() bool {
		a.mu.RLock()
		defer a.mu.RUnlock()
		i, ok := a.known[uid]
		if !ok {
			return true
		}
		now := containerStatusOf(i.status, container)
		return now == nil || now.State.Running == nil || int(now.RestartCount) != attempt
	}
	return logs.Read(ctx, a.logPath(namespace, name, uid, container, attempt), o, ended, w)
}

func containerStatusOf(st *corev1.PodStatus, name string) *corev1.ContainerStatus {
	if st == nil {
		return nil
	}
	for _, list := range [][]corev1.ContainerStatus{st.InitContainerStatuses, st.ContainerStatuses} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}
