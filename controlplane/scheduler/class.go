package scheduler

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

var (
	podGK          = schema.GroupKind{Kind: "Pod"}
	nodeGK         = schema.GroupKind{Kind: "Node"}
	namespaceGK    = schema.GroupKind{Kind: "Namespace"}
	runtimeClassGK = schema.GroupKind{Group: nodev1.GroupName, Kind: "RuntimeClass"}
)

// placementAnnotation chooses the score: "spread", or "pack" (the default).
const placementAnnotation = manifests.AnnotationPlacement

// class is what the scheduler reads of a pod's spec and annotations. Pods of
// one template share it.
type class struct {
	shape    *plan.Shape
	terms    *plan.Terms // nil: none
	spread   bool
	priority int32
	never    bool     // preemptionPolicy Never
	profile  *Profile // nil: another scheduler's
	// Of pods that mount claims only; such a class is one pod's alone. pending
	// claims get their node with the pod; first: some volume must be bound
	// before the pod is.
	claims  []claimKey
	pending []pendingClaim
	first   bool
	base    *class
	text    string
	images  []string // one entry a container, as plan.ImageName tells them
}

// classes finds a pod's class, decoding each distinct pair of bodies once:
// the state machine interns bodies, so the pods of a template share them.
// Bounded: forgotten as a whole when full.
type classes struct {
	store registry.Store
	// profiles by name; defaults: one of them has default constraints.
	profiles map[string]*Profile
	defaults bool
	bodies   map[bodies]*class
	shapes   map[string]*plan.Shape // by canonical text
	terms    map[string]*plan.Terms // by their ID
	// conditioned says which status bodies hold a PodScheduled condition. New
	// pods share one.
	conditioned map[*state.Body]bool
}

type bodies struct {
	spec, meta *state.Body
	namespace  string // only where the spec has terms, which are relative to it
	owner      string // only where a profile's default constraints are its pods'
}

// Names in a pod's encoded spec that its terms cannot be without.
var (
	affinityMark = [][]byte{[]byte("podAffinity"), []byte("podAntiAffinity")}
	spreadMark   = []byte("topologySpreadConstraints")
)

// holds says whether the pod can have terms that concern others.
func holds(r *state.Record) bool {
	return r.Spec != nil && (bytes.Contains(r.Spec.Data, affinityMark[0]) || bytes.Contains(r.Spec.Data, affinityMark[1]))
}

func (c *classes) key(r *state.Record) bodies {
	k := bodies{spec: r.Spec, meta: r.Meta}
	if holds(r) || r.Spec != nil && bytes.Contains(r.Spec.Data, spreadMark) {
		k.namespace = r.Header.Key.Namespace
	}
	if o, ok := loop.ControllerOf(r); ok && c.defaults {
		k.namespace, k.owner = r.Header.Key.Namespace, o.UID
	}
	return k
}

const maxClasses = 4096

func newClasses(store registry.Store, profiles []*Profile) *classes {
	c := &classes{store: store, profiles: map[string]*Profile{}}
	for _, p := range profiles {
		c.profiles[p.SchedulerName] = p
		c.defaults = c.defaults || len(p.DefaultConstraints) > 0
	}
	c.clear()
	return c
}

// clear forgets everything, for when a RuntimeClass changed.
func (c *classes) clear() {
	c.bodies, c.shapes, c.terms = map[bodies]*class{}, map[string]*plan.Shape{}, map[string]*plan.Terms{}
	c.conditioned = map[*state.Body]bool{}
}

// scheduledCondition says whether the pod's status has a PodScheduled
// condition already.
func (c *classes) scheduledCondition(r *state.Record) bool {
	if r.Status == nil {
		return false
	}
	if has, ok := c.conditioned[r.Status]; ok {
		return has
	}
	has := false
	if obj, err := c.store.Decode(r); err == nil {
		if pod, ok := obj.(*corev1.Pod); ok {
			for i := range pod.Status.Conditions {
				has = has || pod.Status.Conditions[i].Type == corev1.PodScheduled
			}
		}
	}
	if len(c.conditioned) >= maxClasses {
		clear(c.conditioned)
	}
	c.conditioned[r.Status] = has
	return has
}

func (c *classes) of(r *state.Record) (*class, error) {
	key := c.key(r)
	if k, ok := c.bodies[key]; ok {
		return k, nil
	}
	obj, err := c.store.Decode(r)
	if err != nil {
		return nil, fmt.Errorf("decode pod %s: %w", r.Header.Key.Name, err)
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("pod %s is a %T", r.Header.Key.Name, obj)
	}
	k, err := c.build(pod, r)
	if err != nil {
		return nil, err
	}
	if len(c.bodies) >= maxClasses {
		c.clear()
	}
	c.bodies[key] = k
	return k, nil
}

func (c *classes) build(pod *corev1.Pod, r *state.Record) (*class, error) {
	s := &plan.Shape{Selector: pod.Spec.NodeSelector, Tolerations: pod.Spec.Tolerations}
	if a := pod.Spec.Affinity; a != nil && a.NodeAffinity != nil {
		s.Required = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
		s.Preferred = a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution
	}
	if name := pod.Spec.RuntimeClassName; name != nil && *name != "" {
		if err := c.addRuntime(s, *name); err != nil {
			return nil, err
		}
	}
	text, err := json.Marshal(s) // map keys are sorted
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", pod.Name, err)
	}
	if known, ok := c.shapes[string(text)]; ok {
		s = known
	} else {
		c.shapes[string(text)] = s
	}
	profile := c.profiles[cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName)]
	terms, err := c.termsOf(pod, r, profile)
	if err != nil {
		return nil, err
	}
	k := &class{shape: s, terms: terms, spread: pod.Annotations[placementAnnotation] == "spread", profile: profile, images: imagesOf(pod)}
	if pod.Spec.Priority != nil {
		k.priority = *pod.Spec.Priority
	}
	if p := pod.Spec.PreemptionPolicy; p != nil {
		k.never = *p == corev1.PreemptNever
	}
	return k, nil
}

// imagesOf lists what the image locality score counts, as upstream's: every
// container's image and every image volume's.
func imagesOf(pod *corev1.Pod) (out []string) {
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			out = append(out, plan.ImageName(list[i].Image))
		}
	}
	for i := range pod.Spec.Volumes {
		if v := pod.Spec.Volumes[i].Image; v != nil {
			out = append(out, plan.ImageName(v.Reference))
		}
	}
	return out
}

// termsOf reads the pod's terms, and the profile's default constraints where
// it has none.
func (c *classes) termsOf(pod *corev1.Pod, r *state.Record, profile *Profile) (*plan.Terms, error) {
	var defaults []corev1.TopologySpreadConstraint
	var like labels.Selector
	if profile != nil && len(profile.DefaultConstraints) > 0 && len(pod.Spec.TopologySpreadConstraints) == 0 {
		defaults, like = profile.DefaultConstraints, c.likeOf(r)
	}
	terms, err := plan.TermsOf(pod, defaults, like)
	if err != nil || terms == nil {
		return nil, err
	}
	if known, ok := c.terms[terms.ID]; ok {
		return known, nil
	}
	c.terms[terms.ID] = terms
	return terms, nil
}

// addRuntime adds the RuntimeClass's demands: its handler and its scheduling
// constraints (KEP-585).
func (c *classes) addRuntime(s *plan.Shape, name string) error {
	s.RuntimeClass = name
	obj, err := c.store.Get(runtimeClassGK, "", name)
	if apierrors.IsNotFound(err) {
		s.Handler = name // nothing can run it until the class or such a node appears
		return nil
	}
	if err != nil {
		return fmt.Errorf("RuntimeClass %s: %w", name, err)
	}
	rc, ok := obj.(*nodev1.RuntimeClass)
	if !ok {
		return fmt.Errorf("RuntimeClass %s is a %T", name, obj)
	}
	s.Handler = rc.Handler
	if rc.Scheduling == nil {
		return nil
	}
	merged := map[string]string{}
	for k, v := range rc.Scheduling.NodeSelector {
		merged[k] = v
	}
	for k, v := range s.Selector {
		merged[k] = v
	}
	s.Selector = merged
	s.Tolerations = append(append([]corev1.Toleration{}, s.Tolerations...), rc.Scheduling.Tolerations...)
	return nil
}
