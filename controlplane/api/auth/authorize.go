package auth

import (
	"context"
	"errors"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Attributes are what is asked of an Authorizer.
type Attributes struct {
	User *User
	// Verb is get, list, watch, create, update, patch, delete or
	// deletecollection for resources; the lower-case HTTP method else.
	Verb string
	// Path is set when the request is not about a resource ("/version");
	// then only User and Verb count besides.
	Path string

	APIGroup, APIVersion  string
	Resource, Subresource string // "pods", "log"
	Namespace, Name       string // Name is "" for list, watch and create without a name
	// Fields is the field selector of a list or watch, nil if none.
	Fields fields.Selector
}

// Authorizer decides whether a request is allowed. The reason of a refusal
// is for the client: it says what is missing and what to do.
type Authorizer interface {
	Authorize(ctx context.Context, a Attributes) (allowed bool, reason string)
}

// Rule is one thing a user may do, for SelfSubjectRulesReview.
type Rule struct {
	Verbs, APIGroups, Resources, ResourceNames []string
	NonResourceURLs                            []string
}

// Ruler is an Authorizer that can also list what a user may do.
type Ruler interface {
	// RulesFor lists what the user may do in a namespace; incomplete is true
	// when what is allowed cannot be told by rules alone.
	RulesFor(ctx context.Context, u *User, namespace string) (rules []Rule, incomplete bool)
}

// policy is the built-in Authorizer.
type policy struct {
	nodes *nodePolicy
	next  []Authorizer
}

// NewAuthorizer returns the built-in policy:
//   - system:masters may do everything;
//   - everybody, also without credentials, may read /healthz, /livez, /readyz
//     and /version;
//   - every authenticated user may read discovery and OpenAPI and ask about
//     itself (SelfSubjectAccessReview and its kin);
//   - every ServiceAccount may read how its tokens are checked;
//   - a node may read its own Node, the pods bound to it and what those refer
//     to, and nothing else; it writes through the node protocol only, and no
//     role lets it exec, attach or port-forward;
//   - everything else is refused, unless one of next allows it (role-based
//     access control has its place there).
func NewAuthorizer(objects Objects, next ...Authorizer) Authorizer {
	return &policy{nodes: &nodePolicy{objects: objects}, next: next}
}

// Authorize implements Authorizer.
func (p *policy) Authorize(ctx context.Context, a Attributes) (bool, string) {
	u := a.User
	if u == nil {
		return false, "the request carries no user"
	}
	if u.InGroup(AdminsGroup) {
		return true, "the user is in " + AdminsGroup
	}
	if a.Path != "" && readVerb(a.Verb) && matchPath(a.Path, openPaths) {
		return true, "open to everybody"
	}
	if !u.Authenticated() {
		return false, "no credentials were given: use a client certificate or a bearer token (see dunlin kubeconfig)"
	}
	if (a.Path != "" && readVerb(a.Verb) && matchPath(a.Path, discoveryPaths)) || isSelfReview(a) {
		return true, "allowed to every authenticated user"
	}
	if a.Path != "" && readVerb(a.Verb) && u.InGroup(ServiceAccountsGroup) && matchPath(a.Path, issuerPaths) {
		return true, "allowed to every ServiceAccount"
	}
	if node, ok := u.NodeName(); ok {
		if a.APIGroup == "" && a.Resource == "pods" && entersPods(a.Subresource) {
			return false, "a node never enters pods through the API, whatever a role may grant"
		}
		if allowed, reason := p.nodes.authorize(node, a); allowed || len(p.next) == 0 {
			return allowed, reason
		}
	}
	var reasons []string
	for _, n := range p.next {
		allowed, reason := n.Authorize(ctx, a)
		if allowed {
			return true, reason
		}
		if reason != "" {
			reasons = append(reasons, reason)
		}
	}
	if len(p.next) == 0 {
		reasons = append(reasons, "only members of "+AdminsGroup+" may do this; this version has no roles that could grant it")
	}
	return false, strings.Join(reasons, "; ")
}

// entersPods names the sub-resources by which a program can be run in a pod,
// or its ports reached.
func entersPods(sub string) bool { return sub == "exec" || sub == "attach" || sub == "portforward" }

// RulesFor implements Ruler.
func (p *policy) RulesFor(ctx context.Context, u *User, namespace string) (rules []Rule, incomplete bool) {
	all := []string{"*"}
	if u.InGroup(AdminsGroup) {
		return []Rule{{Verbs: all, APIGroups: all, Resources: all}, {Verbs: all, NonResourceURLs: all}}, false
	}
	rules = append(rules, Rule{Verbs: []string{"get"}, NonResourceURLs: openPaths})
	if u.Authenticated() {
		rules = append(rules,
			Rule{Verbs: []string{"create"}, APIGroups: []string{"authorization.k8s.io"}, Resources: []string{"selfsubjectaccessreviews", "selfsubjectrulesreviews"}},
			Rule{Verbs: []string{"create"}, APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"selfsubjectreviews"}},
			Rule{Verbs: []string{"get"}, NonResourceURLs: discoveryPaths},
		)
	}
	if u.InGroup(ServiceAccountsGroup) {
		rules = append(rules, Rule{Verbs: []string{"get"}, NonResourceURLs: issuerPaths})
	}
	if node, ok := u.NodeName(); ok {
		rules = append(rules, Rule{Verbs: []string{"get", "list", "watch"}, APIGroups: []string{""}, Resources: []string{"nodes"}, ResourceNames: []string{node}})
		incomplete = true // pods and what they refer to depend on what is bound
	}
	for _, n := range p.next {
		if r, ok := n.(Ruler); ok {
			more, inc := r.RulesFor(ctx, u, namespace)
			rules, incomplete = append(rules, more...), incomplete || inc
		}
	}
	return rules, incomplete
}

var (
	openPaths      = []string{"/healthz", "/livez", "/readyz", "/version", "/version/"}
	discoveryPaths = []string{"/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*"}
)

func readVerb(v string) bool { return v == "get" || v == "head" || v == "list" || v == "watch" }

func matchPath(path string, patterns []string) bool {
	for _, p := range patterns {
		if prefix, ok := strings.CutSuffix(p, "*"); path == p || (ok && strings.HasPrefix(path, prefix)) {
			return true
		}
	}
	return false
}

func isSelfReview(a Attributes) bool {
	if a.Path != "" || a.Verb != "create" || a.Subresource != "" {
		return false
	}
	switch a.APIGroup {
	case "authorization.k8s.io":
		return a.Resource == "selfsubjectaccessreviews" || a.Resource == "selfsubjectrulesreviews"
	case "authentication.k8s.io":
		return a.Resource == "selfsubjectreviews"
	}
	return false
}

// Forbidden is the error of a refusal, with upstream's words, so that
// clients and people recognise it.
func Forbidden(a Attributes, reason string) *apierrors.StatusError {
	name := ""
	if a.User != nil {
		name = a.User.Name
	}
	var msg string
	gr := schema.GroupResource{Group: a.APIGroup, Resource: a.Resource}
	if a.Path != "" {
		msg, gr = fmt.Sprintf("User %q cannot %s path %q", name, a.Verb, a.Path), schema.GroupResource{}
	} else {
		resource := a.Resource
		if a.Subresource != "" {
			resource += "/" + a.Subresource
		}
		msg = fmt.Sprintf("User %q cannot %s resource %q in API group %q", name, a.Verb, resource, a.APIGroup)
		if a.Namespace != "" {
			msg += fmt.Sprintf(" in the namespace %q", a.Namespace)
		} else {
			msg += " at the cluster scope"
		}
	}
	if reason != "" {
		msg += ": " + reason
	}
	return apierrors.NewForbidden(gr, a.Name, errors.New(msg))
}

// Unauthorized is the error of a request whose credential is wrong.
func Unauthorized() *apierrors.StatusError { return apierrors.NewUnauthorized("Unauthorized") }
