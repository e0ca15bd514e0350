package api

import (
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// serveResource finds what answers a request about API objects.
func (s *Server) serveResource(rq *request) error {
	in := &rq.info
	if rk, ok := s.reviews[reviewKey{in.gvr, in.subresource}]; ok {
		if rq.Method != http.MethodPost {
			return methodNotAllowed(in)
		}
		return s.review(rq, rk)
	}
	if in.gvr.Group == "" && in.gvr.Version == "v1" && in.gvr.Resource == "bindings" && in.subresource == "" && in.name == "" {
		if rq.Method != http.MethodPost || in.namespace == "" {
			return methodNotAllowed(in)
		}
		return s.bind(rq)
	}
	if in.gvr.Group == metricsGV.Group && s.cfg.Usage != nil {
		return s.serveUsage(rq)
	}
	if in.gvr == crds && in.verb == "list" && in.name == "" {
		return s.listNoCRDs(rq)
	}
	if rq.kind == nil {
		return pathNotFound()
	}
	if !rq.kind.Namespaced && in.namespace != "" {
		return pathNotFound()
	}
	if rq.kind.Namespaced && in.namespace == "" && (in.subresource != "" || pathName(rq) != "") {
		return pathNotFound()
	}
	if in.subresource != "" {
		return s.serveSubresource(rq)
	}
	return s.serveMain(rq)
}

// crds are kinds that users define. There are none, and discovery does not name
// them; but kubectl asks for their list when a manifest names a kind that is
// not served, and takes a 404 for a fault of its check (query_param_verifier.go
// of cli-runtime) instead of saying that there is no such kind.
var crds = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

func (s *Server) listNoCRDs(rq *request) error {
	rq.w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	_, err := fmt.Fprintf(rq.w, `{"kind":"CustomResourceDefinitionList","apiVersion":"apiextensions.k8s.io/v1","metadata":{"resourceVersion":"%d"},"items":[]}`+"\n",
		s.cfg.Registry.ReaderFor(schema.GroupKind{Kind: "Namespace"}, "").Snapshot().ResourceVersion())
	return ignoreWrite(err)
}

// pathName is the name in the path; info.name may come from a selector.
func pathName(rq *request) string {
	if rq.info.verb == "list" || rq.info.verb == "deletecollection" || (rq.info.verb == "watch" && rq.info.fields != nil) {
		return ""
	}
	return rq.info.name
}

func (s *Server) serveMain(rq *request) error {
	switch in := &rq.info; in.verb {
	case "get":
		return s.get(rq)
	case "list":
		return s.list(rq)
	case "watch":
		return s.watch(rq)
	case "create":
		if in.name != "" || (rq.kind.Namespaced && in.namespace == "") {
			return methodNotAllowed(in)
		}
		return s.create(rq)
	case "update":
		if in.name == "" {
			return methodNotAllowed(in)
		}
		return s.update(rq, registry.Main)
	case "patch":
		if in.name == "" {
			return methodNotAllowed(in)
		}
		return s.patch(rq, registry.Main)
	case "delete":
		return s.remove(rq)
	case "deletecollection":
		if (rq.kind.Namespaced && in.namespace == "") || rq.kind.GVK.Kind == "Namespace" {
			return methodNotAllowed(in)
		}
		return s.removeCollection(rq)
	default:
		return methodNotAllowed(in)
	}
}

// serveSubresource answers what hangs below one object.
func (s *Server) serveSubresource(rq *request) error {
	in, k := &rq.info, rq.kind
	switch isPod := k.GVK.Kind == "Pod" && k.GVK.Group == ""; {
	case in.subresource == "status" && k.Status:
		return s.objectSubresource(rq, registry.Status)
	case in.subresource == "scale" && k.Scale:
		switch in.verb {
		case "get":
			return s.getScale(rq)
		case "update":
			return s.update(rq, registry.Scale)
		case "patch":
			return s.patch(rq, registry.Scale)
		}
	case in.subresource == "finalize" && k.GVK.Kind == "Namespace" && k.GVK.Group == "":
		if in.verb == "update" {
			return s.update(rq, registry.Finalize)
		}
	case in.subresource == "proxy" && k.GVK.Kind == "Node" && k.GVK.Group == "" && s.cfg.Nodes != nil:
		if in.verb == "get" {
			return s.proxyNode(rq)
		}
	case in.subresource == "proxy" && (isPod || k.GVK.Kind == "Service" && k.GVK.Group == "") && s.cfg.Proxy != nil:
		return s.proxy(rq)
	case !isPod:
		return pathNotFound()
	case in.subresource == "binding":
		if in.verb == "create" {
			return s.bind(rq)
		}
	case in.subresource == "eviction":
		if in.verb == "create" {
			return s.evict(rq)
		}
	case in.subresource == "ephemeralcontainers":
		if in.verb == "update" || in.verb == "patch" {
			return apierrors.NewBadRequest("ephemeral containers are not implemented: kubectl exec runs what a container has, kubectl debug --copy-to a copy of the pod with another image")
		}
		return s.objectSubresource(rq, registry.Ephemeral)
	case in.subresource == "log":
		if in.verb == "get" {
			return s.logs(rq)
		}
	case in.subresource == placementSub && s.cfg.Placements != nil:
		if in.verb == "get" {
			return s.placement(rq)
		}
	case in.subresource == "exec" || in.subresource == "attach" || in.subresource == "portforward":
		if s.cfg.Streams == nil {
			return pathNotFound()
		}
		if in.verb == "get" || in.verb == "create" {
			return s.stream(rq)
		}
	default:
		return pathNotFound()
	}
	return methodNotAllowed(in)
}

func (s *Server) objectSubresource(rq *request, sub registry.Subresource) error {
	switch rq.info.verb {
	case "get":
		return s.get(rq)
	case "update":
		return s.update(rq, sub)
	case "patch":
		return s.patch(rq, sub)
	}
	return methodNotAllowed(&rq.info)
}

// rawBody reads a body whose kind is not known beforehand.
func (s *Server) rawBody(rq *request) (runtime.SerializerInfo, []byte, error) {
	info, err := s.codecs.input(rq.Request)
	if err != nil {
		return info, nil, err
	}
	body, err := s.readBody(rq)
	if err != nil {
		return info, nil, err
	}
	if len(body) == 0 {
		return info, nil, apierrors.NewBadRequest("the body of the request is empty")
	}
	return info, body, nil
}
