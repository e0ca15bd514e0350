package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// forwardDial is how long a connection into a pod may take.
const forwardDial = 10 * time.Second

// forward connects to ports of a pod, as often as the control plane asks.
func (a *Agent) forward(ctx context.Context, info podInfo, uid string, begin func() (*mux.Mux, error)) error {
	gone := func() bool {
		a.mu.RLock()
		defer a.mu.RUnlock()
		i, ok := a.known[uid]
		return !ok || i.status == nil || i.alloc == nil || ended(i.status.Phase)
	}
	if gone() || info.status.Phase != corev1.PodRunning {
		return apierrors.NewBadRequest(fmt.Sprintf("pod %q is not running: there is nothing to connect to", info.pod.Name))
	}
	m, err := begin()
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer m.Close("")
	stop := context.AfterFunc(ctx, func() { m.Close("") })
	defer stop()
	wg.Go(func() { watchEnd(ctx, m, 1, gone, "the pod has ended") })
	for {
		s, err := m.Accept()
		if err != nil {
			return nil //nolint:nilerr // the client has what it wanted, or is gone
		}
		wg.Go(func() { a.forwardOne(ctx, uid, s) })
	}
}

// forwardOne serves one connection.
func (a *Agent) forwardOne(ctx context.Context, uid string, s *mux.Stream) {
	c, err := a.dialPod(ctx, uid, s)
	reply := &wire.DialReply{}
	if err != nil {
		reply.Error = err.Error()[:min(len(err.Error()), 2048)]
	}
	if werr := wire.WriteMessage(s, reply); werr != nil || err != nil {
		if c != nil {
			_ = c.Close()
		}
		_ = s.CloseWrite() // the answer is read before the end
		return
	}
	splice(c, s)
}

func (a *Agent) dialPod(ctx context.Context, uid string, s *mux.Stream) (net.Conn, error) {
	d := new(wire.DialRequest)
	if err := wire.Unmarshal(s.What(), d); err != nil {
		return nil, err
	}
	if d.Port < 1 || d.Port > 65535 {
		return nil, fmt.Errorf("%d is not a port", d.Port)
	}
	a.mu.RLock()
	al := a.known[uid].alloc
	a.mu.RUnlock()
	if al == nil {
		return nil, errors.New("the pod has no address")
	}
	ctx, cancel := context.WithTimeout(ctx, forwardDial)
	defer cancel()
	if d.Address {
		return a.c.Network.Dial(ctx, *al, "tcp", d.Port)
	}
	return a.c.Network.Forward(ctx, *al, d.Port)
}

// forwardBuffer is one direction's of one connection.
const forwardBuffer = 16 << 10

// splice copies between a connection and a stream until both directions have
// ended; each ends by itself, and an error ends both. It closes both.
func splice(c net.Conn, s *mux.Stream) {
	defer func() { _ = c.Close() }()
	defer func() { _ = s.Close() }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := io.CopyBuffer(struct{ io.Writer }{c}, s, make([]byte, forwardBuffer)); err != nil {
			_ = c.Close() // given up by the client
			return
		}
		if h, ok := c.(interface{ CloseWrite() error }); ok {
			_ = h.CloseWrite()
		}
	}()
	if _, err := io.CopyBuffer(s, struct{ io.Reader }{c}, make([]byte, forwardBuffer)); err != nil {
		s.Reset("the connection broke: " + err.Error())
		_ = c.Close()
	} else {
		_ = s.CloseWrite()
	}
	<-done
}
