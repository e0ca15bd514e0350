package podstream

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gorilla/websocket"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// TestLogsOverWebSocket: what is logged comes as it is or in base64, the end
// of the log is that of the socket, and an error before the first byte an
// ordinary answer.
func TestLogsOverWebSocket(t *testing.T) {
	s, err := New(Config{Nodes: &fakeNode{t: t}})
	if err != nil {
		t.Fatal(err)
	}
	follows := make(chan error, 1)
	logs := map[string]func(context.Context, io.Writer) error{
		"/two":   func(_ context.Context, w io.Writer) error { return errors.Join(wrote(w, "one\n"), wrote(w, "two\n")) },
		"/empty": func(context.Context, io.Writer) error { return nil },
		"/fails": func(context.Context, io.Writer) error { return apierrors.NewBadRequest("no such container") },
		"/broke": func(_ context.Context, w io.Writer) error { return errors.Join(wrote(w, "one\n"), errors.New("lost")) },
		"/follow": func(ctx context.Context, w io.Writer) error {
			err := wrote(w, "one\n")
			<-ctx.Done()
			follows <- err
			return ctx.Err()
		},
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.ServeLogs(w, r, logs[r.URL.Path]); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
	}))
	defer srv.Close()
	dial := func(path string, protos ...string) (*websocket.Conn, *http.Response, error) {
		d := websocket.Dialer{Subprotocols: protos}
		return d.Dial("ws"+strings.TrimPrefix(srv.URL, "http")+path, nil)
	}
	for _, proto := range []string{"", binaryLog, base64Log} {
		for path, want := range map[string]string{"/two": "one\ntwo\n", "/empty": "", "/broke": "one\n"} {
			var protos []string
			if proto != "" {
				protos = []string{"x", proto}
			}
			c, resp, err := dial(path, protos...)
			if err != nil {
				t.Fatalf("%s %q: %v %+v", path, proto, err, resp)
			}
			got := ""
			for {
				var p []byte
				if _, p, err = c.ReadMessage(); err != nil {
					break
				}
				if proto == base64Log {
					if p, err = base64.StdEncoding.DecodeString(string(p)); err != nil {
						t.Fatal(err)
					}
				}
				got += string(p)
			}
			code := websocket.CloseNormalClosure
			if path == "/broke" {
				code = websocket.CloseInternalServerErr
			}
			if got != want || c.Subprotocol() != proto || !websocket.IsCloseError(err, code) {
				t.Errorf("%s %q: %q, %q, %v", path, proto, got, c.Subprotocol(), err)
			}
			_ = c.Close()
		}
	}
	for path, protos := range map[string][]string{"/fails": {binaryLog}, "/two": {v4Channel}} {
		if _, resp, err := dial(path, protos...); err == nil || resp == nil || resp.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %v, %+v", path, err, resp)
		}
	}
	c, _, err := dial("/follow", binaryLog)
	if err != nil {
		t.Fatal(err)
	}
	for got := ""; got != "one\n"; { // a client that goes earlier is none that follows
		_, p, err := c.ReadMessage()
		if err != nil {
			t.Fatal(err)
		}
		got += string(p)
	}
	_ = c.Close()
	if err := <-follows; err != nil {
		t.Error(err)
	}
}

func wrote(w io.Writer, text string) error {
	_, err := io.WriteString(w, text)
	return err
}
