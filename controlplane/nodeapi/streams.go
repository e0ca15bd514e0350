package nodeapi

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

const (
	// streamWait is how long a node may take to open a stream it was asked for,
	// sessionWait until it knows whether it can serve it.
	streamWait  = 10 * time.Second
	sessionWait = 30 * time.Second
	// maxNodeStreams bounds the streams about one node's pods that are open at
	// once. The node has the same bound, but can only be silent.
	maxNodeStreams = 32
)

// streams are those that were asked for and are not open yet.
type streams struct {
	mu   sync.Mutex
	open map[string]*pending
}

type pending struct {
	uid string // of the node that must open it
	got chan streamConn
}

type streamConn struct {
	net.Conn
	done chan struct{} // closed when the user is finished with it
	once *sync.Once
	free func() // gives its place back
}

// Close implements net.Conn.
func (c streamConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() {
		close(c.done)
		if c.free != nil {
			c.free()
		}
	})
	return err
}

func newStreams() *streams { return &streams{open: map[string]*pending{}} }

// OpenStream asks a node to open a stream back and waits for it. r.ID is set
// here. The caller closes the connection. Errors are *apierrors.StatusError.
func (s *Server) OpenStream(ctx context.Context, node string, r wire.StreamRequest) (net.Conn, error) {
	c, _, err := s.openStream(ctx, node, r)
	return c, err
}

// openStream is OpenStream; the session is the one that it came by.
func (s *Server) openStream(ctx context.Context, node string, r wire.StreamRequest) (net.Conn, *session, error) {
	sess := s.sessionOfNode(node)
	if sess == nil {
		return nil, nil, notConnected(node)
	}
	var free func()
	if r.Namespace != "" {
		if sess.streams.Add(1) > maxNodeStreams {
			sess.streams.Add(-1)
			return nil, nil, apierrors.NewTooManyRequests(fmt.Sprintf("%d streams (logs, exec, attach, port-forward) of pods on node %q are open: close some, or try again later", maxNodeStreams, node), 1)
		}
		free = sync.OnceFunc(func() { sess.streams.Add(-1) })
	}
	c, err := s.dialedBack(ctx, node, sess, r)
	if err != nil {
		if free != nil {
			free()
		}
		return nil, nil, err
	}
	c.free = free
	return c, sess, nil
}

func (s *Server) dialedBack(ctx context.Context, node string, sess *session, r wire.StreamRequest) (streamConn, error) {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		return streamConn{}, fmt.Errorf("nodeapi: random: %w", err)
	}
	r.ID = hex.EncodeToString(id[:])
	p := &pending{uid: sess.uid, got: make(chan streamConn)}
	s.streams.mu.Lock()
	s.streams.open[r.ID] = p
	s.streams.mu.Unlock()
	defer func() {
		s.streams.mu.Lock()
		delete(s.streams.open, r.ID)
		s.streams.mu.Unlock()
	}()
	ctx, cancel := context.WithTimeout(ctx, streamWait)
	defer cancel()
	if err := sess.conn.Send(&r); err != nil {
		return streamConn{}, notConnected(node)
	}
	select {
	case c := <-p.got:
		return c, nil
	case <-sess.conn.Done():
		return streamConn{}, notConnected(node)
	case <-ctx.Done():
		return streamConn{}, apierrors.NewTimeoutError(fmt.Sprintf("node %q did not open a stream in time", node), 1)
	}
}

// Streams counts the streams about pods that are open to all nodes.
func (s *Server) Streams() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	var n int64
	for _, sess := range s.sessions {
		n += sess.streams.Load()
	}
	return int(n)
}

func notConnected(node string) error {
	return apierrors.NewServiceUnavailable(fmt.Sprintf("node %q is not connected: what it runs goes on, but its logs and figures can only be read, and its containers entered, on the node itself (there: 'dunlin get pods --local')", node))
}

// ServeStream serves ALPNStream: a stream that a node opens on request.
func (s *Server) ServeStream(ctx context.Context, c *listener.Conn) {
	if c.Peer.Kind != pki.NodePeer || c.Peer.Limited {
		return
	}
	if _, dead := s.Dead(c.Peer.UID); dead {
		return
	}
	_ = c.SetReadDeadline(time.Now().Add(streamWait))
	head := new(wire.StreamHeader)
	if err := wire.ReadMessage(c, head); err != nil {
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	s.streams.mu.Lock()
	p := s.streams.open[head.ID]
	if p != nil && p.uid == c.Peer.UID {
		delete(s.streams.open, head.ID)
	} else {
		p = nil
	}
	s.streams.mu.Unlock()
	if p == nil {
		return // nobody asked, or nobody waits any more
	}
	sc := streamConn{Conn: c, done: make(chan struct{}), once: new(sync.Once)}
	t := time.NewTimer(streamWait)
	defer t.Stop()
	select {
	case p.got <- sc:
	case <-t.C:
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-sc.done:
	case <-ctx.Done():
	}
}

// Logs writes a container's log to w until it ends, ctx does, or writing
// fails. Errors before the first byte are *apierrors.StatusError.
func (s *Server) Logs(ctx context.Context, pod *corev1.Pod, opts *corev1.PodLogOptions, w io.Writer) error {
	if pod.Spec.NodeName == "" {
		return apierrors.NewBadRequest(fmt.Sprintf("pod %s does not have a host assigned", pod.Name))
	}
	b, err := direct.Marshal(opts)
	if err != nil {
		return fmt.Errorf("nodeapi: log options: %w", err)
	}
	c, err := s.OpenStream(ctx, pod.Spec.NodeName, wire.StreamRequest{
		Kind: "logs", Namespace: pod.Namespace, Pod: pod.Name, UID: uidOnNode(pod), Container: opts.Container, Options: b,
	})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	return copyStream(ctx, w, c)
}

// Bounds of one answer with a node's figures.
const (
	metricsTimeout = 30 * time.Second
	metricsBytes   = 8 << 20
)

// Metrics writes a node's figures, as Prometheus text, to w. Errors before
// the first byte are *apierrors.StatusError.
func (s *Server) Metrics(ctx context.Context, node string, w io.Writer) error {
	return s.tell(ctx, node, "metrics", w)
}

// NetCheck writes whom a node reaches (gossip.NetReport as JSON) to w.
func (s *Server) NetCheck(ctx context.Context, node string, w io.Writer) error {
	return s.tell(ctx, node, "netcheck", w)
}

// tell lets a node tell of itself.
func (s *Server) tell(ctx context.Context, node, kind string, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, metricsTimeout)
	defer cancel()
	c, err := s.OpenStream(ctx, node, wire.StreamRequest{Kind: kind})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	return copyStream(ctx, &bounded{w: w, left: metricsBytes}, c)
}

// bounded ends what a node sends without end.
type bounded struct {
	w    io.Writer
	left int
}

var errTooLong = errors.New("nodeapi: the node sends more than an answer may hold")

// Write implements io.Writer.
func (b *bounded) Write(p []byte) (int, error) {
	if b.left -= len(p); b.left < 0 {
		return 0, errTooLong
	}
	return b.w.Write(p)
}

// copyStream reads a stream's second header, which says whether the node can
// serve it, then its bytes.
func copyStream(ctx context.Context, w io.Writer, c net.Conn) error {
	head := new(wire.StreamHeader)
	if err := wire.ReadMessage(c, head); err != nil {
		return streamBroke(ctx, err)
	}
	if head.Error != "" {
		return streamError(head)
	}
	if _, err := w.Write(nil); err != nil { // it is served: who waits for a log that is empty yet learns it
		return err
	}
	buf := make([]byte, 16<<10)
	for {
		n, err := c.Read(buf)
		if n > 0 {
			if _, werr := w.Write(buf[:n]); werr != nil {
				return werr
			}
		}
		if errors.Is(err, io.EOF) && ctx.Err() == nil {
			return nil // closed in good order: TLS tells an end from a cut
		}
		if err != nil {
			return streamBroke(ctx, err)
		}
	}
}

func streamBroke(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return apierrors.NewServiceUnavailable("the stream from the node broke: " + err.Error())
}

func streamError(h *wire.StreamHeader) error {
	code := int(h.Code)
	switch code {
	case http.StatusBadRequest:
		return apierrors.NewBadRequest(h.Error)
	case http.StatusTooManyRequests:
		return apierrors.NewTooManyRequests(h.Error, 1)
	case http.StatusNotFound:
		return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: int32(code), Reason: metav1.StatusReasonNotFound, Message: h.Error}}
	}
	return apierrors.NewInternalError(errors.New(h.Error))
}
