package manifests

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// yaml decodes a stream of documents. The parser splits it, so a "---" in a
// block string is text.
func (d *decoder) yaml(data []byte) {
	data = bytes.ReplaceAll(data, []byte("\n\xef\xbb\xbf"), []byte("\n")) // files joined with their BOMs
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for len(d.docs) <= d.o.MaxDocuments {
		var root yaml.Node
		err := decodeNode(dec, &root)
		if errors.Is(err, io.EOF) {
			return
		}
		d.budget, d.dropped = maxErrors, 0
		if err != nil {
			d.yamlError(err, data)
			return
		}
		if len(root.Content) == 0 {
			continue
		}
		c := &converter{d: d, nodes: maxNodes, bytes: maxDocumentBytes}
		if n := c.convert(root.Content[0], 0); n != nil && !c.failed {
			d.document(n)
		}
	}
}

// decodeNode turns a panic of the parser on input that it did not foresee
// into an error.
func decodeNode(dec *yaml.Decoder, n *yaml.Node) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("yaml: cannot be parsed: %v", r)
		}
	}()
	return dec.Decode(n)
}

var yamlLine = regexp.MustCompile(`^line (\d+): `)

func (d *decoder) yamlError(err error, data []byte) {
	msg := strings.TrimPrefix(err.Error(), "yaml: ")
	at := &node{}
	if m := yamlLine.FindStringSubmatch(msg); m != nil {
		at.line, _ = strconv.Atoi(m[1])
		msg = msg[len(m[0]):]
	}
	hint := ""
	lines := bytes.Split(data, []byte("\n"))
	for _, l := range []int{at.line - 1, at.line} { // the parser counts some from 0
		if l >= 0 && l < len(lines) && bytes.HasPrefix(bytes.TrimLeft(lines[l], " "), []byte("\t")) {
			hint = "the line is indented with a tab; YAML takes spaces only"
			at.line = l + 1
			break
		}
	}
	d.fail(at, "", "not valid YAML: "+msg, cmp.Or(hint, d.splitHint(at.line)))
}

// splitHint tells of a "---" before a line that was meant to be text: what
// follows it is indented, which no document is. It is "" if there is none.
func (d *decoder) splitHint(line int) string {
	lines := bytes.Split(d.data, []byte("\n"))
	for i := min(line, len(lines)) - 1; i > 0; i-- {
		if !bytes.HasPrefix(lines[i], []byte("---")) {
			continue
		}
		for _, l := range lines[i+1:] {
			if text := bytes.TrimSpace(l); len(text) > 0 && text[0] != '#' {
				if l[0] == ' ' {
					return fmt.Sprintf("the --- of line %d begins another document; as text of a block string it must be indented", i+1)
				}
				break
			}
		}
		return ""
	}
	return ""
}

// converter turns parsed YAML into nodes: aliases expanded within bounds,
// merge keys resolved, duplicate keys reported.
type converter struct {
	d      *decoder
	nodes  int // left
	bytes  int // of scalars, left
	open   []*yaml.Node
	failed bool
}

// fatal reports a fault that ends the document, once.
func (c *converter) fatal(y *yaml.Node, reason, hint string) *node {
	if !c.failed {
		c.d.fail(&node{line: y.Line, column: y.Column}, "", reason, hint)
	}
	c.failed = true
	return nil
}

// convert returns nil when the document cannot be used; other faults are
// reported and conversion goes on.
func (c *converter) convert(y *yaml.Node, depth int) *node {
	c.nodes--
	c.bytes -= len(y.Value)
	switch {
	case c.nodes < 0 || c.bytes < 0:
		return c.fatal(y, fmt.Sprintf("expands to more than %d values or %d bytes", maxNodes, maxDocumentBytes), "aliases of aliases multiply")
	case depth > maxDepth:
		return c.fatal(y, fmt.Sprintf("is nested deeper than %d", maxDepth), "")
	}
	n := &node{line: y.Line, column: y.Column}
	switch y.Kind {
	case yaml.AliasNode:
		return c.alias(y, depth)
	case yaml.ScalarNode:
		c.scalar(n, y)
		return n
	case yaml.SequenceNode:
		n.kind = sequence
		for _, it := range y.Content {
			v := c.convert(it, depth+1)
			if v == nil {
				return nil
			}
			n.items = append(n.items, v)
		}
		return n
	case yaml.MappingNode:
		return c.mapping(n, y, depth)
	}
	return c.fatal(y, "is neither a mapping, a list nor a scalar", "")
}

func (c *converter) alias(y *yaml.Node, depth int) *node {
	for _, o := range c.open {
		if o == y.Alias {
			return c.fatal(y, fmt.Sprintf("alias *%s is inside its own anchor", y.Value), "")
		}
	}
	c.open = append(c.open, y.Alias)
	n := c.convert(y.Alias, depth+1)
	c.open = c.open[:len(c.open)-1]
	return n
}

func (c *converter) mapping(n *node, y *yaml.Node, depth int) *node {
	n.kind = mapping
	seen := map[string]*yaml.Node{}
	var merges []*yaml.Node
	for i := 0; i+1 < len(y.Content); i += 2 {
		k, v := y.Content[i], y.Content[i+1]
		if k.Kind == yaml.AliasNode {
			k = k.Alias
		}
		if k.Kind != yaml.ScalarNode {
			return c.fatal(k, "a key must be a string", "")
		}
		if first, dup := seen[k.Value]; dup {
			c.d.fail(&node{line: k.Line, column: k.Column}, "", fmt.Sprintf("duplicate key %q, first on line %d", short40(k.Value), first.Line), "remove one of the two")
			c.failed = true
			continue
		}
		seen[k.Value] = k
		if isMerge(k) {
			merges = append(merges, v)
			continue
		}
		key := &node{line: k.Line, column: k.Column}
		c.scalar(key, k)
		if key.kind == boolean || key.kind == null {
			c.d.fail(key, "", fmt.Sprintf("the key %s is not a string in YAML", k.Value), "quote it: "+strconv.Quote(k.Value))
			c.failed = true
		}
		key.kind, key.value = text, k.Value
		value := c.convert(v, depth+1)
		if value == nil {
			return nil
		}
		n.pairs = append(n.pairs, pair{key, value})
	}
	if len(merges) == 0 {
		return n
	}
	own := make(map[string]bool, len(n.pairs))
	for _, p := range n.pairs {
		own[p.key.value] = true
	}
	for _, m := range merges {
		if !c.merge(n, own, m, depth) {
			return nil
		}
	}
	return n
}

func isMerge(k *yaml.Node) bool {
	return k.Value == "<<" && (k.Tag == "!!merge" || k.Tag == "" || k.Tag == "!") && k.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle) == 0
}

// merge adds the keys of a merged mapping that n does not have itself (own).
func (c *converter) merge(n *node, own map[string]bool, m *yaml.Node, depth int) bool {
	v := c.convert(m, depth+1)
	if v == nil {
		return false
	}
	from := []*node{v}
	if v.kind == sequence {
		from = v.items
	}
	for _, src := range from {
		if src.kind != mapping {
			c.fatal(m, "<<: takes a mapping or a list of mappings", "")
			return false
		}
		for _, p := range src.pairs {
			if !own[p.key.value] {
				own[p.key.value] = true
				n.pairs = append(n.pairs, p)
			}
		}
	}
	return true
}

// scalar resolves a scalar. Unquoted yes, no, on, off are booleans, as in
// kubectl's YAML 1.1; a field that wants a string then says so.
func (c *converter) scalar(n *node, y *yaml.Node) {
	n.value = y.Value
	quoted := y.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) != 0
	n.plain = !quoted
	if quoted {
		n.kind = text
		return
	}
	switch y.ShortTag() {
	case "!!null":
		n.kind = null
		return
	case "!!bool":
		n.kind = boolean
		return
	case "!!int", "!!float":
		n.kind = number
		if len(y.Value) > 100 {
			n.kind = text
			return
		}
		if f, err := strconv.ParseFloat(strings.TrimPrefix(strings.ToLower(y.Value), "."), 64); err == nil && (math.IsNaN(f) || math.IsInf(f, 0)) {
			n.kind = text
		}
		return
	}
	switch y.Value {
	case "yes", "Yes", "YES", "no", "No", "NO", "on", "On", "ON", "off", "Off", "OFF", "y", "Y", "n", "N":
		if y.Tag == "" || y.Tag == "!!str" && y.Style&yaml.TaggedStyle == 0 {
			n.kind = boolean
			return
		}
	}
	n.kind = text
}
