package manifests

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"pgregory.net/rapid"
)

// What is written is read back, and With keeps a set of single numbers.
func TestIndexesAreASet(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		want := map[int32]bool{}
		var x Indexes
		for range rapid.IntRange(0, 6).Draw(rt, "rounds") {
			more := rapid.SliceOfN(rapid.Int32Range(0, 30), 0, 8).Draw(rt, "more")
			x = x.With(more...)
			for _, i := range more {
				want[i] = true
			}
		}
		again, err := ParseIndexes(x.String(), 31)
		if err != nil {
			rt.Fatal(err)
		}
		for _, y := range []Indexes{x, again} {
			if y.Len() != len(want) {
				rt.Fatalf("%s has %d, want %d", y, y.Len(), len(want))
			}
			for i := int32(0); i <= 31; i++ {
				if y.Has(i) != want[i] {
					rt.Fatalf("%s: %d", y, i)
				}
			}
		}
		for _, r := range x.Below(7) {
			if r.Last >= 7 {
				rt.Fatalf("%v is not below 7", r)
			}
		}
	})
}

func TestIndexesText(t *testing.T) {
	if s := (Indexes)(nil).With(7, 3, 1, 4, 5, 9, 10).String(); s != "1,3-5,7,9,10" {
		t.Error(s)
	}
	for text, want := range map[string]string{
		"1-2-3": "at most two parts", "x": "cannot convert", "5": "too large", "3-3": "non-increasing", "2,1": "non-increasing", "1-3,3": "non-increasing", "": "",
	} {
		_, err := ParseIndexes(text, 5)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// A claim that would not hold what was asked for is refused, wherever it
// stands.
func TestClaimsThatCannotBeKept(t *testing.T) {
	spec := func(change func(*corev1.PersistentVolumeClaimSpec)) corev1.PersistentVolumeClaimSpec {
		s := corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1Gi")}}}
		change(&s)
		return s
	}
	for field, change := range map[string]func(*corev1.PersistentVolumeClaimSpec){
		"":            func(*corev1.PersistentVolumeClaimSpec) {},
		".volumeMode": func(s *corev1.PersistentVolumeClaimSpec) { s.VolumeMode = ptr(corev1.PersistentVolumeBlock) },
		".dataSource": func(s *corev1.PersistentVolumeClaimSpec) {
			s.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "x"}
		},
	} {
		set := &appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{Template: corev1.PodTemplateSpec{Spec: wasmPod().Spec},
			VolumeClaimTemplates: []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: spec(change)}}}}
		pod := wasmPod(func(p *corev1.Pod) {
			p.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: spec(change)}}}
		})
		for prefix, obj := range map[string]runtime.Object{"spec": &corev1.PersistentVolumeClaim{Spec: spec(change)},
			"spec.volumeClaimTemplates[0].spec": set, "spec.volumes[0].ephemeral.volumeClaimTemplate.spec": pod} {
			Default(obj)
			warnings, refused := Unsupported(obj)
			if len(warnings) > 0 || (field == "") != (len(refused) == 0) || field != "" && refused[0].Field != prefix+field {
				t.Errorf("%s%s: %v %v", prefix, field, warnings, refused)
			}
		}
	}
}

func TestGeneratedJobSelector(t *testing.T) {
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "j", Namespace: "default", UID: "u"}}
	j.Spec.Template.Spec = wasmPod().Spec
	j.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	Default(j)
	GenerateJobSelector(j)
	if errs := Validate(j); len(errs) > 0 {
		t.Fatal(errs)
	}
	j.Spec.Template.Labels[batchv1.ControllerUidLabel] = "another"
	if errs := Validate(j); !slices.ContainsFunc(errs.ToAggregate().Errors(), func(err error) bool { return strings.Contains(err.Error(), "must be 'u'") }) {
		t.Fatal(errs)
	}
}

func TestSchedules(t *testing.T) {
	for text, ok := range map[string]bool{"* * * * *": true, "@daily": true, "@every 1h": true, "* * * *": false, "61 * * * *": false, "TZ=0": false, "": false} {
		if _, err := ParseSchedule(text); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
	if z, err := LoadZone(nil); err != nil || z.String() != "UTC" {
		t.Error(z, err)
	}
	if _, err := LoadZone(ptr("Europe/Berlin")); err != nil {
		t.Error(err)
	}
}
