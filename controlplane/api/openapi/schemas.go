// Package openapi publishes the schemas of what is served: OpenAPI v3, one
// document a group version, and OpenAPI v2, one document in protobuf or JSON
// for clients of older years; and gives server-side apply its types.
//
// Embedded is only the structure of the schemas, as one merged map
// (schemas.json.gz, made by tools/openapigen). Descriptions come at run time
// from the SwaggerDoc methods of the Go types. Documents are built when they
// are first asked for and kept compressed, so a server that nobody asks, and
// an agent, pay nothing.
//
// No goroutines; everything is safe for concurrent use.
package openapi

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"sync"

	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

//go:embed schemas.json.gz
var embedded []byte

// structure decompresses the embedded map: schema name to OpenAPI v3 schema,
// as JSON.
func structure() ([]byte, error) {
	zr, err := gzip.NewReader(bytes.NewReader(embedded))
	if err != nil {
		return nil, fmt.Errorf("openapi: embedded schemas: %w", err)
	}
	b, err := io.ReadAll(zr)
	if err != nil {
		return nil, fmt.Errorf("openapi: embedded schemas: %w", err)
	}
	return b, nil
}

// Schemas parses the schemas of every served kind, by name
// ("io.k8s.api.apps.v1.Deployment"), without descriptions. Each call parses
// anew (some milliseconds, some megabytes): use TypeConverter where possible.
// It panics only if the binary was built with a broken file.
func Schemas() map[string]*spec.Schema {
	b, err := structure()
	if err != nil {
		panic(err)
	}
	m := map[string]*spec.Schema{}
	if err := json.Unmarshal(b, &m); err != nil {
		panic(fmt.Errorf("openapi: embedded schemas: %w", err))
	}
	return m
}

// TypeConverter is what server-side apply needs to tell lists from maps and
// keys from values (structured-merge-diff). It is built on the first call
// and then shared; it is safe for concurrent use.
var TypeConverter = sync.OnceValues(func() (managedfields.TypeConverter, error) {
	tc, err := managedfields.NewTypeConverter(Schemas(), false)
	if err != nil {
		return nil, fmt.Errorf("openapi: types for server-side apply: %w", err)
	}
	return tc, nil
})

// tree parses the structure into plain JSON values that a builder may change.
func tree() (map[string]map[string]any, error) {
	b, err := structure()
	if err != nil {
		return nil, err
	}
	m := map[string]map[string]any{}
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("openapi: embedded schemas: %w", err)
	}
	return m, nil
}
