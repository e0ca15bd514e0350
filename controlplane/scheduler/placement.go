package scheduler

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Placement explains where a pod could run, node by node and filter by
// filter, as things are now.
type Placement struct {
	Kind       string          `json:"kind"`
	APIVersion string          `json:"apiVersion"`
	Namespace  string          `json:"namespace"`
	Pod        string          `json:"pod"`
	Node       string          `json:"node,omitempty"` // where it is
	Nominated  string          `json:"nominatedNode,omitempty"`
	Message    string          `json:"message"`
	Nodes      []NodePlacement `json:"nodes"`
}

// NodePlacement is one node of a Placement.
type NodePlacement struct {
	Name    string            `json:"name"`
	Fits    bool              `json:"fits"`
	Filters []FilterPlacement `json:"filters"`
}

// FilterPlacement is what one filter says of the node.
type FilterPlacement struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Reason string `json:"reason,omitempty"`
	// Figures are quantities.
	Figures []FigurePlacement `json:"figures,omitempty"`
	HeldBy  []string          `json:"heldBy,omitempty"`
}

// FigurePlacement is one resource: needs 300Mi, free 210Mi of 430Mi.
type FigurePlacement struct {
	Resource string   `json:"resource"`
	Needs    string   `json:"needs"`
	Free     string   `json:"free"`
	Of       string   `json:"of"`
	Short    bool     `json:"short,omitempty"`  // too little is free
	HeldBy   []string `json:"heldBy,omitempty"` // those that take most, if too little is free
}

// maxHolders are named; of the others the number is told.
const maxHolders = 3

// Explain judges every node for a pod, from the newest snapshot of the
// store; what the pod itself takes is left out. Pods of namespaces that the
// reader may not see are not named.
func Explain(store registry.Store, profiles []*Profile, pod *corev1.Pod, sees func(namespace string) bool) (*Placement, error) {
	s := New(Config{Store: store, Profiles: profiles})
	s.resync()
	r, ok := s.reader.Snapshot().Get(state.Key{Kind: podGK.String(), Namespace: pod.Namespace, Name: pod.Name})
	if !ok || r.Header.UID != string(pod.UID) {
		return nil, apierrors.NewConflict(corev1.Resource("pods"), pod.Name, fmt.Errorf("the pod is another one now; try again"))
	}
	s.claims.forget(r.Header.UID)
	class, err := s.classOf(r)
	if err == nil && class.profile == nil && pod.Spec.NodeName == "" {
		return &Placement{Kind: "PodPlacement", APIVersion: "dunlin.dev/v1alpha1", Namespace: pod.Namespace, Pod: pod.Name,
			Message: fmt.Sprintf("No scheduler here is called %q, so the pod waits for another program to place it; there are: %s.", pod.Spec.SchedulerName, strings.Join(slices.Sorted(maps.Keys(s.classes.profiles)), ", "))}, nil
	}
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	out := &Placement{Kind: "PodPlacement", APIVersion: "dunlin.dev/v1alpha1", Namespace: pod.Namespace, Pod: pod.Name,
		Node: pod.Spec.NodeName, Nominated: pod.Status.NominatedNodeName}
	s.cache.drop(r.Header.UID)
	group := s.group([]*waitingPod{{rec: r, class: class}})[0]
	s.ghosts.level(class.priority, r.Header.UID)
	if group.Terms != nil || s.ghosts.terms > 0 {
		group.Ghosts = s.ghosts.list()
	}
	fit := 0
	for _, report := range plan.Report(s.cache.nodes, &group.Group) {
		n := NodePlacement{Name: s.cache.nodes.At(report.Slot).Name, Fits: report.Fits()}
		for i := range report.Findings {
			f := filterPlacement(&report.Findings[i], group, sees)
			if t := report.Findings[i].Volume; t != nil {
				s.volumePlacement(&f, t, claimKey{pod.Namespace, t.Claim}, string(pod.UID))
			}
			n.Filters = append(n.Filters, f)
		}
		if n.Fits {
			fit++
		}
		out.Nodes = append(out.Nodes, n)
	}
	switch {
	case r.Header.Gated:
		var gates []string
		for _, g := range pod.Spec.SchedulingGates {
			gates = append(gates, g.Name)
		}
		out.Message = "Scheduling is blocked due to non-empty scheduling gates: " + strings.Join(gates, ", ")
	case pod.Spec.NodeName != "" && !slices.ContainsFunc(out.Nodes, func(n NodePlacement) bool { return n.Name == pod.Spec.NodeName }):
		out.Message = fmt.Sprintf("The pod's spec.nodeName is %s, and there is no such node; %d of %d nodes could take it.", pod.Spec.NodeName, fit, len(out.Nodes))
	case pod.Spec.NodeName != "":
		out.Message = fmt.Sprintf("The pod is on node %s; %d of %d nodes could take it.", pod.Spec.NodeName, fit, len(out.Nodes))
	case fit == 0:
		out.Message = plan.Explain(s.cache.nodes, &group.Group).Message
		if note := s.volumeNote(class); note != "" {
			out.Message += " " + note + "."
		}
	default:
		out.Message = fmt.Sprintf("%d of %d nodes could take the pod: it is about to be placed.", fit, len(out.Nodes))
	}
	return out, nil
}

// volumePlacement says where the volume of a claim is, and which pods use it
// there: pods of the claim's own namespace, which its reader may see.
func (s *Scheduler) volumePlacement(f *FilterPlacement, t *plan.VolumeTerm, claim claimKey, self string) {
	if note := s.termNote(t); note != "" {
		f.Reason += " (" + note + ")"
	} else if t.Claim != "" {
		f.Reason += " (for its claim " + t.Claim + ")"
	}
	users := make(map[string]string, len(s.claims.users[claim]))
	for uid, node := range s.claims.users[claim] {
		if uid != self {
			users[uid] = node
		}
	}
	if len(users) == 0 {
		return
	}
	s.reader.Snapshot().Range(podGK.String(), claim.namespace, state.Key{}, func(r *state.Record) bool {
		if node, uses := users[r.Header.UID]; uses {
			f.HeldBy = append(f.HeldBy, fmt.Sprintf("%s/%s (node %s)", claim.namespace, r.Header.Key.Name, node))
		}
		return true
	})
	slices.Sort(f.HeldBy)
	if more := len(f.HeldBy) - maxHolders; more > 0 {
		f.HeldBy = append(f.HeldBy[:maxHolders], fmt.Sprintf("%d others", more))
	}
}

func filterPlacement(f *plan.Finding, group *podGroup, sees func(string) bool) FilterPlacement {
	out := FilterPlacement{Name: f.Filter, OK: f.OK, Reason: f.Text, HeldBy: holders(f.Holders, "", sees)}
	var lacks []string
	for _, x := range f.Figures {
		needs := group.Wanted[x.Resource]
		if needs == "" {
			needs = plan.Format(x.Resource, x.Needs)
		}
		one := FigurePlacement{Resource: x.Resource, Needs: needs, Free: plan.Format(x.Resource, max(x.Free, 0)), Of: plan.Format(x.Resource, x.Of),
			HeldBy: holders(x.Holders, x.Resource, sees)}
		if x.Free < x.Needs {
			one.Short = true
			lacks = append(lacks, fmt.Sprintf("%s: needs %s, free %s of %s", one.Resource, one.Needs, one.Free, one.Of))
		}
		out.Figures = append(out.Figures, one)
	}
	if len(lacks) > 0 {
		out.Reason = strings.Join(lacks, "; ")
	}
	return out
}

// holders names who has what is missing, the largest first.
func holders(pods []*plan.Pod, resource string, sees func(string) bool) (out []string) {
	hidden := 0
	for _, p := range pods {
		if len(out) == maxHolders || !sees(p.Namespace) {
			hidden++
			continue
		}
		name := p.Namespace + "/" + p.Name
		if resource != "" {
			name += " (" + plan.Format(resource, p.Takes(resource)) + ")"
		}
		out = append(out, name)
	}
	switch {
	case hidden == 1:
		out = append(out, "1 other")
	case hidden > 1:
		out = append(out, fmt.Sprintf("%d others", hidden))
	}
	return out
}
