package controlplane

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/api"
	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/pki"
)

// Requests that only the leader can answer are passed to it over a connection
// with this server's certificate, which also vouches for who the user is. The
// leader authorizes the user again, by the newest state.
const (
	forwardedUser = "Dunlin-Forwarded-User" // base64 of JSON
	forwardedBy   = "Dunlin-Forwarded-By"   // server id
	// forwardWait bounds the wait for a leader; elections take a second or two.
	forwardWait = 4 * time.Second
)

// forwarder implements api.Elsewhere.
type forwarder struct {
	s     *Server
	tr    *http.Transport
	proxy *httputil.ReverseProxy
}

var _ api.Elsewhere = (*forwarder)(nil)

func newForwarder(s *Server) *forwarder {
	f := &forwarder{s: s, tr: s.mesh.HTTP()}
	f.proxy = &httputil.ReverseProxy{
		Transport: f.tr, FlushInterval: -1, Rewrite: f.rewrite,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() == nil {
				s.log.Debug("request not passed to the leader", "path", r.URL.Path, "err", err)
			}
			writeStatus(w, unavailable("the leader of the control plane does not answer: try again"))
		},
	}
	return f
}

func (f *forwarder) close() { f.tr.CloseIdleConnections() }

// leaderKey carries the leader's id to the proxy.
type leaderKey struct{}

// Leader implements api.Elsewhere.
func (f *forwarder) Leader(r *http.Request) http.Handler {
	id := f.wait(r.Context())
	switch {
	case id == f.s.raft.ServerID():
		return nil
	case id == "" && r.URL.Path == NetCheckPath: // most wanted where nobody leads
		return nil
	case id == "" || r.Header.Get(forwardedBy) != "": // no second hop
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			writeStatus(w, unavailable("no server leads at the moment: try again"))
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), leaderKey{}, id)))
	})
}

// wait returns the id of the server that leads, and is ready to; "" is none
// in time.
func (f *forwarder) wait(ctx context.Context) string {
	t := time.NewTimer(forwardWait)
	defer t.Stop()
	for {
		id, changed := f.s.raft.Leader()
		_, leading := f.s.raft.Leadership()
		if leading {
			return f.s.raft.ServerID()
		}
		if id != "" && id != f.s.raft.ServerID() {
			return id
		}
		select {
		case <-changed:
		case <-t.C:
			return ""
		case <-ctx.Done():
			return ""
		}
	}
}

func (f *forwarder) rewrite(p *httputil.ProxyRequest) {
	id, _ := p.In.Context().Value(leaderKey{}).(string)
	p.Out.URL.Scheme, p.Out.URL.Host = "https", id
	p.Out.Host = p.In.Host // pods that are proxied to, and browsers' pages, know this server by it
	p.Out.Header["X-Forwarded-For"] = p.In.Header["X-Forwarded-For"]
	p.SetXForwarded()
	p.Out.URL.RawQuery = p.In.URL.RawQuery // as it came
	h := p.Out.Header
	h.Del("Authorization")
	for k := range h {
		if strings.HasPrefix(k, "Impersonate-") { // done here
			h.Del(k)
		}
	}
	u, _ := auth.UserFrom(p.In.Context())
	b, err := json.Marshal(u)
	if err != nil {
		b = nil // the leader refuses it
	}
	h.Set(forwardedUser, base64.StdEncoding.EncodeToString(b))
	h.Set(forwardedBy, f.s.raft.ServerID())
}

// forwarded authenticates a request that another server passed on. From
// anybody else its headers are a wrong credential.
func (s *Server) forwarded() auth.Authenticator {
	return auth.AuthenticatorFunc(func(r *http.Request) (*auth.User, bool, error) {
		text := r.Header.Get(forwardedUser)
		if text == "" && r.Header.Get(forwardedBy) == "" {
			return nil, false, nil
		}
		if r.TLS == nil {
			return nil, false, errors.New("a forwarded request without TLS")
		}
		peer, err := s.verifier.Peer(*r.TLS)
		if err != nil {
			return nil, false, err
		}
		if peer.Kind != pki.ServerPeer || s.removedServer(peer.UID) {
			return nil, false, fmt.Errorf("%s may not speak for others", peer.Name)
		}
		b, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			return nil, false, fmt.Errorf("forwarded user: %w", err)
		}
		u := new(auth.User)
		if err := json.Unmarshal(b, u); err != nil || u.Name == "" {
			return nil, false, fmt.Errorf("forwarded user: %q", b)
		}
		return u, true, nil
	})
}

func unavailable(text string) *apierrors.StatusError {
	e := apierrors.NewServiceUnavailable(text)
	e.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
	return e
}
