package printers

import (
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// reasonNodeLost is the status reason of a pod whose node is unreachable.
const reasonNodeLost = "NodeLost"

// PodStatus is what kubectl get shows of a pod's containers.
type PodStatus struct {
	Ready, Total int
	// Reason is the STATUS column: the phase, or what says more than it.
	Reason string
	// Restarts counts restarts of the containers that count at this time;
	// LastRestart is when the newest of them ended, zero if unknown.
	Restarts    int
	LastRestart time.Time
}

// SummarizePod computes the READY, STATUS and RESTARTS columns.
//
// The rules: while init containers run, the first that is not done is the
// reason ("Init:1/3", "Init:CrashLoopBackOff", "Init:Error"); then the first
// container that waits or ended with a reason, looked at from the last to the
// first; "Completed" becomes Running or NotReady while another container
// still runs; deletion outranks all that.
func SummarizePod(pod *corev1.Pod) PodStatus {
	s := PodStatus{Total: len(pod.Spec.Containers), Reason: string(pod.Status.Phase)}
	if pod.Status.Reason != "" {
		s.Reason = pod.Status.Reason
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonSchedulingGated {
			s.Reason = corev1.PodReasonSchedulingGated
		}
	}
	sidecars := map[string]bool{}
	for i := range pod.Spec.InitContainers {
		if c := &pod.Spec.InitContainers[i]; c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			sidecars[c.Name] = true
			s.Total++
		}
	}
	var all, ofSidecars restarts
	initializing := s.initContainers(pod, sidecars, &all, &ofSidecars)
	count := all
	if !initializing || conditionTrue(pod.Status.Conditions, corev1.PodInitialized) {
		count = ofSidecars
		s.containers(pod, &count)
	}
	s.Restarts, s.LastRestart = count.n, count.last
	switch {
	case pod.DeletionTimestamp == nil:
	case pod.Status.Reason == reasonNodeLost:
		s.Reason = "Unknown"
	case pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed:
		s.Reason = "Terminating"
	}
	return s
}

// restarts adds up restarts and when the newest of them was.
type restarts struct {
	n    int
	last time.Time
}

func (r *restarts) add(c *corev1.ContainerStatus) {
	r.n += int(c.RestartCount)
	if t := c.LastTerminationState.Terminated; t != nil && t.FinishedAt.After(r.last) {
		r.last = t.FinishedAt.Time
	}
}

// initContainers looks at the init containers in order, up to the first that
// holds the pod back; it reports whether there is one.
func (s *PodStatus) initContainers(pod *corev1.Pod, sidecars map[string]bool, all, ofSidecars *restarts) bool {
	for i := range pod.Status.InitContainerStatuses {
		c := &pod.Status.InitContainerStatuses[i]
		all.add(c)
		if sidecars[c.Name] {
			ofSidecars.add(c)
		}
		ended, waiting := c.State.Terminated, c.State.Waiting
		switch {
		case ended != nil && ended.ExitCode == 0:
			continue
		case sidecars[c.Name] && c.Started != nil && *c.Started:
			if c.Ready {
				s.Ready++
			}
			continue
		case ended != nil:
			s.Reason = "Init:" + endReason(ended)
		case waiting != nil && waiting.Reason != "" && waiting.Reason != "PodInitializing":
			s.Reason = "Init:" + waiting.Reason
		default:
			s.Reason = fmt.Sprintf("Init:%d/%d", i, len(pod.Spec.InitContainers))
		}
		return true
	}
	return false
}

// containers looks at the main containers from the last to the first, so
// that the first one's trouble is what is shown.
func (s *PodStatus) containers(pod *corev1.Pod, count *restarts) {
	running, failure := false, ""
	for i := len(pod.Status.ContainerStatuses) - 1; i >= 0; i-- {
		c := &pod.Status.ContainerStatuses[i]
		count.add(c)
		switch {
		case c.State.Waiting != nil && c.State.Waiting.Reason != "":
			s.Reason = c.State.Waiting.Reason
		case c.State.Terminated != nil:
			s.Reason = endReason(c.State.Terminated)
			if c.State.Terminated.ExitCode != 0 {
				failure = s.Reason
			}
		case c.Ready && c.State.Running != nil:
			running = true
			s.Ready++
		}
	}
	if s.Reason != "Completed" {
		return
	}
	switch {
	case running && conditionTrue(pod.Status.Conditions, corev1.PodReady):
		s.Reason = "Running"
	case failure != "":
		s.Reason = failure
	case running:
		s.Reason = "NotReady"
	}
}

// endReason says in a word why a container ended.
func endReason(t *corev1.ContainerStateTerminated) string {
	switch {
	case t.Reason != "":
		return t.Reason
	case t.Signal != 0:
		return "Signal:" + strconv.Itoa(int(t.Signal))
	}
	return "ExitCode:" + strconv.Itoa(int(t.ExitCode))
}

func conditionTrue(list []corev1.PodCondition, t corev1.PodConditionType) bool {
	for i := range list {
		if list[i].Type == t {
			return list[i].Status == corev1.ConditionTrue
		}
	}
	return false
}

func podColumns() []metav1.TableColumnDefinition {
	spec, status := corev1.PodSpec{}.SwaggerDoc(), corev1.PodStatus{}.SwaggerDoc()
	return []metav1.TableColumnDefinition{
		nameColumn(),
		column("Ready", "The aggregate readiness state of this pod for accepting traffic."),
		column("Status", "The aggregate status of the containers in this pod."),
		column("Restarts", "The number of times the containers in this pod have been restarted and when the last container in this pod has restarted."),
		ageColumn(),
		wide(column("IP", status["podIP"])),
		wide(column("Node", spec["nodeName"])),
		wide(column("Nominated Node", status["nominatedNodeName"])),
		wide(column("Readiness Gates", spec["readinessGates"])),
	}
}

func podRow(pod *corev1.Pod, now time.Time) ([]any, []metav1.TableRowCondition) {
	s := SummarizePod(pod)
	restarted := strconv.Itoa(s.Restarts)
	if s.Restarts != 0 && !s.LastRestart.IsZero() {
		restarted += " (" + since(s.LastRestart, now) + " ago)"
	}
	ip := pod.Status.PodIP
	if len(pod.Status.PodIPs) > 0 {
		ip = pod.Status.PodIPs[0].IP
	}
	cells := []any{
		pod.Name, fmt.Sprintf("%d/%d", s.Ready, s.Total), s.Reason, restarted, age(pod.CreationTimestamp, now),
		orNone(ip), orNone(pod.Spec.NodeName), orNone(pod.Status.NominatedNodeName), readinessGates(pod),
	}
	switch pod.Status.Phase {
	case corev1.PodSucceeded:
		return cells, completed("The pod has completed successfully.", string(corev1.PodSucceeded))
	case corev1.PodFailed:
		return cells, completed("The pod failed.", string(corev1.PodFailed))
	}
	return cells, nil
}

// completed marks a row that a client may hide.
func completed(message, reason string) []metav1.TableRowCondition {
	return []metav1.TableRowCondition{{Type: metav1.RowCompleted, Status: metav1.ConditionTrue, Reason: reason, Message: message}}
}

func readinessGates(pod *corev1.Pod) string {
	if len(pod.Spec.ReadinessGates) == 0 {
		return none
	}
	n := 0
	for _, g := range pod.Spec.ReadinessGates {
		if conditionTrue(pod.Status.Conditions, g.ConditionType) {
			n++
		}
	}
	return fmt.Sprintf("%d/%d", n, len(pod.Spec.ReadinessGates))
}
