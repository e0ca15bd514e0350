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

// streamWait is how long a node may take to open a stream it was asked for.
const streamWait = 10 * time.Second

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
}

// Close implements net.Conn.
func (c streamConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.done) })
	return err
}

func newStreams() *streams { return &streams{open: map[string]*pending{}} }

// OpenStream asks a node to open a stream back and waits for it. r.ID is set
// here. The caller closes the connection. Errors are *apierrors.StatusError.
func (s *Server) OpenStream(ctx context.Context, node string, r wire.StreamRequest) (net.Conn, error) {
	sess := s.sessionOfNode(node)
	if sess == nil {
		return nil, notConnected(node)
	}
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, fmt.Errorf("nodeapi: random: %w", err)
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
		return nil, notConnected(node)
	}
	select {
	case c := <-p.got:
		return c, nil
	case <-sess.conn.Done():
		return nil, notConnected(node)
	case <-ctx.Done():
		return nil, apierrors.NewTimeoutError(fmt.Sprintf("node %q did not open a stream in time", node), 1)
	}
}

func notConnected(node string) error {
	return apierrors.NewServiceUnavailable(fmt.Sprintf("node %q is not connected: what it runs goes on, but its logs can only be read on the node itself", node))
}

// ServeStream serves ALPNStream: a stream that a node opens on request.
func (s *Server) ServeStream(ctx context.Context, c *listener.Conn) {
	if c.Peer.Kind != pki.NodePeer || c.Peer.Limited {
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
	uid := string(pod.UID)
	if hash, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]; ok {
		uid = hash // what the node calls its static pod
	}
	c, err := s.OpenStream(ctx, pod.Spec.NodeName, wire.StreamRequest{
		Kind: "logs", Namespace: pod.Namespace, Pod: pod.Name, UID: uid, Container: opts.Container, Options: b,
	})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	return copyStream(ctx, w, c)
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
	case http.StatusNotFound:
		return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: int32(code), Reason: metav1.StatusReasonNotFound, Message: h.Error}}
	}
	return apierrors.NewInternalError(errors.New(h.Error))
}
