// Package client is the commands' thin client of the API: a kubeconfig, TLS,
// JSON requests, and nothing that the server can do itself (tables, merging,
// validation are asked from it).
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Accept headers.
const (
	JSON  = "application/json"
	Table = "application/json;as=Table;v=v1;g=meta.k8s.io"
)

// Client talks to one API server, or to the agent of this machine.
type Client struct {
	base      string
	socket    string // of the agent; "" for a server
	token     string
	tls       *tls.Config // of streams, which are HTTP/1.1
	http      *http.Client
	Namespace string // of the kubeconfig's context
	// Warn receives the server's Warning headers; may be nil.
	Warn      func(string)
	userAgent string
}

// StatusError is the server's metav1.Status.
type StatusError struct{ Status metav1.Status }

// Error implements error.
func (e *StatusError) Error() string { return e.Status.Message }

// IsNotFound says whether the server answered 404.
func IsNotFound(err error) bool { return code(err) == http.StatusNotFound }

// IsConflict says whether the server answered 409.
func IsConflict(err error) bool { return code(err) == http.StatusConflict }

// IsInvalid says whether the server answered 400 or 422: the same object will
// never do.
func IsInvalid(err error) bool {
	c := code(err)
	return c == http.StatusBadRequest || c == http.StatusUnprocessableEntity
}

func code(err error) int32 {
	var se *StatusError
	if errors.As(err, &se) {
		return se.Status.Code
	}
	return 0
}

// UnreachableError says that no server answered, and what to look at.
type UnreachableError struct {
	Server string
	Err    error
}

// Error implements error.
func (e *UnreachableError) Error() string {
	hint := "is it running there? another kubeconfig can be given with --kubeconfig"
	if errors.Is(e.Err, syscall.ECONNREFUSED) {
		hint = "nothing listens there: start one with 'dunlin server', or give another kubeconfig with --kubeconfig"
	}
	if bad := (x509.CertificateInvalidError{}); errors.As(e.Err, &bad) && bad.Reason == x509.Expired {
		hint = "this machine's clock or the server's is wrong, most likely: compare 'date' on both"
	}
	return fmt.Sprintf("cannot reach the server %s: %v (%s)", e.Server, root(e.Err), hint)
}

// Unwrap gives the cause.
func (e *UnreachableError) Unwrap() error { return e.Err }

func root(err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	var oe *net.OpError
	if errors.As(err, &oe) {
		return oe.Err
	}
	return err
}

// New makes a client from a kubeconfig file (see Load).
func New(kubeconfig, version string) (*Client, error) {
	c, err := Load(kubeconfig, "")
	if err != nil {
		return nil, err
	}
	return c.Client(version)
}

// Client talks to the configuration's server.
func (c *Config) Client(version string) (*Client, error) {
	t := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: c.Insecure} //nolint:gosec // only when the user's kubeconfig says so
	if len(c.CA) > 0 {
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(c.CA) {
			return nil, fmt.Errorf("%s: certificate-authority-data holds no certificate", c.Path)
		}
	}
	if len(c.Cert) > 0 {
		pair, err := tls.X509KeyPair(c.Cert, c.Key)
		if err != nil {
			return nil, fmt.Errorf("%s: client certificate: %w", c.Path, err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	streams := t.Clone()
	streams.NextProtos = []string{"http/1.1"}
	tr := &http.Transport{
		TLSClientConfig:     t,
		ForceAttemptHTTP2:   true,
		DialContext:         (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
		TLSHandshakeTimeout: 10 * time.Second,
	}
	return &Client{
		base: strings.TrimSuffix(c.Server, "/"), token: c.Token, Namespace: c.Namespace, tls: streams,
		http: &http.Client{Transport: tr}, userAgent: "dunlin/" + version,
	}, nil
}

// Request is one call.
type Request struct {
	Method      string
	Path        string // "/api/v1/..."
	Query       url.Values
	Accept      string // "" is JSON
	ContentType string
	Body        []byte
}

// Do sends the request and returns the answer's body, open. Errors of the
// server are *StatusError.
func (c *Client) Do(ctx context.Context, r Request) (io.ReadCloser, error) {
	u := c.base + r.Path
	if len(r.Query) > 0 {
		u += "?" + r.Query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, u, bytes.NewReader(r.Body))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	if r.Accept == "" {
		r.Accept = JSON
	}
	req.Header.Set("Accept", r.Accept)
	req.Header.Set("User-Agent", c.userAgent)
	if r.ContentType != "" {
		req.Header.Set("Content-Type", r.ContentType)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if c.Local() {
			return nil, &AgentError{Socket: c.socket, Err: err}
		}
		return nil, &UnreachableError{Server: c.base, Err: err}
	}
	if c.Warn != nil {
		for _, w := range resp.Header.Values("Warning") {
			c.Warn(warningText(w))
		}
	}
	if resp.StatusCode < 300 {
		return resp.Body, nil
	}
	return nil, refusal(resp)
}

// refusal reads the error that the server answered with.
func refusal(resp *http.Response) error {
	defer func() { _ = resp.Body.Close() }()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	se := &StatusError{}
	if json.Unmarshal(b, &se.Status) != nil || se.Status.Kind != "Status" {
		se.Status = metav1.Status{Code: int32(resp.StatusCode), Message: fmt.Sprintf("%s: %s", resp.Status, firstLine(b))}
	}
	if se.Status.Code == 0 {
		se.Status.Code = int32(resp.StatusCode)
	}
	return se
}

// JSON sends the request and decodes the answer into out.
func (c *Client) JSON(ctx context.Context, r Request, out any) error {
	body, err := c.Do(ctx, r)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	if out == nil {
		_, err = io.Copy(io.Discard, body)
		return err
	}
	if err := json.NewDecoder(body).Decode(out); err != nil {
		return fmt.Errorf("read the server's answer: %w", err)
	}
	return nil
}

// Object gets one object.
func (c *Client) Object(ctx context.Context, path string) (*unstructured.Unstructured, error) {
	u := &unstructured.Unstructured{}
	if err := c.JSON(ctx, Request{Method: http.MethodGet, Path: path}, &u.Object); err != nil {
		return nil, err
	}
	return u, nil
}

// Watch opens a watch and calls f for every event until f returns false, the
// server ends the stream (io.EOF) or ctx ends.
func (c *Client) Watch(ctx context.Context, path string, q url.Values, accept string, f func(typ string, object json.RawMessage) (bool, error)) error {
	if q == nil {
		q = url.Values{}
	}
	q.Set("watch", "true")
	body, err := c.Do(ctx, Request{Method: http.MethodGet, Path: path, Query: q, Accept: accept})
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	d := json.NewDecoder(body)
	for {
		var e struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		if err := d.Decode(&e); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return io.EOF
		}
		if e.Type == "ERROR" {
			se := &StatusError{}
			if err := json.Unmarshal(e.Object, &se.Status); err != nil {
				return fmt.Errorf("read watch error: %w", err)
			}
			return se
		}
		if more, err := f(e.Type, e.Object); err != nil || !more {
			return err
		}
	}
}

func warningText(header string) string {
	if i := strings.IndexByte(header, '"'); i >= 0 {
		if s := strings.TrimSuffix(header[i+1:], `"`); s != "" {
			return strings.ReplaceAll(s, `\"`, `"`)
		}
	}
	return header
}

func firstLine(b []byte) string {
	s, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	if len(s) > 200 {
		s = s[:200]
	}
	return s
}
