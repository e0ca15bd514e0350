package nodeapi

import (
	"context"
	"fmt"
	"net"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// Session opens an exec, attach or port-forward of a running pod. The caller
// closes it. It also ends with the node's connection, and says so
// (mux.ErrLost). Errors are *apierrors.StatusError.
func (s *Server) Session(ctx context.Context, pod *corev1.Pod, kind, container string) (*mux.Mux, error) {
	node, r, err := SessionRequest(pod, kind, container)
	if err != nil {
		return nil, err
	}
	c, lost, err := s.OpenSession(ctx, node, *r)
	if err != nil {
		return nil, err
	}
	m := mux.New(c, true, 0)
	go func() { // ends with m, which its caller closes
		select {
		case <-lost:
			m.Fail(mux.ErrLost)
		case <-m.Done():
		}
	}()
	return m, nil
}

// SessionRequest is what a session's node is asked for.
func SessionRequest(pod *corev1.Pod, kind, container string) (node string, r *wire.StreamRequest, err error) {
	if pod.Spec.NodeName == "" {
		return "", nil, apierrors.NewBadRequest(fmt.Sprintf("pod %s does not have a host assigned", pod.Name))
	}
	return pod.Spec.NodeName, &wire.StreamRequest{Kind: kind, Namespace: pod.Namespace, Pod: pod.Name, UID: uidOnNode(pod), Container: container}, nil
}

// OpenSession has a node begin a session, whose frames (wire/mux) go over the
// connection. lost is closed with the node's own connection. The caller closes
// the session's. Errors are *apierrors.StatusError.
func (s *Server) OpenSession(ctx context.Context, node string, r wire.StreamRequest) (c net.Conn, lost <-chan struct{}, err error) {
	c, sess, err := s.openStream(ctx, node, r)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	_ = c.SetReadDeadline(time.Now().Add(sessionWait))
	head := new(wire.StreamHeader)
	if err := wire.ReadMessage(c, head); err != nil {
		_ = c.Close()
		return nil, nil, streamBroke(ctx, err)
	}
	if head.Error != "" {
		_ = c.Close()
		return nil, nil, streamError(head)
	}
	_ = c.SetReadDeadline(time.Time{})
	return c, sess.conn.Done(), nil
}

// uidOnNode is what the node calls the pod.
func uidOnNode(pod *corev1.Pod) string {
	if hash, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]; ok {
		return hash
	}
	return string(pod.UID)
}
