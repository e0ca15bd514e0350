package podstream

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

const (
	// forwardsMost bounds the connections of one port-forward.
	forwardsMost = 64
	// forwardStall is how long one connection into a pod may take nothing while
	// others of the same client wait behind it: all of them share one, and SPDY
	// as kubectl speaks it has no other way to slow down one alone.
	forwardStall = 30 * time.Second
)

// serveForward serves port-forward: over SPDY, over SPDY inside a WebSocket
// (kubectl), or with a WebSocket for each set of connections.
func (s *Server) serveForward(w http.ResponseWriter, r *http.Request, pod *corev1.Pod, ws bool) error {
	proto, err := negotiate(r, ws, forwardWebSocket, []string{forwardSPDY}, map[bool]string{true: v4Channel, false: forwardSPDY}[ws])
	if err != nil {
		return err
	}
	ports, err := forwardPorts(r, ws && proto != tunnelled)
	if err != nil {
		return err
	}
	m, err := s.c.Nodes.Session(r.Context(), pod, kindForward, "")
	if err != nil {
		return err
	}
	defer m.Close("")
	f := &forwards{s: s, m: m, pod: pod.Name}
	if ws && proto != tunnelled {
		err = f.overChannels(w, r, proto, ports)
	} else {
		err = f.overSPDY(w, r, proto, ws)
	}
	s.log.Debug("port-forward ended", "namespace", pod.Namespace, "pod", pod.Name, "err", err)
	return nil // the connection was taken over: there is nothing left to answer
}

// forwardPorts are those of the query. Clients over SPDY name them per stream.
func forwardPorts(r *http.Request, required bool) ([]int32, error) {
	o := &corev1.PodPortForwardOptions{}
	if err := manifests.ParameterCodec().DecodeParameters(r.URL.Query(), corev1.SchemeGroupVersion, o); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if required && (len(o.Ports) == 0 || len(o.Ports) > forwardsMost) {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the query must name 1 to %d ports", forwardsMost))
	}
	for _, p := range o.Ports {
		if p < 1 || p > 65535 {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("%d is not a port", p))
		}
	}
	return o.Ports, nil
}

// forwards are the connections of one client into one pod.
type forwards struct {
	s     *Server
	m     *mux.Mux
	pod   string
	touch func()
	open  atomic.Int32
	wg    sync.WaitGroup
}

// begin arms what ends a session early; done waits for everything.
func (f *forwards) begin(ctx context.Context, kind string, ws bool) (done func()) {
	count := f.s.count(kindForward, kind, ws)
	stopClosing := context.AfterFunc(ctx, func() { f.m.Fail(errClosing) })
	touch, stopIdle := f.s.idleTimer(f.m)
	f.touch = touch
	return func() {
		stopIdle()
		stopClosing()
		f.m.Close("")
		f.wg.Wait()
		count()
	}
}

// dial asks the node for a connection; its answer comes on the stream.
func (f *forwards) dial(port int32) (*mux.Stream, error) {
	if f.open.Add(1) > forwardsMost {
		f.open.Add(-1)
		return nil, fmt.Errorf("%d connections are open already", forwardsMost)
	}
	b, err := wire.Marshal(&wire.DialRequest{Port: port})
	if err != nil {
		f.open.Add(-1)
		return nil, err
	}
	st, err := f.m.Open(b)
	if err != nil {
		f.open.Add(-1)
	}
	return st, err
}

// receive passes on what the pod sends; its error is for the client.
func (f *forwards) receive(st *mux.Stream, write func(p []byte) error) error {
	defer f.open.Add(-1)
	reply := new(wire.DialReply)
	if err := wire.ReadMessage(st, reply); err != nil {
		if errors.Is(err, mux.ErrClosed) && f.m.Err() == nil {
			return nil
		}
		return errors.New(why(err))
	}
	if reply.Error != "" {
		_ = st.Close()
		return errors.New(reply.Error)
	}
	buf := make([]byte, copyBuffer)
	for {
		n, err := st.Read(buf)
		if n > 0 {
			f.touch()
			if werr := write(buf[:n]); werr != nil {
				st.Reset("the client is gone")
				return nil //nolint:nilerr // nobody is left to hear it
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, mux.ErrClosed) && f.m.Err() == nil {
				return nil // the pod's end, or the client gave it up
			}
			return errors.New(why(err))
		}
	}
}

// send passes on what the client sends. It gives up on a pod that takes
// nothing while others wait.
func (f *forwards) send(st *mux.Stream, p []byte) error {
	f.touch()
	t := time.AfterFunc(forwardStall, func() {
		if f.open.Load() > 1 {
			st.ResetAs(errStall)
		}
	})
	defer t.Stop()
	_, err := st.Write(p)
	return err
}

var errStall = fmt.Errorf("the pod took nothing for %s, and other connections wait behind this one", forwardStall)

func (f *forwards) words(port int32, err error) []byte {
	return fmt.Appendf(nil, "error forwarding port %d to pod %s: %v", port, f.pod, err)
}

// overSPDY: a connection is a pair of streams with the same number, one for
// its data and one for an error.
func (f *forwards) overSPDY(w http.ResponseWriter, r *http.Request, proto string, ws bool) error {
	var c *spdyConn
	var err error
	if ws {
		conn, uerr := upgrade(w, r, proto)
		if uerr != nil {
			return uerr
		}
		b := &wsBytes{ws: conn}
		c, err = newSPDY(b, bufio.NewReaderSize(b, wsBuffer))
	} else {
		c, err = hijackSPDY(w, proto)
	}
	if err != nil {
		return err
	}
	defer f.begin(r.Context(), proto, ws)()
	defer c.close()
	gone := make(chan struct{})
	f.wg.Go(func() { pinger(c, gone) })
	f.wg.Go(func() { // nothing more can be forwarded
		select {
		case <-f.m.Done():
			f.linger(c, gone)
		case <-gone:
		}
	})
	pairs := map[string]*pair{}
	err = c.serve(func(st *spdyStream) error { return f.paired(pairs, st) })
	close(gone)
	return err
}

// linger lets errors of connections reach the client before it is cut off.
func (f *forwards) linger(c *spdyConn, gone <-chan struct{}) {
	t := time.NewTimer(time.Second)
	defer t.Stop()
	select {
	case <-t.C:
	case <-gone:
	}
	c.close()
}

// pair are the two streams of one connection.
type pair struct{ data, errs *spdyStream }

// paired is called by the reader for each new stream.
func (f *forwards) paired(pairs map[string]*pair, st *spdyStream) error {
	id := st.headers.Get("requestID")
	port, err := strconv.ParseUint(st.headers.Get("port"), 10, 16)
	if err != nil || port == 0 || id == "" {
		return errors.New("a stream without a port and a number")
	}
	p := pairs[id]
	if p == nil {
		p = &pair{}
		pairs[id] = p
	}
	switch kind := st.headers.Get(streamType); {
	case kind == "data" && p.data == nil:
		p.data = st
	case kind == "error" && p.errs == nil:
		p.errs = st
	default:
		return fmt.Errorf("a stream of type %q", kind)
	}
	if p.data == nil || p.errs == nil {
		return nil
	}
	delete(pairs, id)
	far, err := f.dial(int32(port))
	if err != nil {
		_ = p.errs.write(f.words(int32(port), err), true)
		return p.data.write(nil, true)
	}
	p.data.sink = &forwardSink{f: f, st: far}
	f.wg.Go(func() {
		err := f.receive(far, func(b []byte) error { return p.data.write(b, false) })
		var text []byte
		if err != nil {
			text = f.words(int32(port), err)
		}
		_ = p.errs.write(text, true) // a client that is gone needs neither
		_ = p.data.write(nil, true)
	})
	return nil
}

// forwardSink takes what the client sends on one connection.
type forwardSink struct {
	f    *forwards
	st   *mux.Stream
	over bool
}

func (s *forwardSink) data(p []byte) {
	if !s.over {
		s.over = s.f.send(s.st, p) != nil // why is told on the error stream
	}
}
func (s *forwardSink) fin()   { _ = s.st.CloseWrite() }
func (s *forwardSink) reset() { s.st.Reset("the client gave the connection up") }

// overChannels: two channels for each port of the query, for data and errors,
// both of which begin with the port; each is one connection.
func (f *forwards) overChannels(w http.ResponseWriter, r *http.Request, proto string, ports []int32) error {
	c, err := newWSChannels(w, r, proto)
	if err != nil {
		return err
	}
	defer f.begin(r.Context(), proto, true)()
	defer c.close()
	gone := make(chan struct{})
	f.wg.Go(func() { pinger(c, gone) })
	far := make([]*mux.Stream, len(ports))
	var ends sync.WaitGroup
	for i, port := range ports {
		ch := byte(2 * i)
		name := binary.LittleEndian.AppendUint16(nil, uint16(port))
		if err := errors.Join(c.write(ch, name), c.write(ch+1, name)); err != nil {
			close(gone)
			return err
		}
		if far[i], err = f.dial(port); err != nil {
			_ = c.write(ch+1, f.words(port, err))
			continue
		}
		ends.Add(1)
		f.wg.Go(func() {
			defer ends.Done()
			if err := f.receive(far[i], func(b []byte) error { return c.write(ch, b) }); err != nil {
				_ = c.write(ch+1, f.words(port, err)) // a client that is gone needs none
			}
			if proto == v5Channel {
				_ = c.write(chClose, []byte{ch})
			}
		})
	}
	f.wg.Go(func() {
		ends.Wait()
		_ = c.bye()
		t := time.AfterFunc(lingerTimeout, c.close)
		<-gone
		t.Stop()
	})
	over := make([]bool, len(ports))
	err = c.read(func(channel byte, p []byte) {
		end := channel == chClose && proto == v5Channel
		if end {
			channel = p[0]
		}
		i := int(channel / 2)
		switch {
		case channel%2 != 0 || i >= len(far) || far[i] == nil || over[i]:
		case end:
			_ = far[i].CloseWrite()
		default:
			over[i] = f.send(far[i], p) != nil
		}
	})
	f.m.Close("")
	close(gone)
	return err
}
