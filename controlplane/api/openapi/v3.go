package openapi

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/api/discovery"
)

const v3Prefix = "#/components/schemas/"

// documentV3 builds the document of one group version: the schemas that its
// resources lead to, and the paths that clients look at: PATCH, by which
// kubectl finds out which parameters and patch types a kind supports, and
// POST for what can only be created.
func documentV3(resources []discovery.Resource, gv schema.GroupVersion) (map[string]any, error) {
	schemas, err := tree()
	if err != nil {
		return nil, err
	}
	describe(schemas)
	names := byKind(schemas)
	paths := map[string]any{}
	keep := map[string]map[string]any{}
	for i := range resources {
		r := &resources[i]
		if r.GroupVersion != gv {
			continue
		}
		name := names[r.Kind]
		for _, root := range []string{name, names[r.Kind.GroupVersion().WithKind(r.Kind.Kind+"List")]} {
			collect(schemas, root, keep)
		}
		item := map[string]any{}
		switch {
		case slices.Contains(r.Verbs, "patch"):
			item["patch"] = operationV3(r, name, true)
			collect(schemas, names[deleteOptions(gv)], keep)
			collect(schemas, metaPatch, keep)
			collect(schemas, metaStatus, keep)
		case slices.Equal(r.Verbs, []string{"create"}):
			item["post"] = operationV3(r, name, false)
		default:
			continue
		}
		paths[pathOf(r)] = item
	}
	return map[string]any{
		"openapi":    "3.0.0",
		"info":       info(),
		"paths":      paths,
		"components": map[string]any{"schemas": keep},
	}, nil
}

const (
	metaPatch  = "io.k8s.apimachinery.pkg.apis.meta.v1.Patch"
	metaStatus = "io.k8s.apimachinery.pkg.apis.meta.v1.Status"
)

func deleteOptions(gv schema.GroupVersion) schema.GroupVersionKind {
	return gv.WithKind("DeleteOptions")
}

func info() map[string]any {
	return map[string]any{"title": "Kubernetes", "version": "v" + discovery.KubernetesVersion}
}

// pathOf is where one object of the resource is found, or, for what can only
// be created, where it is posted.
func pathOf(r *discovery.Resource) string {
	path := "/apis/" + r.GroupVersion.String()
	if r.GroupVersion.Group == "" {
		path = "/api/" + r.GroupVersion.Version
	}
	if r.Namespaced {
		path += "/namespaces/{namespace}"
	}
	name, sub := r.Subresource()
	path += "/" + name
	if sub != "" {
		return path + "/{name}/" + sub
	}
	if slices.Contains(r.Verbs, "patch") {
		path += "/{name}"
	}
	return path
}

// parameters of every PATCH and POST.
var parameters = []struct{ name, kind string }{
	{"dryRun", "string"}, {"fieldManager", "string"}, {"fieldValidation", "string"}, {"force", "boolean"}, {"pretty", "string"},
}

// patchTypes are the bodies that a PATCH may have.
var patchTypes = []string{
	"application/apply-patch+yaml", "application/json-patch+json", "application/merge-patch+json", "application/strategic-merge-patch+json",
}

var bodyTypes = []string{"application/json", "application/vnd.kubernetes.protobuf", "application/yaml"}

func operationV3(r *discovery.Resource, schemaName string, patch bool) map[string]any {
	var list []any
	for _, p := range parameters {
		if p.name == "force" && !patch {
			continue
		}
		list = append(list, map[string]any{"in": "query", "name": p.name, "schema": map[string]any{"type": p.kind, "uniqueItems": true}})
	}
	bodies, body, action := bodyTypes, schemaName, "post"
	if patch {
		bodies, body, action = patchTypes, metaPatch, "patch"
	}
	return map[string]any{
		"parameters":                      list,
		"requestBody":                     map[string]any{"required": true, "content": contentV3(bodies, body)},
		"responses":                       map[string]any{"200": map[string]any{"description": "OK", "content": contentV3(bodyTypes, schemaName)}},
		"x-kubernetes-action":             action,
		"x-kubernetes-group-version-kind": kindMap(r.Kind),
	}
}

func contentV3(types []string, name string) map[string]any {
	m := map[string]any{}
	for _, t := range types {
		m[t] = map[string]any{"schema": map[string]any{"$ref": v3Prefix + name}}
	}
	return m
}

func kindMap(k schema.GroupVersionKind) map[string]any {
	return map[string]any{"group": k.Group, "version": k.Version, "kind": k.Kind}
}

// byKind finds a schema by its kind.
func byKind(schemas map[string]map[string]any) map[schema.GroupVersionKind]string {
	out := map[schema.GroupVersionKind]string{}
	for name, s := range schemas {
		list, _ := s["x-kubernetes-group-version-kind"].([]any)
		for _, e := range list {
			m, _ := e.(map[string]any)
			group, _ := m["group"].(string)
			version, _ := m["version"].(string)
			kind, _ := m["kind"].(string)
			out[schema.GroupVersionKind{Group: group, Version: version, Kind: kind}] = name
		}
	}
	return out
}

// collect adds a schema and all that it refers to.
func collect(schemas map[string]map[string]any, name string, into map[string]map[string]any) {
	s, ok := schemas[name]
	if _, have := into[name]; !ok || have {
		return
	}
	into[name] = s
	references(s, func(ref string) { collect(schemas, ref, into) })
}

// references calls f for the name of every schema that v refers to.
func references(v any, f func(name string)) {
	switch v := v.(type) {
	case map[string]any:
		if ref, ok := v["$ref"].(string); ok {
			f(strings.TrimPrefix(ref, v3Prefix))
		}
		for _, e := range v {
			references(e, f)
		}
	case []any:
		for _, e := range v {
			references(e, f)
		}
	}
}
