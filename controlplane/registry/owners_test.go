package registry

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/manifests"
)

// The note of owners in another namespace is made in the same write as the
// reference, and is what the cluster knows, whatever is given: it stays when a
// write leaves it out and when the owner is gone, and names no valid owner.
func TestIgnoredOwnersAreNoted(t *testing.T) {
	w := newWorld(t)
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "elsewhere"}})
	put := func(ns, name string, note string, owners ...types.UID) *corev1.ConfigMap {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
		for _, uid := range owners {
			cm.OwnerReferences = append(cm.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: "x", UID: uid})
		}
		if note != "" {
			cm.Annotations = map[string]string{manifests.AnnotationIgnoredOwners: note}
		}
		return as[*corev1.ConfigMap](t, w.create(cm), nil)
	}
	update := func(name string, sub Subresource, f func(*corev1.ConfigMap)) *corev1.ConfigMap {
		t.Helper()
		out, err := w.Update(context.Background(), cmGK, "default", name, sub, func(cur runtime.Object) (runtime.Object, error) {
			cm := as[*corev1.ConfigMap](t, cur, nil)
			f(cm)
			return cm, nil
		}, WriteOptions{})
		return as[*corev1.ConfigMap](t, out, err)
	}
	expect := func(what string, cm *corev1.ConfigMap, want ...types.UID) {
		t.Helper()
		var got []types.UID
		for _, uid := range IgnoredOwners(cm) {
			got = append(got, types.UID(uid))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: noted %v, want %v", what, got, want)
		}
	}
	far, near := put("elsewhere", "far", ""), put("default", "near", "")
	expect("an object without owners", put("default", "none", "forged"))
	expect("an owner beside it", put("default", "valid", string(near.UID), near.UID))
	expect("an owner that is nowhere", put("default", "dead", "", "no-such-uid"))
	expect("owners of both sorts", put("default", "both", "", near.UID, far.UID), far.UID)
	strip := func(cm *corev1.ConfigMap) { cm.Annotations = nil }
	before := as[*corev1.ConfigMap](t, w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "late"}}), nil)
	expect("an object that gets the reference later", update(before.Name, Main, func(cm *corev1.ConfigMap) {
		cm.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "far", UID: far.UID}}
	}), far.UID)
	expect("replaced", update("both", Main, strip), far.UID)
	if _, _, err := w.Delete(context.Background(), cmGK, "elsewhere", "far", DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	expect("its owner gone", update("both", Main, func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"a": "1"} }), far.UID)
	version := as[*corev1.ConfigMap](t, update("both", Main, strip), nil)
	expect("replaced after that", version, far.UID)
	if again := update("both", Main, strip); again.ResourceVersion != version.ResourceVersion {
		t.Errorf("a write that changes nothing but the note is written: %s, %s", version.ResourceVersion, again.ResourceVersion)
	}
	expect("made again from what was exported", put("default", "restored", string(far.UID), far.UID), far.UID)
	expect("the reference gone", update("both", Main, func(cm *corev1.ConfigMap) { cm.OwnerReferences = nil }))
}
