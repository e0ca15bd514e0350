package api

import (
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// stream answers exec, attach and portforward of a pod.
func (s *Server) stream(rq *request) error {
	in := &rq.info
	if in.verb == "get" {
		// A WebSocket begins with a GET, which a role that only lets read may
		// grant: as upstream since 1.35, both verbs are needed then.
		a := in.attributes(rq.user)
		a.Verb = "create"
		if allowed, reason := s.cfg.Authorizer.Authorize(rq.Context(), a); !allowed {
			return auth.Forbidden(a, reason)
		}
	}
	p, err := s.pod(rq)
	if err != nil {
		return err
	}
	if state.Terminal(string(p.Status.Phase)) {
		return apierrors.NewBadRequest(fmt.Sprintf("pod %s has ended (%s): there is nothing left to %s; its output is in 'logs'", p.Name, p.Status.Phase, in.subresource))
	}
	o := &corev1.PodLogOptions{Container: rq.URL.Query().Get("container")}
	if in.subresource == "portforward" {
		o.Container = ""
	} else if err := chooseContainer(p, o); err != nil {
		return err
	}
	rq.w.code = http.StatusSwitchingProtocols
	// The upgrade takes the connection over, so it needs the real writer.
	if err := s.cfg.Streams.ServeStream(rq.w.ResponseWriter, rq.Request, p, in.subresource, o.Container); err != nil {
		rq.w.code = 0
		return err
	}
	return nil
}
