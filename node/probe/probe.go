// Package probe runs one probe once: HTTP GET, TCP connect, gRPC health check
// and a command in the container, as the kubelet does. When, how often and what follows is the pod step's decision.
package probe

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// ErrUnsupported says that this kind of probe cannot be run for the pod.
var ErrUnsupported = errors.New("probe not supported: only httpGet, tcpSocket, grpc and, for containers, exec are; a Wasm guest has no exec")

// maxBody is how much of an answer is read; the rest is not of interest.
const maxBody = 10 << 10

// DialFunc connects to a port of the pod. A host that the probe names itself is
// connected to from the node instead, as the kubelet does.
type DialFunc func(ctx context.Context, network string, port int32) (net.Conn, error)

// PortFunc resolves a port number or name of the container.
type PortFunc func(intstr.IntOrString) (int32, error)

// ExecFunc runs a command in the container and gives its exit code.
type ExecFunc func(ctx context.Context, command []string, out io.Writer) (int, error)

// Run probes once within the probe's timeout. The message says what was
// seen, for an event; it is empty when all is well.
func Run(ctx context.Context, p *corev1.Probe, dial DialFunc, ports PortFunc, run ExecFunc) (ok bool, message string) {
	timeout := time.Duration(max(1, p.TimeoutSeconds)) * time.Second
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var err error
	switch {
	case p.HTTPGet != nil:
		err = httpGet(ctx, p.HTTPGet, dial, ports)
	case p.TCPSocket != nil:
		err = tcp(ctx, p.TCPSocket.Port, dialHost(p.TCPSocket.Host, dial), ports)
	case p.GRPC != nil:
		err = health(ctx, p.GRPC, dial)
	case p.Exec != nil && run != nil:
		err = execute(ctx, p.Exec.Command, run)
	default:
		err = ErrUnsupported
	}
	switch {
	case err == nil:
		return true, ""
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return false, fmt.Sprintf("no answer within %s: %v", timeout, err)
	}
	return false, err.Error()
}

// execute is healthy when the command ends with 0; what it printed says why not.
func execute(ctx context.Context, command []string, run ExecFunc) error {
	out := &head{left: maxBody}
	code, err := run(ctx, command, out)
	if err == nil && code != 0 {
		err = fmt.Errorf("command ended with exit code %d: %s", code, strings.ToValidUTF8(strings.TrimSpace(out.b.String()), "?"))
	}
	return err
}

// head keeps the beginning of what is written.
type head struct {
	mu   sync.Mutex
	b    strings.Builder
	left int
}

// Write implements io.Writer.
func (h *head) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := min(len(p), h.left)
	h.b.Write(p[:n])
	h.left -= n
	return len(p), nil
}

// dialHost connects to a named host from the node, and to the pod if none is.
func dialHost(host string, pod DialFunc) DialFunc {
	if host == "" {
		return pod
	}
	return func(ctx context.Context, network string, port int32) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, net.JoinHostPort(host, strconv.Itoa(int(port))))
	}
}

func tcp(ctx context.Context, port intstr.IntOrString, dial DialFunc, ports PortFunc) error {
	n, err := ports(port)
	if err != nil {
		return err
	}
	c, err := dial(ctx, "tcp", n)
	if err != nil {
		return err
	}
	return c.Close()
}

// HTTPGet runs the request of an httpGet probe or lifecycle hook.
func HTTPGet(ctx context.Context, a *corev1.HTTPGetAction, dial DialFunc, ports PortFunc) error {
	return httpGet(ctx, a, dial, ports)
}

func httpGet(ctx context.Context, a *corev1.HTTPGetAction, dial DialFunc, ports PortFunc) error {
	port, err := ports(a.Port)
	if err != nil {
		return err
	}
	scheme := "http"
	if a.Scheme == corev1.URISchemeHTTPS {
		scheme = "https"
	}
	path, err := url.Parse(a.Path)
	if err != nil {
		return fmt.Errorf("path: %w", err)
	}
	u := url.URL{Scheme: scheme, Host: net.JoinHostPort("pod", strconv.Itoa(int(port))), Path: path.Path, RawQuery: path.RawQuery}
	where := fmt.Sprintf("on port %d", port)
	if a.Host != "" {
		dial, where = dialHost(a.Host, dial), "at "+net.JoinHostPort(a.Host, strconv.Itoa(int(port)))
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("User-Agent", "kube-probe/1.37")
	req.Header.Set("Accept", "*/*")
	req.Host = net.JoinHostPort(cmp.Or(a.Host, "localhost"), strconv.Itoa(int(port)))
	for _, h := range a.HTTPHeaders {
		if http.CanonicalHeaderKey(h.Name) == "Host" {
			req.Host = h.Value
			continue
		}
		req.Header.Add(h.Name, h.Value)
	}
	tr := &http.Transport{
		DisableKeepAlives:  true,
		DisableCompression: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dial(ctx, network, port)
		},
		// The probe asks "does it answer", not "who is it" (kubelet does the same).
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
	}
	client := &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err // without the made-up host name
		}
		return fmt.Errorf("GET %s %s: %w", u.Path, where, err)
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxBody))
	if resp.StatusCode < 200 || resp.StatusCode >= 400 {
		return fmt.Errorf("GET %s %s: status %d", u.Path, where, resp.StatusCode)
	}
	return nil
}
