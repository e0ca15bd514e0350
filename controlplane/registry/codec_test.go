package registry

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"math/rand"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	runtimeserializer "k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

var update = flag.Bool("update", false, "write golden files")

func quantity(s string) resource.Quantity { return resource.MustParse(s) }

func fieldsV1(s string) *metav1.FieldsV1 { return &metav1.FieldsV1{Raw: []byte(s)} }

func asError[T error](err error, into *T) bool { return errors.As(err, into) }

// fuzzFuncs make values that a decoded request could have.
func fuzzFuncs(_ runtimeserializer.CodecFactory) []any {
	return []any{
		func(q *resource.Quantity, c randfill.Continue) {
			*q = quantity(resource.NewMilliQuantity(c.Int63n(1<<40), resource.DecimalSI).String())
		},
		func(i *intstr.IntOrString, c randfill.Continue) {
			if c.Bool() {
				*i = intstr.FromInt32(c.Int31())
			} else {
				*i = intstr.FromString(c.String(0))
			}
		},
		func(r *runtime.RawExtension, c randfill.Continue) {
			r.Raw = []byte(`{"apiVersion":"apps/v1","kind":"Thing","n":` + string('0'+rune(c.Intn(10))) + `}`)
			r.Object = nil
		},
		func(l *corev1.ResourceList, c randfill.Continue) {
			*l = corev1.ResourceList{}
			for _, n := range []corev1.ResourceName{"cpu", "memory", "example.com/gpu"} {
				if c.Bool() {
					(*l)[n] = quantity(resource.NewQuantity(c.Int63n(1<<40), resource.BinarySI).String())
				}
			}
		},
		func(m *metav1.ObjectMeta, c randfill.Continue) {
			c.FillNoCustom(m)
			m.UID = types.UID(c.String(0))
			m.ResourceVersion = formatRV(c.Uint64() | 1)
			m.CreationTimestamp = metav1.Unix(c.Int63n(1<<33)+1, 0)
			if m.DeletionTimestamp != nil {
				t := metav1.Unix(c.Int63n(1<<33)+1, 0)
				m.DeletionTimestamp = &t
			}
			for i := range m.ManagedFields {
				m.ManagedFields[i].FieldsV1 = fieldsV1(`{"f:metadata":{"f:labels":{".":{},"f:a":{}}}}`)
				t := metav1.Unix(c.Int63n(1<<33), 0)
				m.ManagedFields[i].Time = &t
			}
			for i := range m.OwnerReferences {
				m.OwnerReferences[i].APIVersion = "apps/v1"
			}
		},
	}
}

// TestCodecRoundTrip: for every kind and any content, what is decoded is
// what was encoded, and encoding it again gives the same bytes.
func TestCodecRoundTrip(t *testing.T) {
	codec := NewCodec(nil)
	n := 30
	if testing.Short() {
		n = 10
	}
	f := fuzzer.FuzzerFor(fuzzer.MergeFuzzerFuncs(metafuzzer.Funcs, fuzzFuncs), rand.NewSource(1), manifests.Codecs()).NilChance(.3).NumElements(1, 3)
	for _, k := range manifests.Kinds() {
		if k.AliasOf.Kind != "" {
			continue
		}
		t.Run(k.GVK.Kind, func(t *testing.T) {
			for range n {
				in := k.New()
				f.Fill(in)
				in.GetObjectKind().SetGroupVersionKind(k.GVK)
				before := in.DeepCopyObject()
				rec, err := codec.Encode(k, in)
				if err != nil {
					t.Fatal(err)
				}
				if !apiequality.Semantic.DeepEqual(in, before) {
					t.Fatal("encoding changed the object")
				}
				m, err := meta.Accessor(in)
				if err != nil {
					t.Fatal(err)
				}
				rec.Header.ResourceVersion = parseRV(t, m.GetResourceVersion())
				out, err := codec.Decode(rec)
				if err != nil {
					t.Fatal(err)
				}
				if !apiequality.Semantic.DeepEqual(in, out) {
					t.Fatalf("not equal:\n in %#v\nout %#v", in, out)
				}
				again, err := codec.Encode(k, out)
				if err != nil {
					t.Fatal(err)
				}
				if !same(rec.Meta, again.Meta) || !same(rec.Spec, again.Spec) || !same(rec.Status, again.Status) {
					t.Fatal("encoding what was decoded gives other bytes")
				}
			}
		})
	}
}

func parseRV(t *testing.T, s string) uint64 {
	t.Helper()
	var v uint64
	for _, c := range s {
		v = v*10 + uint64(c-'0')
	}
	return v
}

// goldenObjects cover what plain struct encoding gets wrong, and every
// header fact.
func goldenObjects() map[string]runtime.Object {
	always, yes, grace := corev1.ContainerRestartPolicyAlways, true, int64(30)
	deleted := metav1.Unix(1800000030, 0)
	return map[string]runtime.Object{
		"pod": &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: "web-1", Namespace: "default", UID: "11111111-2222-4333-8444-555555555555", Generation: 2, GenerateName: "web-",
				CreationTimestamp: metav1.Unix(1800000000, 0), DeletionTimestamp: &deleted, DeletionGracePeriodSeconds: &grace,
				Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"note": "x"}, Finalizers: []string{"example.com/f"},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web", UID: "u-rs", Controller: &yes, BlockOwnerDeletion: &yes}},
				ManagedFields: []metav1.ManagedFieldsEntry{{
					Manager: "kubectl", Operation: metav1.ManagedFieldsOperationApply, APIVersion: "v1", FieldsType: "FieldsV1",
					FieldsV1: fieldsV1(`{"f:spec":{}}`),
				}},
			},
			Spec: corev1.PodSpec{
				NodeName:        "n1",
				SchedulingGates: []corev1.PodSchedulingGate{{Name: "g"}},
				InitContainers: []corev1.Container{
					{Name: "side", RestartPolicy: &always, Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": quantity("100m")}}},
					{Name: "init", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": quantity("2"), "memory": quantity("10Mi")}}},
				},
				Containers: []corev1.Container{{
					Name: "c", Image: "file:///a.wasm",
					Ports:     []corev1.ContainerPort{{ContainerPort: 80, HostPort: 8080, Protocol: corev1.ProtocolTCP}, {ContainerPort: 81, HostPort: 53, HostIP: "0.0.0.0", Protocol: corev1.ProtocolUDP}},
					Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": quantity("250m"), "memory": quantity("64Mi")}},
				}},
			},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
		},
		"service": &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", UID: "u-svc", CreationTimestamp: metav1.Unix(1800000000, 0)},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeNodePort, ClusterIP: "10.43.1.2", ClusterIPs: []string{"10.43.1.2"},
				Ports: []corev1.ServicePort{{Port: 80, NodePort: 30080, TargetPort: intstr.FromString("http")}},
			},
		},
		"secret": &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "default", UID: "u-sec", CreationTimestamp: metav1.Unix(1800000000, 0)},
			Data:       map[string][]byte{"k": {0, 1, 2, 255}}, Type: corev1.SecretTypeOpaque,
		},
		"node": &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "u-n", CreationTimestamp: metav1.Unix(1800000000, 0)},
			Spec:       corev1.NodeSpec{PodCIDR: "10.42.3.0/24", PodCIDRs: []string{"10.42.3.0/24"}},
			Status:     corev1.NodeStatus{Allocatable: corev1.ResourceList{"cpu": quantity("3900m"), "memory": quantity("1Gi"), "pods": quantity("110")}},
		},
	}
}

// TestGolden pins the bytes: they are in every log and snapshot ever written.
func TestGolden(t *testing.T) {
	codec := NewCodec(nil)
	for name, obj := range goldenObjects() {
		t.Run(name, func(t *testing.T) {
			_, k, err := servedOf(obj)
			if err != nil {
				t.Fatal(err)
			}
			rec, err := codec.Encode(k, obj)
			if err != nil {
				t.Fatal(err)
			}
			header, err := state.EncodeRecord(&state.Record{Header: rec.Header})
			if err != nil {
				t.Fatal(err)
			}
			var b bytes.Buffer
			for _, p := range []struct {
				name string
				data []byte
			}{{"header", header}, {"meta", body(rec.Meta)}, {"spec", body(rec.Spec)}, {"status", body(rec.Status)}} {
				b.WriteString(p.name + "\n" + hex.Dump(p.data))
			}
			file := filepath.Join("testdata", "golden", name+".hex")
			if *update {
				if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(want, b.Bytes()) {
				t.Errorf("the stored form changed; data in the field could not be read.\ngot:\n%s", b.Bytes())
			}
		})
	}
}

func body(b *state.Body) []byte {
	if b == nil {
		return nil
	}
	return b.Data
}

func TestReplicasShareTheirSpec(t *testing.T) {
	codec := NewCodec(nil)
	_, k, err := servedOf(&corev1.Pod{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := newPod("a"), newPod("b")
	b.Spec.NodeName = "n2"
	x, err := codec.Encode(k, a)
	if err != nil {
		t.Fatal(err)
	}
	y, err := codec.Encode(k, b)
	if err != nil {
		t.Fatal(err)
	}
	if !same(x.Spec, y.Spec) || y.Header.NodeName != "n2" {
		t.Error("two replicas on two nodes must have one spec body")
	}
}

func TestDecodeRefusesWhatItDoesNotKnow(t *testing.T) {
	codec := NewCodec(nil)
	good := state.Record{Header: state.Header{Key: state.Key{Kind: "Pod", Name: "a"}, UID: "u"}}
	if _, err := codec.Decode(&good); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]*state.Body{
		"codec":     {Codec: 99, Data: []byte{0xa0}},
		"not a map": {Codec: state.CodecKubeCBOR, Data: []byte{0x01}},
		"empty":     {Codec: state.CodecKubeCBOR},
		"cut off":   {Codec: state.CodecKubeCBOR, Data: []byte{0xa2, 0x44}},
	} {
		bad := good
		bad.Spec = b
		if _, err := codec.Decode(&bad); err == nil {
			t.Errorf("%s: decoded", name)
		}
	}
	bad := good
	bad.Header.Key.Kind = "Future.example.com"
	if _, err := codec.Decode(&bad); err == nil {
		t.Error("unknown kind decoded")
	}
}

func FuzzDecode(f *testing.F) {
	codec := NewCodec(nil)
	for _, obj := range goldenObjects() {
		_, k, err := servedOf(obj)
		if err != nil {
			f.Fatal(err)
		}
		rec, err := codec.Encode(k, obj)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(k.GVK.Kind, body(rec.Meta), body(rec.Spec), body(rec.Status))
	}
	f.Fuzz(func(_ *testing.T, kind string, m, spec, status []byte) {
		part := func(b []byte) *state.Body {
			if b == nil {
				return nil
			}
			return &state.Body{Codec: state.CodecKubeCBOR, Data: b}
		}
		rec := &state.Record{Header: state.Header{Key: state.Key{Kind: kind, Name: "a"}, UID: "u"}, Meta: part(m), Spec: part(spec), Status: part(status)}
		_, _ = codec.Decode(rec) // must not panic
	})
}

func BenchmarkCodec(b *testing.B) {
	codec := NewCodec(nil)
	obj := goldenObjects()["pod"]
	_, k, err := servedOf(obj)
	if err != nil {
		b.Fatal(err)
	}
	rec, err := codec.Encode(k, obj)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := codec.Encode(k, obj); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := codec.Decode(rec); err != nil {
				b.Fatal(err)
			}
		}
	})
}
