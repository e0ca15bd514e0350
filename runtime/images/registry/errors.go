package registry

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Error is an answer of a registry, or that there was none.
type Error struct {
	Host       string
	Code       int           // HTTP status; 0 when nothing was answered
	Message    string        // the registry's own words
	RetryAfter time.Duration // what it asked for
	Err        error
}

// Error implements error.
func (e *Error) Error() string {
	if e.Code == 0 {
		return fmt.Sprintf("registry %s: %s", e.Host, e.cause())
	}
	s := fmt.Sprintf("registry %s answered %d %s", e.Host, e.Code, http.StatusText(e.Code))
	if e.Message != "" {
		s += ": " + e.Message
	}
	if e.RetryAfter > 0 {
		s += fmt.Sprintf(" (it asks to wait %s)", e.RetryAfter)
	}
	return s
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Answered says that the registry itself decided: asking again with the same
// question has no other answer for now.
func (e *Error) Answered() bool {
	return e.Code >= 400 && e.Code < 500 && e.Code != http.StatusRequestTimeout && e.Code != http.StatusTooManyRequests
}

// cause is the innermost of what net/http wraps in URLs and operations.
func (e *Error) cause() string {
	var (
		dns     *net.DNSError
		op      *net.OpError
		unknown x509.UnknownAuthorityError
		host    x509.HostnameError
		invalid x509.CertificateInvalidError
		record  tls.RecordHeaderError
	)
	switch {
	case errors.As(e.Err, &unknown):
		return "its certificate is of an authority that this node does not know"
	case errors.As(e.Err, &host):
		return "its certificate is for another host: " + host.Error()
	case errors.As(e.Err, &invalid):
		return "its certificate is not valid: " + invalid.Error()
	case errors.As(e.Err, &record), strings.Contains(e.Err.Error(), "server gave HTTP response to HTTPS client"):
		return "it does not speak TLS"
	case errors.As(e.Err, &dns):
		return "no address found: " + dns.Error()
	case errors.As(e.Err, &op) && op.Op == "dial":
		return "cannot be reached: " + op.Err.Error()
	}
	return e.Err.Error()
}

// Hint says what to do about it.
func (e *Error) Hint() string {
	var invalid x509.CertificateInvalidError
	switch why := e.cause; {
	case e.Code == http.StatusUnauthorized:
		return "the image needs a login, or the one that was given is refused: name a secret of type kubernetes.io/dockerconfigjson in imagePullSecrets"
	case e.Code == http.StatusForbidden:
		return "the login may not read this image"
	case e.Code == http.StatusNotFound:
		return "no such repository or tag: check the image's name"
	case e.Code == http.StatusTooManyRequests:
		return "too many pulls for this login or address: log in, or name a mirror in registries.yaml"
	case e.Code != 0 || e.Err == nil:
		return ""
	case errors.As(e.Err, &invalid) && invalid.Reason == x509.Expired:
		return "it has expired, or this node's clock is wrong"
	case strings.HasPrefix(why(), "its certificate is of an authority"):
		return "name the authority in registries.yaml: configs, " + e.Host + ", tls, ca_file"
	case why() == "it does not speak TLS":
		return "allow it in registries.yaml: mirrors, " + e.Host + `, endpoint ["http://` + e.Host + `"]`
	}
	return ""
}

// refused makes an Error of an answer, and ends it.
func refused(host string, r *http.Response) *Error {
	defer func() { _ = r.Body.Close() }()
	e := &Error{Host: host, Code: r.StatusCode, RetryAfter: retryAfter(r.Header.Get("Retry-After"), r.Header.Get("Date"))}
	const most = 8 << 10
	b, _ := io.ReadAll(io.LimitReader(r.Body, most))
	var body struct {
		Errors []struct{ Code, Message string } `json:"errors"`
	}
	if json.Unmarshal(b, &body) == nil && len(body.Errors) > 0 {
		e.Message = line(strings.TrimSpace(body.Errors[0].Code + " " + body.Errors[0].Message))
	}
	return e
}

// line makes what a stranger wrote one short line.
func line(s string) string {
	const most = 200
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}

// retryAfter reads both forms of the header (RFC 9110, 10.2.3); a date is
// compared with the registry's own, since this node's clock may be wrong.
func retryAfter(v, date string) time.Duration {
	const most = time.Hour
	if n, err := strconv.Atoi(v); err == nil && n > 0 {
		return min(time.Duration(min(n, int(most/time.Second)))*time.Second, most)
	}
	at, err := http.ParseTime(v)
	if err != nil {
		return 0
	}
	now, err := http.ParseTime(date)
	if err != nil {
		return 0
	}
	return max(0, min(at.Sub(now), most))
}
