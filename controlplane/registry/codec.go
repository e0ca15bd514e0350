package registry

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"time"

	"github.com/fxamacker/cbor/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kubecbor "k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// Codec turns typed objects into records and back. It is stateless and safe
// for concurrent use. The bytes that it writes last for ever: golden files
// pin them.
type Codec struct {
	serializer kubecbor.Serializer
	sealer     *Sealer
}

// NewCodec returns the codec of every kind that manifests serves. Secrets
// are sealed with the sealer; nil stores them in clear.
func NewCodec(sealer *Sealer) *Codec {
	s := runtime.NewScheme()
	for _, k := range manifests.Kinds() {
		s.AddKnownTypeWithName(k.GVK, k.New())
	}
	return &Codec{serializer: kubecbor.NewSerializer(s, s), sealer: sealer}
}

// selfDescribed is the CBOR tag that the serializer puts before every value
// (RFC 8949 section 3.4.6). Bodies are stored without it.
var selfDescribed = []byte{0xd9, 0xd9, 0xf7}

// Top-level keys as the serializer writes them: byte strings.
var (
	keyMetadata = []byte("\x48metadata")
	keyStatus   = []byte("\x46status")
)

var errNotMap = errors.New("registry: body is not a CBOR map")

// Encode makes the record of an object. ResourceVersion stays 0 (Apply sets
// it). The object is not modified, and the record shares nothing with it.
func (c *Codec) Encode(k *manifests.Kind, obj runtime.Object) (*state.Record, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, fmt.Errorf("registry: encode %s: %w", k.GVK.Kind, err)
	}
	rec := &state.Record{Header: header(k, obj, m)}
	bare, err := strip(obj)
	if err != nil {
		return nil, fmt.Errorf("registry: encode %s: %w", k.GVK.Kind, err)
	}
	var buf bytes.Buffer
	if err := c.serializer.Encode(bare, &buf); err != nil {
		return nil, fmt.Errorf("registry: encode %s %s/%s: %w", k.GVK.Kind, m.GetNamespace(), m.GetName(), err)
	}
	if err := split(bytes.TrimPrefix(buf.Bytes(), selfDescribed), rec); err != nil {
		return nil, fmt.Errorf("registry: encode %s: %w", k.GVK.Kind, err)
	}
	if sealed(k) && c.sealer != nil {
		// Annotations too: kubectl keeps what was applied in one.
		rec.Meta = c.sealer.seal(rec, "meta", rec.Meta)
		rec.Spec = c.sealer.seal(rec, "spec", rec.Spec)
	}
	return rec, nil
}

// sealed says whether a kind's bodies never leave this process in clear.
func sealed(k *manifests.Kind) bool { return k.GVK.Group == "" && k.GVK.Kind == "Secret" }

// Decode makes a new, private object from a record.
func (c *Codec) Decode(rec *state.Record) (runtime.Object, error) {
	h := &rec.Header
	k := kindOfKey(h.Key.Kind)
	if k == nil {
		return nil, fmt.Errorf("registry: decode %s %s/%s: kind is not known to this version", h.Key.Kind, h.Key.Namespace, h.Key.Name)
	}
	plain, err := c.open(rec)
	if err != nil {
		return nil, fmt.Errorf("registry: decode %s %s/%s: %w", h.Key.Kind, h.Key.Namespace, h.Key.Name, err)
	}
	data, err := join(plain)
	if err != nil {
		return nil, fmt.Errorf("registry: decode %s %s/%s: %w", h.Key.Kind, h.Key.Namespace, h.Key.Name, err)
	}
	gvk := k.GVK
	obj, _, err := c.serializer.Decode(data, &gvk, k.New())
	if err != nil {
		return nil, fmt.Errorf("registry: decode %s %s/%s: %w", h.Key.Kind, h.Key.Namespace, h.Key.Name, err)
	}
	if err := restore(obj, h); err != nil {
		return nil, fmt.Errorf("registry: decode %s %s/%s: %w", h.Key.Kind, h.Key.Namespace, h.Key.Name, err)
	}
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	return obj, nil
}

// open returns the record with its bodies in clear.
func (c *Codec) open(rec *state.Record) (*state.Record, error) {
	if (rec.Meta == nil || rec.Meta.Codec != state.CodecSealed) && (rec.Spec == nil || rec.Spec.Codec != state.CodecSealed) {
		return rec, nil
	}
	if c.sealer == nil {
		return nil, errNoSealer
	}
	out := *rec
	var err error
	if out.Meta, err = c.sealer.open(rec, "meta", rec.Meta); err != nil {
		return nil, err
	}
	if out.Spec, err = c.sealer.open(rec, "spec", rec.Spec); err != nil {
		return nil, err
	}
	return &out, nil
}

// strip returns a shallow copy of the object without what the header holds.
func strip(obj runtime.Object) (runtime.Object, error) {
	v := reflect.ValueOf(obj).Elem()
	cp := reflect.New(v.Type())
	cp.Elem().Set(v)
	out, ok := cp.Interface().(runtime.Object)
	if !ok {
		return nil, fmt.Errorf("%T is not an object", obj)
	}
	m, err := meta.Accessor(out)
	if err != nil {
		return nil, err
	}
	m.SetName("")
	m.SetNamespace("")
	m.SetUID("")
	m.SetResourceVersion("")
	m.SetGeneration(0)
	m.SetCreationTimestamp(metav1.Time{})
	m.SetDeletionTimestamp(nil)
	m.SetDeletionGracePeriodSeconds(nil)
	m.SetLabels(nil)
	m.SetFinalizers(nil)
	cp.Elem().FieldByName("TypeMeta").Set(reflect.ValueOf(metav1.TypeMeta{}))
	if pod, ok := out.(*corev1.Pod); ok {
		pod.Spec.NodeName = ""
	}
	return out, nil
}

// restore puts back what strip took.
func restore(obj runtime.Object, h *state.Header) error {
	m, err := meta.Accessor(obj)
	if err != nil {
		return err
	}
	m.SetName(h.Key.Name)
	m.SetNamespace(h.Key.Namespace)
	m.SetUID(types.UID(h.UID))
	if h.ResourceVersion != 0 {
		m.SetResourceVersion(strconv.FormatUint(h.ResourceVersion, 10))
	}
	m.SetGeneration(h.Generation)
	if h.Created != 0 {
		m.SetCreationTimestamp(metav1.NewTime(time.Unix(h.Created, 0)))
	}
	if h.Deleted != 0 {
		t := metav1.NewTime(time.Unix(h.Deleted, 0))
		m.SetDeletionTimestamp(&t)
	}
	if h.DeletionGrace != nil {
		g := *h.DeletionGrace
		m.SetDeletionGracePeriodSeconds(&g)
	}
	if len(h.Labels) > 0 {
		l := make(map[string]string, len(h.Labels))
		for k, v := range h.Labels {
			l[k] = v
		}
		m.SetLabels(l)
	}
	if len(h.Finalizers) > 0 {
		m.SetFinalizers(append([]string(nil), h.Finalizers...))
	}
	if pod, ok := obj.(*corev1.Pod); ok {
		pod.Spec.NodeName = h.NodeName
	}
	return nil
}

// rawDecoder reads items without interpreting them.
var rawDecoder = func() cbor.DecMode {
	m, err := cbor.DecOptions{MaxNestedLevels: 256, MaxArrayElements: 1 << 27, MaxMapPairs: 1 << 27}.DecMode()
	if err != nil {
		panic(err) // constant options
	}
	return m
}()

// split cuts the top-level map into metadata, status and the rest.
func split(data []byte, rec *state.Record) error {
	n, body, err := mapHead(data)
	if err != nil {
		return err
	}
	var rest []byte
	left := 0
	for range n {
		var key, val cbor.RawMessage
		start := body
		if body, err = rawDecoder.UnmarshalFirst(body, &key); err != nil {
			return err
		}
		if body, err = rawDecoder.UnmarshalFirst(body, &val); err != nil {
			return err
		}
		switch {
		case bytes.Equal(key, keyMetadata):
			rec.Meta = part(val)
		case bytes.Equal(key, keyStatus):
			rec.Status = part(val)
		default:
			rest = append(rest, start[:len(start)-len(body)]...)
			left++
		}
	}
	if left > 0 {
		rec.Spec = &state.Body{Codec: state.CodecKubeCBOR, Data: append(appendMapHead(nil, left), rest...)}
	}
	return nil
}

// part is one body; an empty map is none.
func part(val []byte) *state.Body {
	if len(val) == 0 || (len(val) == 1 && val[0] == 0xa0) {
		return nil
	}
	return &state.Body{Codec: state.CodecKubeCBOR, Data: bytes.Clone(val)}
}

// join is the inverse of split.
func join(rec *state.Record) ([]byte, error) {
	n, size := 0, 16
	var rest []byte
	for _, b := range []*state.Body{rec.Meta, rec.Spec, rec.Status} {
		if b == nil {
			continue
		}
		if b.Codec != state.CodecKubeCBOR {
			return nil, fmt.Errorf("registry: body codec %d is not known to this version", b.Codec)
		}
		size += len(b.Data) + 16
	}
	if rec.Spec != nil {
		var err error
		if n, rest, err = mapHead(rec.Spec.Data); err != nil {
			return nil, err
		}
	}
	if rec.Meta != nil {
		n++
	}
	if rec.Status != nil {
		n++
	}
	out := append(make([]byte, 0, size), selfDescribed...)
	out = appendMapHead(out, n)
	out = append(out, rest...)
	if rec.Meta != nil {
		out = append(append(out, keyMetadata...), rec.Meta.Data...)
	}
	if rec.Status != nil {
		out = append(append(out, keyStatus...), rec.Status.Data...)
	}
	return out, nil
}

// mapHead reads the head of a definite-length CBOR map (RFC 8949 section 3).
func mapHead(data []byte) (n int, rest []byte, err error) {
	if len(data) == 0 || data[0]>>5 != 5 {
		return 0, nil, errNotMap
	}
	switch info := data[0] & 0x1f; {
	case info < 24:
		return int(info), data[1:], nil
	case info == 24 && len(data) >= 2:
		return int(data[1]), data[2:], nil
	case info == 25 && len(data) >= 3:
		return int(binary.BigEndian.Uint16(data[1:])), data[3:], nil
	}
	// Objects have a handful of top-level fields.
	return 0, nil, errNotMap
}

func appendMapHead(b []byte, n int) []byte {
	switch {
	case n < 24:
		return append(b, 0xa0|byte(n))
	case n < 256:
		return append(b, 0xb8, byte(n))
	default:
		return append(b, 0xb9, byte(n>>8), byte(n))
	}
}
