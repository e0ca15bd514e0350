package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/manifests"
)

// The note of an owner in another namespace is nobody's field: who applies or
// replaces the object has no conflict over it, does not get to own it, and
// changes nothing when there is nothing else to change.
func TestForeignOwnersNoteDoesNotFightApply(t *testing.T) {
	w := newWorld(t)
	w.want(201, http.MethodPost, "/api/v1/namespaces", `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"elsewhere"}}`)
	const there = "/api/v1/namespaces/elsewhere/configmaps"
	uid := at(w.want(201, http.MethodPost, there, cmJSON("far", "v")), "metadata", "uid")
	manifest := func(value string) string {
		return fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"cross","annotations":{"mine":"x"},"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"far","uid":%q}]},"data":{"k":%q}}`, uid, value)
	}
	check := func(what string, m map[string]any) (version any) {
		t.Helper()
		if got := at(m, "metadata", "annotations", manifests.AnnotationIgnoredOwners); got != uid {
			t.Errorf("%s: noted %v, want %v", what, got, uid)
		}
		fields, err := json.Marshal(at(m, "metadata", "managedFields"))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(fields), manifests.AnnotationIgnoredOwners) || !strings.Contains(string(fields), "f:mine") {
			t.Errorf("%s: managed fields %s", what, fields)
		}
		return at(m, "metadata", "resourceVersion")
	}
	const path = cms + "/cross"
	first := check("made", w.want(201, http.MethodPatch, path+"?fieldManager=one", manifest("a"), "Content-Type", apply))
	if again := check("applied again", w.want(200, http.MethodPatch, path+"?fieldManager=one", manifest("a"), "Content-Type", apply)); again != first {
		t.Errorf("written again: %v, %v", first, again)
	}
	w.want(200, http.MethodDelete, there+"/far", "")
	check("changed", w.want(200, http.MethodPatch, path+"?fieldManager=one", manifest("b"), "Content-Type", apply))
	check("applied by another", w.want(200, http.MethodPatch, path+"?fieldManager=two", manifest("b"), "Content-Type", apply))
	check("replaced", w.want(200, http.MethodPut, path, manifest("c")))
	check("patched", w.want(200, http.MethodPatch, path, `{"metadata":{"annotations":{"`+manifests.AnnotationIgnoredOwners+`":null}}}`, "Content-Type", merge))
}
