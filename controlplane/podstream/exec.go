package podstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// Channels of a console, as all protocols number them.
const (
	chStdin  = 0
	chStdout = 1
	chStderr = 2
	chError  = 3
	chResize = 4
)

// console is a client's end of an exec or attach.
type console interface {
	// ready waits until everything is open that the client asked for.
	ready(ctx context.Context) error
	// read hands on what the client sends until it is gone. It returns only
	// then.
	read(in *input) error
	// write sends output.
	write(channel byte, p []byte) error
	// ping writes something that means nothing.
	ping() error
	// end tells how it ended, and that there is no more.
	end(st *metav1.Status) error
	// close ends the connection.
	close()
}

// input takes what a client sends.
type input struct {
	stdin  *mux.Stream                // nil: dropped
	resize func(width, height uint16) // nil: dropped
	touch  func()                     // something was sent
}

// stdinWrite passes input on. Once the program takes no more it is dropped,
// as a pipe would have it: the end is still to be told.
func (in *input) stdinWrite(p []byte) {
	in.touch()
	if in.stdin == nil {
		return
	}
	if _, err := in.stdin.Write(p); err != nil {
		in.stdin = nil
	}
}

func (in *input) stdinEnd() {
	if in.stdin != nil {
		_ = in.stdin.CloseWrite()
	}
}

// sizes reads {"Width":..,"Height":..} objects, one after the other, however
// they are cut up.
type sizes struct {
	buf []byte
	in  *input
}

// maxSizeText is more than one size can take.
const maxSizeText = 512

func (z *sizes) write(p []byte) {
	if z.in.resize == nil {
		return
	}
	if z.buf = append(z.buf, p...); len(z.buf) > maxSizeText {
		z.buf = nil
		return
	}
	for {
		var size struct{ Width, Height uint16 }
		d := json.NewDecoder(bytes.NewReader(z.buf))
		err := d.Decode(&size)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return // the rest will come
		}
		if err != nil {
			z.buf = nil
			return
		}
		z.buf = z.buf[d.InputOffset():]
		z.in.resize(size.Width, size.Height)
	}
}

// exec carries one command, or an attach, from the client's streams being
// open to its having heard the end.
func (s *Server) exec(ctx context.Context, m *mux.Mux, o *wire.ExecOpen, c console) {
	defer c.close()
	stopClosing := context.AfterFunc(ctx, func() { m.Fail(errClosing) })
	defer stopClosing()
	touch, stopIdle := s.idleTimer(m)
	defer stopIdle()
	ctl, in, outs, err := openConsole(m, o, touch)
	if err != nil {
		_ = c.end(failed(errors.New(why(err))))
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer c.close() // ends the reading
	gone := make(chan struct{})
	wg.Go(func() {
		defer close(gone)
		if err := c.read(in); err != nil {
			s.log.Debug("client of a stream is gone", "err", err)
		}
		m.Close("")
	})
	wg.Go(func() { pinger(c, gone) })
	rctx, cancel := context.WithTimeout(ctx, openTimeout)
	err = c.ready(rctx)
	cancel()
	if err == nil {
		err = ctl.begin(o)
	}
	var end *wire.ExecEnd
	if err == nil {
		end, err = outputs(m, ctl, outs, c, touch)
	}
	st := statusOf(end, err)
	if c.end(st) == nil {
		t := time.NewTimer(lingerTimeout)
		defer t.Stop()
		select {
		case <-gone:
		case <-t.C:
		}
	}
}

// control is the control stream, on which the ExecOpen comes first: a client
// may tell the size of its terminal before it has opened everything.
type control struct {
	*mux.Stream
	mu    sync.Mutex
	begun bool
	early *wire.TerminalSize
}

func (c *control) begin(o *wire.ExecOpen) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begun = true
	if err := wire.WriteMessage(c, o); err != nil || c.early == nil {
		return err
	}
	return wire.WriteMessage(c, c.early)
}

func (c *control) resize(width, height uint16) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.early = &wire.TerminalSize{Width: width, Height: height}
	if c.begun {
		_ = wire.WriteMessage(c, c.early) // its end is noticed elsewhere
	}
}

// openConsole opens what an exec needs.
func openConsole(m *mux.Mux, o *wire.ExecOpen, touch func()) (ctl *control, in *input, outs map[byte]*mux.Stream, err error) {
	st, err := m.Open([]byte(wire.StreamControl))
	if err != nil {
		return nil, nil, nil, err
	}
	ctl = &control{Stream: st}
	in, outs = &input{touch: touch}, map[byte]*mux.Stream{}
	if o.Stdin {
		if in.stdin, err = m.Open([]byte(wire.StreamStdin)); err != nil {
			return nil, nil, nil, err
		}
	}
	for ch, name := range map[byte]string{chStdout: wire.StreamStdout, chStderr: wire.StreamStderr} {
		if (ch == chStdout && !o.Stdout) || (ch == chStderr && !o.Stderr) {
			continue
		}
		if outs[ch], err = m.Open([]byte(name)); err != nil {
			return nil, nil, nil, err
		}
	}
	if o.TTY {
		in.resize = ctl.resize
	}
	return ctl, in, outs, nil
}

// outputs copies what the node sends to the client, to the end.
func outputs(m *mux.Mux, ctl *control, outs map[byte]*mux.Stream, c console, touch func()) (*wire.ExecEnd, error) {
	var wg sync.WaitGroup
	for ch, st := range outs {
		wg.Go(func() {
			buf := make([]byte, copyBuffer)
			for {
				n, err := st.Read(buf)
				if n > 0 {
					touch()
					if werr := c.write(ch, buf[:n]); werr != nil {
						m.Close("")
						return
					}
				}
				if err != nil {
					return // its end; any other is told by ctl, too
				}
			}
		})
	}
	end := new(wire.ExecEnd)
	err := wire.ReadMessage(ctl, end)
	wg.Wait()
	return end, err
}

// pings is what keeps an eye on a client.
type pings interface {
	ping() error
	close()
}

// pinger writes to the client now and then until it is gone.
func pinger(c pings, gone <-chan struct{}) {
	t := time.NewTicker(pingInterval)
	defer t.Stop()
	for {
		select {
		case <-gone:
			return
		case <-t.C:
		}
		if err := c.ping(); err != nil {
			c.close()
			return
		}
	}
}

// statusOf is how it ended in the form of version 4 and later.
func statusOf(end *wire.ExecEnd, err error) *metav1.Status {
	switch {
	case err != nil:
		return failed(errors.New(why(err)))
	case end.Error != "":
		return failed(errors.New(end.Error))
	case end.ExitCode != 0:
		return &metav1.Status{
			TypeMeta: statusType, Status: metav1.StatusFailure, Reason: "NonZeroExitCode",
			Message: fmt.Sprintf("command terminated with non-zero exit code: exit status %d", end.ExitCode),
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "ExitCode", Message: strconv.Itoa(int(end.ExitCode))}}},
		}
	}
	return &metav1.Status{TypeMeta: statusType, Status: metav1.StatusSuccess}
}

var statusType = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}

func failed(err error) *metav1.Status {
	return &metav1.Status{
		TypeMeta: statusType, Status: metav1.StatusFailure, Reason: metav1.StatusReasonInternalError, Code: http.StatusInternalServerError,
		Message: err.Error(), Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Message: err.Error()}}},
	}
}

// errorText is what goes over the error channel: versions before 4 have words
// only, and nothing for success.
func errorText(proto string, st *metav1.Status) []byte {
	switch proto {
	case v4Channel, v4Base64, v5Channel:
		b, err := json.Marshal(st)
		if err != nil {
			return []byte(err.Error())
		}
		return b
	}
	if st.Status == metav1.StatusSuccess {
		return nil
	}
	return []byte(st.Message)
}
