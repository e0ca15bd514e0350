package controlplane

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/pprof"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
)

// TokensPath is where an administrator makes join tokens.
const TokensPath = "/dunlin.dev/v1/join-tokens"

// RevokePath is where an administrator revokes a node.
const RevokePath = "/dunlin.dev/v1/revoke-node"

// DeadPath is where an administrator declares a node dead.
const DeadPath = "/dunlin.dev/v1/declare-node-dead"

// ServersPath lists the servers; RemoveServerPath takes one out for good.
const (
	ServersPath      = "/dunlin.dev/v1/servers"
	RemoveServerPath = "/dunlin.dev/v1/remove-server"
)

// leaderPaths are those of the above that need the leader itself.
var leaderPaths = []string{RevokePath, DeadPath, RemoveServerPath, LevelPath, NetCheckPath}

// RemoveServerRequest names the server, by name or id.
type RemoveServerRequest struct {
	Server string `json:"server"`
}

// RemoveServerReply says which server it was.
type RemoveServerReply struct {
	Server string `json:"server"`
}

// RevokeRequest names the node.
type RevokeRequest struct {
	Node string `json:"node"`
}

// RevokeReply says what the node held: it is known to whoever took it.
type RevokeReply struct {
	Node    string   `json:"node"`
	Secrets []string `json:"secrets"` // namespace/name
}

// DeadRequest names the node.
type DeadRequest struct {
	Node string `json:"node"`
}

// DeadReply says what was released.
type DeadReply struct {
	Node string   `json:"node"`
	Pods []string `json:"pods"` // namespace/name
}

// TokenRequest asks for a join token.
type TokenRequest struct {
	TTLSeconds int64 `json:"ttlSeconds,omitempty"` // default one hour
	Uses       int   `json:"uses,omitempty"`       // default 1
	Server     bool  `json:"server,omitempty"`     // for a server; a node otherwise
	// NodeName is what the node will be called; "" leaves it to the node.
	NodeName string `json:"nodeName,omitempty"`
}

// TokenReply holds the line to carry to the new node.
type TokenReply struct {
	Line    string    `json:"line"`
	Expires time.Time `json:"expires"`
}

// extra serves what is beside the Kubernetes API's objects. Every request
// has passed the authorizer: administrators only, and ServiceAccounts for
// how their tokens are checked.
func (s *Server) extra(issuer *auth.Issuer) http.Handler {
	mux := http.NewServeMux()
	discovery := issuer.Discovery(func() string { return first(s.advertise()) })
	mux.Handle(auth.IssuerConfigurationPath, discovery)
	mux.Handle(auth.IssuerKeysPath, discovery)
	mux.Handle(auth.IssuerConfigurationPath+"/", discovery)
	mux.Handle(auth.IssuerKeysPath+"/", discovery)
	mux.HandleFunc("POST "+TokensPath, s.createToken)
	mux.HandleFunc("POST "+RevokePath, s.revokeNode)
	mux.HandleFunc("POST "+DeadPath, s.declareDead)
	mux.HandleFunc("GET "+ServersPath, s.getServers)
	mux.HandleFunc("GET "+SnapshotPath, s.getSnapshot)
	mux.HandleFunc("POST "+RemoveServerPath, s.postRemoveServer)
	mux.HandleFunc("POST "+LevelPath, s.postLevel)
	mux.HandleFunc("GET "+NetCheckPath, s.getNetCheck)
	mux.HandleFunc("POST "+RotateKeysPath, s.postRotateKeys)
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
	o := nodeapi.TokenOptions{TTL: time.Duration(req.TTLSeconds) * time.Second, Uses: req.Uses, Server: req.Server, Name: req.NodeName}
	line, err := s.JoinLine(r.Context(), o)
	var st *apierrors.StatusError
	switch {
	case errors.As(err, &st):
		writeStatus(w, st)
		return
	case errors.Is(err, nodeapi.ErrTokenOptions):
		writeStatus(w, apierrors.NewBadRequest(err.Error()))
		return
	case err != nil:
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

func (s *Server) declareDead(w http.ResponseWriter, r *http.Request) {
	var req DeadRequest
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil || req.Node == "" {
		writeStatus(w, apierrors.NewBadRequest(`declare dead: want {"node": NAME}`))
		return
	}
	pods, err := s.nodes.DeclareDead(r.Context(), req.Node)
	var st *apierrors.StatusError
	switch {
	case errors.As(err, &st):
		writeStatus(w, st)
		return
	case err != nil:
		writeStatus(w, apierrors.NewInternalError(err))
		return
	}
	s.log.Warn("node declared dead", "node", req.Node, "pods", len(pods))
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(DeadReply{Node: req.Node, Pods: pods})
}

func (s *Server) getServers(w http.ResponseWriter, r *http.Request) {
	if s.raft.State().Facts().Feature == 0 { // just started: names and addresses are in the state
		ctx, cancel := context.WithTimeout(r.Context(), forwardWait)
		_ = s.writes.Barrier(ctx) // without a leader the list says so
		cancel()
	}
	list, err := s.listServers(r.Context())
	if err != nil {
		writeStatus(w, apierrors.NewInternalError(err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(list)
}

func (s *Server) postRemoveServer(w http.ResponseWriter, r *http.Request) {
	var req RemoveServerRequest
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil || req.Server == "" {
		writeStatus(w, apierrors.NewBadRequest(`remove server: want {"server": NAME}`))
		return
	}
	e, err := s.removeServer(r.Context(), req.Server)
	var st *apierrors.StatusError
	switch {
	case errors.Is(err, errHandedOver):
		writeStatus(w, unavailable("server "+e.Name+" was the leader, and another one leads now: try again"))
		return
	case errors.Is(err, ErrNoSuchServer):
		writeStatus(w, &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound, Message: err.Error()}})
		return
	case errors.As(err, &st):
		writeStatus(w, st)
		return
	case err != nil:
		writeStatus(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(RemoveServerReply{Server: e.Name})
}

func writeStatus(w http.ResponseWriter, e *apierrors.StatusError) {
	st := e.Status()
	st.Kind, st.APIVersion = "Status", "v1"
	if d := st.Details; d != nil && d.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(d.RetryAfterSeconds)))
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(st.Code))
	_ = json.NewEncoder(w).Encode(st)
}
