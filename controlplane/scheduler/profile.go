package scheduler

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Strategies of a profile: upstream's names.
const (
	MostAllocated  = "MostAllocated"  // packs: the fullest node first
	LeastAllocated = "LeastAllocated" // the emptiest node first
)

// Profile is a named way to place pods: those whose spec.schedulerName it is.
type Profile struct {
	SchedulerName string `json:"schedulerName"`
	// ScoringStrategy is MostAllocated (the default) or LeastAllocated.
	ScoringStrategy string `json:"scoringStrategy,omitempty"`
	// Weights by score (0 to 100, 0 switches it off): NodeResourcesFit,
	// NodeAffinity, TaintToleration, InterPodAffinity, PodTopologySpread,
	// ImageLocality. What is not named keeps upstream's.
	Weights map[string]float32 `json:"weights,omitempty"`
	// DefaultConstraints stand in for topologySpreadConstraints of pods that
	// have none and belong to a ReplicaSet, StatefulSet or
	// ReplicationController: over its pods. They have no labelSelector.
	DefaultConstraints []corev1.TopologySpreadConstraint `json:"defaultConstraints,omitempty"`

	weights plan.Weights
}

// profilesFile is the file of profiles.
type profilesFile struct {
	Profiles []Profile `json:"profiles"`
}

// maxWeight is upstream's largest weight of a score.
const maxWeight = 100

// ParseProfiles reads a file of profiles strictly. A default-scheduler that it
// does not name is added. Errors name the place in the file.
func ParseProfiles(text []byte) ([]*Profile, error) {
	var f profilesFile
	if err := yaml.UnmarshalStrict(text, &f); err != nil {
		return nil, fmt.Errorf("scheduler profiles: %w", plainly(err))
	}
	if len(f.Profiles) == 0 {
		return nil, fmt.Errorf("scheduler profiles: profiles: at least one is needed")
	}
	var out []*Profile
	for i := range f.Profiles {
		p := &f.Profiles[i]
		if err := p.complete(); err != nil {
			return nil, fmt.Errorf("scheduler profiles: profiles[%d].%w", i, err)
		}
		if slices.ContainsFunc(out, func(o *Profile) bool { return o.SchedulerName == p.SchedulerName }) {
			return nil, fmt.Errorf("scheduler profiles: profiles[%d].schedulerName: %q is there twice", i, p.SchedulerName)
		}
		out = append(out, p)
	}
	if !slices.ContainsFunc(out, func(p *Profile) bool { return p.SchedulerName == corev1.DefaultSchedulerName }) {
		out = append(out, defaultProfile())
	}
	return out, nil
}

// plainly says what is wrong with a file without the names of Go's types.
func plainly(err error) error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return err
	}
	where := cmp.Or(wrong.Field, "the file")
	wanted := "another type"
	switch wrong.Type.Kind() {
	case reflect.Slice:
		wanted = "a list"
	case reflect.Struct, reflect.Map:
		wanted = "a map"
	case reflect.String:
		wanted = "text"
	case reflect.Int32, reflect.Float32:
		wanted = "a number"
	}
	return fmt.Errorf("%s: %s is wanted, not %s", where, wanted, wrong.Value)
}

func defaultProfile() *Profile {
	return &Profile{SchedulerName: corev1.DefaultSchedulerName, ScoringStrategy: MostAllocated, weights: plan.DefaultWeights}
}

// complete checks a profile and fills in defaults.
func (p *Profile) complete() error {
	if p.SchedulerName == "" {
		return fmt.Errorf("schedulerName: is needed")
	}
	switch p.ScoringStrategy {
	case "":
		p.ScoringStrategy = MostAllocated
	case MostAllocated, LeastAllocated:
	default:
		return fmt.Errorf("scoringStrategy: %q is neither %s nor %s", p.ScoringStrategy, MostAllocated, LeastAllocated)
	}
	p.weights = plan.DefaultWeights
	scores := map[string]*float32{"NodeResourcesFit": &p.weights.Fit, "NodeAffinity": &p.weights.NodeAffinity, "TaintToleration": &p.weights.Taints,
		"InterPodAffinity": &p.weights.InterPod, "PodTopologySpread": &p.weights.Topology, "ImageLocality": &p.weights.Images}
	for _, name := range slices.Sorted(maps.Keys(p.Weights)) {
		to, w := scores[name], p.Weights[name]
		if to == nil {
			return fmt.Errorf("weights.%s: there is no such score; known are %s", name, strings.Join(slices.Sorted(maps.Keys(scores)), ", "))
		}
		if !(w >= 0 && w <= maxWeight) {
			return fmt.Errorf("weights.%s: %v is not between 0 and %d", name, w, maxWeight)
		}
		*to = w
	}
	for i := range p.DefaultConstraints {
		c := &p.DefaultConstraints[i]
		switch {
		case c.TopologyKey == "":
			return fmt.Errorf("defaultConstraints[%d].topologyKey: is needed", i)
		case c.MaxSkew < 1:
			return fmt.Errorf("defaultConstraints[%d].maxSkew: must be 1 or more", i)
		case c.WhenUnsatisfiable != corev1.DoNotSchedule && c.WhenUnsatisfiable != corev1.ScheduleAnyway:
			return fmt.Errorf("defaultConstraints[%d].whenUnsatisfiable: %q is neither %s nor %s", i, c.WhenUnsatisfiable, corev1.DoNotSchedule, corev1.ScheduleAnyway)
		case c.LabelSelector != nil || len(c.MatchLabelKeys) > 0:
			return fmt.Errorf("defaultConstraints[%d]: has no labelSelector and no matchLabelKeys: it counts the pods of the same controller", i)
		}
	}
	return nil
}

// likeOf selects the pods of the same controller; nil if there is none that
// is known.
func (c *classes) likeOf(r *state.Record) labels.Selector {
	owner, ok := loop.ControllerOf(r)
	if !ok {
		return nil
	}
	obj, err := c.store.Get(schema.ParseGroupKind(owner.Kind), r.Header.Key.Namespace, owner.Name)
	if err != nil {
		return nil
	}
	return selectorOf(obj)
}

func selectorOf(obj runtime.Object) labels.Selector {
	var s *metav1.LabelSelector
	switch o := obj.(type) {
	case *appsv1.ReplicaSet:
		s = o.Spec.Selector
	case *appsv1.StatefulSet:
		s = o.Spec.Selector
	case *corev1.ReplicationController:
		return labels.SelectorFromSet(o.Spec.Selector)
	}
	if s == nil {
		return nil
	}
	out, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return nil
	}
	return out
}
