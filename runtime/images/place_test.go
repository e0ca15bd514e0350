package images

import (
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// TestStalledPullsKeepNobodyWaiting: the node has two places, and two images
// never come. A third one does; it says what it waits for, and those say that
// they stand still. Two more that want the same layer wait for it without a
// place, and all come once the registry answers.
func TestStalledPullsKeepNobodyWaiting(t *testing.T) {
	needRoot(t)
	h := newHub(t)
	shared := tarOf(t, file("shared", noise(1<<20, 7)))
	for _, name := range []string{"one", "two", "again"} {
		push(t, h.srv.URL, name, "1", nil, makeImage(t, amd64(), plain, tarOf(t, file(name, name)), shared))
	}
	push(t, h.srv.URL, "good", "1", nil, makeImage(t, amd64(), plain, tarOf(t, file("good", "good"))))
	lost := digestOf(shared)
	h.setFault(func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
		if strings.HasSuffix(r.URL.Path, lost) {
			panic(http.ErrAbortHandler)
		}
		return w
	})
	store := testStore(t)
	p := testPuller(t, store, registry.Config{})
	store.pauseUnit = 300 * time.Millisecond
	var mu sync.Mutex
	said := map[string]string{}
	var wg sync.WaitGroup
	stalls := make(chan struct{}, 100)
	pull := func(name string, ends chan<- error) {
		wg.Go(func() {
			_, err := p.Image(t.Context(), workload.ImageRequest{Image: h.host + "/" + name + ":1", Policy: "IfNotPresent"}, func(m string) {
				mu.Lock()
				defer mu.Unlock()
				said[name] += m + "\n"
				if strings.Contains(m, "stands still") {
					stalls <- struct{}{}
				}
			})
			ends <- err
		})
	}
	bad, good := make(chan error, 3), make(chan error, 1)
	for _, name := range []string{"one", "two", "again"} {
		pull(name, bad)
	}
	<-stalls
	pull("good", good)
	if err := <-good; err != nil {
		t.Errorf("the good one: %v", err)
	}
	h.setFault(nil)
	for range 3 {
		if err := <-bad; err != nil {
			t.Errorf("one that came at last: %v", err)
		}
	}
	wg.Wait()
	all := said["one"] + said["two"] + said["again"]
	if !strings.Contains(all, "stands still, and goes on in") || !strings.Contains(all, "waits until one of the 2 pulls under way is over") {
		t.Errorf("said %q", said)
	}
}
