package manifests

import (
	"bytes"
	"encoding/json"
	"math/big"
	"strconv"
	"strings"
)

type nodeKind int

const (
	null nodeKind = iota
	boolean
	number
	text
	mapping
	sequence
)

// node is a value of the input with its place, whatever the format.
type node struct {
	kind         nodeKind
	line, column int
	value        string // scalars: as written, unescaped
	plain        bool   // an unquoted YAML scalar
	pairs        []pair
	items        []*node
}

type pair struct{ key, value *node }

func (n *node) get(name string) *node {
	for _, p := range n.pairs {
		if p.key.value == name {
			return p.value
		}
	}
	return nil
}

// set adds a string field in front.
func (n *node) set(name, value string) {
	at := func(v string) *node { return &node{kind: text, line: n.line, column: n.column, value: v} }
	n.pairs = append([]pair{{at(name), at(value)}}, n.pairs...)
}

// describe names the value in an error.
func (n *node) describe() string {
	switch n.kind {
	case null:
		return "empty"
	case boolean:
		return "a boolean (" + short40(n.value) + ")"
	case number:
		return "a number (" + short40(n.value) + ")"
	case text:
		return "a string (" + strconv.Quote(short40(n.value)) + ")"
	case mapping:
		return "a mapping"
	}
	return "a list"
}

func short40(s string) string {
	if len(s) > 40 {
		return strings.ToValidUTF8(s[:37], "") + "..."
	}
	return s
}

// json writes the value as JSON, keys in their order.
func (n *node) json() []byte {
	var b bytes.Buffer
	n.write(&b)
	return b.Bytes()
}

func (n *node) write(b *bytes.Buffer) {
	switch n.kind {
	case null:
		b.WriteString("null")
	case boolean:
		b.WriteString(strconv.FormatBool(truth(n.value)))
	case number:
		b.WriteString(jsonNumber(n.value))
	case text:
		writeString(b, n.value)
	case mapping:
		b.WriteByte('{')
		for i, p := range n.pairs {
			if i > 0 {
				b.WriteByte(',')
			}
			writeString(b, p.key.value)
			b.WriteByte(':')
			p.value.write(b)
		}
		b.WriteByte('}')
	case sequence:
		b.WriteByte('[')
		for i, it := range n.items {
			if i > 0 {
				b.WriteByte(',')
			}
			it.write(b)
		}
		b.WriteByte(']')
	}
}

func writeString(b *bytes.Buffer, s string) {
	e := json.NewEncoder(b)
	e.SetEscapeHTML(false)
	if err := e.Encode(s); err != nil {
		b.WriteString(`""`) // a string always encodes
		return
	}
	b.Truncate(b.Len() - 1) // the encoder's newline
}

// truth reads a YAML 1.1 boolean, as kubectl does.
func truth(v string) bool {
	switch strings.ToLower(v) {
	case "true", "yes", "on", "y":
		return true
	}
	return false
}

// jsonNumber rewrites a YAML number (hexadecimal, octal, a bare point) as a
// JSON one.
func jsonNumber(v string) string {
	if json.Valid([]byte(v)) {
		return v
	}
	clean := strings.ReplaceAll(strings.TrimPrefix(v, "+"), "_", "")
	if i, ok := new(big.Int).SetString(clean, 0); ok {
		return i.String()
	}
	if f, err := strconv.ParseFloat(clean, 64); err == nil {
		if raw, err := json.Marshal(f); err == nil {
			return string(raw)
		}
	}
	return "null" // .nan and .inf, which check refused
}
