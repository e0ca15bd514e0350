package logs

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func write(t *testing.T, path string, lines ...string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for _, l := range lines {
		if _, err := f.WriteString(l); err != nil {
			t.Fatal(err)
		}
	}
}

func line(sec int, stream, tag, text string) string {
	return fmt.Sprintf("2026-01-02T00:00:%02d.000000000Z %s %s %s\n", sec, stream, tag, text)
}

func TestReadOptions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	write(t, path+".2", line(1, "stdout", "F", "a"))
	write(t, path+".1", line(2, "stdout", "P", "b"), line(2, "stdout", "F", "c"), "garbage\n", "\x00\x00\x00\n")
	write(t, path, line(3, "stderr", "F", "d"), line(4, "stdout", "F", ""), "2026-01-02T00:00:05Z stdout F cut off")
	ptr := func(n int64) *int64 { return &n }
	str := func(s string) *string { return &s }
	at := metav1.NewTime(time.Date(2026, 1, 2, 0, 0, 3, 0, time.UTC))
	for name, c := range map[string]struct {
		o    corev1.PodLogOptions
		want string
	}{
		"all":        {corev1.PodLogOptions{}, "a\nbc\nd\n\n"},
		"tail":       {corev1.PodLogOptions{TailLines: ptr(3)}, "bc\nd\n\n"},
		"tail 0":     {corev1.PodLogOptions{TailLines: ptr(0)}, ""},
		"tail more":  {corev1.PodLogOptions{TailLines: ptr(99)}, "a\nbc\nd\n\n"},
		"since":      {corev1.PodLogOptions{SinceTime: &at}, "d\n\n"},
		"limit":      {corev1.PodLogOptions{LimitBytes: ptr(3)}, "a\nb"},
		"timestamps": {corev1.PodLogOptions{Timestamps: true, TailLines: ptr(3)}, "2026-01-02T00:00:02.000000000Z bc\n2026-01-02T00:00:03.000000000Z d\n2026-01-02T00:00:04.000000000Z \n"},
		"stderr":     {corev1.PodLogOptions{Stream: str(corev1.LogStreamStderr)}, "d\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			if err := Read(t.Context(), path, &c.o, nil, &b); err != nil {
				t.Fatal(err)
			}
			if b.String() != c.want {
				t.Fatalf("got %q, want %q", b.String(), c.want)
			}
		})
	}
	if err := Read(t.Context(), filepath.Join(t.TempDir(), "none"), nil, nil, &bytes.Buffer{}); err != nil {
		t.Fatalf("missing log: %v", err)
	}
}

// notifyBuffer tells the test when the wanted text has arrived.
type notifyBuffer struct {
	mu   sync.Mutex
	b    strings.Builder
	want string
	seen chan struct{}
}

func (n *notifyBuffer) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.b.Write(p)
	if n.want != "" && strings.Contains(n.b.String(), n.want) {
		n.want = ""
		n.seen <- struct{}{}
	}
	return len(p), nil
}

func (n *notifyBuffer) expect(s string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.want = s
	if strings.Contains(n.b.String(), s) {
		n.want = ""
		n.seen <- struct{}{}
	}
}

func TestFollowAcrossRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	write(t, path, line(1, "stdout", "F", "one"))
	out := &notifyBuffer{seen: make(chan struct{}, 1)}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var mu sync.Mutex
	over := false
	done := make(chan error, 1)
	go func() {
		done <- Read(ctx, path, &corev1.PodLogOptions{Follow: true}, func() bool { mu.Lock(); defer mu.Unlock(); return over }, out)
	}()
	wait := func(s string) {
		t.Helper()
		out.expect(s)
		select {
		case <-out.seen:
		case <-ctx.Done():
			t.Fatalf("%q never arrived", s)
		}
	}
	wait("one\n")
	write(t, path, line(2, "stdout", "F", "two"))
	wait("two\n")
	write(t, path, line(3, "stdout", "F", "before the rotation"))
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	write(t, path, line(4, "stdout", "F", "after"))
	wait("two\nbefore the rotation\nafter\n")
	mu.Lock()
	over = true
	mu.Unlock()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("2026-01-02T00:00:01Z stdout F x"))
	f.Add([]byte(" stdout F"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if e, err := parse(b); err == nil && len(e.stream) == 0 {
			t.Fatal("a line without a stream was accepted")
		}
	})
}
