package api

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// pages keeps the snapshots that unfinished paginated lists read, so that
// all pages of a list show one version. A snapshot shares everything that
// did not change with the live state, so keeping one costs what was replaced
// since.
type pages struct {
	ttl time.Duration
	max int

	mu     sync.Mutex
	closed bool
	byRV   map[pageKey]*page
	order  []pageKey // oldest first
}

type pageKey struct {
	soft bool
	rv   uint64
}

type page struct {
	snap  state.Snapshot
	timer *time.Timer
}

func newPages(ttl time.Duration, most int) *pages {
	return &pages{ttl: ttl, max: most, byRV: map[pageKey]*page{}}
}

// keep remembers a snapshot for the TTL, counted from its first page.
func (p *pages) keep(soft bool, snap state.Snapshot) {
	k := pageKey{soft, snap.ResourceVersion()}
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.byRV[k]; ok || p.closed {
		return
	}
	for len(p.order) >= p.max {
		p.drop(p.order[0])
	}
	p.byRV[k] = &page{snap: snap, timer: time.AfterFunc(p.ttl, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.drop(k)
	})}
	p.order = append(p.order, k)
}

func (p *pages) drop(k pageKey) {
	e, ok := p.byRV[k]
	if !ok {
		return
	}
	e.timer.Stop()
	delete(p.byRV, k)
	for i := range p.order {
		if p.order[i] == k {
			p.order = append(p.order[:i], p.order[i+1:]...)
			return
		}
	}
}

func (p *pages) at(soft bool, rv uint64) (state.Snapshot, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e, ok := p.byRV[pageKey{soft, rv}]
	if !ok {
		return nil, false
	}
	return e.snap, true
}

func (p *pages) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for len(p.order) > 0 {
		p.drop(p.order[0])
	}
}

// continueToken is where the next page starts: opaque to clients.
type continueToken struct {
	Version   string `json:"v"`
	RV        int64  `json:"rv"` // -1: whatever is newest
	Namespace string `json:"ns,omitempty"`
	Name      string `json:"n"`
	Sent      int    `json:"c,omitempty"` // items in all pages so far
}

const tokenVersion = "dunlin.dev/v1"

func (t continueToken) encode() string {
	t.Version = tokenVersion
	b, err := json.Marshal(t)
	if err != nil {
		panic(err) // strings and integers cannot fail
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

// decodeToken has upstream's words. How a token is encoded is nobody's
// business, so they do not say where decoding failed.
func decodeToken(s string) (continueToken, error) {
	var t continueToken
	b, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(s, "="))
	if err != nil || json.Unmarshal(b, &t) != nil {
		return continueToken{}, invalidToken("continue key is not valid")
	}
	switch {
	case t.Version != tokenVersion:
		return t, invalidToken("continue key is not valid: server does not recognize this encoded version " + t.Version)
	case t.Name == "":
		return t, invalidToken("continue key is not valid: encoded start key empty (version " + tokenVersion + ")")
	case (t.RV < 1 && t.RV != -1) || t.Sent < 0:
		return t, invalidToken("continue key is not valid: incorrect encoded start resourceVersion (version " + tokenVersion + ")")
	}
	return t, nil
}

func invalidToken(why string) error { return apierrors.NewBadRequest("invalid continue token: " + why) }

// expiredToken is the 410 that carries a token to go on inconsistently.
func expiredToken(t continueToken) error {
	t.RV, t.Sent = -1, 0
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired,
		ListMeta: metav1.ListMeta{Continue: t.encode()},
		Message: "The provided continue parameter is too old to display a consistent list result. You can start a new list without " +
			"the continue parameter, or use the continue token in this response to retrieve the remainder of the results. " +
			"Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted " +
			"between the time the first chunk was returned and now may show up in the list.",
	}}
}
