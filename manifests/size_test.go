package manifests

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

func manyStrings(n int) map[string]string {
	m := make(map[string]string, n)
	for i := range n {
		m[fmt.Sprint("k", i)] = ""
	}
	return m
}

func manyJSON(n int) []byte {
	var b strings.Builder
	b.WriteString(`{"f:data":{".":{},`)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `"f:k%d":{}`, i)
	}
	b.WriteString("}}")
	return []byte(b.String())
}

func TestCheckEntries(t *testing.T) {
	const over = MaxEntries + 1
	pods := func(containers, env int) *corev1.Pod {
		p := &corev1.Pod{}
		for range containers {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Env: make([]corev1.EnvVar, env)})
		}
		return p
	}
	managed := func(n, keys int) *corev1.Pod {
		p := &corev1.Pod{}
		for range n {
			p.ManagedFields = append(p.ManagedFields, metav1.ManagedFieldsEntry{FieldsV1: metav1.NewFieldsV1(string(manyJSON(keys)))})
		}
		return p
	}
	pod := func(env int) *corev1.Pod {
		return &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{}, {Env: make([]corev1.EnvVar, env)}}}}
	}
	for name, c := range map[string]struct {
		obj  runtime.Object
		path string // "" is fine
	}{
		"as many as allowed":    {&corev1.ConfigMap{Data: manyStrings(MaxEntries), BinaryData: map[string][]byte{"a": make([]byte, 1<<20)}}, ""},
		"map":                   {&corev1.ConfigMap{Data: manyStrings(over)}, "data"},
		"labels":                {&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: manyStrings(over)}}, "metadata.labels"},
		"set":                   {&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Finalizers: make([]string, over)}}, "metadata.finalizers"},
		"list":                  {pod(over), "spec.containers[1].env"},
		"list, allowed":         {pod(MaxEntries), ""},
		"managed fields":        {&corev1.Pod{ObjectMeta: metav1.ObjectMeta{ManagedFields: []metav1.ManagedFieldsEntry{{FieldsV1: metav1.NewFieldsV1(string(manyJSON(over)))}}}}, "metadata.managedFields[0].fieldsV1"},
		"managed fields, fine":  {&corev1.Pod{ObjectMeta: metav1.ObjectMeta{ManagedFields: []metav1.ManagedFieldsEntry{{FieldsV1: metav1.NewFieldsV1(string(manyJSON(MaxEntries)))}}}}, ""},
		"raw":                   {&appsv1.ControllerRevision{Data: runtime.RawExtension{Raw: manyJSON(over)}}, "data"},
		"raw, no JSON":          {&appsv1.ControllerRevision{Data: runtime.RawExtension{Raw: make([]byte, 1<<20)}}, ""},
		"all together, allowed": {pods(4, MaxEntries-2), ""},
		"all together":          {pods(6, MaxEntries-2), "spec.containers[5].env"},
		"all in managed fields": {managed(6, MaxEntries-2), "metadata.managedFields[4].fieldsV1"},
		"unstructured":          {&unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"l": make([]any, over)}}}, "spec.l"},
	} {
		err := CheckEntries(c.obj)
		var many *TooManyEntriesError
		switch {
		case c.path == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.path != "" && (!errors.As(err, &many) || many.Path != c.path):
			t.Errorf("%s: %v, want one about %q", name, err, c.path)
		}
	}
}

func BenchmarkCheckEntries(b *testing.B) {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Labels: manyStrings(5)},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Env: make([]corev1.EnvVar, 10)}, {Env: make([]corev1.EnvVar, 10)}}},
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := CheckEntries(pod); err != nil {
			b.Fatal(err)
		}
	}
}
