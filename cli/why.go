package cli

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/dunlin-project/dunlin/manifests"
)

// why is the answer to "why does it not run": one current reason, since
// when, and what to do next.
type why struct {
	reason string
	since  time.Time // zero when it is not known
	next   string
}

// text is the reason with its age.
func (w why) text(now time.Time) string {
	if w.since.IsZero() {
		return w.reason
	}
	return fmt.Sprintf("%s (for %s)", w.reason, duration.HumanDuration(now.Sub(w.since)))
}

// command is one to type next; with local it asks this machine's agent.
func command(local bool, format string, args ...any) string {
	s := "dunlin " + fmt.Sprintf(format, args...)
	if local {
		s += " --local"
	}
	return "'" + s + "'"
}

// slowReport is how old a pod is of which its node should have said something:
// nobody is told before to look for the node.
const slowReport = 30 * time.Second

// whyPod says why a pod does not serve; ok is false when it does, or when it
// is done. local: the pod is as its node's agent told it.
func whyPod(p *corev1.Pod, local bool) (w why, ok bool) {
	if p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded {
		return why{}, false // said elsewhere; done
	}
	goes := "the pod goes on there by itself"
	if d := p.Annotations[manifests.AnnotationStopDeadline]; d != "" {
		goes = "the pod stops there by itself after " + d + " without contact"
	}
	if c := podCondition(p, corev1.DisruptionTarget); c != nil && c.Status == corev1.ConditionTrue && c.Reason == "NodeUnreachable" {
		return why{"its node " + p.Spec.NodeName + " is out of reach", c.LastTransitionTime.Time,
			"look at 'dunlin describe node " + p.Spec.NodeName + "'; " + goes}, true
	}
	if p.Status.Phase == corev1.PodFailed {
		reason := "it failed"
		if s := firstEnded(p); s != nil {
			reason = ended(p, s)
		}
		if p.Status.Reason != "" {
			reason = strings.TrimSuffix(p.Status.Reason+": "+p.Status.Message, ": ")
		}
		return why{reason, time.Time{}, command(local, "logs %s", p.Name) + " shows what it wrote; a failed pod does not start again: delete it, or let its owner replace it"}, true
	}
	if p.Spec.NodeName == "" {
		return whyUnbound(p), true
	}
	if c := podCondition(p, corev1.PodReady); c != nil && c.Status == corev1.ConditionFalse && c.Reason == "NodeUnreachable" {
		return why{"its node " + p.Spec.NodeName + " is out of reach, and nothing takes its place yet", c.LastTransitionTime.Time,
			"'dunlin describe node " + p.Spec.NodeName + "' says since when; " + goes + ". If that machine is off for good, 'dunlin node declare-dead " + p.Spec.NodeName + "' releases the pod"}, true
	}
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for i := range list {
			if w, ok := whyContainer(p, &list[i], local); ok {
				return w, true
			}
		}
	}
	c := podCondition(p, corev1.PodReady)
	if c == nil && local {
		return why{"the agent has not come to it yet", p.CreationTimestamp.Time, "wait a moment, then look again"}, true
	}
	if c == nil && time.Since(p.CreationTimestamp.Time) < slowReport {
		return why{"node " + p.Spec.NodeName + " has not reported on it yet", p.CreationTimestamp.Time, "wait a moment, then look again"}, true
	}
	if c == nil {
		return why{"node " + p.Spec.NodeName + " has not reported on it yet", p.CreationTimestamp.Time,
			"'dunlin describe node " + p.Spec.NodeName + "' says whether there is such a node, whether it is Ready, and whether its disk takes no writes (DiskPressure: it begins nothing then); if it was deleted and is off for good, or its disk is, " + command(local, "delete pod %s --force", p.Name) + " lets the pod's owner make another one"}, true
	}
	if c.Status == corev1.ConditionTrue {
		return why{}, false
	}
	if name := notMade(p); name != "" {
		return why{"container " + name + " is not started yet: its image is being fetched or compiled, or its volumes are being made", c.LastTransitionTime.Time,
			"its events ('dunlin describe pod " + p.Name + "') say how far that is; to compile a large module takes minutes on a small machine, the first time"}, true
	}
	reason := "it is not Ready"
	if c.Message != "" {
		reason += ": " + c.Message
	}
	if !slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return c.ReadinessProbe != nil }) {
		return why{reason, c.LastTransitionTime.Time, command(local, "logs %s", p.Name) + " shows what it wrote"}, true
	}
	return why{reason, c.LastTransitionTime.Time, "its events ('dunlin describe pod " + p.Name + "') say what its readiness probe gets; " + command(local, "logs %s", p.Name) + " shows what it wrote"}, true
}

func podCondition(p *corev1.Pod, t corev1.PodConditionType) *corev1.PodCondition {
	for i := range p.Status.Conditions {
		if p.Status.Conditions[i].Type == t {
			return &p.Status.Conditions[i]
		}
	}
	return nil
}

// notMade is the first container that was never started; "" is none.
func notMade(p *corev1.Pod) string {
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for i := range list {
			if w := list[i].State.Waiting; w != nil && list[i].LastTerminationState.Terminated == nil && (w.Reason == "ContainerCreating" || w.Reason == "PodInitializing") {
				return list[i].Name
			}
		}
	}
	return ""
}

func firstEnded(p *corev1.Pod) *corev1.ContainerStatus {
	for i := range p.Status.ContainerStatuses {
		if t := p.Status.ContainerStatuses[i].State.Terminated; t != nil && t.ExitCode != 0 {
			return &p.Status.ContainerStatuses[i]
		}
	}
	return nil
}

// ended says how a container ended last.
func ended(_ *corev1.Pod, s *corev1.ContainerStatus) string {
	t := s.State.Terminated
	if t == nil {
		t = s.LastTerminationState.Terminated
	}
	if t == nil {
		return "container " + s.Name + " ended"
	}
	out := fmt.Sprintf("container %s ended with exit code %d (%s)", s.Name, t.ExitCode, t.Reason)
	if line, _, _ := strings.Cut(strings.TrimSpace(t.Message), "\n"); line != "" {
		out += ": " + line
	}
	return out
}

func whyUnbound(p *corev1.Pod) why {
	c := podCondition(p, corev1.PodScheduled)
	if name := p.Spec.SchedulerName; c == nil && name != "" && name != corev1.DefaultSchedulerName {
		return why{fmt.Sprintf("no scheduler took it: its schedulerName is %q", name), p.CreationTimestamp.Time,
			"take schedulerName out of its spec, or start the servers with a profile of that name (--scheduler-profiles); a scheduler of your own has to run somewhere"}
	}
	if c == nil || c.Status == corev1.ConditionTrue {
		return why{"the scheduler has not looked at it yet", p.CreationTimestamp.Time, "wait a moment; a server without a leader says so in 'dunlin get nodes'"}
	}
	if next := nextOfVolume(p, c.Message); next != "" {
		return why{c.Message, c.LastTransitionTime.Time, next}
	}
	next := "'dunlin describe node' shows what each node has and has left"
	for _, h := range []struct{ says, next string }{
		{"Insufficient", "ask for less, free some ('dunlin describe node NAME' shows what is requested), or add a node"},
		{"node affinity/selector", "compare its nodeSelector and affinity with the labels in 'dunlin describe node NAME'"},
		{"cannot run RuntimeClass", "runtimeClassName: wasm runs a module on every node; other classes need a runtime there"},
		{"node.kubernetes.io/disk-pressure", "free room on that node's disk; the taint goes by itself some minutes later"},
		{"node.kubernetes.io/memory-pressure", "that node is short of memory; the taint goes by itself some minutes after it has more"},
		{"node.kubernetes.io/pid-pressure", "that node is short of process ids; the taint goes by itself some minutes after it has more"},
		{"node.kubernetes.io/not-ready", "'dunlin describe node NAME' says why it is not Ready; the taint goes by itself"},
		{"node.kubernetes.io/unreachable", "'dunlin describe node NAME' says since when it is out of reach; the taint goes by itself"},
		{"untolerated taint", "add a toleration, or remove the taint shown by 'dunlin describe node NAME'"},
		{"unschedulable", "a node is cordoned: 'kubectl uncordon NAME' opens it"},
		{"free ports", "another pod has the host port: choose another, or remove that pod"},
		{"no nodes", "no node has joined: 'dunlin token create' makes the line for 'dunlin agent --join'"},
	} {
		if strings.Contains(c.Message, h.says) {
			next = h.next
			break
		}
	}
	if c.Reason == corev1.PodReasonSchedulingGated {
		next = "whoever set spec.schedulingGates must remove them"
	}
	return why{c.Message, c.LastTransitionTime.Time, next}
}

func whyContainer(p *corev1.Pod, s *corev1.ContainerStatus, local bool) (why, bool) {
	w := s.State.Waiting
	if w == nil {
		return why{}, false
	}
	since := p.CreationTimestamp.Time
	if c := podCondition(p, corev1.ContainersReady); c != nil && c.Status != corev1.ConditionTrue {
		since = c.LastTransitionTime.Time
	}
	switch w.Reason {
	case "CrashLoopBackOff":
		return why{fmt.Sprintf("%s, %d times so far; %s", ended(p, s), s.RestartCount+1, firstWords(w.Message)), since,
			command(local, "logs %s -c %s --previous", p.Name, s.Name) + " shows what it wrote before it ended"}, true
	case "PodInitializing", "ContainerCreating":
		if w.Message == "" {
			return why{}, false // another container says more, or it is being made
		}
	}
	reason := strings.TrimSuffix(w.Reason+": "+w.Message, ": ")
	next := "it is tried again by itself"
	switch {
	case w.Reason == manifests.ReasonHeldAfterRestore:
		next = "'dunlin describe node " + p.Spec.NodeName + "' says what is held there; apply again what shall stay, then 'dunlin node accept-restore " + p.Spec.NodeName + "'"
	case w.Reason == "Disconnected":
		next = command(true, "describe node %s", p.Spec.NodeName) + " on that machine says why no server is reached; the pod then starts by itself"
	case local && w.Reason == "CreateContainerConfigError":
		next = "what is missing comes from a server: " + command(local, "describe node %s", p.Spec.NodeName) + " says whether one can be reached; the pod then starts by itself"
	case w.Reason == "OOMKilled":
		next = "raise resources.limits.memory of container " + s.Name
	case w.Reason == "CreateContainerConfigError":
		next = "create what is missing; the pod then starts by itself"
	default:
		if n := nextOfImage(p, s, w, local); n != "" {
			next = n
		}
	}
	return why{reason, since, next}, true
}

// firstWords is kubelet's "back-off 10s restarting failed container" without
// the ids that follow.
func firstWords(s string) string {
	s, _, _ = strings.Cut(s, " restarting ")
	if s == "" {
		return "it is started again after a pause"
	}
	return s + " before the next start"
}
