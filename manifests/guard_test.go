package manifests

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestCheckNumbers(t *testing.T) {
	pod := ByGVK(corev1.SchemeGroupVersion.WithKind("Pod"))
	for in, refused := range map[string]bool{
		`{"spec":{"overhead":{"memory":"1e999999999"}}}`:                                        true,
		`{"spec":{"overhead":{"memory":1e-999999999}}}`:                                         true,
		`{"spec":{"overhead":{"memory": "1.5E+9999999"}}}`:                                      true,
		"spec:\n  overhead: {memory: 1e999999999}\n":                                            true,
		`{"metadata":{"labels":{"v":"1e12345"}}}`:                                               false,
		`{"metadata":{"labels":{"v":"1e12345"}},"spec":{"overhead":{"memory":"1e-999999999"}}}`: true,
		`[{"op":"add","path":"/spec/overhead/memory","value":"1e999999999"}]`:                   true,
		"k8s\x00\x0f\x0a\x0b1e999999999":                                                        true,
		"\xa1\x611\x6b1e999999999":                                                              true,
		`{"image":"app:12e1234567"}`:                                                            false, `{"sha":"9f12e1234567"}`: false, `{"image":"app@12e1234567"}`: false,
		`{"memory":"1e9"}`: false, `{"data":"e99999999"}`: false, "": false, "e": false, `{"a":1e99999`: false,
		`{"name":"web-5e1234567f-abcde"}`: false,
	} {
		if got := CheckNumbers([]byte(in), pod) != nil; got != refused {
			t.Errorf("%s: refused %v", in, got)
		}
	}
	if CheckNumbers([]byte(`"1e99999"`), nil) == nil {
		t.Error("a body of no known kind passed")
	}
}

// A page size is a quantity inside a resource's name.
func TestHostilePageSize(t *testing.T) {
	p := wasmPod(func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Limits["hugepages-1e-999999999"] = p.Spec.Containers[0].Resources.Limits["memory"]
	})
	if len(Validate(p)) == 0 {
		t.Fatal("passed")
	}
}
