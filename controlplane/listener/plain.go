package listener

import (
	"errors"
	"io"
	"net"
	"time"
)

// errPlainHTTP is why a connection without TLS ends.
var errPlainHTTP = errors.New("it speaks HTTP without TLS")

// plainHTTP says whether the first bytes of a connection, where TLS has its
// record's header, begin an HTTP request (net/http's own rule).
func plainHTTP(header [5]byte) bool {
	switch string(header[:]) {
	case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO", "PATCH", "DELET":
		return true
	}
	return false
}

// answerPlain says what is wrong in net/http's words. What the client still
// sends is read for a moment: a connection that is closed on unread data is
// reset, and the answer lost with it.
func answerPlain(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(time.Second))
	const text = "Client sent an HTTP request to an HTTPS server.\n"
	if _, err := io.WriteString(c, "HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"+text); err != nil {
		return
	}
	if half, ok := c.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		_, _ = io.CopyN(io.Discard, c, 64<<10)
	}
}
