package api

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// stream is an open watch.
type stream struct {
	t      testing.TB
	cancel context.CancelFunc
	lines  chan map[string]any
}

func (w *world) watch(path string, header ...string) *stream {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.http.URL+path, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer admin")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := w.http.Client().Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(resp.Body)
		w.t.Fatalf("watch %s: HTTP %d %s", path, resp.StatusCode, b)
	}
	s := &stream{t: w.t, cancel: cancel, lines: make(chan map[string]any, 1000)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(s.lines)
		defer func() { _ = resp.Body.Close() }()
		sc := bufio.NewScanner(resp.Body)
		sc.Buffer(nil, 4<<20)
		for sc.Scan() {
			var m map[string]any
			if err := json.Unmarshal(sc.Bytes(), &m); err != nil {
				return
			}
			s.lines <- m
		}
	}()
	w.t.Cleanup(func() {
		cancel()
		<-done
	})
	return s
}

// next waits for one event.
func (s *stream) next() (typ string, obj map[string]any) {
	s.t.Helper()
	select {
	case m, ok := <-s.lines:
		if !ok {
			return "CLOSED", nil
		}
		typ, _ = m["type"].(string)
		obj, _ = m["object"].(map[string]any)
		return typ, obj
	case <-time.After(20 * time.Second):
		s.t.Fatal("no event")
		return "", nil
	}
}

func (s *stream) expect(typ, name string) map[string]any {
	s.t.Helper()
	got, obj := s.next()
	if got != typ || (name != "" && at(obj, "metadata", "name") != name) {
		s.t.Fatalf("event %s %v, want %s %s", got, at(obj, "metadata", "name"), typ, name)
	}
	return obj
}

func TestWatchSelectorTransitions(t *testing.T) {
	w := newWorld(t)
	list := w.want(200, "GET", cms, "")
	rv := at(list, "metadata", "resourceVersion").(string)
	s := w.watch(cms + "?watch=true&labelSelector=on%3D1&resourceVersion=" + rv)
	w.want(201, "POST", cms, cmJSON("c", "v"))
	w.want(200, "PATCH", cms+"/c", `{"metadata":{"labels":{"on":"1"}}}`, "Content-Type", merge)
	s.expect("ADDED", "c")
	w.want(200, "PATCH", cms+"/c", `{"data":{"k":"2"}}`, "Content-Type", merge)
	s.expect("MODIFIED", "c")
	left := w.want(200, "PATCH", cms+"/c", `{"metadata":{"labels":{"on":"0"}}}`, "Content-Type", merge)
	obj := s.expect("DELETED", "c")
	if at(obj, "metadata", "resourceVersion") != at(left, "metadata", "resourceVersion") {
		t.Errorf("DELETED has version %v, the change %v", at(obj, "metadata", "resourceVersion"), at(left, "metadata", "resourceVersion"))
	}
	w.want(200, "PATCH", cms+"/c", `{"metadata":{"labels":{"on":"1"}}}`, "Content-Type", merge)
	s.expect("ADDED", "c")
	w.want(200, "DELETE", cms+"/c", "")
	s.expect("DELETED", "c")
	w.want(201, "POST", cms, cmJSON("turns", "v"))
	w.want(200, "PATCH", cms+"/turns", `{"metadata":{"labels":{"on":"1"}}}`, "Content-Type", merge)
	s.expect("ADDED", "turns")
	for i := range 2 * w.server.limiter.sends.total { // no turn to send is kept
		w.want(200, "PATCH", cms+"/turns", fmt.Sprintf(`{"data":{"k":"%d"}}`, i), "Content-Type", merge)
		s.expect("MODIFIED", "turns")
	}
}

// A watch that is quiet for longer than the write deadline goes on: over
// HTTP/2 a deadline that is left standing resets the stream.
func TestQuietWatchOutlivesTheWriteDeadline(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.BookmarkInterval = time.Second
		c.WriteDeadline = 400 * time.Millisecond
	})
	s := w.watch(cms + "?watch=true&allowWatchBookmarks=true")
	w.want(201, "POST", cms, cmJSON("a", "v"))
	s.expect("ADDED", "a")
	w.want(201, "POST", pods, podJSON("elsewhere"))
	s.expect("BOOKMARK", "")
	w.want(201, "POST", cms, cmJSON("b", "v"))
	s.expect("ADDED", "b")
}

func TestWatchList(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.BookmarkInterval = 50 * time.Millisecond })
	w.want(201, "POST", cms, cmJSON("a", "v"))
	w.want(201, "POST", cms, cmJSON("b", "v"))
	q := "?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
	s := w.watch(cms + q)
	s.expect("ADDED", "a")
	s.expect("ADDED", "b")
	b := s.expect("BOOKMARK", "")
	if at(b, "metadata", "annotations", "k8s.io/initial-events-end") != "true" || at(b, "kind") != "ConfigMap" || at(b, "metadata", "resourceVersion") == nil {
		t.Errorf("bookmark: %v", b)
	}
	w.want(201, "POST", pods, podJSON("elsewhere")) // moves the version only
	if b = s.expect("BOOKMARK", ""); at(b, "metadata", "annotations") != nil {
		t.Errorf("periodic bookmark: %v", b)
	}
	w.want(201, "POST", cms, cmJSON("c", "v"))
	s.expect("ADDED", "c")
	w.want(422, "GET", cms+"?watch=true&sendInitialEvents=true", "")

	s = w.watch(cms+q, "Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1")
	if m := s.expect("ADDED", "a"); at(m, "kind") != "PartialObjectMetadata" || at(m, "data") != nil {
		t.Errorf("metadata event: %v", m)
	}
	s.expect("ADDED", "b")
	s.expect("ADDED", "c")
	if m := s.expect("BOOKMARK", ""); at(m, "kind") != "PartialObjectMetadata" {
		t.Errorf("metadata bookmark: %v", m)
	}
}

func TestWatchTooOldAndClose(t *testing.T) {
	w := newWorld(t)
	s := w.watch(cms + "?watch=true")
	if err := w.server.Close(); err != nil {
		t.Fatal(err)
	}
	if typ, _ := s.next(); typ != "CLOSED" {
		t.Errorf("after Close: %s", typ)
	}
}

// TestWatchesSendInTurn: of many watches that a write wakes only as many send
// at once as there are places; those whose readers take nothing give theirs up
// and keep nobody waiting, another identity's least of all.
func TestWatchesSendInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sends := newSlots(4, math.MaxInt)
		stuck, sending := make(chan struct{}), 0
		var mu sync.Mutex
		send := func(identity string, write func()) time.Duration {
			start := time.Now()
			p, err := sends.enter(t.Context(), identity)
			if err != nil {
				t.Error(err)
				return 0
			}
			defer p.leave()
			_ = p.unlessSlow(func() error { write(); return nil })
			return time.Since(start)
		}
		var wg sync.WaitGroup
		for range 1000 {
			wg.Go(func() {
				send("greedy", func() {
					mu.Lock()
					sending++
					mu.Unlock()
					<-stuck
				})
			})
		}
		synctest.Wait()
		if sending != 2 || sends.inUse() != 2 {
			t.Errorf("%d of one identity send, %d places are taken", sending, sends.inUse())
		}
		if d := send("other", func() {}); d != 0 {
			t.Errorf("another identity waited for %s", d)
		}
		if d := send("greedy", func() {}); d > 500*slowEvent {
			t.Errorf("the same identity's next waited for %s", d)
		}
		if synctest.Wait(); sending != 1000 || sends.inUse() != 0 {
			t.Errorf("%d have begun, %d places are taken", sending, sends.inUse())
		}
		close(stuck)
		wg.Wait()
	})
}
