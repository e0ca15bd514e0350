package manifests

import (
	"bytes"
	"net/url"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Every kind and its list survive every format.
func TestCodecsRoundTrip(t *testing.T) {
	for _, k := range Kinds() {
		for _, obj := range []runtime.Object{k.New(), k.NewList()} {
			gvks, _, err := Scheme().ObjectKinds(obj)
			if err != nil || len(gvks) != 1 {
				t.Fatalf("%s: %v %v", k.GVK, gvks, err)
			}
			obj.GetObjectKind().SetGroupVersionKind(gvks[0])
			for _, info := range Codecs().SupportedMediaTypes() {
				var b bytes.Buffer
				if err := info.Serializer.Encode(obj, &b); err != nil {
					t.Fatalf("%s as %s: %v", gvks[0], info.MediaType, err)
				}
				back, _, err := info.Serializer.Decode(b.Bytes(), nil, nil)
				if err != nil {
					t.Fatalf("%s as %s: %v", gvks[0], info.MediaType, err)
				}
				back.GetObjectKind().SetGroupVersionKind(gvks[0]) // protobuf leaves it out
				if !equality.Semantic.DeepEqual(obj, back) {
					t.Errorf("%s as %s: %v", gvks[0], info.MediaType, back)
				}
			}
		}
	}
}

func TestParameterCodec(t *testing.T) {
	var list metav1.ListOptions
	q := url.Values{"limit": {"5"}, "watch": {"true"}, "sendInitialEvents": {"true"}, "labelSelector": {"a=b"}}
	if err := ParameterCodec().DecodeParameters(q, corev1.SchemeGroupVersion, &list); err != nil || list.Limit != 5 || !list.Watch || !*list.SendInitialEvents {
		t.Fatal(list, err)
	}
	var logs corev1.PodLogOptions
	q = url.Values{"tailLines": {"7"}, "follow": {"true"}, "sinceTime": {"2026-01-31T12:00:00Z"}, "container": {"c"}}
	if err := ParameterCodec().DecodeParameters(q, corev1.SchemeGroupVersion, &logs); err != nil || *logs.TailLines != 7 || !logs.Follow || logs.SinceTime.Year() != 2026 {
		t.Fatal(logs, err)
	}
	if err := ParameterCodec().DecodeParameters(url.Values{"tailLines": {"x"}}, corev1.SchemeGroupVersion, &logs); err == nil {
		t.Fatal("tailLines=x passed")
	}
}
