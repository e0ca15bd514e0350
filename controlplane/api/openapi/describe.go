package openapi

import (
	"reflect"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/manifests"
)

// documented is what the types of k8s.io/api have: texts by JSON field name,
// and under "" that of the type itself.
type documented interface{ SwaggerDoc() map[string]string }

// schemaName is a Go type's name in the documents:
// k8s.io/api/core/v1.Pod is io.k8s.api.core.v1.Pod.
func schemaName(t reflect.Type) string {
	domain, path, ok := strings.Cut(t.PkgPath(), "/")
	if !ok {
		return ""
	}
	words := strings.Split(domain, ".")
	for i, j := 0, len(words)-1; i < j; i, j = i+1, j-1 {
		words[i], words[j] = words[j], words[i]
	}
	return strings.Join(words, ".") + "." + strings.ReplaceAll(path, "/", ".") + "." + t.Name()
}

// describe adds the descriptions to the schemas of all types that can be
// reached from a served kind.
func describe(schemas map[string]map[string]any) {
	d := describer{schemas: schemas, seen: map[reflect.Type]bool{}}
	for _, k := range manifests.Kinds() {
		d.visit(reflect.TypeOf(k.New()))
		d.visit(reflect.TypeOf(k.NewList()))
	}
	for _, obj := range []any{
		&corev1.Binding{}, &policyv1.Eviction{}, &autoscalingv1.Scale{},
		&authenticationv1.TokenRequest{}, &authenticationv1.TokenReview{}, &authenticationv1.SelfSubjectReview{},
		&authorizationv1.LocalSubjectAccessReview{}, &authorizationv1.SelfSubjectAccessReview{},
		&authorizationv1.SelfSubjectRulesReview{}, &authorizationv1.SubjectAccessReview{},
		&metav1.Status{}, &metav1.DeleteOptions{}, &metav1.WatchEvent{},
	} {
		d.visit(reflect.TypeOf(obj))
	}
}

type describer struct {
	schemas map[string]map[string]any
	seen    map[reflect.Type]bool
}

// visit describes a type and all that its fields lead to.
func (d *describer) visit(t reflect.Type) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Array || t.Kind() == reflect.Map {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || d.seen[t] {
		return
	}
	d.seen[t] = true
	schema := d.schemas[schemaName(t)]
	if schema != nil {
		if text := docOf(t)[""]; text != "" {
			schema["description"] = text
		}
	}
	properties, _ := schema["properties"].(map[string]any)
	d.fields(t, properties)
}

// fields describes the properties that come from a struct's fields, also
// those of embedded structs.
func (d *describer) fields(t reflect.Type, properties map[string]any) {
	doc := docOf(t)
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" || !f.IsExported() {
			continue
		}
		if name == "" && (f.Anonymous || strings.Contains(options, "inline")) {
			if ft := f.Type; ft.Kind() == reflect.Struct {
				d.fields(ft, properties)
			}
			continue
		}
		if p, ok := properties[name].(map[string]any); ok && doc[name] != "" {
			p["description"] = doc[name]
		}
		d.visit(f.Type)
	}
}

func docOf(t reflect.Type) map[string]string {
	if d, ok := reflect.Zero(t).Interface().(documented); ok {
		return d.SwaggerDoc()
	}
	return nil
}
