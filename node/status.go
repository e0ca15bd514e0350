package node

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/store"
)

// facts of the node that a pod's status repeats.
type facts struct {
	hostIPs []string
	scheme  string // of container ids: "wazero"
}

// status computes the pod's status, as upstream's kubelet would word it, and
// remembers the conditions' transition times in s.
func (s *podState) status(f facts, now moment) corev1.PodStatus {
	st := corev1.PodStatus{
		ObservedGeneration: s.pod.Generation,
		QOSClass:           manifests.QOSClass(s.pod),
	}
	if s.rec.StartTime != 0 {
		t := metav1.NewTime(time.UnixMilli(s.rec.StartTime).UTC().Truncate(time.Second))
		st.StartTime = &t
	}
	for i, ip := range f.hostIPs {
		if i == 0 {
			st.HostIP = ip
		}
		st.HostIPs = append(st.HostIPs, corev1.HostIP{IP: ip})
	}
	for i, ip := range s.rec.IPs {
		if i == 0 {
			st.PodIP = ip
		}
		st.PodIPs = append(st.PodIPs, corev1.PodIP{IP: ip})
	}
	rejected := s.rec.Verdict != nil && s.rec.Verdict.Rejected
	if !rejected {
		for i := range s.ctrs {
			c := s.containerStatus(&s.ctrs[i], f)
			if s.ctrs[i].init {
				st.InitContainerStatuses = append(st.InitContainerStatuses, c)
			} else {
				st.ContainerStatuses = append(st.ContainerStatuses, c)
			}
		}
	}
	st.Phase = s.phase()
	if v := s.rec.Verdict; v != nil {
		st.Reason, st.Message = v.Reason, v.Message
	}
	s.conditions = s.conditionsNow(st.Phase, now)
	st.Conditions = slices.Clone(s.conditions)
	return st
}

// ended: every container has ended and stays so.
func (s *podState) ended() bool {
	for i := range s.ctrs {
		if s.ctrs[i].live() || s.ctrs[i].op == opStart {
			return false
		}
	}
	return true
}

// phase follows upstream: a terminal phase only once nothing runs any more,
// and Running only once each container has been started.
func (s *podState) phase() corev1.PodPhase {
	if s.ended() && ended(s.pod.Status.Phase) {
		return s.pod.Status.Phase
	}
	if s.rec.Verdict != nil && s.ended() {
		return corev1.PodFailed
	}
	if s.rec.Verdict == nil && (s.rec.Finished || s.rec.Stopping != 0) && s.ended() {
		return s.outcome()
	}
	if s.ran {
		return corev1.PodRunning
	}
	if !s.rec.Initialized {
		return corev1.PodPending
	}
	for i := range s.ctrs {
		if c := &s.ctrs[i]; !c.init && c.rec.Last == nil && (!c.rec.Begun || c.seen != present && c.rec.Exit == nil) {
			return corev1.PodPending
		}
	}
	return corev1.PodRunning
}

// outcome of a pod whose containers all ended. A deleted pod of which some
// container never ran, or was to be restarted, failed.
func (s *podState) outcome() corev1.PodPhase {
	for i := range s.ctrs {
		c := &s.ctrs[i]
		switch {
		case c.sidecar():
		case c.init && s.rec.Initialized:
		case c.rec.Exit == nil || c.rec.Exit.Code != 0:
			return corev1.PodFailed
		}
	}
	return corev1.PodSucceeded
}

func containerID(f facts, s *podState, name string, attempt int) string {
	return fmt.Sprintf("%s://%s/%s/%d", f.scheme, s.rec.UID, name, attempt)
}

func (s *podState) containerStatus(c *ctrState, f facts) corev1.ContainerStatus {
	started := c.running() && c.started
	if c.init && !c.sidecar() {
		started = false
	}
	st := corev1.ContainerStatus{
		Name: c.rec.Name, Image: c.spec.Image, RestartCount: int32(c.rec.Attempt),
		Started: &started, Ready: s.containerReady(c), ImageID: c.rec.Digest,
	}
	if c.rec.Begun && (c.seen == present || c.rec.Exit != nil) {
		st.ContainerID = containerID(f, s, c.rec.Name, c.rec.Attempt)
	} else if c.rec.Last != nil {
		st.ContainerID = containerID(f, s, c.rec.Name, c.rec.Last.Attempt)
	}
	if c.rec.Last != nil {
		st.LastTerminationState = s.terminated(c.rec.Last, f, c.rec.Name)
	}
	switch {
	case c.running():
		st.State.Running = &corev1.ContainerStateRunning{StartedAt: seconds3339(c.run.StartedAt)}
	case c.rec.Exit != nil && (!c.waitsBack || s.over()):
		st.State = s.terminated(c.rec.Exit, f, c.rec.Name)
	case c.rec.Exit != nil:
		st.LastTerminationState = s.terminated(c.rec.Exit, f, c.rec.Name)
		st.State.Waiting = s.crashWait(c)
	default:
		st.State.Waiting = s.waiting(c)
		s.betweenAttempts(c, f, &st)
	}
	return st
}

// betweenAttempts: until the next attempt runs, or fails to start, a
// restarted container shows the one before, as upstream's does. Anything else
// would look as if it were new.
func (s *podState) betweenAttempts(c *ctrState, f facts, st *corev1.ContainerStatus) {
	if c.rec.Last == nil || c.rec.Begun && c.seen == notRead || st.State.Waiting.Reason != reasonCreating || st.State.Waiting.Message != "" || s.over() {
		return
	}
	st.RestartCount = int32(c.rec.Last.Attempt)
	if c.waitsBack {
		st.State.Waiting = s.crashWait(c)
		return
	}
	st.State = s.terminated(c.rec.Last, f, c.rec.Name)
}

// reasonCreating is shown while nothing is known of a container but that it
// shall be.
const reasonCreating = "ContainerCreating"

func (s *podState) crashWait(c *ctrState) *corev1.ContainerStateWaiting {
	return &corev1.ContainerStateWaiting{
		Reason: "CrashLoopBackOff",
		Message: fmt.Sprintf("back-off %s restarting failed container=%s pod=%s",
			crashDelay(c.rec.Backoff-1), c.rec.Name, s.podName()),
	}
}

// containerReady: as upstream, an init container is ready once it completed.
func (s *podState) containerReady(c *ctrState) bool {
	if c.init && !c.sidecar() {
		return c.rec.Exit != nil && c.rec.Exit.Code == 0 || s.rec.Initialized && c.rec.Exit != nil
	}
	return c.running() && c.started && c.ready && !c.ending() && s.serves()
}

func seconds3339(t time.Time) metav1.Time { return metav1.NewTime(t.UTC().Truncate(time.Second)) }

func (s *podState) terminated(e *store.Exit, f facts, name string) corev1.ContainerState {
	t := &corev1.ContainerStateTerminated{
		ExitCode: e.Code, Signal: e.Signal, Reason: e.Reason, Message: e.Message,
		ContainerID: containerID(f, s, name, e.Attempt),
	}
	if e.StartedAt != 0 {
		t.StartedAt = seconds3339(time.UnixMilli(e.StartedAt))
	}
	if e.FinishedAt != 0 {
		t.FinishedAt = seconds3339(time.UnixMilli(e.FinishedAt))
	}
	return corev1.ContainerState{Terminated: t}
}

func (s *podState) waiting(c *ctrState) *corev1.ContainerStateWaiting {
	if f := s.back; f != nil && !c.rec.Begun {
		return &corev1.ContainerStateWaiting{Reason: f.Reason, Message: f.Message}
	}
	w := &corev1.ContainerStateWaiting{Reason: reasonCreating}
	hasInit := len(s.pod.Spec.InitContainers) > 0
	if hasInit && !s.rec.Initialized {
		w.Reason = "PodInitializing"
	}
	for _, f := range []*failure{s.volumes.fail, s.network.fail} {
		if f != nil {
			w.Message = f.Message
			return w
		}
	}
	for _, f := range []*failure{c.image.fail, c.start.fail} {
		if f != nil {
			w.Reason, w.Message = f.Reason, f.Message
			return w
		}
	}
	return w
}

// conditionsNow computes the node's own conditions, keeping the transition
// times of those that did not change.
func (s *podState) conditionsNow(phase corev1.PodPhase, now moment) []corev1.PodCondition {
	terminal := phase == corev1.PodSucceeded || phase == corev1.PodFailed
	sandbox := corev1.PodCondition{Type: corev1.PodReadyToStartContainers, Status: boolean(s.rec.Allocation != nil && !terminal)}
	initialized := corev1.PodCondition{Type: corev1.PodInitialized, Status: boolean(s.rec.Initialized || phase == corev1.PodSucceeded)}
	if phase == corev1.PodSucceeded {
		initialized.Reason = "PodCompleted"
	} else if !s.rec.Initialized {
		initialized.Reason = "ContainersNotInitialized"
		initialized.Message = fmt.Sprintf("containers with incomplete status: [%s]", join(s.incomplete()))
	}
	containers := corev1.PodCondition{Type: corev1.ContainersReady, Status: corev1.ConditionTrue}
	unready := s.unready()
	switch {
	case phase == corev1.PodSucceeded:
		containers.Status, containers.Reason = corev1.ConditionFalse, "PodCompleted"
	case phase == corev1.PodFailed:
		containers.Status, containers.Reason = corev1.ConditionFalse, "PodFailed"
	case len(unready) > 0:
		containers.Status, containers.Reason = corev1.ConditionFalse, "ContainersNotReady"
		containers.Message = fmt.Sprintf("containers with unready status: [%s]", join(unready))
	}
	ready := containers
	ready.Type = corev1.PodReady
	if ready.Status == corev1.ConditionTrue {
		if gates := s.closedGates(); gates != "" {
			ready.Status, ready.Reason, ready.Message = corev1.ConditionFalse, "ReadinessGatesNotReady", gates
		}
	}
	scheduled := corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}
	out := []corev1.PodCondition{sandbox, initialized, ready, containers, scheduled}
	if v := s.rec.Verdict; v != nil && v.Reason == reasonEvicted && !v.Rejected {
		out = append(out, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: corev1.PodReasonTerminationByKubelet, Message: v.Message})
	}
	if s.drain.known {
		out = append(out, s.drain.condition(s.ended()))
	}
	for i := range out {
		c := &out[i]
		c.ObservedGeneration = s.pod.Generation
		c.LastTransitionTime = seconds3339(now.wall)
		j := slices.IndexFunc(s.conditions, func(o corev1.PodCondition) bool { return o.Type == c.Type })
		if j >= 0 && s.conditions[j].Status == c.Status {
			c.LastTransitionTime = s.conditions[j].LastTransitionTime
		}
	}
	return out
}

func boolean(b bool) corev1.ConditionStatus {
	if b {
		return corev1.ConditionTrue
	}
	return corev1.ConditionFalse
}

func join(names []string) string {
	out := ""
	for i, n := range names {
		if i > 0 {
			out += " "
		}
		out += n
	}
	return out
}

func (s *podState) incomplete() (names []string) {
	for i := range s.ctrs {
		if c := &s.ctrs[i]; c.init && !s.containerReady(c) {
			names = append(names, c.rec.Name)
		}
	}
	return names
}

func (s *podState) unready() (names []string) {
	for i := range s.ctrs {
		if c := &s.ctrs[i]; (!c.init || c.sidecar()) && !s.containerReady(c) {
			names = append(names, c.rec.Name)
		}
	}
	return names
}

func (s *podState) closedGates() string {
	for _, g := range s.pod.Spec.ReadinessGates {
		i := slices.IndexFunc(s.pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == g.ConditionType })
		if i < 0 {
			return fmt.Sprintf("corresponding condition of pod readiness gate %q does not exist.", g.ConditionType)
		}
		if s.pod.Status.Conditions[i].Status != corev1.ConditionTrue {
			return fmt.Sprintf("the status of pod readiness gate %q is not \"True\", but %v", g.ConditionType, s.pod.Status.Conditions[i].Status)
		}
	}
	return ""
}

func qosFolder(q corev1.PodQOSClass) string {
	switch q {
	case corev1.PodQOSGuaranteed:
		return "guaranteed"
	case corev1.PodQOSBestEffort:
		return "besteffort"
	}
	return "burstable"
}
