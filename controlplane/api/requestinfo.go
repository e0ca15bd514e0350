package api

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
)

// requestInfo is what the address of a request says.
type requestInfo struct {
	resource bool // about API objects; otherwise only path counts
	path     string
	verb     string // see auth.Attributes

	gvr         schema.GroupVersionResource
	subresource string
	proxyPath   string // behind proxy: "/metrics"; "" if not even a slash is
	namespace   string
	name        string
	fields      fields.Selector // of a list or watch; nil if none or malformed
}

// parseInfo reads method, path and query. A path under /api or /apis that is
// too short to name a resource is discovery.
func parseInfo(r *http.Request) requestInfo {
	in := requestInfo{path: r.URL.Path, verb: strings.ToLower(r.Method)}
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	if i := slices.Index(parts, ""); i >= 0 && !slices.Contains(parts[:i], "proxy") {
		return in // a doubled slash names nothing
	}
	switch {
	case parts[0] == "api" && len(parts) >= 3:
		in.gvr.Version, parts = parts[1], parts[2:]
	case parts[0] == "apis" && len(parts) >= 4:
		in.gvr.Group, in.gvr.Version, parts = parts[1], parts[2], parts[3:]
	default:
		return in
	}
	watchPrefix := parts[0] == "watch" && len(parts) > 1 // the form before ?watch=true
	if watchPrefix {
		parts = parts[1:]
	}
	if parts[0] == "namespaces" && len(parts) > 1 {
		in.namespace = parts[1]
		// namespaces/N/status and /finalize are sub-resources of N itself.
		if len(parts) > 2 && parts[2] != "status" && parts[2] != "finalize" {
			parts = parts[2:]
		}
	}
	in.resource = true
	in.gvr.Resource = parts[0]
	if len(parts) > 1 {
		in.name = parts[1]
	}
	switch {
	case len(parts) > 2 && parts[2] == "proxy": // one sub-resource, whatever is asked behind it
		in.subresource, in.proxyPath = "proxy", behindProxy(r.URL.Path, parts[3:])
	case len(parts) > 2:
		in.subresource = strings.Join(parts[2:], "/")
	}
	if in.gvr.Resource == "namespaces" && in.gvr.Group == "" {
		in.namespace = "" // a namespace is in none; auth asks for the name
	}
	if in.proxied() { // the query is for who is behind it
		in.verb = resourceVerb(r.Method, in.name, nil)
		return in
	}
	q := r.URL.Query()
	in.verb = resourceVerb(r.Method, in.name, q)
	if watchPrefix && r.Method == http.MethodGet {
		in.verb = "watch"
	}
	if f, err := fields.ParseSelector(q.Get("fieldSelector")); err == nil && !f.Empty() {
		in.fields = f
		if name, ok := f.RequiresExactMatch("metadata.name"); ok && in.name == "" && in.verb != "create" {
			in.name = name
		}
	}
	return in
}

func resourceVerb(method, name string, q url.Values) string {
	switch method {
	case http.MethodPost:
		return "create"
	case http.MethodGet, http.MethodHead:
		if w, ok := q["watch"]; ok && len(w) > 0 && w[0] != "false" && w[0] != "0" {
			return "watch"
		}
		if name == "" {
			return "list"
		}
		return "get"
	case http.MethodPut:
		return "update"
	case http.MethodPatch:
		return "patch"
	case http.MethodDelete:
		if name == "" {
			return "deletecollection"
		}
		return "delete"
	}
	return strings.ToLower(method)
}

// behindProxy is the path behind the word proxy, as it came.
func behindProxy(whole string, parts []string) string {
	rest := strings.Join(parts, "/")
	if rest != "" || strings.HasSuffix(whole, "/") {
		rest = "/" + rest
	}
	if rest != "/" && strings.HasSuffix(whole, "/") {
		rest += "/"
	}
	return rest
}

// proxied: the body, the query and the answer are those of a pod, service or
// node.
func (in *requestInfo) proxied() bool { return in.resource && in.subresource == "proxy" }

// attributes are what the authorizer is asked.
func (in *requestInfo) attributes(u *auth.User) auth.Attributes {
	a := auth.Attributes{User: u, Verb: in.verb}
	if !in.resource {
		a.Path = in.path
		return a
	}
	a.APIGroup, a.APIVersion = in.gvr.Group, in.gvr.Version
	a.Resource, a.Subresource = in.gvr.Resource, in.subresource
	a.Namespace, a.Name, a.Fields = in.namespace, in.name, in.fields
	if a.APIGroup == "" && a.Resource == "pods" && a.Subresource == placementSub && a.Verb == "get" {
		a.Subresource = "" // it tells of the pod what its reader may know
	}
	return a
}

// long requests may take as long as they like.
func (in *requestInfo) long() bool {
	if !in.resource {
		return false
	}
	switch in.subresource {
	case "log", "exec", "attach", "portforward", "proxy":
		return true
	}
	return in.verb == "watch"
}
