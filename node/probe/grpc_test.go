package probe

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestGRPC: a server that answers as the health protocol says, byte for byte.
func TestGRPC(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.ProtoMajor != 2 || r.URL.Path != "/grpc.health.v1.Health/Check" || r.Header.Get("Content-Type") != "application/grpc" ||
			r.Header.Get("Te") != "trailers" || len(body) < 5 || body[0] != 0 || int(binary.BigEndian.Uint32(body[1:])) != len(body)-5 {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Trailer", "Grpc-Status, Grpc-Message")
		var answer []byte
		code := "0"
		switch service := string(body[5:]); service {
		case "", "\x0a\x04good":
			answer = []byte{0, 0, 0, 0, 2, 8, 1}
		case "\x0a\x03bad":
			answer = []byte{0, 0, 0, 0, 2, 8, 2}
		case "\x0a\x05empty":
			answer = []byte{0, 0, 0, 0, 0}
		case "\x0a\x04torn":
			answer = []byte{0, 0, 0, 0, 9, 8, 1}
		case "\x0a\x06broken":
			answer = []byte{0, 0, 0, 0, 1, 8}
		default:
			code = "5"
		}
		_, _ = w.Write(answer)
		w.Header().Set("Grpc-Status", code)
	})
	srv := httptest.NewUnstartedServer(h)
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	defer srv.Close()
	plain := httptest.NewServer(h) // HTTP/1.1 only
	defer plain.Close()
	dial := func(ctx context.Context, network string, port int32) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	}
	port := func(s *httptest.Server) int32 { return int32(s.Listener.Addr().(*net.TCPAddr).Port) }
	for _, c := range []struct {
		service, want string
		port          int32
	}{
		{"", "", port(srv)},
		{"good", "", port(srv)},
		{"bad", "is not serving (2)", port(srv)},
		{"empty", "is not serving (0)", port(srv)},
		{"torn", "not one uncompressed message", port(srv)},
		{"broken", "answer: ", port(srv)},
		{"other", `does not know the service "other"`, port(srv)},
		{"good", "gRPC health check on port", port(plain)},
		{"good", "refused", 1},
	} {
		p := &corev1.Probe{TimeoutSeconds: 5, ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: c.port, Service: &c.service}}}
		ok, message := Run(t.Context(), p, dial, nil, nil)
		if ok != (c.want == "") || !strings.Contains(message, c.want) {
			t.Errorf("%q on %d: %v %q, want %q", c.service, c.port, ok, message, c.want)
		}
	}
}
