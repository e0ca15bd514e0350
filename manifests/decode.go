package manifests

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf16"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
)

// Options of Decode. The zero value is right for files that people write.
type Options struct {
	// File stands in errors; "" is "<input>".
	File string
	// MaxBytes bounds the input; 0 is 16 MiB. One document is bounded by what
	// the API takes: 3 MiB as JSON, aliases expanded.
	MaxBytes int64
	// MaxDocuments bounds the objects, those in Lists counted; 0 is 10,000.
	MaxDocuments int
	// Lenient turns unknown fields into Document.Warnings.
	Lenient bool
}

// Bounds of one document.
const (
	maxDocumentBytes = 3 << 20
	maxDepth         = 100
	maxNodes         = 500_000
	maxErrors        = 20 // reported per document
)

// Document is one object of the input. Its typed form is not defaulted.
type Document struct {
	Object runtime.Object
	Kind   *Kind
	// JSON is the object as written, for patches: no defaults, keys in their
	// order, apiVersion and kind always present.
	JSON []byte
	// File, Line and Column are where it begins; 0 for CBOR.
	File         string
	Line, Column int
	Warnings     []string // of unknown fields, when Lenient

	root *node
}

// LineOf is the line of a field, which is named as in the API's answers
// (spec.containers[0].image, metadata.annotations[a.example/b]), or of the
// innermost part of its path that is there; 0 if none is, or lines are not
// known.
func (d *Document) LineOf(path string) int {
	at, line := d.root, 0
	for at != nil && path != "" {
		var next *node
		var name string
		if rest, ok := strings.CutPrefix(path, "["); ok {
			end := strings.IndexByte(rest, ']')
			if end < 0 {
				return line
			}
			name, path = strings.Trim(rest[:end], `"`), rest[end+1:]
			if i, err := strconv.Atoi(name); err == nil && i >= 0 && i < len(at.items) {
				next = at.items[i]
			}
		} else {
			end := strings.IndexAny(path, ".[")
			if end < 0 {
				end = len(path)
			}
			name, path = path[:end], path[end:]
		}
		path = strings.TrimPrefix(path, ".")
		for _, p := range at.pairs {
			if next == nil && p.key.value == name {
				next = p.value
				line = p.key.line
			}
		}
		if next == nil {
			return line
		}
		if at.kind != mapping && next.line > 0 {
			line = next.line
		}
		at = next
	}
	return line
}

// Error is one fault of the input. It prints on one line.
type Error struct {
	File         string
	Line, Column int    // 0 if unknown
	Path         string // of the field, in the object; may be ""
	Reason       string
	Hint         string // what to do; may be ""
}

// Error implements error.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
		if e.Column > 0 {
			fmt.Fprintf(&b, ":%d", e.Column)
		}
	}
	b.WriteString(": ")
	if e.Path != "" {
		b.WriteString(e.Path + ": ")
	}
	b.WriteString(e.Reason)
	if e.Hint != "" {
		b.WriteString(" (" + e.Hint + ")")
	}
	return strings.NewReplacer("\n", " ", "\r", " ").Replace(b.String())
}

// Errors are all faults found, in the order of the input.
type Errors []*Error

// Error prints one fault a line.
func (es Errors) Error() string {
	lines := make([]string, len(es))
	for i, e := range es {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find each *Error.
func (es Errors) Unwrap() []error {
	out := make([]error, len(es))
	for i, e := range es {
		out[i] = e
	}
	return out
}

// Decode reads YAML (many documents), JSON (one or concatenated) or CBOR
// (one or concatenated) strictly, expands Lists, and gives one Document per
// object. What kubectl would let pass in silence or refuse without saying
// where, such as duplicate keys, unknown fields, wrong types and units, is an
// Error with its place.
//
// The error is nil, an Errors, or of the reader. The documents without
// faults are returned even then; a caller that must change nothing on bad
// input looks at the error first.
func Decode(r io.Reader, o Options) ([]Document, error) {
	if o.File == "" {
		o.File = "<input>"
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 16 << 20
	}
	if o.MaxDocuments == 0 {
		o.MaxDocuments = 10_000
	}
	data, err := io.ReadAll(io.LimitReader(r, o.MaxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", o.File, err)
	}
	d := &decoder{o: o, budget: maxErrors}
	if int64(len(data)) > o.MaxBytes {
		d.fail(nil, "", fmt.Sprintf("is larger than %d bytes", o.MaxBytes), "")
		return nil, d.errs
	}
	d.stream(data)
	if len(d.errs) > 0 {
		return d.docs, d.errs
	}
	return d.docs, nil
}

type decoder struct {
	o       Options
	docs    []Document
	errs    Errors
	budget  int // errors left for this document
	dropped int
	warns   []string
	hostile bool        // a quantity that must not be parsed was seen
	root    func(*node) // if set, takes the first document instead
	data    []byte      // the text, for hints
}

var utf8BOM = []byte("\xef\xbb\xbf")

// stream tells the formats apart and decodes each document.
func (d *decoder) stream(data []byte) {
	data = bytes.TrimPrefix(utf8Of(data), utf8BOM)
	d.data = data
	switch trimmed := bytes.TrimLeft(data, " \t\r\n"); {
	case looksCBOR(data):
		d.cbor(data)
	case len(trimmed) > 0 && trimmed[0] == '{':
		d.json(data)
	default:
		d.yaml(data)
	}
}

// utf8Of is text that begins with the mark of UTF-16, as PowerShell's > and
// Notepad's "Unicode" write it, in UTF-8; other input is left as it is.
func utf8Of(data []byte) []byte {
	var order binary.ByteOrder
	switch {
	case bytes.HasPrefix(data, []byte{0xff, 0xfe}):
		order = binary.LittleEndian
	case bytes.HasPrefix(data, []byte{0xfe, 0xff}):
		order = binary.BigEndian
	default:
		return data
	}
	var units []uint16
	for b := data[2:]; len(b) >= 2; b = b[2:] {
		units = append(units, order.Uint16(b))
	}
	return []byte(string(utf16.Decode(units)))
}

// document decodes one root node.
func (d *decoder) document(n *node) {
	d.budget, d.dropped = maxErrors, 0
	if n.kind == null {
		return // comments only
	}
	if d.root != nil {
		d.root(n)
		return
	}
	d.object(n, "", nil)
	if d.dropped > 0 {
		d.errs = append(d.errs, &Error{File: d.o.File, Reason: fmt.Sprintf("and %d more faults in this document", d.dropped)})
	}
}

// object decodes one object: the root, or an item of a List. item is what a
// typed List's items are, when they do not say.
func (d *decoder) object(n *node, path string, item *schema.GroupVersionKind) {
	if len(d.docs) >= d.o.MaxDocuments {
		d.fail(n, path, fmt.Sprintf("more than %d objects", d.o.MaxDocuments), "")
		return
	}
	if n.kind != mapping {
		d.fail(n, path, "is "+n.describe()+", not an object", cmp.Or(d.splitHint(n.line), "an object has apiVersion, kind and metadata"))
		return
	}
	gvk, ok := d.typeOf(n, path, item)
	if !ok {
		return
	}
	if list, elem := listOf(gvk); list {
		d.items(n, path, elem)
		return
	}
	k := ByGVK(gvk)
	if k == nil {
		d.unknownKind(n, path, gvk)
		return
	}
	d.typed(n, path, k)
}

func (d *decoder) typed(n *node, path string, k *Kind) {
	before := len(d.errs) + d.dropped
	d.warns = nil
	obj := k.New()
	d.check(n, typeOfObject(obj), path, k.GVK.Kind)
	if len(d.errs)+d.dropped > before {
		return
	}
	raw := n.json()
	if len(raw) > maxDocumentBytes {
		d.fail(n, path, fmt.Sprintf("is %d bytes as JSON, more than the API takes (%d)", len(raw), maxDocumentBytes), "")
		return
	}
	s := json.NewSerializerWithOptions(json.DefaultMetaFactory, Scheme(), Scheme(), json.SerializerOptions{Strict: !d.o.Lenient})
	if _, _, err := s.Decode(raw, &k.GVK, obj); err != nil {
		d.fail(n, path, strings.TrimPrefix(err.Error(), "strict decoding error: "), "")
		return
	}
	d.docs = append(d.docs, Document{Object: obj, Kind: k, JSON: raw, File: d.o.File, Line: n.line, Column: n.column, Warnings: d.warns, root: n})
}

// typeOf reads apiVersion and kind.
func (d *decoder) typeOf(n *node, path string, item *schema.GroupVersionKind) (gvk schema.GroupVersionKind, ok bool) {
	get := func(name string) (string, *node) {
		v := n.get(name)
		if v == nil || v.kind != text {
			return "", v
		}
		return v.value, v
	}
	version, versionNode := get("apiVersion")
	kind, kindNode := get("kind")
	if version == "" && kind == "" && versionNode == nil && kindNode == nil && item != nil {
		n.set("kind", item.Kind)
		n.set("apiVersion", item.GroupVersion().String())
		return *item, true
	}
	ok = true
	missing := func(name, v string, at *node) {
		if v != "" {
			return
		}
		ok = false
		switch {
		case at == nil:
			d.fail(n, path, name+" is missing", nearField(n, name))
		case at.kind == null || at.kind == text:
			d.fail(at, join(path, name), "is empty", "")
		default:
			d.fail(at, join(path, name), "is "+at.describe()+", not a string", "")
		}
	}
	missing("apiVersion", version, versionNode)
	missing("kind", kind, kindNode)
	if !ok {
		return gvk, false
	}
	gv, err := schema.ParseGroupVersion(version)
	if err != nil {
		d.fail(versionNode, join(path, "apiVersion"), err.Error(), "")
		return gvk, false
	}
	return gv.WithKind(kind), true
}

// listOf says whether a type is a List, and what its items are if they do
// not say.
func listOf(gvk schema.GroupVersionKind) (list bool, item *schema.GroupVersionKind) {
	if gvk.Kind == "List" && gvk.Group == "" {
		return true, nil
	}
	name, ok := strings.CutSuffix(gvk.Kind, "List")
	if !ok {
		return false, nil
	}
	elem := gvk.GroupVersion().WithKind(name)
	if ByGVK(elem) == nil {
		return false, nil
	}
	return true, &elem
}

func (d *decoder) items(n *node, path string, elem *schema.GroupVersionKind) {
	for _, p := range n.pairs {
		switch p.key.value {
		case "apiVersion", "kind", "metadata":
		case "items":
			switch p.value.kind {
			case null:
			case sequence:
				for i, it := range p.value.items {
					d.object(it, fmt.Sprintf("%s[%d]", join(path, "items"), i), elem)
				}
			default:
				d.fail(p.value, join(path, "items"), "is "+p.value.describe()+", not a list", "")
			}
		default:
			d.unknownField(p.key, n, path, p.key.value, []string{"apiVersion", "kind", "metadata", "items"}, "List", nil)
		}
	}
}

// unknownKind explains a type that is not served.
func (d *decoder) unknownKind(n *node, path string, gvk schema.GroupVersionKind) {
	var same, near []string
	var names []string
	for _, k := range Kinds() {
		names = append(names, k.GVK.Kind)
		if k.GVK.Kind == gvk.Kind {
			same = append(same, k.GVK.GroupVersion().String())
		}
	}
	at := n.get("kind")
	if len(same) > 0 {
		if v := n.get("apiVersion"); v != nil {
			at = v
		}
		d.fail(at, join(path, "apiVersion"), fmt.Sprintf("%s is not served in %q", gvk.Kind, gvk.GroupVersion()), "write apiVersion: "+strings.Join(same, " or "))
		return
	}
	for _, name := range nearest(gvk.Kind, names) {
		for _, k := range Kinds() {
			if k.GVK.Kind == name {
				near = append(near, fmt.Sprintf("%s (%s)", name, k.GVK.GroupVersion()))
			}
		}
	}
	hint := "'dunlin api-resources' lists what is served"
	if len(near) > 0 {
		hint = "did you mean " + strings.Join(near, " or ") + "?"
	}
	d.fail(at, join(path, "kind"), fmt.Sprintf("%q of %q is not served", gvk.Kind, gvk.GroupVersion()), hint)
}

// fail records a fault at a node (nil: no place).
func (d *decoder) fail(n *node, path, reason, hint string) {
	if d.budget <= 0 {
		d.dropped++
		return
	}
	d.budget--
	e := &Error{File: d.o.File, Path: path, Reason: reason, Hint: hint}
	if n != nil {
		e.Line, e.Column = n.line, n.column
	}
	d.errs = append(d.errs, e)
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
