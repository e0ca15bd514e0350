package oracle

import (
	"math/rand/v2"
	"reflect"
	"regexp"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"

	"github.com/dunlin-project/dunlin/manifests"
)

// filler fills objects with values that survive JSON.
func filler(seed int64) *randfill.Filler {
	return randfill.NewWithSeed(seed).NilChance(0.2).NumElements(0, 2).MaxDepth(40).Funcs(
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewMilliQuantity(c.Int63n(1_000_000), resource.DecimalSI)
		},
		func(v *intstr.IntOrString, c randfill.Continue) {
			*v = intstr.FromInt32(c.Int31n(100))
			if c.Bool() {
				*v = intstr.FromString([]string{"", "http", "25%"}[c.Intn(3)])
			}
		},
		func(t *metav1.Time, c randfill.Continue) { *t = metav1.Unix(c.Int63n(2_000_000_000), 0) },
		func(t *metav1.MicroTime, c randfill.Continue) {
			*t = metav1.NewMicroTime(metav1.Unix(c.Int63n(2_000_000_000), 0).Time)
		},
		func(r *runtime.RawExtension, _ randfill.Continue) { r.Raw = []byte(`{"a":1}`) },
		func(f *metav1.FieldsV1, _ randfill.Continue) { f.Raw = []byte(`{"f:a":{}}`) },
	)
}

// thin sets pointers to nil now and then, also those that filler's functions
// always fill, and takes strings from those that mean something.
func thin(v reflect.Value, r *rand.Rand) {
	words := []string{"", "", "a", "b-c", "TCP", "nginx:latest", "v1", "ClusterIP", "LoadBalancer", "None", "Container", "10.0.0.1", "Recreate", "ClientIP"}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return
		}
		if v.CanSet() && r.IntN(4) == 0 {
			v.SetZero()
			return
		}
		thin(v.Elem(), r)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				thin(v.Field(i), r)
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			thin(v.Index(i), r)
		}
	case reflect.String:
		v.SetString(words[r.IntN(len(words))])
	}
}

// TestRandomDefaults compares the defaults of filled objects, most of which
// no user would write: every default depends on few fields.
func TestRandomDefaults(t *testing.T) {
	allow := sharedAllowed(t)
	index := regexp.MustCompile(`\[[^\]]*\]|ours .*`)
	for _, k := range manifests.Kinds() {
		seen, compared := map[string]bool{}, 0
		for seed := range int64(150) {
			obj := k.New()
			filler(seed).Fill(obj)
			thin(reflect.ValueOf(obj), rand.New(rand.NewPCG(uint64(seed), 1)))
			obj.GetObjectKind().SetGroupVersionKind(k.GVK)
			stored, _, err := upstreamDefault(obj)
			if err != nil {
				continue // what the conversion refuses never is an object
			}
			compared++
			ours := obj.DeepCopyObject()
			manifests.Default(ours)
			for _, d := range compareObjects(t, ours, stored) {
				line := k.GVK.Kind + " defaults: " + d
				if form := index.ReplaceAllString(d, "[]"); allow.covers(line) || seen[form] {
					continue
				} else {
					seen[form] = true
				}
				t.Errorf("%.300s (seed %d)", line, seed)
			}
			again := ours.DeepCopyObject()
			manifests.Default(again)
			if d := compareObjects(t, again, ours); len(d) > 0 {
				t.Errorf("%s: not idempotent: %v (seed %d)", k.GVK.Kind, d, seed)
			}
		}
		t.Logf("%s: %d objects", k.GVK.Kind, compared)
		if compared < 100 {
			t.Errorf("%s: only %d objects could be compared", k.GVK.Kind, compared)
		}
	}
	allow.users++
}

// TestAllowedIsNeeded runs last: a difference that is gone must leave the
// list.
func TestAllowedIsNeeded(t *testing.T) {
	a := sharedAllowed(t)
	if a.users < 2 {
		t.Skip("SKIPPED: needs the tests before it, all of them and in order")
	}
	for _, l := range a.lines {
		if !l.used {
			t.Errorf("allowed.txt: nothing needs %q any more", l.text)
		}
	}
}
