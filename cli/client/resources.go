package client

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	apidiscovery "k8s.io/api/apidiscovery/v2"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Resource is one served resource, as discovery tells it.
type Resource struct {
	GVK        schema.GroupVersionKind
	Name       string // plural
	Singular   string
	ShortNames []string
	Categories []string
	Namespaced bool
	Verbs      []string
	// Subresources by name, such as "scale".
	Subresources []string
}

// Path of the collection, or of one object if name is not empty.
func (r Resource) Path(namespace, name string) string {
	p := "/apis/" + r.GVK.Group + "/" + r.GVK.Version
	if r.GVK.Group == "" {
		p = "/api/" + r.GVK.Version
	}
	if r.Namespaced && namespace != "" {
		p += "/namespaces/" + url.PathEscape(namespace)
	}
	p += "/" + r.Name
	if name != "" {
		p += "/" + url.PathEscape(name)
	}
	return p
}

// String is the name with its group, as kubectl prints it: "deployment.apps".
func (r Resource) String() string {
	if r.GVK.Group == "" {
		return r.Singular
	}
	return r.Singular + "." + r.GVK.Group
}

// Resources asks the server what it serves.
func (c *Client) Resources(ctx context.Context) ([]Resource, error) {
	if c.Local() {
		return LocalResources(), nil
	}
	const accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	var out []Resource
	for _, path := range []string{"/api", "/apis"} {
		var l apidiscovery.APIGroupDiscoveryList
		if err := c.JSON(ctx, Request{Method: http.MethodGet, Path: path, Accept: accept}, &l); err != nil {
			return nil, err
		}
		for _, g := range l.Items {
			for _, v := range g.Versions {
				for _, r := range v.Resources {
					x := Resource{
						Name: r.Resource, Singular: r.SingularResource, ShortNames: r.ShortNames, Categories: r.Categories,
						Namespaced: r.Scope == apidiscovery.ScopeNamespace, Verbs: r.Verbs,
					}
					if r.ResponseKind != nil {
						x.GVK = schema.GroupVersionKind{Group: r.ResponseKind.Group, Version: r.ResponseKind.Version, Kind: r.ResponseKind.Kind}
						if x.GVK.Version == "" {
							x.GVK.Group, x.GVK.Version = g.Name, v.Version
						}
					}
					for _, sub := range r.Subresources {
						x.Subresources = append(x.Subresources, sub.Subresource)
					}
					out = append(out, x)
				}
			}
		}
	}
	return out, nil
}

// Find resolves what a user types ("po", "deploy", "pods", "Pod",
// "deployments.apps", a category such as "all", or several with commas).
func Find(all []Resource, typed string) ([]Resource, error) {
	var out []Resource
	for _, one := range strings.Split(typed, ",") {
		found := findOne(all, one)
		if len(found) == 0 {
			return nil, unknownResource(all, one)
		}
		out = append(out, found...)
	}
	return out, nil
}

func findOne(all []Resource, typed string) []Resource {
	name, group, qualified := strings.Cut(strings.ToLower(typed), ".")
	for _, r := range all {
		if qualified && r.GVK.Group != group && !strings.HasPrefix(group, r.GVK.Version+".") {
			continue
		}
		if name == r.Name || name == r.Singular || name == strings.ToLower(r.GVK.Kind) || slices.Contains(r.ShortNames, name) {
			return []Resource{r}
		}
	}
	var out []Resource
	for _, r := range all {
		if slices.Contains(r.Categories, name) {
			out = append(out, r)
		}
	}
	return out
}

// ByKind finds the resource of a kind.
func ByKind(all []Resource, gvk schema.GroupVersionKind) (Resource, error) {
	for _, r := range all {
		if r.GVK == gvk {
			return r, nil
		}
	}
	return Resource{}, fmt.Errorf("the server does not serve %s %s", gvk.GroupVersion(), gvk.Kind)
}

func unknownResource(all []Resource, typed string) error {
	best, bestDistance := "", 4
	for _, r := range all {
		for _, n := range append([]string{r.Name, r.Singular}, r.ShortNames...) {
			if d := distance(strings.ToLower(typed), n); d < bestDistance && d < len(n) {
				best, bestDistance = n, d
			}
		}
	}
	return &UnknownTypeError{Typed: typed, Meant: best}
}

// UnknownTypeError says that a typed resource type is none.
type UnknownTypeError struct {
	Typed string
	Meant string // what was probably meant; may be empty
}

// Error implements error.
func (e *UnknownTypeError) Error() string {
	if e.Meant != "" {
		return fmt.Sprintf("the server has no resource type %q, did you mean %q?", e.Typed, e.Meant)
	}
	return fmt.Sprintf("the server has no resource type %q ('dunlin get --help' lists the ways to name one)", e.Typed)
}

// distance is the Levenshtein distance.
func distance(a, b string) int {
	prev := make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := range len(a) {
		cur := make([]int, len(b)+1)
		cur[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			cur[j+1] = min(cur[j]+1, prev[j+1]+1, prev[j]+cost)
		}
		prev = cur
	}
	return prev[len(b)]
}
