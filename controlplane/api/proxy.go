package api

import (
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// metricsText is version 0.0.4 of the Prometheus text format.
const metricsText = "text/plain; version=0.0.4; charset=utf-8"

// proxyNode answers GET on a node's proxy. Upstream's hands out the whole
// HTTP server of a kubelet, exec included; here it is the node's figures.
func (s *Server) proxyNode(rq *request) error {
	if rq.info.proxyPath != "/metrics" {
		return &apierrors.StatusError{ErrStatus: metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
			Message: fmt.Sprintf("nodes have no %s: their proxy serves /metrics only", rq.info.proxyPath), Details: &metav1.StatusDetails{},
		}}
	}
	if _, err := s.read(rq, ""); err != nil {
		return err // no such node
	}
	w := &logWriter{w: rq.w, rc: http.NewResponseController(rq.w), deadline: s.cfg.WriteDeadline, header: func() {
		rq.writeWarnings()
		rq.w.Header().Set("Content-Type", metricsText)
		rq.w.WriteHeader(http.StatusOK)
	}}
	err := s.cfg.Nodes.Metrics(rq.Context(), rq.info.name, w)
	if err == nil && rq.w.code == 0 {
		w.header()
	}
	return err
}
