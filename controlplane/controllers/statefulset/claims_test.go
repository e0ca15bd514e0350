package statefulset

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
)

// TestWhoseEndAClaimShares is upstream's table of the retention policy.
func TestWhoseEndAClaimShares(t *testing.T) {
	const keep, remove = appsv1.RetainPersistentVolumeClaimRetentionPolicyType, appsv1.DeletePersistentVolumeClaimRetentionPolicyType
	yes := true
	pod := &metav1.ObjectMeta{Name: "s-1", UID: "pod"}
	foreign := metav1.OwnerReference{Kind: "Backup", Name: "b", UID: "foreign", Controller: &yes}
	for _, tc := range []struct {
		deleted, scaled appsv1.PersistentVolumeClaimRetentionPolicyType
		condemned       bool
		want            string
	}{
		{keep, keep, false, ""}, {keep, keep, true, ""},
		{remove, keep, false, "set"}, {remove, keep, true, "set"},
		{keep, remove, false, ""}, {keep, remove, true, "pod"},
		{remove, remove, false, "set"}, {remove, remove, true, "pod"},
	} {
		set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "s", UID: "set"}}
		set.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{WhenDeleted: tc.deleted, WhenScaled: tc.scaled}
		for _, have := range [][]metav1.OwnerReference{nil, {{UID: "set", Controller: &yes}}, {{UID: "pod", Controller: &yes}}} {
			got := ""
			for _, o := range ownersOf(set, pod, have, tc.condemned) {
				got += string(o.UID)
			}
			if got != tc.want {
				t.Errorf("deleted %s, scaled %s, condemned %v, had %v: %q, want %q", tc.deleted, tc.scaled, tc.condemned, have, got, tc.want)
			}
		}
		if got := ownersOf(set, pod, []metav1.OwnerReference{foreign}, tc.condemned); len(got) != 1 || got[0].UID != "foreign" {
			t.Errorf("somebody else's claim: %v", got)
		}
	}
}

// TestClaimsOfASet: each pod has claims of its own name; one that is going is
// waited for, so that no pod starts on data that is about to go.
func TestClaimsOfASet(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("a")
	two, class := int32(2), ""
	template := fixture.Template("db")
	w.Create(&appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "db"}, Spec: appsv1.StatefulSetSpec{
		Replicas: &two, Template: template, PodManagementPolicy: appsv1.ParallelPodManagement, Selector: &metav1.LabelSelector{MatchLabels: template.Labels},
		VolumeClaimTemplates: []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &class,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1Gi")}}}}}}})
	going := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "data-db-1", Finalizers: []string{"example.com/slow"}},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &class,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1Gi")}}}}
	w.Create(going)
	w.Delete(claimGK, "default", "data-db-1", "")
	w.Try(w.Env(), New(w.Env()))
	pods := fixture.List[*corev1.Pod](w, fixture.Pod, "default")
	if len(pods) != 1 || pods[0].Name != "db-0" || pods[0].Spec.Volumes[0].PersistentVolumeClaim == nil || pods[0].Spec.Volumes[0].PersistentVolumeClaim.ClaimName != "data-db-0" {
		t.Fatalf("%d pods, %+v", len(pods), pods[0].Spec.Volumes)
	}
	c := fixture.Get[*corev1.PersistentVolumeClaim](w, claimGK, "default", "data-db-0")
	if c.Labels["app"] != "db" || len(c.OwnerReferences) != 0 {
		t.Fatalf("%+v", c.ObjectMeta)
	}
	fixture.Change(w, claimGK, "default", "data-db-1", "", func(c *corev1.PersistentVolumeClaim) { c.Finalizers = nil })
	w.Settle(New(w.Env()))
	if pods := fixture.List[*corev1.Pod](w, fixture.Pod, "default"); len(pods) != 2 {
		t.Fatalf("%d pods", len(pods))
	}
}

// TestClaimOfAPendingPodIsMadeAnew: to delete the claim is the way out of a
// volume that is lost with its node, or too large for any; the pod that waits
// must not wait for ever.
func TestClaimOfAPendingPodIsMadeAnew(t *testing.T) {
	w := newWorld(t)
	w.Create(newSet(2, parallel, func(s *appsv1.StatefulSet) {
		class := ""
		s.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &class,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1Gi")}}}}}
	}))
	w.Settle(w.c)
	claim := func() *corev1.PersistentVolumeClaim {
		return fixture.Get[*corev1.PersistentVolumeClaim](w.World, claimGK, "default", "data-db-1")
	}
	before := claim().UID
	fixture.Change(w.World, claimGK, "default", "data-db-1", "", func(c *corev1.PersistentVolumeClaim) { c.Finalizers = []string{"example.com/slow"} })
	w.Delete(claimGK, "default", "data-db-1", "")
	w.Settle(w.c)
	if claim().UID != before || len(w.Events.With("FailedCreate")) != 0 {
		t.Fatalf("while it is being deleted: %+v, %+v", claim().ObjectMeta, w.Events.With("FailedCreate"))
	}
	fixture.Change(w.World, claimGK, "default", "data-db-1", "", func(c *corev1.PersistentVolumeClaim) { c.Finalizers = nil })
	w.Settle(w.c)
	if now := claim(); now.UID == before || now.DeletionTimestamp != nil {
		t.Fatalf("not made anew: %+v", now.ObjectMeta)
	}
	// One that runs has its volume; its claim is protected, and nothing of the set's.
	w.BindAll("n")
	w.Report(nil)
	w.Delete(claimGK, "default", "data-db-0", "")
	w.Settle(w.c)
	if n := len(fixture.List[*corev1.PersistentVolumeClaim](w.World, claimGK, "default")); n != 1 {
		t.Fatalf("%d claims after that of a running pod was removed", n)
	}
}
