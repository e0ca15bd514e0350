package podproxy

import (
	"compress/gzip"
	"io"
	"mime"
	"net/http"
	"net/url"
	"path"
	"strings"
)

// rewriteResponse lets addresses in an answer lead through the proxy again,
// as upstream's does: that of a redirection, and those in HTML.
func rewriteResponse(r *http.Response) error {
	c := callOf(r.Request.Context())
	h := r.Header
	for _, name := range []string{"Credentials", "Headers", "Methods", "Origin"} {
		h.Del("Access-Control-Allow-" + name) // who may read answers of this server is not a pod's to say
	}
	if h.Get("Cache-Control") != "" {
		c.w.Header().Del("Cache-Control") // the pod's own instead of ours
	}
	if to := h.Get("Location"); to != "" {
		h.Set("Location", c.address(to))
		return nil
	}
	kind, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil || kind != "text/html" || r.Body == nil || r.Body == http.NoBody || r.Request.Method == http.MethodHead || r.StatusCode == http.StatusSwitchingProtocols {
		return nil
	}
	body := io.Reader(r.Body)
	switch h.Get("Content-Encoding") {
	case "":
	case "gzip":
		body = &lazyGzip{r: r.Body}
		h.Del("Content-Encoding")
	default:
		return nil // it passes as it is
	}
	h.Del("Content-Length")
	h.Del("Etag") // it was of other bytes
	h.Del("Accept-Ranges")
	r.ContentLength = -1
	r.Body = struct {
		io.Reader
		io.Closer
	}{newHTML(body, c.address), r.Body}
	return nil
}

// lazyGzip reads the header of what is packed with the first byte that is
// asked for, not before the answer has begun.
type lazyGzip struct {
	r io.Reader
	z *gzip.Reader
}

// Read implements io.Reader.
func (g *lazyGzip) Read(p []byte) (int, error) {
	if g.z == nil {
		z, err := gzip.NewReader(g.r)
		if err != nil {
			return 0, err
		}
		g.z = z
	}
	return g.z.Read(p)
}

// address puts the proxy's prefix before an absolute path of the same host.
// What leads elsewhere, and what is relative, stays.
func (c *call) address(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return text
	}
	if u.Host != "" && u.Host != c.in.Host && u.Host != c.host || !strings.HasPrefix(u.Path, "/") {
		return text
	}
	// An address without a host is the one the client used, whatever it calls
	// this server.
	u.Scheme, u.Host, u.User = "", "", nil
	if u.Path == c.prefix || strings.HasPrefix(u.Path, c.prefix+"/") {
		return u.String()
	}
	p := path.Join(c.prefix, u.Path)
	if strings.HasSuffix(u.Path, "/") {
		p += "/" // which Join drops
	}
	u.Path, u.RawPath = p, ""
	return u.String()
}
