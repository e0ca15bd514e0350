package api

import (
	"net/http"
	"testing"
)

// The list of user-defined kinds is empty, and nothing else of their group is
// there: discovery does not name it.
func TestNoUserDefinedKinds(t *testing.T) {
	w := newWorld(t)
	const path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	got := w.want(http.StatusOK, "GET", path, "")
	if items, ok := got["items"].([]any); !ok || len(items) != 0 || got["kind"] != "CustomResourceDefinitionList" {
		t.Errorf("%v", got)
	}
	for _, p := range []string{path + "/x", "/apis/apiextensions.k8s.io/v1", "/apis/apiextensions.k8s.io/v1/others"} {
		w.want(http.StatusNotFound, "GET", p, "")
	}
	w.want(http.StatusNotFound, "POST", path, "{}")
}
