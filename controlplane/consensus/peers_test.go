package consensus

import (
	"os"
	"slices"
	"testing"
)

func TestPeers(t *testing.T) {
	dir, d := t.TempDir(), &Disk{}
	open := func() *Peers {
		p, err := OpenPeers(dir, d)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		return p
	}
	p := open()
	for _, addr := range []string{"10.0.0.1:6443", "10.0.0.2:6443", "10.0.0.2:6443"} {
		if err := p.Set("server-1", []string{addr}); err != nil {
			t.Fatal(err)
		}
	}
	if n := d.Stats().Writes; n != 2 {
		t.Errorf("%d writes for two changes", n)
	}
	if got := open().Resolve("server-1"); !slices.Equal(got, []string{"10.0.0.2:6443"}) {
		t.Errorf("resolved %v", got)
	}
	// One damaged copy: the other. Both: an empty list, the files kept aside.
	if err := os.WriteFile(p.slots.name(0), make([]byte, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := open().Resolve("server-1"); len(got) != 1 {
		t.Errorf("resolved %v", got)
	}
	if err := os.WriteFile(p.slots.name(1), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := open().Resolve("server-1"); got != nil {
		t.Errorf("resolved %v", got)
	}
	if _, err := os.Stat(p.slots.name(0) + ".damaged"); err != nil {
		t.Error(err)
	}
}
