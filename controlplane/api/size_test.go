package api

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/manifests"
)

// keys is a JSON object with the keys from..to-1.
func keys(from, to int, value string) string {
	var b strings.Builder
	b.WriteByte('{')
	for i := from; i < to; i++ {
		if i > from {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `"k%d":%s`, i, value)
	}
	b.WriteByte('}')
	return b.String()
}

func bigMap(name string, n int) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q},"data":%s}`, name, keys(0, n, `""`))
}

// TestLongCollections: tracking who set which field costs the square of a
// map's or list's length, so an object with too long a one is refused before
// that begins, on every path by which it could come in.
func TestLongCollections(t *testing.T) {
	w := newWorld(t)
	const most = manifests.MaxEntries
	w.want(201, "POST", cms, bigMap("most", most))
	refused := func(what string, m map[string]any, field string) {
		t.Helper()
		if at(m, "reason") != "Invalid" || at(m, "details", "causes", 0, "field") != field ||
			!strings.Contains(fmt.Sprint(at(m, "message")), "Forbidden: too many entries, 10000 are the most in one map or list") {
			t.Errorf("%s: %.300v", what, m)
		}
	}
	refused("create", w.want(422, "POST", cms, bigMap("c", 200_000)), "data")
	refused("update", w.want(422, "PUT", cms+"/most", bigMap("most", most+1)), "data")
	more := fmt.Sprintf(`{"data":%s}`, keys(most, most+1, `""`))
	refused("patch", w.want(422, "PATCH", cms+"/most", more, "Content-Type", merge), "data")
	intent := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"most"},"data":`
	refused("apply", w.want(422, "PATCH", cms+"/most?fieldManager=x", intent+keys(0, most+1, `""`)+"}", "Content-Type", apply), "data")
	refused("apply that grows", w.want(422, "PATCH", cms+"/most?fieldManager=x", intent+keys(most, most+1, `""`)+"}", "Content-Type", apply), "data")

	var finalizers []string
	for i := range most + 1 {
		finalizers = append(finalizers, fmt.Sprintf(`"example.com/%d"`, i))
	}
	slices.Reverse(finalizers)
	refused("set", w.want(422, "POST", cms, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c","finalizers":[`+strings.Join(finalizers, ",")+`]}}`), "metadata.finalizers")
	refused("managed fields", w.want(422, "PUT", cms+"/most", `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"most","managedFields":[{"manager":"m","operation":"Update","apiVersion":"v1","fieldsType":"FieldsV1","fieldsV1":{"f:data":`+
		keys(0, most+2, "{}")+`}}]}}`), "metadata.managedFields[0].fieldsV1")
}

// TestPatchThatDoubles: copies of copies are refused before they fill the
// memory.
func TestPatchThatDoubles(t *testing.T) {
	w := newWorld(t)
	w.want(201, "POST", cms, cmJSON("c", strings.Repeat("x", 1000)))
	ops := []string{`{"op":"add","path":"/metadata/annotations","value":{}}`}
	for i := range 40 {
		ops = append(ops, fmt.Sprintf(`{"op":"copy","from":"/metadata","path":"/metadata/annotations/a%d"}`, i))
	}
	// Upstream's answer to any JSON patch that cannot be applied.
	m := w.want(422, "PATCH", cms+"/c", "["+strings.Join(ops, ",")+"]", "Content-Type", "application/json-patch+json")
	if at(m, "reason") != "Invalid" {
		t.Errorf("%v", m)
	}
}

// TestLargeBodiesTakeTurns: one identity may have two large bodies in work;
// small requests go on beside them.
func TestLargeBodiesTakeTurns(t *testing.T) {
	w := newWorld(t)
	var held []func()
	for range maxLarge / 2 {
		release, err := w.server.limiter.large.acquire(context.Background(), "admin")
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, release)
	}
	large := cmJSON("large", strings.Repeat("x", largeBody))
	if m := w.want(429, "POST", cms+"?timeout=50ms", large); at(m, "reason") != "TooManyRequests" {
		t.Errorf("%v", m)
	}
	w.want(201, "POST", cms, cmJSON("small", "x"))
	for _, release := range held {
		release()
	}
	w.want(201, "POST", cms, large)
	if n := w.server.limiter.large.inUse(); n != 0 {
		t.Errorf("%d slots are still taken", n)
	}
}

// TestListsTakeTurns: however many lists one identity asks for, it has half of
// the places where they are made; its other requests, and others' lists, go on
// beside them. A list that is made needs no place to be sent.
func TestListsTakeTurns(t *testing.T) {
	w := newWorld(t)
	lists := w.server.limiter.lists
	w.want(201, "POST", cms, cmJSON("c", "x"))
	var held []func()
	for range lists.share {
		release, err := lists.acquire(context.Background(), "admin")
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, release)
	}
	if m := w.want(429, "GET", cms+"?timeout=50ms", ""); at(m, "reason") != "TooManyRequests" {
		t.Errorf("%v", m)
	}
	w.want(200, "GET", cms+"/c", "")
	if release, err := lists.acquire(context.Background(), "another"); err != nil {
		t.Error(err)
	} else {
		release()
	}
	for _, release := range held {
		release()
	}
	w.want(200, "GET", cms, "")
	w.want(200, "GET", cms, "", "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	if n := lists.inUse(); n != 0 {
		t.Errorf("%d places are still taken", n)
	}
}

// TestOneIdentitysListsLeaveProcessorsFree: however many lists one identity
// asks for, a processor is left that looks at what else arrives.
func TestOneIdentitysListsLeaveProcessorsFree(t *testing.T) {
	for procs, want := range map[int]int{1: 1, 2: 1, 3: 1, 4: 2, 8: 4} {
		if l := newLists(procs); l.share != want || l.total <= l.share {
			t.Errorf("%d processors: %d lists of one identity, %d in all", procs, l.share, l.total)
		}
	}
}

// slowReader takes a piece whenever it is told to.
type slowReader struct {
	http.ResponseWriter
	takes chan struct{}
}

func (w *slowReader) Write(b []byte) (int, error) {
	<-w.takes
	return w.ResponseWriter.Write(b)
}

// TestListsGiveTheirPlaceBack: while its reader takes nothing a list has no
// place; before it goes on it has one again; in the end it gives it back,
// once. Without a place it goes on all the same when its time is over.
func TestListsGiveTheirPlaceBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		places := newSlots(2, 4)
		ctx, cancel := context.WithCancel(t.Context())
		enter := func() *place {
			p, err := places.enter(ctx, "reader")
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		state := func(step string, used int) {
			t.Helper()
			if synctest.Wait(); places.inUse() != used {
				t.Fatalf("%s: %d places are taken", step, places.inUse())
			}
		}
		takes, body := make(chan struct{}), httptest.NewRecorder()
		q := &request{Request: httptest.NewRequest(http.MethodGet, cms, nil), w: &response{ResponseWriter: &slowReader{body, takes}}, listed: enter()}
		sent := make(chan error)
		go func() {
			_, err := (&lazyGzip{rq: q, code: http.StatusOK}).Write(make([]byte, gzipFrom))
			sent <- err
		}()
		time.Sleep(slowPiece / 2)
		state("the first piece is on its way", 1)
		takes <- struct{}{}
		state("the second is", 1)
		time.Sleep(2 * slowPiece)
		state("the reader takes nothing", 0)
		other := enter()
		takes <- struct{}{}
		state("the place is another list's", 1)
		select {
		case takes <- struct{}{}:
			t.Fatal("it goes on without a place")
		default:
		}
		other.leave()
		state("the other one is done", 1)
		takes <- struct{}{}
		time.Sleep(2 * slowPiece)
		other = enter()
		cancel() // the time is over
		takes <- struct{}{}
		if err := <-sent; err != nil || body.Body.Len() != gzipFrom {
			t.Fatalf("%d bytes, %v", body.Body.Len(), err)
		}
		q.listed.leave()
		q.listed.leave()
		state("it is sent", 1)
		other.leave()
		state("all are", 0)
	})
}
