package podstream

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/wire"
)

// streamType is the header that says what a stream is for.
const streamType = "streamType"

// spdyConsole is a console over SPDY: a stream for each channel, which the
// client opens.
type spdyConsole struct {
	*spdyConn
	proto string

	mu      sync.Mutex
	missing map[byte]bool
	by      map[byte]*spdyStream
	all     chan struct{} // closed when nothing is missing
	over    chan struct{} // closed when the reader ended
}

var channelNames = map[string]byte{"stdin": chStdin, "stdout": chStdout, "stderr": chStderr, "error": chError, "resize": chResize}

func newSPDYConsole(w http.ResponseWriter, _ *http.Request, proto string, o *wire.ExecOpen) (console, error) {
	conn, err := hijackSPDY(w, proto)
	if err != nil {
		return nil, err
	}
	c := &spdyConsole{
		spdyConn: conn, proto: proto, by: map[byte]*spdyStream{}, all: make(chan struct{}), over: make(chan struct{}),
		missing: map[byte]bool{chError: true},
	}
	for ch, yes := range map[byte]bool{
		chStdin: o.Stdin, chStdout: o.Stdout, chStderr: o.Stderr, chResize: o.TTY && proto != v1Channel && proto != v2Channel,
	} {
		if yes {
			c.missing[ch] = true
		}
	}
	return c, nil
}

func (c *spdyConsole) ready(ctx context.Context) error {
	select {
	case <-c.all:
		return nil
	case <-c.over:
		return errors.New("the client is gone")
	case <-ctx.Done():
		return errors.New("the client did not open its streams in time")
	}
}

func (c *spdyConsole) read(in *input) error {
	defer close(c.over)
	return c.serve(func(st *spdyStream) error {
		ch, known := channelNames[st.headers.Get(streamType)]
		c.mu.Lock()
		defer c.mu.Unlock()
		if !known || c.by[ch] != nil {
			return fmt.Errorf("a stream of type %q", st.headers.Get(streamType))
		}
		c.by[ch] = st
		switch ch {
		case chStdin:
			st.sink = stdinSink{in}
		case chResize:
			st.sink = sizeSink{&sizes{in: in}}
		}
		if c.missing[ch] {
			if delete(c.missing, ch); len(c.missing) == 0 {
				close(c.all)
			}
		}
		return nil
	})
}

func (c *spdyConsole) stream(ch byte) *spdyStream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.by[ch]
}

func (c *spdyConsole) write(channel byte, p []byte) error {
	return c.stream(channel).write(p, false)
}

func (c *spdyConsole) end(st *metav1.Status) error {
	if d, ok := c.conn.(interface{ SetWriteDeadline(time.Time) error }); ok {
		_ = d.SetWriteDeadline(time.Now().Add(openTimeout))
	}
	for _, ch := range []byte{chStdout, chStderr} {
		if s := c.stream(ch); s != nil {
			if err := s.write(nil, true); err != nil {
				return err
			}
		}
	}
	s := c.stream(chError)
	if s == nil {
		return errors.New("the client opened no stream for errors")
	}
	return s.write(errorText(c.proto, st), true)
}

// stdinSink passes a stream on as input.
type stdinSink struct{ in *input }

func (s stdinSink) data(p []byte) { s.in.stdinWrite(p) }
func (s stdinSink) fin()          { s.in.stdinEnd() }
func (s stdinSink) reset()        { s.in.stdinEnd() }

// sizeSink reads the sizes of the client's terminal.
type sizeSink struct{ z *sizes }

func (s sizeSink) data(p []byte) { s.z.write(p) }
func (s sizeSink) fin()          {}
func (s sizeSink) reset()        {}
