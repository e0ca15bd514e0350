package ingress

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// A backend that does not begin its answer is given up, with the status that
// says so; one that began and pauses is not.
func TestTimeouts(t *testing.T) {
	e := newEngine(slog.New(slog.DiscardHandler))
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	b := backend(t, func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/begun" {
			_, _ = io.WriteString(rw, "begun ")
			_ = http.NewResponseController(rw).Flush()
			<-time.After(300 * time.Millisecond)
			_, _ = io.WriteString(rw, "done")
			return
		}
		select {
		case <-over:
		case <-r.Context().Done():
		}
	})
	w := &world{t: t, items: map[string][]byte{}}
	w.service("a", false, b)
	w.rule("a", "", "/", "a", func(i *wire.Ingress) { i.Timeout = 100 })
	var items []wire.ServiceItem
	for k, v := range w.items {
		items = append(items, wire.ServiceItem{Key: k, Data: v})
	}
	e.Apply(items, nil, true)
	srv := httptest.NewServer(http.HandlerFunc(e.serve))
	defer srv.Close()
	if s, text, err := get(srv.Client(), srv.URL+"/never"); err != nil || s != http.StatusGatewayTimeout {
		t.Errorf("a backend that says nothing: %d %q %v", s, text, err)
	}
	if s, text, err := get(srv.Client(), srv.URL+"/begun"); err != nil || s != http.StatusOK || text != "begun done" {
		t.Errorf("a backend that pauses: %d %q %v", s, text, err)
	}
	if n := e.counters.faults[faultTimeout].Load(); n != 1 {
		t.Errorf("%d time-outs are counted", n)
	}
}
