package podstream

import (
	"context"
	"encoding/base64"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/gorilla/websocket"
)

// Protocols of a log over a WebSocket: a message is a piece of the log, the
// first one is empty.
const (
	kindLog   = "log"
	binaryLog = "binary.k8s.io"
	base64Log = "base64.binary.k8s.io"
)

// ServeLogs implements api.Streams.
func (s *Server) ServeLogs(w http.ResponseWriter, r *http.Request, logs func(context.Context, io.Writer) error) error {
	proto, err := negotiate(r, true, []string{binaryLog, base64Log}, nil, "")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	l := &wsLog{base64: proto == base64Log, gone: make(chan struct{}), cancel: cancel}
	l.begin = func() error {
		c, err := upgrade(w, r, proto)
		if err != nil {
			return err
		}
		l.c = &wsChannels{ws: c}
		l.wg.Go(l.read)
		l.wg.Go(func() { pinger(l.c, l.gone) })
		return l.send(nil)
	}
	defer s.count(kindLog, proto, true)()
	err = logs(ctx, l)
	if !l.begun {
		if err != nil {
			return err
		}
		_, err = l.Write(nil)
	}
	l.end(err)
	return nil
}

// wsLog is upgraded by the first write: until then an error is an ordinary
// answer.
type wsLog struct {
	begun  bool
	begin  func() error
	base64 bool
	c      *wsChannels // nil: the client has another answer, or is gone
	gone   chan struct{}
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// Write implements io.Writer.
func (l *wsLog) Write(p []byte) (int, error) {
	if !l.begun {
		l.begun = true
		if err := l.begin(); err != nil {
			return 0, err
		}
	}
	if len(p) == 0 {
		return 0, nil
	}
	return len(p), l.send(p)
}

func (l *wsLog) send(p []byte) error {
	kind := websocket.BinaryMessage
	if l.base64 {
		kind, p = websocket.TextMessage, []byte(base64.StdEncoding.EncodeToString(p))
	}
	_ = l.c.ws.SetWriteDeadline(time.Now().Add(openTimeout)) // one that does not read is cut, as over HTTP
	return l.c.ws.WriteMessage(kind, p)
}

// read takes what the client sends, which means nothing, until it goes.
func (l *wsLog) read() {
	defer close(l.gone)
	defer l.cancel()
	for {
		if _, _, err := l.c.ws.NextReader(); err != nil {
			return
		}
	}
}

// end tells how it ended.
func (l *wsLog) end(err error) {
	if l.c == nil {
		return
	}
	defer l.wg.Wait()
	defer l.c.close()
	if err != nil {
		reason := why(err)
		msg := websocket.FormatCloseMessage(websocket.CloseInternalServerErr, reason[:min(len(reason), 120)]) // a frame holds no more
		err = l.c.ws.WriteControl(websocket.CloseMessage, msg, time.Now().Add(lingerTimeout))
	} else {
		err = l.c.bye()
	}
	if err == nil {
		t := time.NewTimer(lingerTimeout)
		defer t.Stop()
		select {
		case <-l.gone:
		case <-t.C:
		}
	}
}
