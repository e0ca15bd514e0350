package api

import (
	"encoding/json"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
)

// placementSub is the sub-resource of pods that explains where a pod could
// run. Who may get the pod may get it.
const placementSub = "placement"

// Placements explains where a pod could run: a value that is answered as
// JSON. sees says whether the reader may get pods of a namespace.
type Placements func(pod *corev1.Pod, sees func(namespace string) bool) (any, error)

// placement answers GET on placement.
func (s *Server) placement(rq *request) error {
	p, err := s.pod(rq)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	sees := func(namespace string) bool {
		ok, asked := known[namespace]
		if !asked {
			ok, _ = s.cfg.Authorizer.Authorize(rq.Context(), auth.Attributes{User: rq.user, Verb: "list", APIVersion: "v1", Resource: "pods", Namespace: namespace})
			known[namespace] = ok
		}
		return ok
	}
	out, err := s.cfg.Placements(p, sees)
	if err != nil {
		return err
	}
	b, err := json.Marshal(out)
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	rq.writeWarnings()
	rq.w.Header().Set("Content-Type", "application/json")
	rq.w.WriteHeader(http.StatusOK)
	_, _ = rq.w.Write(append(b, '\n')) // the client is gone
	return nil
}
