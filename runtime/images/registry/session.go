package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Times.
const (
	dialTimeout   = 15 * time.Second
	answerTimeout = 30 * time.Second
	stallTimeout  = 60 * time.Second // a body without a byte
	idleTimeout   = 30 * time.Second
	maxRedirects  = 5
)

// Client asks registries. It is safe for concurrent use.
type Client struct {
	config Config
	agent  string
	stall  time.Duration // stallTimeout, but in tests

	mu      sync.Mutex
	clients map[string]*http.Client // by host
}

// New makes a client; agent is its User-Agent.
func New(c Config, agent string) *Client {
	return &Client{config: c, agent: agent, stall: stallTimeout, clients: map[string]*http.Client{}}
}

// Close ends idle connections.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.clients {
		h.CloseIdleConnections()
	}
}

func (c *Client) http(host string) (*http.Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h := c.clients[host]; h != nil {
		return h, nil
	}
	t, err := c.config.Configs[host].tlsConfig()
	if err != nil {
		return nil, fmt.Errorf("registries: configs: %s: %w", host, err)
	}
	h := &http.Client{
		Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext, TLSClientConfig: t, ForceAttemptHTTP2: true,
			TLSHandshakeTimeout: dialTimeout, ResponseHeaderTimeout: answerTimeout, IdleConnTimeout: idleTimeout, MaxIdleConnsPerHost: 2, DisableCompression: true,
		},
		CheckRedirect: func(r *http.Request, via []*http.Request) error {
			if len(via) > maxRedirects {
				return fmt.Errorf("more than %d redirects", maxRedirects)
			}
			if via[0].URL.Scheme == "https" && r.URL.Scheme != "https" {
				return errors.New("it redirects to a place without TLS")
			}
			return nil
		},
	}
	c.clients[host] = h
	return h, nil
}

// Session asks for one repository with one set of credentials. It is for one
// goroutine at a time.
type Session struct {
	c          *Client
	repository string
	endpoints  []endpoint
	creds      []workload.RegistryCredential
	auth       map[string]string // Authorization that worked, by endpoint
	personal   bool
}

// Personal says whether one of the credentials that Open was given let the
// session in.
func (s *Session) Personal() bool { return s.personal }

// Open begins a session.
func (c *Client) Open(registry, repository string, creds []workload.RegistryCredential) *Session {
	return &Session{c: c, repository: repository, endpoints: c.config.endpoints(registry), creds: matching(creds, registry, repository), auth: map[string]string{}}
}

const accept = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, " +
	"application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"

// each asks one endpoint after the other. What counts at the end is what the
// registry itself said: mirrors need not have everything.
func (s *Session) each(ctx context.Context, ask func(endpoint) error) error {
	var mirrors []string
	for i, e := range s.endpoints {
		err := ask(e)
		if err == nil || ctx.Err() != nil {
			return err
		}
		if i < len(s.endpoints)-1 {
			mirrors = append(mirrors, err.Error())
			continue
		}
		if len(mirrors) > 0 {
			return fmt.Errorf("%w (before that: %s)", err, strings.Join(mirrors, "; "))
		}
		return err
	}
	return nil
}

// Head says which digest a tag has now; "" when the registry does not say.
func (s *Session) Head(ctx context.Context, reference string) (digest string, err error) {
	err = s.each(ctx, func(e endpoint) error {
		r, err := s.do(ctx, e, http.MethodHead, "/manifests/"+reference, http.Header{"Accept": {accept}})
		if err != nil {
			return err
		}
		_ = r.Body.Close()
		if r.StatusCode != http.StatusOK {
			return refused(e.host, r)
		}
		digest = r.Header.Get("Docker-Content-Digest")
		return nil
	})
	return digest, err
}

// TooLargeError is a document that is larger than anybody needs.
type TooLargeError struct {
	What  string
	Limit int64
}

// Error implements error.
func (e *TooLargeError) Error() string {
	return fmt.Sprintf("%s is larger than the limit of %d MiB", e.What, e.Limit>>20)
}

// DigestError is content that is not what was asked for.
type DigestError struct {
	Host, Want, Got string
}

// Error implements error.
func (e *DigestError) Error() string {
	return fmt.Sprintf("registry %s delivered %s where %s was asked for", e.Host, e.Got, e.Want)
}

// Manifest gets the document that a tag or digest names, of at most limit
// bytes; a digest is verified.
func (s *Session) Manifest(ctx context.Context, reference string, limit int64) (body []byte, err error) {
	return body, s.each(ctx, func(e endpoint) error {
		body, err = s.small(ctx, e, "/manifests/"+reference, reference, limit)
		return err
	})
}

// Small gets a small blob at once, verified.
func (s *Session) Small(ctx context.Context, digest string, limit int64) (body []byte, err error) {
	return body, s.each(ctx, func(e endpoint) error {
		body, err = s.small(ctx, e, "/blobs/"+digest, digest, limit)
		return err
	})
}

func (s *Session) small(ctx context.Context, e endpoint, path, reference string, limit int64) ([]byte, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r, err := s.do(ctx, e, http.MethodGet, path, http.Header{"Accept": {accept + ", */*;q=0.1"}})
	if err != nil {
		return nil, err
	}
	if r.StatusCode != http.StatusOK {
		return nil, refused(e.host, r)
	}
	body := newStall(r.Body, cancel, s.c.stall)
	defer func() { _ = body.Close() }()
	b, err := io.ReadAll(io.LimitReader(body, limit+1))
	if err != nil {
		return nil, &Error{Host: e.host, Err: causeOf(ctx, err)}
	}
	if int64(len(b)) > limit {
		return nil, &TooLargeError{What: path[1:strings.LastIndexByte(path, '/')] + " " + reference, Limit: limit}
	}
	sum := sha256.Sum256(b)
	if got := "sha256:" + hex.EncodeToString(sum[:]); strings.HasPrefix(reference, "sha256:") && got != reference {
		return nil, &DigestError{Host: e.host, Want: reference, Got: got}
	}
	return b, nil
}

// Blob is a part of a blob on its way.
type Blob struct {
	io.ReadCloser
	Host   string
	Offset int64 // where it begins; 0 although more was asked for: from the beginning
}

// Blob asks for a blob of that size from offset on. Its reader fails when
// nothing comes for a minute, and ends early when the connection is cut: who
// reads counts.
func (s *Session) Blob(ctx context.Context, digest string, offset, size int64) (b *Blob, err error) {
	return b, s.each(ctx, func(e endpoint) error {
		b, err = s.blob(ctx, e, digest, offset, size)
		return err
	})
}

func (s *Session) blob(ctx context.Context, e endpoint, digest string, offset, size int64) (*Blob, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	h := http.Header{"Accept": {"*/*"}}
	if offset > 0 {
		// With its end: not every registry takes an open range.
		h.Set("Range", "bytes="+strconv.FormatInt(offset, 10)+"-"+strconv.FormatInt(size-1, 10))
	}
	r, err := s.do(ctx, e, http.MethodGet, "/blobs/"+digest, h)
	if err != nil {
		cancel(nil)
		return nil, err
	}
	fail := func(err error) (*Blob, error) {
		_ = r.Body.Close()
		cancel(nil)
		return nil, err
	}
	from := int64(0)
	switch r.StatusCode {
	case http.StatusOK:
	case http.StatusPartialContent:
		var total string
		from, total, err = contentRange(r.Header.Get("Content-Range"))
		if err != nil || from != offset || total != "*" && total != strconv.FormatInt(size, 10) {
			return fail(&Error{Host: e.host, Err: fmt.Errorf("asked for bytes from %d of %d, it sends %q", offset, size, line(r.Header.Get("Content-Range")))})
		}
	default:
		defer cancel(nil)
		return nil, refused(e.host, r)
	}
	if r.ContentLength >= 0 && r.ContentLength != size-from {
		return fail(&LengthError{Host: e.host, Digest: digest, Want: size - from, Got: r.ContentLength})
	}
	return &Blob{ReadCloser: newStall(r.Body, cancel, s.c.stall), Host: e.host, Offset: from}, nil
}

// LengthError is a blob that has not the length that its manifest says.
type LengthError struct {
	Host, Digest string
	Want, Got    int64
}

// Error implements error.
func (e *LengthError) Error() string {
	return fmt.Sprintf("registry %s sends %d bytes of %.19s, and the manifest says %d", e.Host, e.Got, e.Digest, e.Want)
}

func contentRange(v string) (from int64, total string, err error) {
	v, ok := strings.CutPrefix(v, "bytes ")
	part, total, ok2 := strings.Cut(v, "/")
	first, _, ok3 := strings.Cut(part, "-")
	if !ok || !ok2 || !ok3 {
		return 0, "", errors.New("no range")
	}
	from, err = strconv.ParseInt(first, 10, 64)
	return from, total, err
}

// stalledError says that a connection lives and nothing comes.
type stalledError time.Duration

func (e stalledError) Error() string {
	return fmt.Sprintf("nothing came for %s", time.Duration(e))
}

// stallReader ends a body that stands still.
type stallReader struct {
	body   io.ReadCloser
	cancel context.CancelCauseFunc
	timer  *time.Timer
	after  time.Duration
}

func newStall(body io.ReadCloser, cancel context.CancelCauseFunc, after time.Duration) *stallReader {
	return &stallReader{body: body, cancel: cancel, after: after, timer: time.AfterFunc(after, func() { cancel(stalledError(after)) })}
}

func (s *stallReader) Read(p []byte) (int, error) {
	s.timer.Reset(s.after)
	n, err := s.body.Read(p)
	s.timer.Stop()
	return n, err
}

func (s *stallReader) Close() error {
	s.timer.Stop()
	err := s.body.Close()
	s.cancel(nil)
	return err
}

// causeOf says why a context ended rather than that it did.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}
