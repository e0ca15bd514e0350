package manifests

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
)

// json decodes one or more JSON values. What starts like JSON but is not (a
// YAML flow mapping, with comments perhaps) is read as YAML.
func (d *decoder) json(data []byte) {
	s := &scanner{data: data, line: 1, lineStart: 0, nodes: maxNodes}
	var roots []*node
	for {
		s.space()
		if s.pos == len(data) {
			break
		}
		n, err := s.value(0)
		if err != nil {
			s.failed(d, err, len(roots))
			return
		}
		roots = append(roots, n)
		if len(roots) > d.o.MaxDocuments {
			break
		}
	}
	for _, f := range s.faults {
		d.fail(f.at, "", f.reason, f.hint)
	}
	if len(s.faults) > 0 {
		return
	}
	for _, n := range roots {
		d.document(n)
	}
}

// failed reports a syntax error, unless the whole input is valid YAML.
func (s *scanner) failed(d *decoder, err error, values int) {
	rest := bytes.TrimLeft(s.data[s.pos:], " \t\r\n")
	first := bytes.TrimLeft(bytes.TrimLeft(s.data, " \t\r\n")[1:], " \t\r\n")
	unquoted := values == 0 && len(first) > 0 && first[0] != '"'
	yamlish := unquoted || len(rest) > 0 && (rest[0] == '-' || rest[0] == '#')
	if yamlish && !errors.Is(err, errTooDeep) {
		y := &decoder{o: d.o, budget: maxErrors}
		y.yaml(s.data)
		if len(y.docs) > 0 || len(y.errs) > 0 && !bytes.Contains([]byte(y.errs[0].Reason), []byte("not valid YAML")) {
			d.docs, d.errs = append(d.docs, y.docs...), append(d.errs, y.errs...)
			return
		}
	}
	d.fail(&node{line: s.line, column: s.column()}, "", "not valid JSON: "+err.Error(), "")
}

var errTooDeep = fmt.Errorf("nested deeper than %d", maxDepth)

// scanner is a JSON parser that keeps places.
type scanner struct {
	data      []byte
	pos       int
	line      int
	lineStart int
	nodes     int
	faults    []fault
}

type fault struct {
	at           *node
	reason, hint string
}

func (s *scanner) column() int { return s.pos - s.lineStart + 1 }

func (s *scanner) space() {
	for ; s.pos < len(s.data); s.pos++ {
		switch s.data[s.pos] {
		case '\n':
			s.line++
			s.lineStart = s.pos + 1
		case ' ', '\t', '\r':
		default:
			return
		}
	}
}

func (s *scanner) peek() byte {
	s.space()
	if s.pos < len(s.data) {
		return s.data[s.pos]
	}
	return 0
}

func (s *scanner) value(depth int) (*node, error) {
	if depth > maxDepth {
		return nil, errTooDeep
	}
	if s.nodes--; s.nodes < 0 {
		return nil, fmt.Errorf("more than %d values", maxNodes)
	}
	c := s.peek()
	n := &node{line: s.line, column: s.column()}
	switch {
	case c == '{':
		return n, s.object(n, depth)
	case c == '[':
		return n, s.array(n, depth)
	case c == '"':
		n.kind = text
		var err error
		n.value, err = s.str()
		return n, err
	case c == 0 && s.pos >= len(s.data):
		return nil, errors.New("ends too early")
	}
	start := s.pos
	for s.pos < len(s.data) && !bytes.ContainsRune([]byte(" \t\r\n,:]}[{\""), rune(s.data[s.pos])) {
		s.pos++
	}
	word := s.data[start:s.pos]
	switch string(word) {
	case "null":
	case "true", "false":
		n.kind = boolean
	default:
		if !json.Valid(word) {
			end := min(max(s.pos, start+1), len(s.data))
			s.pos = start
			return nil, fmt.Errorf("unexpected %q", short40(string(s.data[start:end])))
		}
		n.kind = number
		if len(word) > 100 {
			s.pos = start
			return nil, errors.New("a number of more than 100 digits")
		}
	}
	n.value = string(word)
	return n, nil
}

func (s *scanner) str() (string, error) {
	start := s.pos
	for s.pos++; s.pos < len(s.data); s.pos++ {
		switch s.data[s.pos] {
		case '\\':
			s.pos++
		case '\n':
			return "", errors.New("a string does not end on its line")
		case '"':
			s.pos++
			var v string
			if err := json.Unmarshal(s.data[start:s.pos], &v); err != nil {
				return "", fmt.Errorf("a string has a bad escape or control character: %w", err)
			}
			return v, nil
		}
	}
	return "", errors.New("a string does not end")
}

func (s *scanner) object(n *node, depth int) error {
	n.kind = mapping
	seen := map[string]int{}
	s.pos++
	if s.peek() == '}' {
		s.pos++
		return nil
	}
	for {
		if s.peek() != '"' {
			return errors.New("expected a key in quotes")
		}
		key := &node{kind: text, line: s.line, column: s.column()}
		var err error
		if key.value, err = s.str(); err != nil {
			return err
		}
		if first, dup := seen[key.value]; dup {
			s.faults = append(s.faults, fault{key, fmt.Sprintf("duplicate key %q, first on line %d", short40(key.value), first), "remove one of the two"})
		} else {
			seen[key.value] = key.line
		}
		if s.peek() != ':' {
			return fmt.Errorf("expected ':' after the key %q", short40(key.value))
		}
		s.pos++
		v, err := s.value(depth + 1)
		if err != nil {
			return err
		}
		n.pairs = append(n.pairs, pair{key, v})
		switch s.peek() {
		case ',':
			s.pos++
		case '}':
			s.pos++
			return nil
		default:
			return errors.New("expected ',' or '}'")
		}
	}
}

func (s *scanner) array(n *node, depth int) error {
	n.kind = sequence
	s.pos++
	if s.peek() == ']' {
		s.pos++
		return nil
	}
	for {
		v, err := s.value(depth + 1)
		if err != nil {
			return err
		}
		n.items = append(n.items, v)
		switch s.peek() {
		case ',':
			s.pos++
		case ']':
			s.pos++
			return nil
		default:
			return errors.New("expected ',' or ']'")
		}
	}
}

// looksCBOR: the self-described tag, or a map, whose first bytes begin no
// UTF-8 text.
func looksCBOR(data []byte) bool {
	return bytes.HasPrefix(data, []byte{0xd9, 0xd9, 0xf7}) || len(data) > 0 && data[0] >= 0xa0 && data[0] <= 0xbf
}

// cbor decodes one object. CBOR has no lines; errors name paths only.
func (d *decoder) cbor(data []byte) {
	if len(data) > maxDocumentBytes {
		d.fail(nil, "", fmt.Sprintf("is larger than %d bytes", maxDocumentBytes), "")
		return
	}
	var v any
	if err := direct.Unmarshal(data, &v); err != nil {
		d.fail(nil, "", "not valid CBOR: "+err.Error(), "")
		return
	}
	nodes := maxNodes
	if n := fromAny(v, 0, &nodes); n != nil {
		d.document(n)
		return
	}
	d.fail(nil, "", fmt.Sprintf("is nested deeper than %d or has more than %d values", maxDepth, maxNodes), "")
}

// fromAny converts what the CBOR decoder gives; nil if it is too much.
func fromAny(v any, depth int, nodes *int) *node {
	if *nodes--; *nodes < 0 || depth > maxDepth {
		return nil
	}
	n := &node{}
	switch x := v.(type) {
	case nil:
	case bool:
		n.kind, n.value = boolean, fmt.Sprint(x)
	case int64, float64:
		raw, err := json.Marshal(x)
		if err != nil {
			return nil // NaN and infinities are refused by the decoder
		}
		n.kind, n.value = number, string(raw)
	case string:
		n.kind, n.value = text, x
		if !utf8.ValidString(x) {
			n.value = string([]rune(x))
		}
	case []any:
		n.kind = sequence
		for _, e := range x {
			item := fromAny(e, depth+1, nodes)
			if item == nil {
				return nil
			}
			n.items = append(n.items, item)
		}
	case map[string]any:
		n.kind = mapping
		for _, k := range sortedKeys(x) {
			item := fromAny(x[k], depth+1, nodes)
			if item == nil {
				return nil
			}
			n.pairs = append(n.pairs, pair{&node{kind: text, value: k}, item})
		}
	default:
		return nil
	}
	return n
}
