package openapi

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// The protobuf form of an OpenAPI v2 document is that of gnostic
// (openapi.v2.Document in OpenAPIv2.proto), which clients have compiled in.
// We only ever write it, and only what documentV2 makes, so it is written by
// hand: field numbers are those of that file. Values of extensions are YAML
// text there; JSON is YAML.

// message is a protobuf message being written.
type message []byte

func (m *message) str(field protowire.Number, s string) {
	if s != "" {
		*m = protowire.AppendTag(*m, field, protowire.BytesType)
		*m = protowire.AppendString(*m, s)
	}
}

func (m *message) strs(field protowire.Number, v any) {
	list, _ := v.([]any)
	for _, e := range list {
		s, _ := e.(string)
		*m = protowire.AppendTag(*m, field, protowire.BytesType)
		*m = protowire.AppendString(*m, s)
	}
}

func (m *message) flag(field protowire.Number, v any) {
	if b, _ := v.(bool); b {
		*m = protowire.AppendTag(*m, field, protowire.VarintType)
		*m = protowire.AppendVarint(*m, 1)
	}
}

func (m *message) sub(field protowire.Number, body message) {
	*m = protowire.AppendTag(*m, field, protowire.BytesType)
	*m = protowire.AppendBytes(*m, body)
}

// named writes every Named... message of a map: name 1, value 2.
func (m *message) named(field protowire.Number, v any, value func(any) message) {
	all := object(v)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		var entry message
		entry.str(1, name)
		entry.sub(2, value(all[name]))
		m.sub(field, entry)
	}
}

// extensions writes the x-... keys as NamedAny: Any has the YAML in field 2.
func (m *message) extensions(field protowire.Number, v map[string]any) {
	for _, name := range slices.Sorted(maps.Keys(v)) {
		if !strings.HasPrefix(name, "x-") {
			continue
		}
		text, err := json.Marshal(v[name])
		if err != nil {
			continue // values come from JSON
		}
		var value, entry message
		value.str(2, string(text))
		entry.str(1, name)
		entry.sub(2, value)
		m.sub(field, entry)
	}
}

func object(v any) map[string]any { m, _ := v.(map[string]any); return m }

func text(v any) string { s, _ := v.(string); return s }

// encodeV2 writes an openapi.v2.Document.
func encodeV2(doc map[string]any) []byte {
	var m, inf, paths, definitions message
	m.str(1, text(doc["swagger"]))
	inf.str(1, text(object(doc["info"])["title"]))
	inf.str(2, text(object(doc["info"])["version"]))
	m.sub(2, inf)
	paths.named(2, doc["paths"], encodePath)
	m.sub(8, paths)
	definitions.named(1, doc["definitions"], func(v any) message { return encodeSchema(object(v)) })
	m.sub(9, definitions)
	return m
}

// encodePath writes a PathItem.
func encodePath(v any) message {
	var m, op message
	patch := object(object(v)["patch"])
	op.strs(6, patch["produces"])
	op.strs(7, patch["consumes"])
	list, _ := patch["parameters"].([]any)
	for _, p := range list {
		op.sub(8, encodeParameter(object(p)))
	}
	var responses message
	responses.named(1, patch["responses"], encodeResponse)
	op.sub(9, responses)
	op.extensions(13, patch)
	m.sub(8, op)
	return m
}

// encodeParameter writes a ParametersItem: a body or a query parameter.
func encodeParameter(p map[string]any) message {
	var leaf, kind, item message
	if text(p["in"]) == "body" {
		leaf.str(2, text(p["name"]))
		leaf.str(3, "body")
		leaf.flag(4, p["required"])
		leaf.sub(5, encodeSchema(object(p["schema"])))
		kind.sub(1, leaf)
	} else {
		leaf.str(2, text(p["in"]))
		leaf.str(4, text(p["name"]))
		leaf.str(6, text(p["type"]))
		leaf.flag(20, p["uniqueItems"])
		var nonBody message
		nonBody.sub(3, leaf)
		kind.sub(2, nonBody)
	}
	item.sub(1, kind)
	return item
}

// encodeResponse writes a ResponseValue.
func encodeResponse(v any) message {
	var m, response, item message
	r := object(v)
	response.str(1, text(r["description"]))
	item.sub(1, encodeSchema(object(r["schema"])))
	response.sub(2, item)
	m.sub(1, response)
	return m
}

// encodeSchema writes a Schema.
func encodeSchema(s map[string]any) message {
	var m message
	m.str(1, text(s["$ref"]))
	m.str(2, text(s["format"]))
	m.str(4, text(s["description"]))
	m.flag(16, s["uniqueItems"])
	m.strs(19, s["required"])
	switch extra := s["additionalProperties"].(type) {
	case map[string]any:
		var item message
		item.sub(1, encodeSchema(extra))
		m.sub(21, item)
	case bool:
		var item message
		item.flag(2, extra)
		m.sub(21, item)
	}
	if t := text(s["type"]); t != "" {
		var item message
		item.str(1, t)
		m.sub(22, item)
	}
	if items := object(s["items"]); items != nil {
		var item message
		item.sub(1, encodeSchema(items))
		m.sub(23, item)
	}
	if props := object(s["properties"]); len(props) > 0 {
		var item message
		item.named(1, props, func(v any) message { return encodeSchema(object(v)) })
		m.sub(25, item)
	}
	m.extensions(31, s)
	return m
}
