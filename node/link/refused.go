package link

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
)

// errCertificate: a server ended the connection over our certificate. TLS has
// no words for why.
var errCertificate = errors.New("the server refused this node's certificate: the node was revoked ('dunlin node revoke'), or this is a server of another cluster; " +
	"what runs here goes on; for a place in a cluster again the machine needs a new key: stop the agent, run 'dunlin agent reset', " +
	"and start it with a new --join line")

const badCertificate = tls.AlertError(42) // RFC 8446, 6.2: bad_certificate

// explained adds to a server's bad_certificate what it means.
func explained(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "remote error" && op.Err.Error() == badCertificate.Error() {
		return fmt.Errorf("%w (%w)", errCertificate, err)
	}
	return err
}
