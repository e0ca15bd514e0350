package cli

import (
	"fmt"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
)

// boundClaim is how the scheduler tells where a pod's data is.
var boundClaim = regexp.MustCompile(`its claim (\S+) is bound to volume \S+ on node ([^\s,;]+)([^;]*)`)

// nextOfVolume is what to do about a pod whose volume is on a node that is not
// there; "" where that is not what keeps it waiting. It comes before all that
// other nodes lack: none of them can have the data.
func nextOfVolume(p *corev1.Pod, message string) string {
	for _, m := range boundClaim.FindAllStringSubmatch(message, -1) {
		empty := startEmpty(m[1], p.Name)
		switch node, is := m[2], m[3]; {
		case strings.Contains(is, "which was declared dead"):
			return deadNext(empty)
		case strings.Contains(is, "which is out of service"):
			return outOfServiceNext(node, empty)
		case strings.Contains(is, "which is Unknown since"), strings.Contains(is, "which is NotReady since"):
			return awayNext(node, empty)
		case strings.Contains(is, "which no longer exists"):
			return "join that machine again under its name with its identity, or give the data up: " + empty
		case strings.Contains(is, "an earlier machine of that name"):
			return "the data is on the disk of that machine and nowhere else; to give it up: " + empty
		}
	}
	switch {
	case !strings.Contains(message, "persistentvolumeclaim "):
		return ""
	case strings.Contains(message, " not found"):
		return "make that claim; the pod then starts by itself. A StatefulSet makes its pods' claims anew"
	case strings.Contains(message, " is being deleted"):
		return "'dunlin describe pvc' says what the claim waits for; when it is gone make it anew, as a StatefulSet does"
	}
	return ""
}

// startEmpty is how to go on without the data of a claim.
func startEmpty(claim, pod string) string {
	if pod == "" {
		return fmt.Sprintf("'dunlin delete pvc %s' and delete its pod (a StatefulSet makes both anew and empty; else make the claim again)", claim)
	}
	return fmt.Sprintf("'dunlin delete pvc/%s pod/%s' (a StatefulSet makes both anew and empty; else make the claim again)", claim, pod)
}

func deadNext(empty string) string {
	return "the node is declared dead and cannot come back, the data is lost with it; to start empty: " + empty
}

func outOfServiceNext(node, empty string) string {
	return fmt.Sprintf("the data is on that node and nowhere else: bring it back and remove the taint ('kubectl taint node %s %s-'); if it is off for good, 'dunlin node declare-dead %s', and to start empty: %s",
		node, corev1.TaintNodeOutOfService, node, empty)
}

func awayNext(node, empty string) string {
	return fmt.Sprintf("the data is there and nowhere else: pods of the claim wait for the node; bring it back. If it is off for good, 'dunlin node declare-dead %s', and to start empty: %s", node, empty)
}

// lostNode says what became of a volume's node by a user's word, and what to
// do; where is "" if nothing did.
func lostNode(n *corev1.Node, claim string) (where, next string) {
	if n.Labels[manifests.LabelDead] != "" {
		return "which was declared dead", deadNext(startEmpty(claim, ""))
	}
	for i := range n.Spec.Taints {
		if n.Spec.Taints[i].Key == corev1.TaintNodeOutOfService {
			return "which is out of service", outOfServiceNext(n.Name, startEmpty(claim, ""))
		}
	}
	return "", ""
}
