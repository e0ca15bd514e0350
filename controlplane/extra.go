package controlplane

import (
	"encoding/json"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
)

// TokensPath is where an administrator makes join tokens.
const TokensPath = "/dunlin.dev/v1/join-tokens" //nolint:gosec // a path

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

func writeStatus(w http.ResponseWriter, e *apierrors.StatusError) {
	st := e.Status()
	st.Kind, st.APIVersion = "Status", "v1"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(st.Code))
	_ = json.NewEncoder(w).Encode(st)
}
