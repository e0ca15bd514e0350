package api

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// TestBodyThatDoesNotArrive: a body that is sent drop by drop, or half, ends
// with an answer and a closed connection; nothing waits for it for ever. The
// same for one who may not ask at all.
func TestBodyThatDoesNotArrive(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.RequestTimeout = 500 * time.Millisecond })
	for name, c := range map[string]struct {
		auth string
		half bool // the client closes its side
		code int
	}{
		"slow":         {"Bearer admin", false, 408},
		"half":         {"Bearer admin", true, 400},
		"unauthorized": {"Bearer none", false, 401},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := tls.Dial("tcp", w.http.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: %s\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"kind\":", pods, c.auth)
			if err != nil {
				t.Fatal(err)
			}
			if c.half {
				if err := conn.CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second))
			r := bufio.NewReader(conn)
			resp, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil {
				t.Fatal(err)
			}
			if err := resp.Body.Close(); err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != c.code {
				t.Errorf("HTTP %d, want %d", resp.StatusCode, c.code)
			}
			if _, err := r.ReadByte(); err != io.EOF {
				t.Errorf("the connection goes on: %v", err)
			}
		})
	}
	t.Run("HTTP/2", func(t *testing.T) {
		pr, pw := io.Pipe()
		defer func() { _ = pw.Close() }()
		go func() { _, _ = pw.Write([]byte(`{"kind":`)) }()
		req, err := http.NewRequestWithContext(t.Context(), "POST", w.http.URL+pods, pr)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer admin")
		req.Header.Set("Content-Type", "application/json")
		resp, err := w.http.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.ProtoMajor != 2 || resp.StatusCode != 408 {
			t.Errorf("HTTP/%d: %d", resp.ProtoMajor, resp.StatusCode)
		}
	})
}

// deadlines is a response that notes what deadlines its connection gets.
type deadlines struct {
	http.ResponseWriter
	read []time.Time
}

func (d *deadlines) SetReadDeadline(at time.Time) error {
	d.read = append(d.read, at)
	return nil
}

// TestBodysDeadlineEndsWithTheBody: whoever reads the body to its end takes
// the deadline off the connection, and nobody else does.
func TestBodysDeadlineEndsWithTheBody(t *testing.T) {
	at := time.Now().Add(time.Minute)
	for name, c := range map[string]struct {
		read int64
		want []time.Time
	}{
		"whole": {100, []time.Time{at, {}}},
		"half":  {3, []time.Time{at}},
	} {
		d := &deadlines{}
		body := inTime(d, io.NopCloser(strings.NewReader("ignored")), at)
		if _, err := io.CopyN(io.Discard, body, c.read); err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if !slices.EqualFunc(d.read, c.want, time.Time.Equal) {
			t.Errorf("%s: deadlines %v, want %v", name, d.read, c.want)
		}
	}
	d := &deadlines{}
	if inTime(d, http.NoBody, at); len(d.read) != 0 {
		t.Errorf("no body: deadlines %v", d.read)
	}
}

// TestWatchOutlivesTheBodysDeadline: a watch on HTTP/1.1 that came with a body
// goes on after the time that the body had. (That the deadline itself is taken
// off is TestBodysDeadlineEndsWithTheBody: net/http takes one off, too, before
// it looks whether the client is still there.)
func TestWatchOutlivesTheBodysDeadline(t *testing.T) {
	const timeout = 200 * time.Millisecond
	w := newWorld(t, func(c *Config) { c.RequestTimeout = timeout })
	tr := w.http.Client().Transport.(*http.Transport).Clone() //nolint:forcetypeassert // httptest's
	tr.TLSNextProto, tr.ForceAttemptHTTP2 = map[string]func(string, *tls.Conn) http.RoundTripper{}, false
	tr.TLSClientConfig.NextProtos = nil
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), "GET", w.http.URL+"/api/v1/namespaces/default/configmaps?watch=true", strings.NewReader("ignored"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer admin")
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	<-time.After(2 * timeout) // the deadline passes
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "late"}}
	if _, err := w.reg.Create(t.Context(), cm, registry.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if err != nil || resp.ProtoMajor != 1 || !strings.Contains(line, "ADDED") {
		t.Fatalf("HTTP/%d: %q, %v", resp.ProtoMajor, line, err)
	}
}
