package store

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/dunlin-project/dunlin/wire"
)

const inClear = "correct-horse-battery-staple"

func withSecret() Assignment {
	return Assignment{Epoch: 1, Generation: 7, Known: true, Servers: []string{"a:6443"}, Keyring: [][]byte{[]byte("ring-" + inClear)}, Objects: map[string]wire.Object{
		"u-pod":    {Ref: wire.Ref{Kind: "Pod", Namespace: "d", Name: "p"}, UID: "u-pod", ResourceVersion: 3, Data: []byte("a pod")},
		"u-secret": {Ref: wire.Ref{Kind: "Secret", Namespace: "d", Name: "s"}, UID: "u-secret", ResourceVersion: 4, Data: []byte(strings.Repeat(inClear, 400))},
	}}
}

func noClear(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err != nil || bytes.Contains(b, []byte(inClear)) {
			t.Errorf("%s holds a Secret in clear (%v)", f, err)
		}
	}
}

func TestSecretsAreSealed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	b := openBolt(t, path)
	want := withSecret()
	if err := b.SaveAssignment(want); err != nil {
		t.Fatal(err)
	}
	noClear(t, filepath.Dir(path))
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b = openBolt(t, path)
	got, err := b.Assignment()
	if err != nil || got.Generation != 7 || len(got.Lost) != 0 || !maps.EqualFunc(got.Objects, want.Objects, func(a, b wire.Object) bool { return bytes.Equal(a.Data, b.Data) && a.Ref == b.Ref }) || !slices.EqualFunc(got.Keyring, want.Keyring, bytes.Equal) {
		t.Fatalf("%+v %v", got, err)
	}
	// One that is changed, and one that goes.
	s := want.Objects["u-secret"]
	s.ResourceVersion, s.Data = 5, []byte("new "+inClear)
	want.Objects["u-secret"] = s
	if err := b.SaveAssignment(want); err != nil {
		t.Fatal(err)
	}
	if got, err = b.Assignment(); err != nil || string(got.Objects["u-secret"].Data) != "new "+inClear {
		t.Fatalf("%+v %v", got, err)
	}
	delete(want.Objects, "u-secret")
	if err := b.SaveAssignment(want); err != nil {
		t.Fatal(err)
	}
	if got, err = b.Assignment(); err != nil || len(got.Objects) != 1 {
		t.Fatalf("%+v %v", got, err)
	}
	noClear(t, filepath.Dir(path))
	_ = b.Close()
}

// On another board nothing sealed opens: the rest is there, and all is asked
// for again.
func TestAnotherBoardOpensNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	b := openBolt(t, path)
	if err := b.SaveAssignment(withSecret()); err != nil {
		t.Fatal(err)
	}
	_ = b.Close()
	b, err := Open(path, testSeal(t, "serial-number=2"), time.Second, quiet)
	if err != nil {
		t.Fatal(err)
	}
	got, err := b.Assignment()
	if err != nil || got.Generation != 0 || !got.Known || len(got.Objects) != 1 || len(got.Keyring) != 0 {
		t.Fatalf("%+v %v", got, err)
	}
	if !slices.Contains(got.Lost, wire.Ref{Kind: "Secret", Namespace: "d", Name: "s"}) {
		t.Fatalf("lost %v", got.Lost)
	}
	// What does not open and is not assigned any more goes.
	got.Generation = 8
	if err := b.SaveAssignment(got); err != nil {
		t.Fatal(err)
	}
	if got, err = b.Assignment(); err != nil || got.Generation != 8 || len(got.Lost) != 0 {
		t.Fatalf("%+v %v", got, err)
	}
	// And what is fetched again is there.
	if err := b.SaveAssignment(withSecret()); err != nil {
		t.Fatal(err)
	}
	if got, err = b.Assignment(); err != nil || len(got.Objects) != 2 || got.Generation != 7 {
		t.Fatalf("%+v %v", got, err)
	}
	_ = b.Close()
}

// A database of a version that did not seal is sealed by its first open, free
// pages included; and one that does not know seals asks for all it misses.
func TestOldDatabaseIsSealed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	old, err := Open(path, nil, time.Second, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.SaveAssignment(withSecret()); err != nil {
		t.Fatal(err)
	}
	if raw, _ := os.ReadFile(path); !bytes.Contains(raw, []byte(inClear)) {
		t.Fatal("the old form is not in clear: nothing would be shown")
	}
	_ = old.Close()
	b := openBolt(t, path)
	got, err := b.Assignment()
	if err != nil || got.Generation != 7 || len(got.Objects) != 2 || len(got.Keyring) != 1 {
		t.Fatalf("%+v %v", got, err)
	}
	noClear(t, filepath.Dir(path))
	_ = b.Close()
	old, err = Open(path, nil, time.Second, quiet)
	if err != nil {
		t.Fatal(err)
	}
	raw := header{}
	if a, err := old.Assignment(); err != nil || len(a.Objects) != 1 {
		t.Fatalf("%+v %v", a, err)
	}
	if err := old.db.View(oneHeader(&raw)); err != nil || raw.Generation != 0 || raw.SealedGeneration != 7 {
		t.Fatalf("%+v %v", raw, err)
	}
	_ = old.Close()
}

func oneHeader(into *header) func(*bbolt.Tx) error {
	return func(tx *bbolt.Tx) error { return each(tx, bucketAssignment, func(h header) { *into = h }) }
}

func TestSealKeyIsKeptTwice(t *testing.T) {
	dir := t.TempDir()
	open := func() *Seal {
		t.Helper()
		s, err := LoadSeal(dir, "board")
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	x := box{UID: "u"}
	if err := open().close(&x, []byte(inClear)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"seal-key", "seal-key.copy"} {
		if err := os.Truncate(filepath.Join(dir, name), 3); err != nil {
			t.Fatal(err)
		}
		if plain, ok := open().open(&x); !ok || string(plain) != inClear {
			t.Fatalf("without %s it does not open", name)
		}
	}
	x.UID = "v"
	if _, ok := open().open(&x); ok {
		t.Fatal("it opens as another object")
	}
}
