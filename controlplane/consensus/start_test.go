package consensus

import (
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// loopback is a stream layer whose accepted connections say when they end.
type loopback struct {
	net.Listener
	accepted chan *watchedConn
}

type watchedConn struct {
	net.Conn
	closed context.CancelFunc
	done   context.Context
}

func (c *watchedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

func (l loopback) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &watchedConn{Conn: c, closed: cancel, done: ctx}
	l.accepted <- w
	return w, nil
}

func (l loopback) Dial(a raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	return net.DialTimeout("tcp", string(a), timeout)
}

// TestLoneServerKeepsNoConnectionToItself: the one for the first election has
// 512 KiB of buffers.
func TestLoneServerKeepsNoConnectionToItself(t *testing.T) {
	in, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := loopback{Listener: in, accepted: make(chan *watchedConn, 16)}
	cfg := testConfig(t, t.TempDir())
	trans := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: l, MaxPool: 3, Timeout: time.Minute,
		Logger: hclog.New(&hclog.LoggerOptions{Output: io.Discard, Level: hclog.Off}),
	})
	t.Cleanup(func() { _ = trans.Close() })
	cfg.Transport, cfg.ServerID = trans, in.Addr().String()
	openTest(t, cfg)
	ctx := testContext(t)
	select {
	case c := <-l.accepted:
		select {
		case <-c.done.Done():
		case <-ctx.Done():
			t.Fatal("the connection to itself stays open")
		}
	case <-ctx.Done():
		t.Fatal("the server did not call itself: this test looks at nothing")
	}
}
