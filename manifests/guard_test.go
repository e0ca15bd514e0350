package manifests

import (
	"bytes"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
)

func TestCheckNumbers(t *testing.T) {
	pod := ByGVK(corev1.SchemeGroupVersion.WithKind("Pod"))
	for in, refused := range map[string]bool{
		`{"spec":{"overhead":{"memory":"1e999999999"}}}`:                                        true,
		`{"spec":{"overhead":{"memory":1e-999999999}}}`:                                         true,
		`{"spec":{"overhead":{"memory": "1.5E+9999999"}}}`:                                      true,
		"spec:\n  overhead: {memory: 1e999999999}\n":                                            true,
		`{"metadata":{"labels":{"v":"1e12345"}}}`:                                               false,
		`{"metadata":{"uid":"1e123456-0000-4000-8000-000000000000"}}`:                           false,
		`{"metadata":{"labels":{"v":"1e12345"}},"spec":{"overhead":{"memory":"1e-999999999"}}}`: true,
		`[{"op":"add","path":"/spec/overhead/memory","value":"1e999999999"}]`:                   true,
		`[{"op":"add","path":"/spec/overhead","value":{"memory":1e999999999}}]`:                 true,
		`[{"op":"add","path":"/metadata/labels/v","value":"1e999999999"}]`:                      false,
		`[{"op":"test","path":"/spec/nodeName","value":"1e123456-a"}]`:                          false,
		`{"spec":{"overhead":{"memory":"1\u0065999999999"}}}`:                                   true,
		`{"spec":{"overhead":{"memory":"1e\u0039999"}}}`:                                        true,
		"spec: {overhead: {memory: \"1\\x65999999999\"}}\n":                                     true,
		"spec: {overhead: {memory: \"1e9\\\n  99999999\"}}\n":                                   true,
		"metadata: {annotations: {a: \"1\\x65999999999\"}}\n":                                   false,
		`{"metadata":{"annotations":{"html":"\u003cb\u003e1e9"}}}`:                              false,
		// The body's own kind is decoded before it is compared with the path's.
		`{"apiVersion":"apps/v1","kind":"Deployment","spec":{"template":{"spec":{"overhead":{"cpu":"1e9999999"}}}}}`: true,
		"k8s\x00\x0f\x0a\x0b1e999999999":                                          true,
		"\xa1\x64spec\xa1\x68overhead\xa1\x66memory\x6b1e999999999":               true,
		"\xa1\x68metadata\xa1\x63uid\x78\x241e123456-0000-4000-8000-000000000000": false,
		`{"image":"app:12e1234567"}`:                                              false, `{"sha":"9f12e1234567"}`: false, `{"image":"app@12e1234567"}`: false,
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
	configMap := ByGVK(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
	if err := CheckNumbers([]byte(`[{"op":"add","path":"/data/v","value":"1e999999999"}]`), configMap); err != nil {
		t.Error("a kind without quantities:", err)
	}
}

// About one uid in two hundred begins like a number with a large exponent.
// Clients that speak protobuf send it back with every update.
func TestCheckNumbersReadsProtobuf(t *testing.T) {
	kind := ByGVK(corev1.SchemeGroupVersion.WithKind("Pod"))
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	encode := func(change func(*corev1.Pod)) []byte {
		p := wasmPod(change)
		p.APIVersion, p.Kind = "v1", "Pod"
		p.UID = types.UID("1e123456-7890-4000-8000-000000000000")
		p.Labels = map[string]string{"commit": "1e1234567"}
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("64Mi"), "example.com/thing": resource.MustParse("7777777777777")}
		var b bytes.Buffer
		if err := protobuf.NewSerializer(scheme, scheme).Encode(p, &b); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	body := encode(func(*corev1.Pod) {})
	if err := CheckNumbers(body, kind); err != nil {
		t.Error("a good pod is refused:", err)
	}
	if err := CheckNumbers(body, nil); err != nil {
		t.Error("the kind is not taken from the body:", err)
	}
	// The same bytes with a quantity of the same length that must not be parsed.
	bad := bytes.Replace(body, []byte("7777777777777"), []byte("1e-9999999999"), 1)
	if bytes.Equal(bad, body) {
		t.Fatal("the quantity is not in the body")
	}
	if CheckNumbers(bad, kind) == nil || CheckNumbers(bad, nil) == nil {
		t.Error("a quantity that must not be parsed passed")
	}
	// Cut anywhere, a body that holds the number is never let through as read.
	at := bytes.Index(bad, []byte("1e-9999999999")) + len("1e-9999999999")
	for n := at; n < len(bad); n++ {
		if CheckNumbers(bad[:n], kind) == nil {
			t.Fatalf("cut at %d of %d: passed", n, len(bad))
		}
	}
}

func FuzzCheckNumbers(f *testing.F) {
	kind := ByGVK(corev1.SchemeGroupVersion.WithKind("Pod"))
	f.Add([]byte("k8s\x00\n\x09\n\x02v1\x12\x03Pod\x12\x0d1e-9999999999"))
	f.Add([]byte(`{"spec":{"overhead":{"memory":"1e999999999"}}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if CheckNumbers(body, kind) != nil && !strings.ContainsAny(string(body), "eE") {
			t.Error("refused without an exponent")
		}
	})
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
