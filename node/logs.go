package node

import (
	"context"
	"fmt"
	"io"
	"os"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/node/logs"
)

// Logs implements StreamServer. What it refuses is an apierrors.APIStatus in
// upstream's words.
func (a *Agent) Logs(ctx context.Context, namespace, name, uid string, o *corev1.PodLogOptions, w io.Writer) error {
	info, uid, err := a.find(namespace, name, uid)
	if err != nil {
		return err
	}
	container := o.Container
	if container == "" && len(info.pod.Spec.Containers) == 1 {
		container = info.pod.Spec.Containers[0].Name
	}
	st := containerStatusOf(info.status, container)
	if st == nil {
		return apierrors.NewBadRequest(fmt.Sprintf("container %s is not valid for pod %s", container, name))
	}
	attempt := int(st.RestartCount)
	switch {
	case o.Previous:
		if attempt--; st.LastTerminationState.Terminated == nil {
			return apierrors.NewBadRequest(fmt.Sprintf("previous terminated container %q in pod %q not found", container, name))
		}
		if endedIsNewest(st) {
			attempt++
		}
	case st.State.Waiting != nil && st.LastTerminationState.Terminated == nil:
		return apierrors.NewBadRequest(fmt.Sprintf("container %q in pod %q is waiting to start: %s", container, name, st.State.Waiting.Reason))
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
	if _, err := w.Write(nil); err != nil { // the reader learns now that it is served
		return err
	}
	return logs.Read(ctx, a.logPath(namespace, name, uid, container, attempt), o, ended, w)
}

// find looks a pod up as the cluster names it; the uid is its own here.
func (a *Agent) find(namespace, name, uid string) (podInfo, string, error) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	info, ok := a.known[uid]
	if !ok { // static pods are known to the cluster under the mirror's uid
		for _, i := range a.known {
			if i.pod != nil && i.pod.Namespace == namespace && i.pod.Name == name && (uid == "" || isStatic(i.pod)) {
				info, ok, uid = i, true, string(i.pod.UID)
			}
		}
	}
	if !ok || info.pod == nil {
		return podInfo{}, "", apierrors.NewNotFound(corev1.Resource("pods"), name)
	}
	return info, uid, nil
}

// endedIsNewest says whether the attempt that last ended is the one that
// RestartCount counts: in back-off, and until the next one runs.
func endedIsNewest(st *corev1.ContainerStatus) bool {
	now, last := &st.State, st.LastTerminationState.Terminated
	return now.Waiting != nil && now.Waiting.Reason == "CrashLoopBackOff" ||
		now.Terminated != nil && last != nil && now.Terminated.ContainerID == last.ContainerID
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
