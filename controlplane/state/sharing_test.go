package state

import (
	"fmt"
	"maps"
	"testing"
	"unsafe"
)

// address tells copies of a map apart.
func address(m map[string]string) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&m)) }

func TestHeadersShareWhatIsEqual(t *testing.T) {
	m := NewMachine(Options{})
	l := NewLocal(m)
	propose := func(ops ...Op) {
		t.Helper()
		// Through the encoding, as from the log: nothing is shared before.
		b, err := EncodeEntry(ops)
		if err != nil {
			t.Fatal(err)
		}
		if ops, err = DecodeEntry(b); err != nil {
			t.Fatal(err)
		}
		res, err := l.Propose(t.Context(), ops)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range res {
			if r.Reason != ReasonNone {
				t.Fatalf("%v: %s", r.Reason, r.Detail)
			}
		}
	}
	get := func(i int) *Record {
		t.Helper()
		r, ok := m.Snapshot().Get(benchPod(i).Header.Key)
		if !ok {
			t.Fatalf("pod %d is gone", i)
		}
		return r
	}
	propose(create(object(kindNamespace, "", "default")), create(benchPod(1)), create(benchPod(2)), create(benchPod(100)))
	a, b, other := get(1), get(2), get(100)
	if address(a.Header.Labels) != address(b.Header.Labels) || &a.Header.Owners[0] != &b.Header.Owners[0] || &a.Header.Requests[0] != &b.Header.Requests[0] {
		t.Error("replicas of one template do not share labels, owner and requests")
	}
	if address(a.Header.Labels) == address(other.Header.Labels) || other.Header.Labels["app"] != "web-001" || a.Header.Labels["app"] != "web-000" {
		t.Errorf("labels %v and %v", a.Header.Labels, other.Header.Labels)
	}

	// A new version keeps what did not change, strings too.
	next := benchPod(1)
	next.Header.Phase = "Running"
	propose(Op{Type: OpUpdate, UID: next.Header.UID, Record: next})
	c := get(1)
	if c == a || c.Header.Phase != "Running" {
		t.Fatalf("not written: %+v", c.Header)
	}
	if unsafe.StringData(c.Header.UID) != unsafe.StringData(a.Header.UID) || unsafe.StringData(c.Header.Key.Name) != unsafe.StringData(a.Header.Key.Name) || address(c.Header.Labels) != address(b.Header.Labels) {
		t.Error("a new version has copies of its own")
	}

	// One that is changed leaves the others as they are.
	next = benchPod(1)
	next.Header.Labels = maps.Clone(next.Header.Labels)
	next.Header.Labels["app"] = "changed"
	next.Header.Owners, next.Header.Requests = nil, nil
	propose(Op{Type: OpUpdate, UID: next.Header.UID, Record: next})
	if c = get(1); c.Header.Labels["app"] != "changed" || len(c.Header.Owners)+len(c.Header.Requests) != 0 || get(2).Header.Labels["app"] != "web-000" {
		t.Errorf("changed: %+v, the other: %v", c.Header, get(2).Header.Labels)
	}

	// Nothing is kept of what is gone.
	for _, i := range []int{1, 2, 100} {
		k := benchPod(i).Header.Key
		propose(Op{Type: OpDelete, Key: &k, UID: benchPod(i).Header.UID})
	}
	if s := &m.t.shares; len(s.labels.m)+len(s.owners.m)+len(s.requests.m) != 0 {
		t.Errorf("left: %v, %v, %v", s.labels.m, s.owners.m, s.requests.m)
	}
}

func TestKeysOfSharedValuesDiffer(t *testing.T) {
	seen := map[string]string{}
	note := func(key []byte, what any) {
		t.Helper()
		now := fmt.Sprintf("%T%v", what, what)
		if was, ok := seen[string(key)]; ok && was != now {
			t.Errorf("%s and %s have one key", was, now)
		}
		seen[string(key)] = now
	}
	for _, m := range []map[string]string{{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "", "b": "c"}, {"": "abc"}, {"a": "\x01b", "c": ""}} {
		note(labelsKey(nil, m), m)
	}
	clear(seen)
	for _, o := range [][]Owner{{{UID: "u", Kind: "k", Name: "n"}}, {{UID: "uk", Name: "n"}}, {{UID: "u", Kind: "k", Name: "n", Controller: true}}, {{UID: "u", Kind: "k", Name: "n", Block: true}}} {
		note(ownersKey(nil, o), o)
	}
	clear(seen)
	for _, q := range [][]Quantity{{{"cpu", 1}}, {{"cpu", -1}}, {{"cpu", 1}, {"memory", 2}}, {{"memory", 2}, {"cpu", 1}}} {
		note(requestsKey(nil, q), q)
	}
}
