package api

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Watches without timeoutSeconds end after half an hour to an hour, spread
// so that not all come back at once.
const minWatch = 30 * time.Minute

// watch streams events.
func (s *Server) watch(rq *request) error {
	at, err := s.codecs.negotiate(rq.Request, true, true)
	if err != nil {
		return err
	}
	q, err := parseListQuery(rq)
	if err != nil {
		return err
	}
	if at.form == formTable {
		if _, err := tableOptions(rq.URL.Query()); err != nil {
			return err
		}
	}
	d := minWatch + rand.N(minWatch)
	if q.TimeoutSeconds != nil && *q.TimeoutSeconds > 0 {
		d = time.Duration(min(*q.TimeoutSeconds, 1<<31)) * time.Second
	}
	ctx, cancel := context.WithTimeout(rq.Context(), d)
	defer cancel()
	w := &watchStream{s: s, rq: rq, at: at, q: q, rc: http.NewResponseController(rq.w)}
	defer func() { w.turn.leave() }()
	return w.run(ctx)
}

// watchStream is one watch. It owns the response until it returns.
type watchStream struct {
	s    *Server
	rq   *request
	at   answerType
	q    *listQuery
	rc   *http.ResponseController
	buf  []byte
	rows bool // a Table with its headers was sent

	turn *place // to encode and send what is there; given back in between
}

func (w *watchStream) run(ctx context.Context) error {
	k, ns := w.rq.kind, w.rq.info.namespace
	reader := w.s.cfg.Registry.ReaderFor(k.GroupKind(), ns)
	initial := w.q.rv == 0 && w.q.SendInitialEvents == nil
	if w.q.SendInitialEvents != nil {
		initial = *w.q.SendInitialEvents
	}
	var snap state.Snapshot
	after := w.q.rv
	if initial || w.q.rv == 0 {
		if err := w.s.fresh(w.rq, reader, w.q.ResourceVersion, w.q.rv); err != nil {
			return err
		}
		snap = reader.Snapshot()
		after = snap.ResourceVersion()
	}
	watcher, werr := reader.Watch(k.StorageKind(), ns, after)
	w.begin()
	if initial {
		if err := w.enter(ctx); err != nil {
			return w.end(ctx, err)
		}
		if err := w.sendInitial(snap); err != nil {
			return w.end(ctx, err)
		}
	}
	if err := w.flush(); err != nil {
		return w.end(ctx, err)
	}
	w.turn.leave()
	if werr != nil {
		return w.end(ctx, werr)
	}
	return w.end(ctx, w.follow(ctx, watcher, after))
}

func (w *watchStream) begin() {
	w.rq.writeWarnings()
	w.rq.w.Header().Set("Content-Type", w.at.contentType)
	w.rq.w.WriteHeader(http.StatusOK)
}

// sendInitial sends the snapshot as ADDED events, and the bookmark that ends
// them if that was asked for.
func (w *watchStream) sendInitial(snap state.Snapshot) error {
	k := w.rq.kind
	var err error
	each := func(rec *state.Record) bool {
		var ok bool
		if ok, err = w.q.match.Matches(w.s.cfg.Registry, rec); err == nil && ok {
			err = w.event(watch.Added, rec, 0)
		}
		return err == nil
	}
	if name := w.q.match.Name(); name != "" && (w.rq.info.namespace != "" || !k.Namespaced) {
		if rec, ok := snap.Get(state.Key{Kind: k.StorageKind(), Namespace: w.rq.info.namespace, Name: name}); ok {
			each(rec)
		}
	} else {
		snap.Range(k.StorageKind(), w.rq.info.namespace, state.Key{}, each)
	}
	if err != nil {
		return err
	}
	if w.q.SendInitialEvents != nil && *w.q.SendInitialEvents && w.q.AllowWatchBookmarks {
		return w.bookmark(snap.ResourceVersion(), true)
	}
	return nil
}

// follow sends what happens after a version, until ctx ends or the watcher
// falls behind.
func (w *watchStream) follow(ctx context.Context, watcher state.Watcher, after uint64) error {
	progressed, told := after, after
	for {
		wait, cancel := ctx, context.CancelFunc(func() {})
		if w.q.AllowWatchBookmarks {
			d := w.s.cfg.BookmarkInterval
			wait, cancel = context.WithTimeout(ctx, d*9/10+rand.N(d/5+1))
		}
		batch, p, err := watcher.Next(wait)
		cancel()
		progressed = max(progressed, p)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, context.DeadlineExceeded):
			if progressed > told {
				told = progressed
				if err := w.bookmark(progressed, false); err != nil {
					return err
				}
				if err := w.flush(); err != nil {
					return err
				}
			}
			continue
		default:
			return err
		}
		if err := w.enter(ctx); err != nil {
			return err
		}
		for i := range batch {
			if err := w.one(&batch[i]); err != nil {
				return err
			}
		}
		if len(w.buf) > 0 {
			told = max(told, progressed)
			if err := w.flush(); err != nil {
				return err
			}
		}
		w.turn.leave()
	}
}

// enter waits until it is this watch's turn to encode and send.
func (w *watchStream) enter(ctx context.Context) (err error) {
	w.turn, err = w.s.limiter.sends.enter(ctx, w.rq.identity)
	return err
}

// one turns a change of the store into what this watch shall see: what
// leaves its selectors is deleted, what enters them is added.
func (w *watchStream) one(e *state.Event) error {
	m, d := w.q.match, w.s.cfg.Registry
	now, err := m.Matches(d, e.Record)
	if err != nil {
		return err
	}
	before := false
	if e.Prev != nil && e.Type == state.Modified {
		if before, err = m.Matches(d, e.Prev); err != nil {
			return err
		}
	}
	switch {
	case e.Type == state.Deleted && now:
		return w.event(watch.Deleted, e.Record, e.ResourceVersion)
	case e.Type == state.Deleted:
		return nil
	case now && before:
		return w.event(watch.Modified, e.Record, 0)
	case now:
		return w.event(watch.Added, e.Record, 0)
	case before:
		return w.event(watch.Deleted, e.Prev, e.ResourceVersion)
	}
	return nil
}

// event appends one event; rv, when not 0, replaces the object's version.
func (w *watchStream) event(t watch.EventType, rec *state.Record, rv uint64) error {
	w.s.metrics.events.WithLabelValues(w.rq.info.gvr.Resource).Inc()
	if w.at.form == formTable {
		obj, err := w.object(rec, rv)
		if err != nil {
			return err
		}
		return w.frame(t, obj)
	}
	key := encodingKey{rec: rec, rv: rv, kind: w.rq.kind, format: w.at.index, form: w.at.form, gv: w.at.gv}
	data, ok := w.s.encoded.get(key)
	if !ok {
		obj, err := w.object(rec, rv)
		if err != nil {
			return err
		}
		if obj, err = w.s.transform(w.rq, w.at, obj, false); err != nil {
			return err
		}
		if data, err = encodeObject(w.at, obj); err != nil {
			return err
		}
		w.s.encoded.put(key, data)
	}
	return w.raw(t, data)
}

func (w *watchStream) object(rec *state.Record, rv uint64) (runtime.Object, error) {
	obj, err := w.s.cfg.Registry.DecodeAs(w.rq.kind, rec)
	if err != nil || rv == 0 {
		return obj, err
	}
	obj, m, err := shallow(obj)
	if err != nil {
		return nil, err
	}
	m.SetResourceVersion(formatRV(rv))
	return obj, nil
}

// bookmark tells the version up to which the client has seen everything. It
// has the type that the client expects.
func (w *watchStream) bookmark(rv uint64, initialEnd bool) error {
	obj := w.rq.kind.New()
	obj.GetObjectKind().SetGroupVersionKind(w.rq.kind.GVK)
	m, ok := obj.(metav1.Object)
	if !ok {
		return apierrors.NewInternalError(errors.New("kind has no metadata"))
	}
	m.SetResourceVersion(formatRV(rv))
	if initialEnd {
		m.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	return w.frame(watch.Bookmark, obj)
}

// frame transforms, encodes and appends one event.
func (w *watchStream) frame(t watch.EventType, obj runtime.Object) error {
	out, err := w.s.transform(w.rq, w.at, obj, w.rows)
	if err != nil {
		return err
	}
	if w.at.form == formTable {
		w.rows = true
	}
	data, err := encodeObject(w.at, out)
	if err != nil {
		return err
	}
	return w.raw(t, data)
}

// raw appends one encoded event. A batch is sent in one piece, up to a size.
func (w *watchStream) raw(t watch.EventType, data []byte) error {
	var err error
	if w.buf, err = appendFrame(w.buf, w.at, t, data); err != nil {
		return err
	}
	const piece = 64 << 10
	if len(w.buf) >= piece {
		return w.flush()
	}
	return nil
}

// flush sends what is there.
func (w *watchStream) flush() error { return w.turn.unlessSlow(w.write) }

func (w *watchStream) write() error {
	// Not every writer knows deadlines (tests' recorders do not). The deadline
	// ends with the write: HTTP/2 resets a stream whose deadline passes even
	// while nothing is being written.
	_ = w.rc.SetWriteDeadline(time.Now().Add(w.s.cfg.WriteDeadline))
	defer func() { _ = w.rc.SetWriteDeadline(time.Time{}) }()
	if len(w.buf) > 0 {
		_, err := w.rq.w.Write(w.buf)
		if cap(w.buf) > 256<<10 {
			w.buf = nil
		}
		w.buf = w.buf[:0]
		if err != nil {
			return errGone
		}
	}
	if err := w.rc.Flush(); err != nil {
		return errGone
	}
	return nil
}

// errGone says that the client is no longer there.
var errGone = errors.New("api: the watcher is gone")

// end closes the stream: quietly at its time, with an ERROR event if it can
// not go on.
func (w *watchStream) end(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, errGone) || ctx.Err() != nil {
		return nil
	}
	if errors.Is(err, state.ErrTooOld) {
		err = apierrors.NewResourceExpired("too old resource version: " + w.q.ResourceVersion + " (the watch cannot go on from there; list again)")
	} else {
		w.s.cfg.Log.Error("watch failed", "resource", w.rq.info.gvr.Resource, "err", err)
	}
	st := statusOf(err)
	data, eerr := encodeObject(w.at, &st)
	if eerr != nil {
		return nil //nolint:nilerr // nothing is left to tell the client
	}
	if w.raw(watch.Error, data) == nil {
		_ = w.flush() // the stream ends either way
	}
	return nil
}
