package peers

import (
	"context"
	"net"
	"net/http"
	"time"

	"github.com/dunlin-project/dunlin/internal/attempt"
)

// HTTP is a transport to the API of other servers: the host of a URL is a
// server id. The connection shows this server's certificate. Who uses it
// calls CloseIdleConnections at the end.
func (m *Mesh) HTTP() *http.Transport {
	return &http.Transport{
		DialTLSContext: func(ctx context.Context, _, hostport string) (net.Conn, error) {
			id, _, err := net.SplitHostPort(hostport)
			if err != nil {
				return nil, err
			}
			c, err := attempt.First(ctx, dialStagger, m.cfg.Book.Resolve(id), func(ctx context.Context, addr string) (net.Conn, error) {
				ctx, cancel := context.WithTimeout(ctx, dialTimeout)
				defer cancel()
				c, _, err := m.tls(ctx, addr, "http/1.1", id)
				if err != nil {
					return nil, err
				}
				return c, nil
			}, func(c net.Conn) { _ = c.Close() })
			if err != nil {
				return nil, unreachable(id, err)
			}
			return c, nil
		},
		IdleConnTimeout:     time.Minute,
		MaxIdleConnsPerHost: 16,
		// What the client accepts is between it and the leader.
		DisableCompression: true,
	}
}
