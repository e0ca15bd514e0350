package cli

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"
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

// whyPod says why a pod does not serve; ok is false when it does, or when it
// is done.
func whyPod(p *corev1.Pod) (w why, ok bool) {
	if p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded {
		return why{}, false // said elsewhere; done
	}
	if c := podCondition(p, corev1.DisruptionTarget); c != nil && c.Status == corev1.ConditionTrue && c.Reason == "NodeUnreachable" {
		return why{"its node " + p.Spec.NodeName + " is out of reach", c.LastTransitionTime.Time,
			"look at 'dunlin describe node " + p.Spec.NodeName + "'; the pod goes on there by itself"}, true
	}
	if p.Status.Phase == corev1.PodFailed {
		reason := "it failed"
		if s := firstEnded(p); s != nil {
			reason = ended(p, s)
		}
		if p.Status.Reason != "" {
			reason = strings.TrimSuffix(p.Status.Reason+": "+p.Status.Message, ": ")
		}
		return why{reason, time.Time{}, "'dunlin logs " + p.Name + "' shows what it wrote; a failed pod does not start again: delete it, or let its owner replace it"}, true
	}
	if p.Spec.NodeName == "" {
		return whyUnbound(p), true
	}
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for i := range list {
			if w, ok := whyContainer(p, &list[i]); ok {
				return w, true
			}
		}
	}
	c := podCondition(p, corev1.PodReady)
	if c == nil {
		return why{"node " + p.Spec.NodeName + " has not reported on it yet", p.CreationTimestamp.Time,
			"'dunlin get node " + p.Spec.NodeName + "' says whether the node is Ready"}, true
	}
	if c.Status == corev1.ConditionTrue {
		return why{}, false
	}
	reason := "it is not Ready"
	if c.Message != "" {
		reason += ": " + c.Message
	}
	return why{reason, c.LastTransitionTime.Time, "the events below say what its readiness probe gets; 'dunlin logs " + p.Name + "' shows what it wrote"}, true
}

func podCondition(p *corev1.Pod, t corev1.PodConditionType) *corev1.PodCondition {
	for i := range p.Status.Conditions {
		if p.Status.Conditions[i].Type == t {
			return &p.Status.Conditions[i]
		}
	}
	return nil
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
	if c == nil || c.Status == corev1.ConditionTrue {
		return why{"the scheduler has not looked at it yet", p.CreationTimestamp.Time, "wait a moment; a server without a leader says so in 'dunlin get nodes'"}
	}
	next := "'dunlin describe node' shows what each node has and has left"
	for _, h := range []struct{ says, next string }{
		{"Insufficient", "ask for less, free some ('dunlin describe node NAME' shows what is requested), or add a node"},
		{"node affinity/selector", "compare its nodeSelector and affinity with the labels in 'dunlin describe node NAME'"},
		{"cannot run RuntimeClass", "runtimeClassName: wasm runs a module on every node; other classes need a runtime there"},
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

func whyContainer(p *corev1.Pod, s *corev1.ContainerStatus) (why, bool) {
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
			fmt.Sprintf("'dunlin logs %s -c %s --previous' shows what it wrote before it ended", p.Name, s.Name)}, true
	case "PodInitializing", "ContainerCreating":
		if w.Message == "" {
			return why{}, false // another container says more, or it is on its way
		}
	}
	reason := strings.TrimSuffix(w.Reason+": "+w.Message, ": ")
	next := "it is tried again by itself"
	switch {
	case w.Reason == "CreateContainerConfigError":
		next = "create what is missing; the pod then starts by itself"
	case strings.Contains(w.Reason, "Image"):
		next = "give node " + p.Spec.NodeName + " the module; the pod then starts by itself"
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
