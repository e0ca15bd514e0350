package gossip

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/dunlin-project/dunlin/gossip/simnet"
)

// wish is what a test wants a Keeper to take part in.
type wish struct {
	mu sync.Mutex
	w  Wanted
}

func (w *wish) set(n Wanted) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.w = n
}

func (w *wish) get() Wanted {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.w
}

type kept struct {
	*Keeper
	wish wish
	stop func()
}

func runKeeper(t *testing.T, c KeeperConfig, setUp func(*Keeper)) *kept {
	t.Helper()
	k := &kept{Keeper: NewKeeper(c)}
	if setUp != nil {
		setUp(k.Keeper)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	id := key(t)
	go func() {
		defer close(done)
		_ = k.Run(ctx, Self{Cluster: "c", Key: id, Boot: 7, Wanted: k.wish.get})
	}()
	k.stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(k.stop)
	return k
}

func TestKeeperFollowsKeysAndSite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New(1)
		dir := t.TempDir()
		var mu sync.Mutex
		var got []string
		var ks []*kept
		started := 0
		for i := range 3 {
			ks = append(ks, runKeeper(t, KeeperConfig{
				Advertise: simAddr(i).Addr(), Port: Port, SeedFile: filepath.Join(dir, simAddr(i).Addr().String()),
				Transport: func() memberlist.Transport { return n.Transport(simAddr(i)) },
			}, func(k *Keeper) {
				k.Handle(9, func(b []byte) { mu.Lock(); got = append(got, string(b)); mu.Unlock() })
				k.OnStart(func() { mu.Lock(); started++; mu.Unlock() })
			}))
		}
		if err := ks[0].Send("x", 9, nil); err == nil || ks[0].NodeID() != "" || ks[0].Members() != nil {
			t.Fatal("there is a pool without keys")
		}
		all := func(w Wanted) {
			for _, k := range ks {
				k.wish.set(w)
			}
			time.Sleep(2 * time.Minute)
		}
		complete := func(what string, want int) {
			t.Helper()
			for i, k := range ks {
				if got := len(k.Members()); got != want {
					t.Fatalf("%s: member %d knows %d of %d", what, i, got, want)
				}
			}
		}
		seeds := []string{simAddr(0).String()}
		all(Wanted{Site: "a", Epoch: 1, Keyring: ring, Seeds: seeds})
		complete("first", 3)
		if err := ks[1].Send(ks[2].NodeID(), 9, []byte("hi")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		mu.Lock()
		if !slices.Equal(got, []string{"hi"}) || started != 3 {
			t.Fatalf("messages %q, %d starts", got, started)
		}
		mu.Unlock()
		// A banned key: the new one alone, one member after the other.
		fresh := [][]byte{[]byte("fedcba9876543210")}
		for _, k := range ks {
			k.wish.set(Wanted{Site: "a", Epoch: 1, Keyring: fresh, Seeds: seeds})
			time.Sleep(time.Second)
		}
		time.Sleep(2 * time.Minute)
		complete("after the ban", 3)
		// One that keeps the old key is out.
		ks[2].wish.set(Wanted{Site: "a", Epoch: 1, Keyring: ring, Seeds: seeds})
		time.Sleep(3 * time.Minute)
		if len(ks[0].Members()) != 2 {
			t.Fatalf("a member with banned keys is still there: %v", ks[0].Members())
		}
		// Another site, without seeds from anybody: those kept on disk do.
		all(Wanted{Site: "b", Epoch: 1, Keyring: ring})
		complete("another site", 3)
		all(Wanted{})
		complete("no keys", 0)
		for _, k := range ks {
			k.stop()
		}
		time.Sleep(5 * time.Minute) // memberlist's last timers
		if b, err := os.ReadFile(filepath.Join(dir, simAddr(1).Addr().String())); err != nil || !strings.Contains(string(b), simAddr(0).String()) {
			t.Fatalf("seeds %q, %v", b, err)
		}
	})
}

// A taken port is no error: it is said once, and the rest goes on.
func TestKeeperGoesOnWithoutItsPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	var mu sync.Mutex
	var log bytes.Buffer
	k := runKeeper(t, KeeperConfig{
		Advertise: netip.MustParseAddr("127.0.0.1"), Port: uint16(l.Addr().(*net.TCPAddr).Port),
		Log: slog.New(slog.NewTextHandler(writerFunc(func(b []byte) (int, error) { mu.Lock(); defer mu.Unlock(); return log.Write(b) }), nil)),
	}, nil)
	k.wish.set(Wanted{Site: "a", Keyring: ring})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		mu.Lock()
		said := log.String()
		mu.Unlock()
		if strings.Contains(said, "--gossip-port") {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("nothing said: %q", said)
		}
	}
	if _, ok := k.Addr(); ok {
		t.Fatal("there is a pool")
	}
	k.stop()
}

type writerFunc func([]byte) (int, error)

// Write implements io.Writer.
func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
