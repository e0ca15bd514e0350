package scheduler

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

var (
	podGK          = schema.GroupKind{Kind: "Pod"}
	nodeGK         = schema.GroupKind{Kind: "Node"}
	runtimeClassGK = schema.GroupKind{Group: nodev1.GroupName, Kind: "RuntimeClass"}
)

// placementAnnotation chooses the score: "spread", or "pack" (the default).
const placementAnnotation = "dunlin.dev/placement"

// class is what the scheduler reads of a pod's spec and annotations. Pods of
// one template share it.
type class struct {
	shape     *plan.Shape
	spread    bool
	priority  int32
	scheduler string
}

// classes finds a pod's class, decoding each distinct pair of bodies once:
// the state machine interns bodies, so the pods of a template share them.
// Bounded: forgotten as a whole when full.
type classes struct {
	store  registry.Store
	bodies map[bodies]*class
	shapes map[string]*plan.Shape // by canonical text
	// conditioned says which status bodies hold a PodScheduled condition. New
	// pods share one.
	conditioned map[*state.Body]bool
}

type bodies struct{ spec, meta *state.Body }

const maxClasses = 4096

func newClasses(store registry.Store) *classes {
	c := &classes{store: store}
	c.clear()
	return c
}

// clear forgets everything, for when a RuntimeClass changed.
func (c *classes) clear() {
	c.bodies, c.shapes = map[bodies]*class{}, map[string]*plan.Shape{}
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
	key := bodies{r.Spec, r.Meta}
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
	k, err := c.build(pod)
	if err != nil {
		return nil, err
	}
	if len(c.bodies) >= maxClasses {
		c.clear()
	}
	c.bodies[key] = k
	return k, nil
}

func (c *classes) build(pod *corev1.Pod) (*class, error) {
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
	k := &class{shape: s, spread: pod.Annotations[placementAnnotation] == "spread", scheduler: pod.Spec.SchedulerName}
	if pod.Spec.Priority != nil {
		k.priority = *pod.Spec.Priority
	}
	return k, nil
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
