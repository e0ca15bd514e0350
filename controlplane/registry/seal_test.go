package registry

import (
	"bytes"
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

func TestSecretsAreSealed(t *testing.T) {
	old, fresh := bytes.Repeat([]byte{1}, SealKeySize), bytes.Repeat([]byte{2}, SealKeySize)
	sealer, err := NewSealer(old)
	if err != nil {
		t.Fatal(err)
	}
	w, ctx := newWorld(t, func(c *Config) { c.Sealer = sealer }), context.Background()
	gk := schema.GroupKind{Kind: "Secret"}
	w.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "default", Annotations: map[string]string{"last-applied": "PASSWORD"}},
		Data:       map[string][]byte{"k": []byte("PASSWORD")},
	})
	rec, ok := w.machine.Snapshot().Get(state.Key{Kind: "Secret", Namespace: "default", Name: "s"})
	if !ok {
		t.Fatal("no record")
	}
	raw, err := state.EncodeRecord(rec)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(raw, []byte("PASSWORD")) || rec.Spec.Codec != state.CodecSealed || rec.Meta.Codec != state.CodecSealed {
		t.Fatal("the secret is in the state in clear")
	}
	got := as[*corev1.Secret](t, must(w.Get(gk, "default", "s")), nil)
	if string(got.Data["k"]) != "PASSWORD" {
		t.Errorf("got %v", got.Data)
	}
	out, err := w.Update(ctx, gk, "default", "s", Main, func(o runtime.Object) (runtime.Object, error) { return o, nil }, WriteOptions{})
	if s := as[*corev1.Secret](t, out, err); s.ResourceVersion != got.ResourceVersion {
		t.Error("an update without a change wrote")
	}

	rotated, err := NewSealer(fresh, old)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewCodec(rotated).Decode(rec); err != nil {
		t.Errorf("after a new key: %v", err)
	}
	wrong, err := NewSealer(fresh)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewCodec(wrong).Decode(rec); err == nil {
		t.Error("opened with a wrong key")
	}
	if _, err := NewCodec(nil).Decode(rec); err == nil {
		t.Error("opened without a key")
	}
	moved := *rec
	moved.Header.UID = "another"
	if _, err := NewCodec(sealer).Decode(&moved); err == nil {
		t.Error("a body opened as that of another object")
	}
}
