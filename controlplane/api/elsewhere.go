package api

import (
	"net/http"
	"slices"

	"github.com/dunlin-project/dunlin/manifests"
)

// Elsewhere hands requests that only the leader can answer to it.
type Elsewhere interface {
	// Leader returns the handler that passes a request on as the user of its
	// context, or nil where this server leads and answers itself. Who the user
	// is was found out, and what it may do was looked at, here; the leader
	// looks at the latter again.
	Leader(r *http.Request) http.Handler
}

// ofLeader says whether a request needs what only the leader has: the soft
// store, the nodes' connections, and what paths name.
func (in *requestInfo) ofLeader(k *manifests.Kind, paths []string) bool {
	if !in.resource {
		return slices.Contains(paths, in.path)
	}
	if in.gvr.Group == metricsGV.Group {
		return true // the nodes' connections are the leader's
	}
	if k != nil {
		if manifests.IsSoft(k, in.namespace) {
			return true
		}
		// A list of all namespaces holds the soft ones.
		if in.namespace == "" && k.Namespaced && manifests.IsSoft(k, manifests.NodeLeaseNamespace) {
			return true
		}
	}
	// Streams into pods are served here: only their sessions are the leader's.
	return in.subresource == "log" || in.subresource == "proxy" && in.gvr.Resource == "nodes"
}

// elsewhere passes a request to the leader; false: it is answered here.
func (s *Server) elsewhere(rq *request) bool {
	if s.cfg.Elsewhere == nil || !rq.info.ofLeader(rq.kind, s.cfg.LeaderPaths) {
		return false
	}
	h := s.cfg.Elsewhere.Leader(rq.Request)
	if h == nil {
		return false
	}
	h.ServeHTTP(rq.w, rq.Request)
	return true
}
