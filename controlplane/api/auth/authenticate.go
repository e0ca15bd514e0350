package auth

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/dunlin-project/dunlin/internal/clock"
)

// Authenticator finds out who makes a request. ok is false, without an
// error, when the request carries no credential of the authenticator's kind;
// an error means that it carries one that is wrong (HTTP 401). Errors are
// for the log: a client is told only that it is unauthorized.
type Authenticator interface {
	Authenticate(*http.Request) (u *User, ok bool, err error)
}

// AuthenticatorFunc adapts a function.
type AuthenticatorFunc func(*http.Request) (*User, bool, error)

// Authenticate implements Authenticator.
func (f AuthenticatorFunc) Authenticate(r *http.Request) (*User, bool, error) { return f(r) }

// Union asks each in order. The first that knows the user wins; if none does
// and one was given a wrong credential, that is the answer, so that a bad
// token never becomes anonymous. The Authorization header is removed from
// an authenticated request, so that nothing behind can log or forward it.
func Union(list ...Authenticator) Authenticator {
	return AuthenticatorFunc(func(r *http.Request) (*User, bool, error) {
		var errs []error
		for _, a := range list {
			u, ok, err := a.Authenticate(r)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			if ok && (len(errs) == 0 || u.Authenticated()) {
				r.Header.Del("Authorization")
				return u, true, nil
			}
		}
		return nil, false, errors.Join(errs...)
	})
}

// ErrCertificateDates says that a client certificate is outside its dates.
// Such a connection may still renew itself through the node protocol; it
// may not use the API.
var ErrCertificateDates = errors.New("auth: the client certificate is not valid at this time; renew it (an agent does so by itself once it is connected) or check the clock")

// ClientCertificates takes the user from the client certificate: the common
// name is the user, the organizations are the groups. The chain must already
// have been verified by the TLS layer (tls.Config.VerifyConnection), which
// may let an expired certificate pass for renewal: dates are checked here.
func ClientCertificates(clk clock.Clock) Authenticator {
	return AuthenticatorFunc(func(r *http.Request) (*User, bool, error) {
		if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
			return nil, false, nil
		}
		cert := r.TLS.PeerCertificates[0]
		if now := clk.Now(); now.Before(cert.NotBefore) || now.After(cert.NotAfter) {
			return nil, false, fmt.Errorf("%w: subject %q, valid %s to %s", ErrCertificateDates,
				cert.Subject.CommonName, cert.NotBefore.UTC().Format("2006-01-02T15:04:05Z"), cert.NotAfter.UTC().Format("2006-01-02T15:04:05Z"))
		}
		if !slices.Contains(cert.ExtKeyUsage, x509.ExtKeyUsageClientAuth) && !slices.Contains(cert.ExtKeyUsage, x509.ExtKeyUsageAny) {
			return nil, false, fmt.Errorf("auth: the certificate of %q is not for client authentication", cert.Subject.CommonName)
		}
		if cert.Subject.CommonName == "" {
			return nil, false, errors.New("auth: the client certificate has no common name")
		}
		return &User{Name: cert.Subject.CommonName, Groups: authenticated(cert.Subject.Organization)}, true, nil
	})
}

// Anonymous names every request that got this far system:anonymous. It
// belongs last in a Union.
func Anonymous() Authenticator {
	return AuthenticatorFunc(func(*http.Request) (*User, bool, error) {
		return &User{Name: AnonymousUser, Groups: []string{UnauthenticatedGroup}}, true, nil
	})
}

// bearer returns the request's bearer token. An Authorization header of
// another scheme is no credential of ours.
func bearer(r *http.Request) (string, bool) {
	scheme, token, ok := strings.Cut(strings.TrimSpace(r.Header.Get("Authorization")), " ")
	token = strings.TrimSpace(token)
	if !ok || !strings.EqualFold(scheme, "bearer") || token == "" {
		return "", false
	}
	return token, true
}

// Tokens checks bearer tokens of any kind by their text. TokenReview uses it
// too.
type Tokens interface {
	// AuthenticateToken returns the token's user and those of the wanted
	// audiences it is good for (nil wanted: the API server's own). ok is
	// false, without an error, when the token is not of the checker's kind.
	AuthenticateToken(token string, audiences []string) (u *User, good []string, ok bool, err error)
}

// ErrUnknownToken says that no checker knows the token.
var ErrUnknownToken = errors.New("auth: unknown bearer token")

// BearerTokens authenticates requests that carry a bearer token that one of
// the checkers knows. A token that none knows is an error.
func BearerTokens(checkers ...Tokens) Authenticator {
	all := UnionTokens(checkers...)
	return AuthenticatorFunc(func(r *http.Request) (*User, bool, error) {
		token, ok := bearer(r)
		if !ok {
			return nil, false, nil
		}
		u, _, ok, err := all.AuthenticateToken(token, nil)
		switch {
		case err != nil:
			return nil, false, err
		case !ok:
			return nil, false, ErrUnknownToken
		}
		return u, true, nil
	})
}

type tokenUnion []Tokens

// UnionTokens asks each checker in order.
func UnionTokens(checkers ...Tokens) Tokens { return tokenUnion(checkers) }

// AuthenticateToken implements Tokens.
func (l tokenUnion) AuthenticateToken(token string, audiences []string) (*User, []string, bool, error) {
	var errs []error
	for _, c := range l {
		u, good, ok, err := c.AuthenticateToken(token, audiences)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if ok {
			return u, good, true, nil
		}
	}
	return nil, nil, false, errors.Join(errs...)
}
