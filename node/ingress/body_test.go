package ingress

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// A body that cannot be read is its sender's fault: it says 400, and no
// backend is blamed.
func TestABodyThatCannotBeRead(t *testing.T) {
	w := newWorld(t)
	w.service("a", false, backend(t, func(rw http.ResponseWriter, r *http.Request) { _, _ = io.Copy(rw, r.Body) }))
	w.rule("a", "a.example", "/", "a")
	w.publish()
	w.expect(w.client(), "http://a.example/", 200, "")
	for _, body := range []string{"zz\r\n", "5\r\nhello\r\nzz\r\n"} {
		c, err := net.Dial("tcp", w.set.HTTP)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err := fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n%s", body); err != nil {
			t.Fatal(err)
		}
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("%q: %v", body, err)
		}
		if _ = r.Body.Close(); r.StatusCode != http.StatusBadRequest {
			t.Errorf("%q: %s", body, r.Status)
		}
		_ = c.Close()
	}
	st, err := Ask(w.dir)
	if err != nil || st.Faults[faults[faultBackend]] != 0 || st.Faults[faults[faultBroken]] != 2 {
		t.Errorf("%v, %v", st.Faults, err)
	}
}
