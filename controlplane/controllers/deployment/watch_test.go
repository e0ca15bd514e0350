package deployment

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

const goodImage, nextImage = "file:///app.wasm", "file:///good2.wasm"

func ofImage(i string) func(*corev1.Pod) bool {
	return func(p *corev1.Pod) bool { return p.Spec.Containers[0].Image == i }
}

// watching is a cluster in which a good version serves and the next, good as
// well, has all its pods available and is watched.
func watching(t *testing.T, n int32, set ...func(*appsv1.Deployment)) *cluster {
	t.Helper()
	c := newCluster(t)
	c.bubble = true
	c.Create(web(n, append([]func(*appsv1.Deployment){rollsBack("true")}, set...)...))
	c.turns(settled, healthy)
	c.change(image(nextImage))
	for range 60 {
		if c.turn(healthy); reason(c.get(), appsv1.DeploymentProgressing) == "True "+reasonWatched {
			return c
		}
	}
	t.Fatalf("the new version is not watched: %+v", c.get().Status)
	return nil
}

// TestNewVersionProvesItself: until the new version was available for the
// whole deadline one pod of the old one stays, and the status says so; after
// that the rollout ends.
func TestNewVersionProvesItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := watching(t, 3)
		said := condition(&c.get().Status, appsv1.DeploymentProgressing).Message
		if !strings.Contains(said, "must stay available for 30 s; until then one pod of revision 1 (ReplicaSet ") {
			t.Error(said)
		}
		for turns := 0; c.readyOf(ofImage(goodImage)) > 0; turns++ {
			if c.turn(healthy); turns > 40 {
				t.Fatalf("the old pod never goes: %+v", c.get().Status)
			}
		}
		since := condition(&c.get().Status, appsv1.DeploymentProgressing).LastUpdateTime
		if got := c.Now().Sub(since.Time); got > 2*time.Second {
			t.Errorf("the deadline counts from %v before the end of the watch", got)
		}
		c.turns(3, healthy)
		if d := c.get(); reason(d, appsv1.DeploymentProgressing) != "True "+reasonSetAvailable || d.Status.Replicas != 3 {
			t.Errorf("%+v", d.Status)
		}
	})
}

// TestWatchOutlivesScaling: no change of the size takes the kept pod, and none
// makes too many.
func TestWatchOutlivesScaling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, surge := range []int32{0, 1} {
			c := watching(t, 4, func(d *appsv1.Deployment) {
				d.Spec.ProgressDeadlineSeconds = new(int32(120)) // what goes on below is over long before
				d.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxSurge: new(intstr.FromInt32(surge)), MaxUnavailable: new(intstr.FromInt32(1 - surge))}
			})
			for _, n := range []int32{1, 4, 2, 3} {
				c.change(func(d *appsv1.Deployment) { d.Spec.Replicas = &n })
				for range 4 {
					if c.turn(healthy); c.readyOf(ofImage(goodImage)) == 0 {
						t.Fatalf("surge %d: scaled to %d, no good pod is left", surge, n)
					}
				}
			}
			c.turns(160, healthy)
			if d := c.get(); c.image() != nextImage || d.Status.AvailableReplicas != 3 || d.Status.Replicas != 3 {
				t.Errorf("surge %d: image %s, %+v", surge, c.image(), d.Status)
			}
		}
	})
}

// TestLateVersionWhenRollbackIsNew: whoever asks for the way back together
// with a version that fails late gets back what served, also over a second one.
func TestLateVersionWhenRollbackIsNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.bubble = true
		c.Create(web(2, rollsBack("true"), func(d *appsv1.Deployment) { d.Annotations = nil }))
		c.turns(5, healthy)
		for _, bad := range []string{"file:///late1.wasm", "file:///late2.wasm"} {
			c.change(func(d *appsv1.Deployment) {
				d.Annotations[manifests.AnnotationAutoRollback] = "true"
				image(bad)(d)
			})
			for range 14 {
				if c.turn(c.behaves); c.readyOf(healthy) == 0 {
					t.Fatal("no healthy pod is left")
				}
			}
		}
		c.turns(110, c.behaves)
		if c.image() != goodImage || c.get().Status.AvailableReplicas != 2 {
			t.Fatalf("image %s: %+v", c.image(), c.get().Status)
		}
	})
}

// TestMovedPodIsNoFault: a pod that is made anew elsewhere while the version is
// watched begins the watch anew, and is no reason to go back.
func TestMovedPodIsNoFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := watching(t, 2)
		for range 4 {
			c.turns(15, healthy)
			for _, p := range fixture.List[*corev1.Pod](c.World, fixture.Pod, "default") {
				if ofImage(nextImage)(p) {
					c.World.Delete(fixture.Pod, "default", p.Name, metav1.DeletePropagationBackground)
					break
				}
			}
		}
		if c.readyOf(ofImage(goodImage)) == 0 {
			t.Error("the old pod is gone although the new version was never available for so long")
		}
		c.turns(60, healthy)
		if d := c.get(); c.image() != nextImage || reason(d, appsv1.DeploymentProgressing) != "True "+reasonSetAvailable || len(c.Events.With("DeploymentRollback")) != 0 {
			t.Errorf("image %s: %+v", c.image(), d.Status)
		}
	})
}

// TestProvenVersionIsNotLeft: pods that crash once the version has proven
// itself, as all do when a database is away, are no reason to go back.
func TestProvenVersionIsNotLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := watching(t, 2, func(d *appsv1.Deployment) { d.Annotations[manifests.AnnotationAutoRollback] = "50%" })
		c.turns(50, healthy)
		for _, p := range fixture.List[*corev1.Pod](c.World, fixture.Pod, "default") {
			fixture.Change(c.World, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) {
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", RestartCount: 5}}
			})
		}
		c.turns(60, func(*corev1.Pod) bool { return false })
		if c.image() != nextImage || len(c.Events.With("DeploymentRollback")) != 0 {
			t.Errorf("image %s: %+v", c.image(), c.get().Status)
		}
	})
}

// TestNothingIsNoProof: a bad version is not good because it has no pods.
func TestNothingIsNoProof(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.bubble = true
		c.Create(web(2, rollsBack("true")))
		c.turns(settled, healthy)
		c.change(image("file:///bad.wasm"))
		c.turns(2, healthy)
		for _, n := range []int32{0, 2} {
			c.change(func(d *appsv1.Deployment) { d.Spec.Replicas = &n })
			c.turns(4, healthy)
		}
		c.turns(60, healthy)
		if c.image() != goodImage {
			t.Errorf("image %s: %+v", c.image(), c.get().Status)
		}
	})
}
