package manifests

import (
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"pgregory.net/rapid"
)

func TestParseWeight(t *testing.T) {
	for text, want := range map[string]uint16{"1": 1, "100": 100, "10000": 10000, "": 0, "0": 0, "-1": 0, "10001": 0, "1.5": 0, "10%": 0, " 5": 0, "65537": 0} {
		got, err := ParseWeight(text)
		if got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"x", "[]", `{"a":"5"}`, `{"a":0}`, `{"a":10001}`, `{"a":-1}`, `{"a":1`} {
		if w, err := ParseWeights(text); err == nil {
			t.Errorf("%s: %v", text, w)
		}
	}
}

func TestWeightsComeBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.MapOf(rapid.StringMatching(`[0-9a-f:.]{1,20}`), rapid.Uint16Range(1, MaxWeight)).Draw(t, "weights")
		got, err := ParseWeights(FormatWeights(want))
		if err != nil || !maps.Equal(got, want) {
			t.Fatalf("%v: %v, %v", want, got, err)
		}
	})
}

// A weight that cannot be read is refused where it is written.
func TestWeightsAreChecked(t *testing.T) {
	for value, wrong := range map[string]string{"5": "", "0": "must be a whole number from 1 to 10000", "half": "must be a whole number"} {
		p := &problems{}
		p.podAnnotations(metadataPath.Child("annotations"), map[string]string{AnnotationWeight: value}, &corev1.PodSpec{})
		check(t, p, AnnotationWeight, wrong)
	}
	for value, wrong := range map[string]string{`{"10.1.2.3":5}`: "", "5": "must be a JSON object of weights by address", `{"10.1.2.3":0}`: "10.1.2.3: must be a whole number"} {
		p := &problems{}
		s := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4}
		s.Annotations = map[string]string{AnnotationWeights: value}
		p.endpointSlice(s, nil)
		check(t, p, AnnotationWeights, wrong)
		p = &problems{}
		e := &corev1.Endpoints{}
		e.Annotations = s.Annotations
		p.endpoints(e, e)
		check(t, p, AnnotationWeights, wrong)
	}
}

func check(t *testing.T, p *problems, key, wrong string) {
	t.Helper()
	text := ""
	if len(p.list) > 0 {
		text = p.list.ToAggregate().Error()
	}
	if (wrong == "") != (text == "") || !strings.Contains(text, wrong) || (text != "" && !strings.Contains(text, key)) {
		t.Errorf("%q, want %q", text, wrong)
	}
}
