package mux

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// pair are two ends of a connection over loopback.
func pair(t testing.TB, most int) (a, b *Mux) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ca, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	cb, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	a, b = New(ca, true, most), New(cb, false, most)
	t.Cleanup(func() { a.Close(""); b.Close("") })
	return a, b
}

func opened(t testing.TB, a, b *Mux, what string) (*Stream, *Stream) {
	t.Helper()
	s, err := a.Open([]byte(what))
	if err != nil {
		t.Fatal(err)
	}
	o, err := b.Accept()
	if err != nil || string(o.What()) != what {
		t.Fatalf("accepted %q, %v", o.What(), err)
	}
	return s, o
}

// Whatever is written comes out, in order, in both directions of many
// streams at once, and each direction ends by itself.
func TestStreamsCarryWhatIsWritten(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		a, b := pair(t, 16)
		n := rapid.IntRange(1, 8).Draw(rt, "streams")
		var wg sync.WaitGroup
		send := func(s *Stream, data []byte, cut int) {
			wg.Go(func() {
				for len(data) > 0 {
					k := min(len(data), cut)
					if _, err := s.Write(data[:k]); err != nil {
						t.Errorf("write: %v", err)
						return
					}
					data = data[k:]
				}
				if err := s.CloseWrite(); err != nil {
					t.Errorf("close: %v", err)
				}
			})
		}
		want := func(s *Stream, data []byte) {
			wg.Go(func() {
				got, err := io.ReadAll(s)
				if err != nil || !bytes.Equal(got, data) {
					t.Errorf("%d bytes, %v; want %d", len(got), err, len(data))
				}
			})
		}
		for range n {
			s, o := opened(t, a, b, "x")
			one := bytes.Repeat([]byte("abcdefg"), rapid.IntRange(0, 60_000).Draw(rt, "there"))
			two := bytes.Repeat([]byte("hijk"), rapid.IntRange(0, 60_000).Draw(rt, "back"))
			cut := rapid.IntRange(1, 70_000).Draw(rt, "cut")
			if len(one) > cut*1000 || len(two) > cut*1000 {
				cut += 1000
			}
			send(s, one, cut)
			send(o, two, cut)
			want(o, one)
			want(s, two)
		}
		wg.Wait()
		for _, m := range []*Mux{a, b} {
			left := func() (int, int, error) {
				m.mu.Lock()
				defer m.mu.Unlock()
				return len(m.streams), m.theirs, m.err
			}
			// The reader forgets a stream just after it told of its end.
			for end := time.Now().Add(10 * time.Second); time.Now().Before(end); <-time.After(time.Millisecond) {
				if streams, theirs, _ := left(); streams == 0 && theirs == 0 {
					break
				}
			}
			if streams, theirs, err := left(); streams != 0 || theirs != 0 || err != nil {
				t.Errorf("left: %d streams, %d of the other end's, %v", streams, theirs, err)
			}
		}
		a.Close("")
		b.Close("")
	})
}

// A stream whose reader does not read takes a window, and no more; another
// goes on beside it.
func TestSlowReaderIsBounded(t *testing.T) {
	a, b := pair(t, 16)
	slow, far := opened(t, a, b, "slow")
	blocked := make(chan int)
	go func() {
		n, _ := slow.Write(make([]byte, 10*Window))
		blocked <- n
	}()
	quick, other := opened(t, a, b, "quick")
	go func() { _, _ = quick.Write(make([]byte, 20*Window)); _ = quick.CloseWrite() }()
	if n, err := io.Copy(io.Discard, other); n != 20*Window || err != nil {
		t.Fatalf("beside a stream that nobody reads: %d, %v", n, err)
	}
	far.mu.Lock()
	if far.n > Window || len(far.in) > Window {
		t.Errorf("%d bytes wait in %d", far.n, len(far.in))
	}
	far.mu.Unlock()
	far.Reset("enough")
	if n := <-blocked; n != Window {
		t.Errorf("%d bytes were taken before the reset, want a window", n)
	}
	var r *ResetError
	if _, err := slow.Read(make([]byte, 1)); !errors.As(err, &r) || r.Reason != "enough" {
		t.Errorf("read after a reset: %v", err)
	}
	if _, err := slow.Write([]byte("x")); !errors.As(err, &r) {
		t.Errorf("write after a reset: %v", err)
	}
}

// What was sent before the end is read before the end is told.
func TestHalfCloseAndReason(t *testing.T) {
	a, b := pair(t, 16)
	s, o := opened(t, a, b, "x")
	if _, err := s.Write([]byte("last words")); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(o); err != nil || string(got) != "last words" {
		t.Fatalf("%q, %v", got, err)
	}
	if _, err := s.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("write after CloseWrite: %v", err)
	}
	b.Close("the pod has ended")
	var r *ResetError
	if _, err := s.Read(make([]byte, 1)); !errors.As(err, &r) || r.Reason != "the pod has ended" {
		t.Errorf("read: %v", err)
	}
	<-a.Done()
	if _, err := a.Open(nil); !errors.As(err, &r) {
		t.Errorf("open: %v", err)
	}
	if _, err := a.Accept(); !errors.As(err, &r) {
		t.Errorf("accept: %v", err)
	}
}

// Whoever breaks the rules is cut off, with everything that waits.
func TestBrokenPeer(t *testing.T) {
	frame := func(kind byte, id byte, size int, p string) []byte {
		return append([]byte{kind, 0, 0, 0, id, byte(size >> 8), byte(size)}, p...)
	}
	full := strings.Repeat("x", 16000)
	for name, raw := range map[string][]byte{
		"too long":        frame(kindData, 1, 0xffff, ""),
		"own number":      frame(kindOpen, 2, 0, ""),
		"number 0":        frame(kindOpen, 0, 0, ""),
		"opened twice":    append(frame(kindOpen, 1, 0, ""), frame(kindOpen, 1, 0, "")...),
		"too many":        append(append(frame(kindOpen, 1, 0, ""), frame(kindOpen, 3, 0, "")...), frame(kindOpen, 5, 0, "")...),
		"over the window": append(frame(kindOpen, 1, 0, ""), bytes.Repeat(frame(kindData, 1, 16000, full), 9)...),
		"after the end":   append(append(frame(kindOpen, 1, 0, ""), frame(kindFin, 1, 0, "")...), frame(kindData, 1, 1, "x")...),
		"odd credit":      append(frame(kindOpen, 1, 0, ""), frame(kindCredit, 1, 1, "x")...),
		"cut":             frame(kindOpen, 1, 10, "x"),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				here, there := net.Pipe()
				m := New(there, false, 2)
				go func() { _, _ = here.Write(raw); _ = here.Close() }()
				<-m.Done()
				if m.Err() == nil {
					t.Error("no error")
				}
				if name != "cut" && (errors.Is(m.Err(), io.EOF) || errors.Is(m.Err(), io.ErrUnexpectedEOF)) {
					t.Errorf("not noticed: %v", m.Err())
				}
			})
		})
	}
}

// Unknown kinds and streams that are gone are nothing to fail over.
func TestUnknownIsIgnored(t *testing.T) {
	here, there := net.Pipe()
	m := New(there, false, 2)
	go func() {
		_, _ = here.Write([]byte{99, 0, 0, 0, 7, 0, 1, 'x', kindData, 0, 0, 0, 9, 0, 1, 'x', kindOpen, 0, 0, 0, 1, 0, 2, 'o', 'k'})
	}()
	s, err := m.Accept()
	if err != nil || string(s.What()) != "ok" {
		t.Fatalf("%v", err)
	}
	m.Close("")
	_ = here.Close()
}

// FuzzTake: no bytes of a peer make an end panic or keep more than a window
// for each stream.
func FuzzTake(f *testing.F) {
	f.Add([]byte{kindOpen, 0, 0, 0, 1, 0, 0, kindData, 0, 0, 0, 1, 0, 1, 'x', kindFin, 0, 0, 0, 1, 0, 0})
	f.Fuzz(func(t *testing.T, raw []byte) {
		here, there := net.Pipe()
		m := New(there, false, 4)
		_, _ = here.Write(raw)
		_ = here.Close()
		<-m.Done()
	})
}

func BenchmarkCopy(b *testing.B) {
	x, y := pair(b, 2)
	s, o := opened(b, x, y, "x")
	buf := make([]byte, 32<<10)
	b.SetBytes(int64(len(buf)))
	go func() { _, _ = io.Copy(io.Discard, o) }()
	for b.Loop() {
		if _, err := s.Write(buf); err != nil {
			b.Fatal(err)
		}
	}
}
