package state

import (
	"bytes"
	"encoding/hex"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files anew; what they pin is on disks for ever")

// full has every field of a record set, so that a field cannot be added
// without showing up in the golden file.
func full() *Record {
	grace := int64(30)
	return &Record{
		Header: Header{
			Version: 1, Key: Key{"Pod", "default", "web-0"}, APIVersion: "v1", UID: "3f6c", ResourceVersion: 42, Generation: 2,
			Created: 1_700_000_000, Owners: []Owner{{UID: "o1", Kind: "ReplicaSet.apps", Name: "web", Controller: true, Block: true}},
			Finalizers: []string{"dunlin.dev/x"}, Deleted: 1_700_000_100, DeletionGrace: &grace,
			Labels: map[string]string{"app": "web", "tier": "front", "a": "b"}, NodeName: "n1", Phase: PodRunning,
			Requests: []Quantity{{"cpu", 500}, {"memory", 1 << 26}, {"pods", 1}}, HostPorts: []HostPort{{"10.0.0.1", "TCP", 80}},
			Gated: true, Allocatable: []Quantity{{"cpu", 4000}}, Claims: []string{"clusterip/10.43.0.10"}, Ready: true,
		},
		Meta:   &Body{CodecKubeCBOR, []byte{0xa0}},
		Spec:   &Body{CodecKubeCBOR, []byte{0xa1, 0x61, 0x61, 0x01}},
		Status: &Body{CodecKubeCBOR, []byte{0xa1, 0x61, 0x62, 0x02}},
	}
}

func goldens(t *testing.T) map[string][]byte {
	t.Helper()
	must := func(b []byte, err error) []byte {
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	r := full()
	ops := []Op{
		{Type: OpCreate, Record: &Record{Header: Header{Version: 1, Key: Key{Kind: "Namespace", Name: "default"}, APIVersion: "v1", UID: "u"}}, IgnoreNamespace: true},
		{Type: OpUpdate, Record: r, Keep: KeepMeta | KeepSpec, UID: "3f6c", ResourceVersion: 41, Term: 7},
		{Type: OpDelete, Key: &r.Header.Key, UID: "3f6c"},
		{Type: OpBind, Key: &r.Header.Key, UID: "3f6c", Node: "n1", NodeUID: "nu"},
		{Type: OpRaiseFeature, Feature: 2},
		{Type: OpTimeFloor, Unix: 1_700_000_000},
		{Type: OpBootstrap, ClusterID: "c", Feature: 1},
		{Type: OpRecover},
	}
	m := NewMachine(Options{})
	if _, err := m.Apply(1, must(EncodeEntry(ops[6:7]))); err != nil {
		t.Fatal(err)
	}
	hash, err := m.Hash()
	return map[string][]byte{
		"header": must(codec.enc.Marshal(&r.Header)),
		"record": must(EncodeRecord(r)),
		"op":     must(EncodeOp(&ops[1])),
		"bind":   must(EncodeOp(&ops[3])),
		"entry":  must(EncodeEntry(ops)),
		"facts":  must(codec.enc.Marshal(Facts{ClusterID: "c", Epoch: 2, Feature: 3, TimeFloor: 4})),
		"image":  must(codec.enc.Marshal(imageHead{Format: 1, Facts: Facts{ClusterID: "c"}, ResourceVersion: 5, Records: 6})),
		"hash":   must(hash[:], err),
	}
}

func TestGolden(t *testing.T) {
	for name, got := range goldens(t) {
		path := filepath.Join("testdata", "golden", name+".hex")
		if *update {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(hex.EncodeToString(got)+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if hex.EncodeToString(got) != strings.TrimSpace(string(want)) {
			t.Errorf("%s changed: logs and snapshots of older servers would not be read.\n got %x\nwant %s", name, got, want)
		}
	}
}

// TestGoldenIsFull fails when a field is added that full does not set.
func TestGoldenIsFull(t *testing.T) {
	var check func(path string, v reflect.Value)
	check = func(path string, v reflect.Value) {
		if v.Kind() == reflect.Pointer {
			v = v.Elem()
		}
		if v.Kind() != reflect.Struct {
			return
		}
		for i := range v.NumField() {
			name := path + "." + v.Type().Field(i).Name
			f := v.Field(i)
			if f.IsZero() {
				t.Errorf("%s is not set", name)
				continue
			}
			if f.Kind() == reflect.Slice && f.Len() > 0 {
				f = f.Index(0)
			}
			check(name, f)
		}
	}
	check("Record", reflect.ValueOf(full()))
}

func TestJoinEntryEqualsEncodeEntry(t *testing.T) {
	ops := []Op{{Type: OpTimeFloor, Unix: 1}, {Type: OpUpdate, Record: full(), UID: "3f6c"}}
	var parts [][]byte
	for i := range ops {
		b, err := EncodeOp(&ops[i])
		if err != nil {
			t.Fatal(err)
		}
		parts = append(parts, b)
	}
	joined, err := JoinEntry(parts)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := EncodeEntry(ops)
	if err != nil || !bytes.Equal(joined, whole) {
		t.Errorf("%v\n%x\n%x", err, joined, whole)
	}
}

func TestBindIsSmall(t *testing.T) {
	k := Key{"Pod", "default", "web-5d4f8c7b9-x2x9q"}
	b, err := EncodeOp(&Op{Type: OpBind, Key: &k, UID: "0b5f7c1e-5a0e-4a57-9d35-0d2c9f1b7a11", Node: "node-0017", NodeUID: "7a1d7c1e-5a0e-4a57-9d35-0d2c9f1b7a11"})
	if err != nil || len(b) > 160 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	t.Logf("a bind with long names is %d bytes", len(b))
}
