package store

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/wire"
)

var quiet = slog.New(slog.DiscardHandler)

func openBolt(t testing.TB, path string) *Bolt {
	t.Helper()
	b, err := Open(path, testSeal(t, ""), 100*time.Millisecond, quiet)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func testSeal(t testing.TB, facts string) *Seal {
	t.Helper()
	s, err := NewSeal(make([]byte, sealKeySize), facts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// both runs one suite over both implementations; reopen closes and opens.
func both(t *testing.T, f func(t *testing.T, s Store, reopen func() Store)) {
	t.Run("memory", func(t *testing.T) {
		m := NewMemory()
		f(t, m, func() Store { m.Reopen(); return m })
	})
	t.Run("bolt", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "node", "node.db")
		b := openBolt(t, path)
		f(t, b, func() Store {
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
			b = openBolt(t, path)
			return b
		})
		_ = b.Close()
	})
}

func samplePod(uid string) Pod {
	return Pod{
		UID: uid, Namespace: "default", Name: "p-" + uid, StartTime: 1700000000000, Volumes: true, Initialized: true,
		Containers: []Container{{
			Name: "main", Attempt: 3, Begun: true, Boot: "b", Backoff: 2, Digest: "sha256:x",
			Exit: &Exit{Attempt: 3, Code: 1, Reason: "Error", Message: "m", StartedAt: 1, FinishedAt: 2},
			Last: &Exit{Attempt: 2, Code: 137, Signal: 9, Reason: "OOMKilled"},
		}},
		Allocation: &network.Allocation{
			IP: netip.MustParseAddr("10.42.0.9"), IPs: []netip.Addr{netip.MustParseAddr("10.42.0.9")}, Ports: map[int32]int32{80: 40001},
		},
		IPs: []string{"10.42.0.9"}, Verdict: &Verdict{Reason: "Evicted", Message: "m"},
	}
}

func object(uid string, rv uint64) wire.Object {
	return wire.Object{Ref: wire.Ref{Kind: "Pod", Namespace: "d", Name: uid}, UID: uid, ResourceVersion: rv, Data: []byte(fmt.Sprint(uid, rv))}
}

func TestStore(t *testing.T) {
	both(t, func(t *testing.T, s Store, reopen func() Store) {
		a, err := s.Assignment()
		if err != nil || a.Known || len(a.Objects) != 0 {
			t.Fatalf("new store: %+v, %v", a, err)
		}
		want := Assignment{
			Epoch: 2, Generation: 7, Known: true, PodCIDRs: []string{"10.42.1.0/24"}, Servers: []string{"a:6443"},
			Keyring: [][]byte{{1}}, Site: "s", Seeds: []string{"x:7946"},
			Held:    map[string]Hold{"u1": {Kind: HoldOld, Offered: 3}, "u2": {Kind: HoldPod}},
			Objects: map[string]wire.Object{"u1": object("u1", 1), "u2": object("u2", 1)},
		}
		must(t, s.SaveAssignment(want))
		pod := samplePod("u1")
		must(t, s.SavePod(pod))
		must(t, s.SavePod(samplePod("u2")))
		must(t, s.DeletePod("u2", &Gone{UID: "u2", Namespace: "d", Name: "n", Status: []byte{1}}))
		boots := s.Boots()
		s = reopen()
		if s.Boots() != boots+1 {
			t.Fatalf("boots %d after %d", s.Boots(), boots)
		}
		if got, err := s.Assignment(); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("assignment %+v, %v", got, err)
		}
		if pods, err := s.Pods(); err != nil || len(pods) != 1 || !reflect.DeepEqual(pods[0], pod) {
			t.Fatalf("pods %+v, %v", pods, err)
		}
		if g, err := s.Gones(); err != nil || len(g) != 1 || g[0].UID != "u2" || len(g[0].Status) != 1 {
			t.Fatalf("tombstones %+v, %v", g, err)
		}
		must(t, s.SaveGone(Gone{UID: "u2", Acked: true}))
		must(t, s.DeleteGone("u2"))
		must(t, s.DeletePod("u1", nil))
		s = reopen()
		if pods, _ := s.Pods(); len(pods) != 0 {
			t.Fatalf("pods left %v", pods)
		}
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestStoreAgainstModel runs random operations with reopens against a map.
func TestStoreAgainstModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp("", "store")
		must(t, err)
		defer func() { _ = os.RemoveAll(dir) }()
		path := filepath.Join(dir, "node.db")
		b := openBolt(t, path)
		b.db.NoSync = true // durability is not what this test is about
		pods, objects := map[string]Pod{}, map[string]wire.Object{}
		n := rapid.IntRange(1, 15).Draw(rt, "ops")
		for range n {
			uid := fmt.Sprintf("u%d", rapid.IntRange(0, 5).Draw(rt, "uid"))
			switch rapid.IntRange(0, 4).Draw(rt, "op") {
			case 0:
				p := samplePod(uid)
				p.StartTime = rapid.Int64().Draw(rt, "start")
				must(t, b.SavePod(p))
				pods[uid] = p
			case 1:
				must(t, b.DeletePod(uid, nil))
				delete(pods, uid)
			case 2:
				objects[uid] = object(uid, rapid.Uint64().Draw(rt, "rv"))
				must(t, b.SaveAssignment(Assignment{Objects: objects}))
			case 3:
				delete(objects, uid)
				must(t, b.SaveAssignment(Assignment{Objects: objects}))
			case 4:
				must(t, b.Close())
				b = openBolt(t, path)
				b.db.NoSync = true
			}
		}
		a, err := b.Assignment()
		must(t, err)
		if len(a.Objects) != len(objects) || len(objects) > 0 && !reflect.DeepEqual(a.Objects, objects) {
			rt.Fatalf("objects %v, want %v", a.Objects, objects)
		}
		got, err := b.Pods()
		must(t, err)
		if len(got) != len(pods) {
			rt.Fatalf("%d pods, want %d", len(got), len(pods))
		}
		for _, p := range got {
			if !reflect.DeepEqual(p, pods[p.UID]) {
				rt.Fatalf("pod %+v, want %+v", p, pods[p.UID])
			}
		}
		must(t, b.Close())
	})
}

func TestLockedDatabaseIsNotTouched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	b := openBolt(t, path)
	defer func() { _ = b.Close() }()
	if _, err := Open(path, testSeal(t, ""), 0, quiet); !errors.Is(err, ErrLocked) {
		t.Fatalf("second open: %v", err)
	}
	if _, err := os.Stat(path + ".damaged"); err == nil {
		t.Fatal("a database in use was moved aside")
	}
}

func TestNewerFormatIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	b := openBolt(t, path)
	tx, err := b.db.Begin(true)
	must(t, err)
	must(t, put(tx, bucketMeta, keyFormat, uint64(format+1)))
	must(t, tx.Commit())
	must(t, b.Close())
	if _, err := Open(path, testSeal(t, ""), 0, quiet); !errors.Is(err, ErrNewer) {
		t.Fatalf("open: %v", err)
	}
}

// filled is a database of some pages, with a free list and branch pages.
func filled(t testing.TB) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "node.db")
	b := openBolt(t, path)
	objects := map[string]wire.Object{}
	for i := range 200 {
		uid := fmt.Sprintf("uid-%03d", i)
		o := object(uid, 1)
		o.Data = make([]byte, 300)
		objects[uid] = o
	}
	must(t, b.SaveAssignment(Assignment{Epoch: 1, Generation: 1, Objects: objects}))
	for i := range 5 {
		must(t, b.SavePod(samplePod(fmt.Sprint(i))))
	}
	big := object("big", 1)
	big.Data = make([]byte, 20000) // overflow pages
	objects["big"] = big
	must(t, b.SaveAssignment(Assignment{Epoch: 1, Generation: 2, Objects: objects}))
	must(t, b.Close())
	raw, err := os.ReadFile(path)
	must(t, err)
	return raw
}

// TestDamageNeverPanics damages the file in the ways of a power cut and of a
// bad card: each open either works or starts empty, with the old one aside.
func TestDamageNeverPanics(t *testing.T) {
	whole := filled(t)
	if err := verify(whole); err != nil {
		t.Fatalf("a good file is refused: %v", err)
	}
	dir := t.TempDir()
	quarantined := 0
	try := func(name string, raw []byte) {
		t.Helper()
		path := filepath.Join(dir, "node.db")
		_ = os.Remove(path + ".damaged")
		must(t, os.WriteFile(path, raw, 0o600))
		b, err := Open(path, testSeal(t, ""), 0, quiet)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		must(t, b.SavePod(samplePod("new")))
		must(t, b.SaveAssignment(Assignment{Epoch: 9, Generation: 9}))
		must(t, b.Close())
		if _, err := os.Stat(path + ".damaged"); err == nil {
			quarantined++
		}
		must(t, os.Remove(path))
	}
	for _, n := range []int{0, 1, 100, 4096, 8192, 12288, len(whole) / 2, len(whole) - 4096} {
		try(fmt.Sprint("truncated to ", n), whole[:n])
		nul := append([]byte{}, whole...)
		clear(nul[n:])
		try(fmt.Sprint("NUL from ", n), nul)
	}
	try("text", []byte("not a database at all"))
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 90 {
		raw := append([]byte{}, whole...)
		switch i % 3 {
		case 0: // one bit
			raw[r.IntN(len(raw))] ^= 1 << r.IntN(8)
		case 1: // a page of another place
			a, b := r.IntN(len(raw)/4096), r.IntN(len(raw)/4096)
			copy(raw[a*4096:(a+1)*4096], whole[b*4096:(b+1)*4096])
		case 2: // the head of a page
			p := 4096 * r.IntN(len(raw)/4096)
			for j := range 16 {
				raw[p+j] ^= byte(r.Uint32())
			}
		}
		try(fmt.Sprint("damage ", i), raw)
	}
	if quarantined < 30 {
		t.Fatalf("only %d of the damaged files were noticed", quarantined)
	}
}

func FuzzVerify(f *testing.F) {
	whole := filled(f)
	f.Add(whole, uint32(0), byte(0))
	f.Add(whole, uint32(16384), byte(0xff))
	f.Add([]byte{}, uint32(0), byte(0))
	f.Fuzz(func(t *testing.T, raw []byte, at uint32, x byte) {
		if len(raw) > 0 {
			raw = append([]byte{}, raw...)
			raw[int(at)%len(raw)] ^= x
		}
		_ = verify(raw) // must return
	})
}

func FuzzDecode(f *testing.F) {
	raw, err := encode(bucketPods, "u", samplePod("u"))
	must(f, err)
	f.Add(raw)
	f.Fuzz(func(t *testing.T, raw []byte) {
		var p Pod
		_ = decode(bucketPods, "u", raw, &p)
		var g Gone
		_ = decode(bucketGone, "u", raw, &g)
	})
}

// TestFigures: every commit is counted, with at least its meta page, and
// reading costs nothing.
func TestFigures(t *testing.T) {
	b := openBolt(t, filepath.Join(t.TempDir(), "node.db"))
	read := func() map[string]float64 {
		t.Helper()
		reg := prometheus.NewPedanticRegistry()
		must(t, reg.Register(b))
		families, err := reg.Gather()
		must(t, err)
		out := map[string]float64{}
		for _, f := range families {
			m := f.GetMetric()[0]
			out[strings.TrimPrefix(f.GetName(), "dunlin_agent_store_")] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
		return out
	}
	before := read()
	if before["bytes"] < 4096 {
		t.Errorf("%v", before)
	}
	for i := range 5 {
		must(t, b.SavePod(samplePod(fmt.Sprint("u", i))))
	}
	if _, err := b.Pods(); err != nil {
		t.Fatal(err)
	}
	after := read()
	if n := after["writes_total"] - before["writes_total"]; n != 5 {
		t.Errorf("%v commits of 5", n)
	}
	if n := after["written_bytes_total"] - before["written_bytes_total"]; n < 5*2*4096 || n > 1<<20 {
		t.Errorf("5 commits wrote %v bytes", n)
	}
}
