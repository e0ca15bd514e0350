//go:build !wasip1

package dunlin

import (
	"context"
	"net"
)

// DialContext is Dial with a context, which can end the attempt.
func DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, address)
}
