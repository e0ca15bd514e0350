package controlplane

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
)

// TokensPath is where an administrator makes join tokens.
const TokensPath = "/dunlin.dev/v1/join-tokens"

// RevokePath is where an administrator revokes a node.
const RevokePath = "/dunlin.dev/v1/revoke-node"

// RevokeRequest names the node.
type RevokeRequest struct {
	Node string `json:"node"`
}

// RevokeReply says what the node held: it is known to whoever took it.
type RevokeReply struct {
	Node    string   `json:"node"`
	Secrets []string `json:"secrets"` // namespace/name
}

// TokenRequest asks for a join token.
type TokenRequest struct {
	TTLSeconds int64 `json:"ttlSeconds,omitempty"` // default one hour
	Uses       int   `json:"uses,omitempty"`       // default 1
}

// TokenReply holds the line to carry to the new node.
type TokenReply struct {
	Line    string    `json:"line"`
	Expires time.Time `json:"expires"`
}

// extra serves what is ours beside the Kubernetes API. Every request has
// passed the authorizer: administrators only.
func (s *Server) extra() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+TokensPath, s.createToken)
	mux.HandleFunc("POST "+RevokePath, s.revokeNode)
	if s.cfg.Metrics != nil {
		mux.Handle("GET /metrics", promhttp.HandlerFor(s.cfg.Metrics, promhttp.HandlerOpts{}))
	}
	if s.cfg.Pprof {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	}
	return mux
}

func (s *Server) createToken(w http.ResponseWriter, r *http.Request) {
	var req TokenRequest
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil {
		writeStatus(w, apierrors.NewBadRequest("join token: "+err.Error()))
		return
	}
	o := nodeapi.TokenOptions{TTL: time.Duration(req.TTLSeconds) * time.Second, Uses: req.Uses}
	line, err := s.JoinLine(r.Context(), o)
	if err != nil {
		writeStatus(w, apierrors.NewInternalError(err))
		return
	}
	if o.TTL <= 0 {
		o.TTL = time.Hour
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(TokenReply{Line: line.String(), Expires: s.cfg.Clock.Now().Add(o.TTL)})
}

func (s *Server) revokeNode(w http.ResponseWriter, r *http.Request) {
	var req RevokeRequest
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil || req.Node == "" {
		writeStatus(w, apierrors.NewBadRequest(`revoke: want {"node": NAME}`))
		return
	}
	// Before: the node's pods move away once it is cut off.
	secrets, err := s.nodes.SecretsOn(req.Node)
	if err == nil {
		err = s.nodes.Revoke(r.Context(), req.Node)
	}
	var st *apierrors.StatusError
	switch {
	case errors.As(err, &st):
		writeStatus(w, st)
		return
	case err != nil:
		writeStatus(w, apierrors.NewInternalError(err))
		return
	}
	s.log.Warn("node revoked", "node", req.Node, "secrets", len(secrets))
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(RevokeReply{Node: req.Node, Secrets: secrets})
}

func writeStatus(w http.ResponseWriter, e *apierrors.StatusError) {
	st := e.Status()
	st.Kind, st.APIVersion = "Status", "v1"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(st.Code))
	_ = json.NewEncoder(w).Encode(st)
}
