package volume

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/manifests"
)

// Pods with ephemeral volumes come and go, claims are deleted, and the leader
// dies anywhere: every waiting pod has a claim of its own for each volume, and
// a claim that has the name by chance is left to its owner, and said so.
func TestEphemeralClaimsThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := world(t)
		w.AddNode("n")
		theirs := map[string]bool{}
		reign := w.Reign(rt, func() error {
			for name := range theirs {
				if len(claimNow(w, name).OwnerReferences) > 0 {
					return fmt.Errorf("claim %s was taken from its owner", name)
				}
			}
			return nil
		}, func(env loop.Env) []*loop.Controller { return []*loop.Controller{NewEphemeral(env)} })
		for i := range rapid.IntRange(3, 25).Draw(rt, "steps") {
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 0:
				reign.Elect(rapid.IntRange(0, 2).Draw(rt, "writes"))
				reign.Work()
			case 1:
				reign.Work()
			case 2, 3:
				p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("p%d", i)}, Spec: fixture.Template("a").Spec}
				for v := range rapid.IntRange(1, 2).Draw(rt, "volumes") {
					p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: fmt.Sprintf("v%d", v), VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
						VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{
							AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
							Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1Gi")}}}}}}})
				}
				if name := manifests.EphemeralClaimName(p, "v0"); rapid.IntRange(0, 3).Draw(rt, "name is taken") == 0 {
					w.Create(claimOf(name))
					theirs[name] = true
				}
				w.Create(p)
			case 4:
				if list := fixture.List[*corev1.Pod](w, fixture.Pod, "default"); len(list) > 0 {
					w.Delete(fixture.Pod, "default", list[rapid.IntRange(0, len(list)-1).Draw(rt, "pod")].Name, "")
				}
			case 5:
				for _, c := range fixture.List[*corev1.PersistentVolumeClaim](w, claimGK, "default") {
					if !theirs[c.Name] && len(c.Finalizers) == 0 && rapid.Bool().Draw(rt, "deleted") {
						w.Delete(claimGK, "default", c.Name, "")
					}
				}
			}
		}
		reign.Finish()
		for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "default") {
			for i := range p.Spec.Volumes {
				name := manifests.EphemeralClaimName(p, p.Spec.Volumes[i].Name)
				switch {
				case p.DeletionTimestamp != nil:
				case theirs[name]:
					if len(w.Events.With("FailedBinding")) == 0 {
						rt.Fatalf("nobody says that %s is somebody else's", name)
					}
				case !metav1.IsControlledBy(claimNow(w, name), p):
					rt.Fatalf("claim %s is not the pod's", name)
				}
			}
		}
	})
}
