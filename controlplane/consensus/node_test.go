package consensus

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelInfo}))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(string(p[:len(p)-1]))
	return len(p), nil
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func testConfig(t testing.TB, dir string) Config {
	return Config{Dir: dir, ClusterID: "cluster-1", ServerID: "server-1", Log: testLog(t)}
}

// openTest opens a Node, waits until it leads and closes it with the test.
func openTest(t testing.TB, cfg Config) *Node {
	t.Helper()
	n, err := Open(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	if _, err := n.WaitLeading(testContext(t)); err != nil {
		t.Fatal(err)
	}
	return n
}

func object(kind, ns, name string) *state.Record {
	return &state.Record{
		Header: state.Header{Key: state.Key{Kind: kind, Namespace: ns, Name: name}, APIVersion: "v1", UID: "uid-" + kind + "-" + ns + "-" + name},
		Spec:   &state.Body{Codec: state.CodecKubeCBOR, Data: []byte("spec of " + name)},
	}
}

func mustPropose(t testing.TB, n *Node, ops ...state.Op) []state.Result {
	t.Helper()
	res, err := n.Propose(testContext(t), ops)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range res {
		if r.Reason != state.ReasonNone {
			t.Fatalf("refused: %d %s", r.Reason, r.Detail)
		}
	}
	return res
}

func TestOpenProposeReopen(t *testing.T) {
	dir := t.TempDir()
	n := openTest(t, testConfig(t, dir))
	if f := n.State().Facts(); f.ClusterID != "cluster-1" || f.Epoch != 1 || f.Feature != 1 {
		t.Errorf("facts %+v", f)
	}
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("Namespace", "", "default")})
	if err := n.Barrier(testContext(t)); err != nil {
		t.Error(err)
	}
	want, err := n.State().Hash()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(testContext(t), testConfig(t, dir)); !errors.Is(err, ErrLocked) {
		t.Errorf("second open: %v", err)
	}
	term, _ := n.Leadership()
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if _, err := n.Propose(testContext(t), []state.Op{{Type: state.OpRecover}}); !errors.Is(err, ErrClosed) {
		t.Errorf("after close: %v", err)
	}
	again := openTest(t, testConfig(t, dir))
	got, err := again.State().Hash()
	if err != nil || got != want {
		t.Errorf("hash differs after a restart: %v", err)
	}
	if next, _ := again.Leadership(); next <= term {
		t.Errorf("term %d after %d", next, term)
	}
	cfg := testConfig(t, dir)
	_ = again.Close()
	cfg.ExpectClusterID = "cluster-2"
	if _, err := Open(testContext(t), cfg); !errors.Is(err, ErrOtherCluster) {
		t.Errorf("other cluster: %v", err)
	}
}
