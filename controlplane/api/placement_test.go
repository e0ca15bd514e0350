package api

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
)

// readers may read the pods of one namespace, and no sub-resource.
type readers struct{ namespace string }

func (r readers) Authorize(_ context.Context, a auth.Attributes) (bool, string) {
	read := a.Verb == "get" || a.Verb == "list" || a.Verb == "create"
	return read && a.Resource == "pods" && a.Subresource == "" && a.Namespace == r.namespace, "readers of " + r.namespace
}

func TestPlacementIsForWhoMayReadThePod(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Authorizer = readers{"default"}
		c.Placements = func(p *corev1.Pod, sees func(string) bool) (any, error) {
			return map[string]any{"pod": p.Name, "own": sees("default"), "others": sees("kube-system")}, nil
		}
	})
	w.want(201, "POST", pods, podJSON("a"))
	m := w.want(200, "GET", pods+"/a/placement", "")
	if at(m, "pod") != "a" || at(m, "own") != true || at(m, "others") != false {
		t.Errorf("%v", m)
	}
	w.want(404, "GET", pods+"/none/placement", "")
	w.want(403, "GET", pods+"/a/log", "")
	w.want(403, "DELETE", pods+"/a/placement", "")
	w.want(403, "GET", "/api/v1/namespaces/kube-system/pods/a/placement", "")
}
