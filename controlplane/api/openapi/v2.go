package openapi

import (
	"slices"
	"strings"

	"github.com/dunlin-project/dunlin/controlplane/api/discovery"
)

const v2Prefix = "#/definitions/"

// documentV2 builds the one OpenAPI v2 document, for clients that know
// nothing newer (kubectl before 1.24). It says what the v3 documents say.
func documentV2(resources []discovery.Resource) (map[string]any, error) {
	schemas, err := tree()
	if err != nil {
		return nil, err
	}
	describe(schemas)
	names := byKind(schemas)
	definitions := map[string]any{}
	for name, s := range schemas {
		definitions[name] = schemaV2(s)
	}
	paths := map[string]any{}
	for i := range resources {
		r := &resources[i]
		if slices.Contains(r.Verbs, "patch") {
			paths[pathOf(r)] = map[string]any{"patch": operationV2(r, names[r.Kind])}
		}
	}
	return map[string]any{"swagger": "2.0", "info": info(), "paths": paths, "definitions": definitions}, nil
}

func operationV2(r *discovery.Resource, name string) map[string]any {
	list := []any{map[string]any{"name": "body", "in": "body", "required": true, "schema": map[string]any{"$ref": v2Prefix + metaPatch}}}
	for _, p := range parameters {
		list = append(list, map[string]any{"name": p.name, "in": "query", "type": p.kind, "uniqueItems": true})
	}
	return map[string]any{
		"consumes": anys(patchTypes), "produces": anys(bodyTypes), "parameters": list,
		"responses":                       map[string]any{"200": map[string]any{"description": "OK", "schema": map[string]any{"$ref": v2Prefix + name}}},
		"x-kubernetes-action":             "patch",
		"x-kubernetes-group-version-kind": kindMap(r.Kind),
	}
}

func anys(list []string) []any {
	out := make([]any, len(list))
	for i, s := range list {
		out[i] = s
	}
	return out
}

// schemaV2 converts a schema: a reference with a description is a plain
// reference, a choice of types is a string, and there are no defaults, which
// old clients cannot read.
func schemaV2(in map[string]any) map[string]any {
	out := map[string]any{}
	for k, v := range in {
		switch k {
		case "default", "oneOf", "anyOf", "not", "nullable":
		case "$ref":
			ref, _ := v.(string)
			out[k] = v2Prefix + strings.TrimPrefix(ref, v3Prefix)
		case "allOf":
			if list, ok := v.([]any); ok && len(list) == 1 {
				if only, ok := list[0].(map[string]any); ok {
					for k2, v2 := range schemaV2(only) {
						out[k2] = v2
					}
				}
			}
		case "items", "additionalProperties":
			if m, ok := v.(map[string]any); ok {
				out[k] = schemaV2(m)
			} else {
				out[k] = v
			}
		case "properties":
			props := map[string]any{}
			m, _ := v.(map[string]any)
			for name, p := range m {
				if pm, ok := p.(map[string]any); ok {
					props[name] = schemaV2(pm)
				}
			}
			out[k] = props
		default:
			out[k] = v
		}
	}
	if _, choice := in["oneOf"]; choice {
		out["type"] = "string"
	}
	return out
}
