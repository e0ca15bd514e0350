package state

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/internal/feature"
)

// Each field that stands in the log or in a snapshot came with a feature
// level. A new one breaks this list: give it the level of its release, and let
// Op.Level ask for that level wherever the field is set.
func TestEveryFieldHasALevel(t *testing.T) {
	levels := map[string]map[uint32]string{
		"entry":     {1: "1-2"},
		"Op":        {1: "1-13"},
		"Record":    {1: "1-4"},
		"Header":    {1: "1-20"},
		"Key":       {1: "1-3"},
		"Owner":     {1: "1-5"},
		"HostPort":  {1: "1-3"},
		"Quantity":  {1: "1-2"},
		"Body":      {1: "1-2"},
		"Facts":     {1: "1-5"},
		"Lost":      {1: "1-3"},
		"imageHead": {1: "1-4"},
	}
	for _, typ := range []reflect.Type{
		reflect.TypeFor[entry](), reflect.TypeFor[Op](), reflect.TypeFor[Record](), reflect.TypeFor[Header](), reflect.TypeFor[Key](), reflect.TypeFor[Owner](),
		reflect.TypeFor[HostPort](), reflect.TypeFor[Quantity](), reflect.TypeFor[Body](), reflect.TypeFor[Facts](), reflect.TypeFor[Lost](), reflect.TypeFor[imageHead](),
	} {
		known := map[int]bool{}
		for _, span := range levels[typ.Name()] {
			var from, to int
			if _, err := fmt.Sscanf(span, "%d-%d", &from, &to); err != nil {
				t.Fatal(err)
			}
			for i := from; i <= to; i++ {
				known[i] = true
			}
		}
		for f := range typ.Fields() {
			var key int
			if _, err := fmt.Sscanf(strings.Split(f.Tag.Get("cbor"), ",")[0], "%d", &key); err != nil {
				t.Errorf("%s.%s: no key", typ.Name(), f.Name)
			}
			if !known[key] {
				t.Errorf("%s.%s has no feature level", typ.Name(), f.Name)
			}
			delete(known, key)
		}
		for key := range known {
			t.Errorf("%s: field %d is gone: it is still in logs and snapshots", typ.Name(), key)
		}
	}
	if len(opLevels) != int(opLast)+1 || slices.Contains(opLevels[1:], 0) || slices.Max(opLevels[:]) > feature.Level {
		t.Errorf("levels of the verbs: %v", opLevels)
	}
}

// What not every server understands is not proposed.
func TestGate(t *testing.T) {
	for typ := OpType(0); typ <= opLast+1; typ++ {
		o := []Op{{Type: typ}}
		sets := typ == OpRaiseFeature || typ == OpBootstrap
		if err := Gate(o, 0); (err == nil) != sets || (err != nil && !errors.Is(err, ErrFeatureLevel)) {
			t.Errorf("verb %d at level 0: %v", typ, err)
		}
		if err := Gate(o, feature.Level); (err == nil) != (typ >= 1 && typ <= opLast) {
			t.Errorf("verb %d at this build's level: %v", typ, err)
		}
	}
}

// A server that is older than the cluster's level goes no further, whether it
// meets the level in the log or in a snapshot.
func TestHigherLevelHalts(t *testing.T) {
	m, _ := newCluster(t)
	raise := func(to uint32) error {
		b, err := EncodeEntry([]Op{{Type: OpRaiseFeature, Feature: to}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.Apply(1, b)
		return err
	}
	if err := raise(feature.Level); err != nil || m.Facts().Feature != feature.Level {
		t.Errorf("raised to its own level: %v, is %d", err, m.Facts().Feature)
	}
	err := raise(feature.Level + 1)
	if !errors.Is(err, ErrUnknownOp) || !strings.Contains(err.Error(), "install the version that the other servers run") {
		t.Errorf("raised beyond: %v", err)
	}
	v := *m.cur.Load()
	v.facts.Feature = feature.Level + 1
	path := t.TempDir() + "/image"
	if err := (&Image{v: &v}).Write(path); err != nil {
		t.Fatal(err)
	}
	other := NewMachine(Options{})
	if err := other.Restore(path); !errors.Is(err, ErrNewerFormat) || other.Facts().Feature != 0 {
		t.Errorf("restored: %v", err)
	}
}
