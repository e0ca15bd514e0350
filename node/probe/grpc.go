package probe

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"google.golang.org/protobuf/encoding/protowire"

	corev1 "k8s.io/api/core/v1"
)

// serving is ServingStatus SERVING of grpc.health.v1.
const serving = 1

// health asks for the health of a service as grpc.health.v1 defines it: one
// call with one short message each way, over HTTP/2 without TLS as the
// kubelet's. Not with google.golang.org/grpc, which is megabytes.
func health(ctx context.Context, a *corev1.GRPCAction, dial DialFunc) error {
	service := ""
	if a.Service != nil {
		service = *a.Service
	}
	const path = "/grpc.health.v1.Health/Check"
	var ask []byte
	if service != "" {
		ask = protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), service)
	}
	frame := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(ask)))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://pod"+path, bytes.NewReader(append(frame, ask...)))
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	req.Header.Set("User-Agent", "kube-probe/1.37")
	tr := &http.Transport{
		Protocols:   new(http.Protocols),
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) { return dial(ctx, network, a.Port) },
	}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("gRPC health check on port %d: %w", a.Port, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return fmt.Errorf("gRPC health check on port %d: %w", a.Port, err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("gRPC health check on port %d: HTTP status %d; does gRPC listen there?", a.Port, resp.StatusCode)
	}
	status := func(name string) string {
		if v := resp.Trailer.Get(name); v != "" {
			return v
		}
		return resp.Header.Get(name) // an answer of headers only
	}
	if code := status("Grpc-Status"); code != "0" {
		const unimplemented, notFound = "12", "5"
		hint := ""
		switch code {
		case unimplemented:
			hint = "; the server has no grpc.health.v1.Health"
		case notFound:
			hint = fmt.Sprintf("; it does not know the service %q", service)
		}
		return fmt.Errorf("gRPC health check on port %d: status %s %s%s", a.Port, code, status("Grpc-Message"), hint)
	}
	got, err := servingStatus(body)
	if err != nil {
		return fmt.Errorf("gRPC health check on port %d: %w", a.Port, err)
	}
	if got != serving {
		return fmt.Errorf("gRPC health check on port %d: service %q is not serving (%d)", a.Port, service, got)
	}
	return nil
}

// servingStatus reads a HealthCheckResponse in its frame; 0, UNKNOWN, is what
// is left out.
func servingStatus(body []byte) (uint64, error) {
	const head = 5
	if len(body) < head || body[0] != 0 || int64(binary.BigEndian.Uint32(body[1:])) != int64(len(body)-head) {
		return 0, errors.New("the answer is not one uncompressed message")
	}
	var status uint64
	for b := body[head:]; len(b) > 0; {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return 0, fmt.Errorf("answer: %w", protowire.ParseError(n))
		}
		b = b[n:]
		if num == 1 && typ == protowire.VarintType {
			if status, n = protowire.ConsumeVarint(b); n < 0 {
				return 0, fmt.Errorf("answer: %w", protowire.ParseError(n))
			}
		} else if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
			return 0, fmt.Errorf("answer: %w", protowire.ParseError(n))
		}
		b = b[n:]
	}
	return status, nil
}
