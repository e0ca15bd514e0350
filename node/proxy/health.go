package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"time"
)

const (
	healthTimeout = 5 * time.Second
	healthRequest = 4 << 10 // bytes of a request that are read
	healthAtOnce  = 64
)

// serveHealth tells load balancers over HTTP whether this node has ready
// endpoints of a Service with externalTrafficPolicy Local. A whole HTTP server
// would be a third of the program.
func serveHealth(l *listener) {
	slots := make(chan struct{}, healthAtOnce)
	for {
		c, err := l.tcp.Accept()
		if err != nil {
			return // closed; when descriptors run out the port is opened anew with the next change
		}
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			answerHealth(c, l.health.Here())
		}()
	}
}

func answerHealth(c net.Conn, n int) {
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(healthTimeout))
	r := bufio.NewReaderSize(io.LimitReader(c, healthRequest), 512)
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return
		}
		if len(line) <= 2 {
			break
		}
	}
	status := "200 OK"
	if n == 0 {
		status = "503 Service Unavailable"
	}
	body := fmt.Sprintf("{\"localEndpoints\":%d}\n", n)
	_, _ = fmt.Fprintf(c, "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status, len(body), body)
}
