package link

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// openStream opens a connection to the server that asked, the way that the
// session has, and serves it. It does not wait.
func (l *Link) openStream(ctx context.Context, to route, r *wire.StreamRequest) {
	slots := l.slots
	if r.Namespace == "" {
		slots = l.short // of the node itself: they end soon, and shall not wait for those that do not
	}
	select {
	case slots <- struct{}{}:
	default:
		l.log.Warn("too many streams: one refused", "kind", r.Kind, "pod", r.Pod)
		return
	}
	l.streams.Go(func() {
		defer func() { <-slots }()
		if err := l.stream(ctx, to, r); err != nil && ctx.Err() == nil {
			l.log.Debug("stream ended", "kind", r.Kind, "pod", r.Pod, "error", err)
		}
	})
}

func (l *Link) stream(ctx context.Context, to route, r *wire.StreamRequest) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c, err := l.connect(ctx, to, wire.ALPNStream, l.certificate())
	if err != nil {
		return err
	}
	defer func() { _ = c.raw.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = c.raw.Close() })
	defer stop()
	w := &streamWriter{c: c}
	if err := w.header(&wire.StreamHeader{ID: r.ID}); err != nil {
		return err
	}
	if isSession(r.Kind) {
		return l.serveSession(ctx, c, w, r)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() { _ = c.raw.Close() }() // ends the watching read
	wg.Go(func() {
		// The server sends nothing: a read ends when it goes away.
		var b [1]byte
		_, _ = c.Read(b[:])
		cancel()
	})
	err = l.serveStream(ctx, r, w)
	if err != nil && w.begun {
		return err // broken off: closed without TLS's closing alert
	}
	if err := w.begin(err); err != nil {
		return err
	}
	_ = c.SetWriteDeadline(time.Now().Add(streamWriteTimeout))
	_ = c.tls.CloseWrite()
	// What was written must leave before the socket is closed: the server
	// closes its end when it has read to the end.
	t := time.NewTimer(streamWriteTimeout)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
	return nil
}

func isSession(kind string) bool {
	return kind == "exec" || kind == "attach" || kind == "portforward"
}

// serveSession serves a stream whose bytes go both ways.
func (l *Link) serveSession(ctx context.Context, c *conn, w *streamWriter, r *wire.StreamRequest) error {
	var err error
	if l.c.Sessions == nil {
		err = apierrors.NewBadRequest("this node does not serve " + r.Kind)
	} else {
		err = l.c.Sessions.Session(ctx, r, func() (*mux.Mux, error) {
			if err := w.begin(nil); err != nil {
				return nil, err
			}
			return mux.New(c, false, sessionStreams), nil
		})
	}
	if err == nil || w.begun {
		return err
	}
	if err := w.begin(err); err != nil {
		return err
	}
	_ = c.SetWriteDeadline(time.Now().Add(streamWriteTimeout))
	_ = c.tls.CloseWrite()
	_ = c.SetReadDeadline(time.Now().Add(streamWriteTimeout))
	var b [1]byte
	_, _ = c.Read(b[:]) // until the control plane has read it
	return nil
}

// sessionStreams is how many streams, connections of a port-forward for
// example, may be open in one session. The control plane keeps to it.
const sessionStreams = 128

func (l *Link) serveStream(ctx context.Context, r *wire.StreamRequest, w *streamWriter) error {
	switch {
	case r.Kind == "metrics" && l.c.Metrics != nil:
		return l.c.Metrics(w)
	case r.Kind == "usage" && l.c.Usage != nil:
		return l.c.Usage(ctx, w)
	case r.Kind == "netcheck" && l.c.NetCheck != nil:
		return l.c.NetCheck(ctx, w)
	case r.Kind != "logs" || l.c.Streams == nil:
		return apierrors.NewBadRequest("this node does not serve " + r.Kind)
	}
	o := &corev1.PodLogOptions{}
	if len(r.Options) > 0 {
		if err := direct.Unmarshal(r.Options, o); err != nil {
			return apierrors.NewBadRequest("log options: " + err.Error())
		}
	}
	if r.Container != "" {
		o.Container = r.Container
	}
	return l.c.Streams.Logs(ctx, r.Namespace, r.Pod, r.UID, o, w)
}

// streamWriteTimeout is how long a reader may take to make room.
const streamWriteTimeout = 30 * time.Second

// streamWriter sends the second header before the first byte.
type streamWriter struct {
	c     *conn
	begun bool
}

func (w *streamWriter) header(h *wire.StreamHeader) error {
	_ = w.c.SetWriteDeadline(time.Now().Add(streamWriteTimeout))
	return wire.WriteMessage(w.c, h)
}

// begin tells whether the request is served; err nil is yes.
func (w *streamWriter) begin(err error) error {
	if w.begun {
		return nil
	}
	w.begun = true
	h := &wire.StreamHeader{}
	if err != nil {
		h.Error, h.Code = err.Error(), codeOf(err)
		if len(h.Error) > 2048 {
			h.Error = h.Error[:2048]
		}
	}
	return w.header(h)
}

// Write implements io.Writer.
func (w *streamWriter) Write(p []byte) (int, error) {
	if err := w.begin(nil); err != nil {
		return 0, err
	}
	_ = w.c.SetWriteDeadline(time.Now().Add(streamWriteTimeout))
	return w.c.Write(p)
}

func codeOf(err error) int32 {
	var st apierrors.APIStatus
	switch {
	case errors.As(err, &st):
		return st.Status().Code
	case errors.Is(err, fs.ErrNotExist):
		return http.StatusNotFound
	}
	return http.StatusInternalServerError
}
