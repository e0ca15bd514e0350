package nodelink

import (
	"context"
	"encoding/binary"
	"net"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
)

type fakeTokens struct {
	n     atomic.Int64
	clock atomic.Pointer[wall]
}

func (f *fakeTokens) Issue(_ *corev1.ServiceAccount, _ runtime.Object, _ *auth.Ref, _ []string, life time.Duration) (string, time.Time, error) {
	f.n.Add(1)
	now := time.Now()
	if c := f.clock.Load(); c != nil {
		now = c.Now()
	}
	return "token", now.Add(life), nil
}

// relisten takes an address again that was just closed.
func relisten(t *testing.T, addr string) net.Listener {
	t.Helper()
	var l net.Listener
	eventually(t, "listen again", func() bool {
		var err error
		l, err = net.Listen("tcp", addr)
		return err == nil
	})
	return l
}

// stripALPN dials through a middlebox that cuts connections whose
// ClientHello names a protocol it does not know.
func stripALPN(t *testing.T) func(context.Context, string, string) (net.Conn, error) {
	t.Helper()
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &inspecting{Conn: c}, nil
	}
}

type inspecting struct {
	net.Conn
	seen bool
}

func (i *inspecting) Write(p []byte) (int, error) {
	if !i.seen {
		i.seen = true
		if hasALPN(p) {
			_ = i.Conn.Close()
			return len(p), nil // reads fail from now on
		}
	}
	return i.Conn.Write(p)
}

// hasALPN looks for "dunlin-" with its length byte in a ClientHello record.
func hasALPN(rec []byte) bool {
	for n := 0; n+9 < len(rec); n++ {
		if string(rec[n:n+7]) == "dunlin-" && n >= 3 && int(binary.BigEndian.Uint16(rec[n-3:n-1])) == int(rec[n-1])+1 {
			return true
		}
	}
	return false
}
