package images

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
)

// slowLink sends 5 MB/s and breaks every five seconds.
type slowLink struct {
	http.ResponseWriter
	limiter *rate.Limiter
	until   time.Time
	r       *http.Request
}

func (s *slowLink) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		if time.Now().After(s.until) {
			panic(http.ErrAbortHandler)
		}
		part := p[:min(len(p), s.limiter.Burst())]
		if err := s.limiter.WaitN(s.r.Context(), len(part)); err != nil {
			return n, err
		}
		m, err := s.ResponseWriter.Write(part)
		n += m
		if err != nil {
			return n, err
		}
		p = p[len(part):]
	}
	return n, nil
}

// BenchmarkPullOverABreakingLink pulls 200 MB; its figure is how many bytes
// the registry sent for each byte of the image.
func BenchmarkPullOverABreakingLink(b *testing.B) {
	needRoot(b)
	const speed, life, size = 5 << 20, 5 * time.Second, 200_000_000
	h := newHub(b)
	layer := tarOf(b, file("big", noise(size, 8)))
	push(b, h.srv.URL, "app", "1", nil, makeImage(b, amd64(), plain, layer))
	for b.Loop() {
		s := testStore(b)
		p := testPuller(b, s, registry.Config{})
		s.pauseUnit = firstPause
		cuts := 0
		h.setFault(func(w http.ResponseWriter, r *http.Request) http.ResponseWriter {
			if !strings.Contains(r.URL.Path, "/blobs/") {
				return w
			}
			cuts++
			return &slowLink{w, rate.NewLimiter(speed, 64<<10), time.Now().Add(life), r}
		})
		if _, err := p.Image(b.Context(), ask(h.host+"/app:1", "IfNotPresent"), nil); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(h.bytes())/float64(len(layer)), "x-size")
		b.ReportMetric(float64(cuts), "connections")
	}
}
