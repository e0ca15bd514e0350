// Package dunlin lets Go guests (GOOS=wasip1 GOARCH=wasm) connect to what
// their pod's annotation dunlin.dev/outbound allows. WASI preview 1 has no
// connect and package net none on this platform; what Dial returns is a
// net.Conn that waits in poll_oneoff like any other, so other goroutines go on.
//
// On other platforms everything here is package net's, so that a program can be
// tried without Wasm.
//
//	client := &http.Client{Transport: dunlin.Transport()}
//	conn, err := dunlin.Dial("tcp", "broker.example:1883")
//
// TLS needs certificates of authorities, of which a guest has none: mount them,
// and name them in SSL_CERT_FILE.
package dunlin

import (
	"context"
	"net"
	"net/http"
	"time"
)

// Dial connects to an address (host:port, the port a number) over tcp, tcp4,
// tcp6 or udp. What the annotation does not allow is EACCES, and a line in the
// pod's log says which entry it would take.
func Dial(network, address string) (net.Conn, error) {
	return DialContext(context.Background(), network, address)
}

// Transport is an http.Transport that dials as Dial does.
func Transport() *http.Transport {
	return &http.Transport{
		DialContext: DialContext, ForceAttemptHTTP2: true, MaxIdleConns: 16, IdleConnTimeout: 90 * time.Second,
		TLSHandshakeTimeout: 10 * time.Second, ExpectContinueTimeout: time.Second,
	}
}
