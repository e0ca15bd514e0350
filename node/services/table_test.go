package services

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

func digest(items map[string]string) (sum uint64) {
	for k, v := range items {
		sum += wire.ItemDigest(k, []byte(v))
	}
	return sum
}

func full(gen uint64, items map[string]string) *wire.ServicesReply {
	r := &wire.ServicesReply{Generation: gen, Full: true, Digest: digest(items)}
	for k, v := range items {
		r.Items = append(r.Items, wire.ServiceItem{Key: k, Data: []byte(v)})
	}
	return r
}

func TestPagesReplaceOnlyOnceComplete(t *testing.T) {
	tab := NewTable()
	if _, err := tab.Apply(full(5, map[string]string{"s/n/a": "1", "s/n/b": "2"})); err != nil {
		t.Fatal(err)
	}
	sub := tab.Subscribe()
	if items, gone, more := sub.Take(1 << 20); len(items) != 2 || len(gone) != 0 || more {
		t.Fatal(items, gone, more)
	}
	want := map[string]string{"s/n/b": "2", "s/n/c": "3"}
	more, err := tab.Apply(&wire.ServicesReply{Generation: 8, Full: true, More: true, Items: []wire.ServiceItem{{Key: "s/n/c", Data: []byte("3")}}})
	if err != nil || !more || tab.Get("s/n/a") == nil || tab.Get("s/n/c") != nil {
		t.Fatal("a page alone changed the table", more, err)
	}
	if r := tab.Request(); !r.Filling || r.Generation != 8 {
		t.Fatalf("%+v", r)
	}
	more, err = tab.Apply(&wire.ServicesReply{Generation: 9, Items: []wire.ServiceItem{{Key: "s/n/b", Data: []byte("2")}}, Digest: digest(want)})
	if err != nil || more || tab.Get("s/n/a") != nil || string(tab.Get("s/n/c")) != "3" || tab.Generation() != 9 {
		t.Fatal(more, err, tab.items)
	}
	if items, gone, _ := sub.Take(1 << 20); len(items) != 1 || items[0].Key != "s/n/c" || len(gone) != 1 || gone[0] != "s/n/a" {
		t.Fatal("the subscriber heard", items, gone)
	}
	// A delta that does not add up: everything is asked for, and kept until then.
	if _, err := tab.Apply(&wire.ServicesReply{Generation: 10, Gone: []string{"s/n/b"}, Digest: 1}); !errors.Is(err, ErrDiverged) {
		t.Fatal(err)
	}
	if r := tab.Request(); r.Generation != 0 || r.Filling {
		t.Fatalf("%+v", r)
	}
}

// fakeLink answers with the tables that it is given.
type fakeLink struct {
	hints chan struct{}
	reply atomic.Pointer[wire.ServicesReply] // nil: offline
	asked atomic.Int64
}

func (l *fakeLink) Services(context.Context, wire.ServicesRequest) (*wire.ServicesReply, error) {
	l.asked.Add(1)
	if r := l.reply.Load(); r != nil {
		return r, nil
	}
	return nil, errors.New("offline")
}
func (l *fakeLink) ServiceHints() <-chan struct{} { return l.hints }
func (l *fakeLink) Connected() bool               { return l.reply.Load() != nil }

// A day of changes costs a few writes, a day of rest none, a day without a
// server neither writes nor questions; and what was saved is there at the
// next start.
func TestSavedSeldomAndFoundAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "services")
	// What was written last, and when: the clock of files is a coarse one.
	modified := func() string {
		st, err := os.Stat(path)
		if err != nil {
			return ""
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Error(err)
		}
		return st.ModTime().String() + string(b)
	}
	synctest.Test(t, func(t *testing.T) {
		l := &fakeLink{hints: make(chan struct{}, 1)}
		p := &Puller{Table: NewTable(), Link: l, Path: path, Log: slog.New(slog.DiscardHandler)}
		p.Load()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		time.Sleep(24 * time.Hour)
		if n := l.asked.Load(); n > 2 {
			t.Fatalf("asked %d times without a connection", n)
		}
		writes, last := 0, ""
		large := strings.Repeat("x", 600<<10)
		for i := range 24 * 60 {
			l.reply.Store(full(uint64(i+1), map[string]string{"s/n/a": fmt.Sprint(i), "s/n/large": large}))
			l.hints <- struct{}{}
			time.Sleep(time.Minute)
			if m := modified(); m != last {
				writes, last = writes+1, m
			}
		}
		if writes < 100 || writes > 150 {
			t.Fatalf("%d writes in a day of changes", writes)
		}
		// What a small site's table says is kept within seconds.
		for i := range 3 {
			l.reply.Store(full(uint64(24*60+1+i), map[string]string{"s/n/a": fmt.Sprint("small ", i)}))
			l.hints <- struct{}{}
			time.Sleep(saveLeast + time.Second)
			if i == 0 {
				time.Sleep(saveMost) // from the large one
			} else if m := modified(); !strings.Contains(m, fmt.Sprint("small ", i)) {
				t.Fatalf("not saved: %q", m)
			}
		}
		time.Sleep(time.Hour)
		last = modified()
		asked := l.asked.Load()
		time.Sleep(24 * time.Hour)
		if modified() != last || l.asked.Load() != asked {
			t.Fatal("written or asked at rest")
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
	again := &Puller{Table: NewTable(), Path: path, Log: slog.New(slog.DiscardHandler)}
	again.Load()
	if string(again.Table.Get("s/n/a")) != "small 2" || again.Table.Generation() != 24*60+3 {
		t.Fatal("not found again", again.Table.gen)
	}
	if err := os.WriteFile(path, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	broken := &Puller{Table: NewTable(), Path: path, Log: slog.New(slog.DiscardHandler)}
	broken.Load()
	if broken.Table.Generation() != 0 {
		t.Fatal("a damaged file was believed")
	}
}
