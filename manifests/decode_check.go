package manifests

import (
	"encoding/base64"
	"fmt"
	"math/big"
	"reflect"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func typeOfObject(obj runtime.Object) reflect.Type { return reflect.TypeOf(obj).Elem() }

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

// Types that decode themselves.
var (
	quantityType    = reflect.TypeFor[resource.Quantity]()
	timeType        = reflect.TypeFor[metav1.Time]()
	microTimeType   = reflect.TypeFor[metav1.MicroTime]()
	intOrStringType = reflect.TypeFor[intstr.IntOrString]()
	rawType         = reflect.TypeFor[runtime.RawExtension]()
	fieldsType      = reflect.TypeFor[metav1.FieldsV1]()
	bytesType       = reflect.TypeFor[[]byte]()
)

// check compares a value with the Go type it shall become, and reports what
// does not fit with its place and a hint. path is shown; owner names the
// type in messages.
func (d *decoder) check(n *node, t reflect.Type, path, owner string) {
	if n.kind == null {
		return // as if absent
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t {
	case quantityType:
		d.quantity(n, path)
		return
	case intOrStringType:
		d.intOrString(n, path)
		return
	case timeType, microTimeType:
		d.time(n, path)
		return
	case bytesType:
		d.base64(n, path)
		return
	case rawType, fieldsType:
		return
	}
	switch t.Kind() {
	case reflect.Struct:
		d.checkStruct(n, t, path, owner)
	case reflect.Slice:
		if n.kind != sequence {
			hint := ""
			if n.kind == mapping {
				hint = `each entry begins with "- "`
			}
			d.fail(n, path, "is "+n.describe()+", not a list", hint)
			return
		}
		for i, it := range n.items {
			d.check(it, t.Elem(), fmt.Sprintf("%s[%d]", path, i), owner)
		}
	case reflect.Map:
		if n.kind != mapping {
			d.fail(n, path, "is "+n.describe()+", not a mapping", "")
			return
		}
		for _, p := range n.pairs {
			d.check(p.value, t.Elem(), path+"["+p.key.value+"]", owner)
		}
	case reflect.String:
		d.text(n, path)
	case reflect.Bool:
		if n.kind != boolean {
			hint := "write true or false"
			if n.kind == text && (n.value == "true" || n.value == "false") {
				hint = "write " + n.value + " without quotes"
			}
			d.fail(n, path, "is "+n.describe()+", not a boolean", hint)
		}
	case reflect.Int32, reflect.Int64, reflect.Int:
		d.integer(n, path, t.Bits())
	}
}

func (d *decoder) checkStruct(n *node, t reflect.Type, path, owner string) {
	if n.kind != mapping {
		hint := ""
		if n.kind == sequence {
			hint = `remove the "- "`
		}
		d.fail(n, path, "is "+n.describe()+", not a mapping", hint)
		return
	}
	fields := fieldsOf(t)
	for _, p := range n.pairs {
		f, ok := fields[p.key.value]
		if !ok {
			d.unknownField(p.key, n, path, p.key.value, sortedKeys(fields), owner, fields)
			continue
		}
		d.check(p.value, f, join(path, p.key.value), p.key.value)
	}
}

// fieldsOf gives a struct's fields by JSON name, inlined ones included.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	fields := map[string]reflect.Type{}
	for i := range t.NumField() {
		f := t.Field(i)
		name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-":
		case name == "" && (f.Anonymous || strings.Contains(opts, "inline")):
			for k, v := range fieldsOf(f.Type) {
				fields[k] = v
			}
		case name != "":
			fields[name] = f.Type
		}
	}
	return fields
}

// unknownField explains a field that the type does not have: misspelt, or
// one level too far out, or simply wrong.
func (d *decoder) unknownField(key, in *node, path, name string, known []string, owner string, fields map[string]reflect.Type) {
	hint := ""
	if near := nearest(name, known); len(near) > 0 {
		hint = "did you mean " + strings.Join(near, " or ") + "?"
	} else if home := d.home(in, name, fields); home != "" {
		hint = home
	} else if len(known) > 0 && len(known) <= 12 {
		hint = "known are " + strings.Join(known, ", ")
	}
	reason := fmt.Sprintf("unknown field %q", short40(name))
	if owner != "" {
		reason += " in " + owner
	}
	if d.o.Lenient {
		e := &Error{File: d.o.File, Line: key.line, Column: key.column, Path: join(path, short40(name)), Reason: reason, Hint: hint}
		if len(d.warns) < maxErrors {
			d.warns = append(d.warns, e.Error())
		}
		return
	}
	d.fail(key, join(path, short40(name)), reason, hint)
}

// home finds a sibling that could hold the field: an empty one that was
// meant to (the usual slip of indentation), else any.
func (d *decoder) home(in *node, name string, fields map[string]reflect.Type) string {
	var candidates []string
	for _, f := range sortedKeys(fields) {
		t := fields[f]
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice && t != bytesType {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct || t == quantityType {
			continue
		}
		if _, ok := fieldsOf(t)[name]; !ok {
			continue
		}
		if v := in.get(f); v != nil && v.kind == null {
			return fmt.Sprintf("it belongs under %q, which is empty on line %d: indent it", f, v.line)
		}
		candidates = append(candidates, f)
	}
	if len(candidates) > 0 && len(candidates) <= 3 {
		return "it belongs under " + strings.Join(candidates, " or ")
	}
	return ""
}

// text wants a string.
func (d *decoder) text(n *node, path string) {
	switch n.kind {
	case text:
	case boolean:
		d.fail(n, path, "is "+n.describe()+", not a string", "quote it: "+strconv.Quote(n.value))
	case number:
		d.fail(n, path, "is "+n.describe()+", not a string", "quote it: "+strconv.Quote(n.value))
	default:
		d.fail(n, path, "is "+n.describe()+", not a string", "")
	}
}

// integer wants a whole number. Octal is for file modes only: anywhere else
// a leading zero is a slip.
func (d *decoder) integer(n *node, path string, bits int) {
	bad := func(hint string) { d.fail(n, path, "is "+n.describe()+", not a whole number", hint) }
	if n.kind == text {
		hint := ""
		if _, err := strconv.ParseInt(n.value, 10, 64); err == nil {
			hint = "write " + n.value + " without quotes"
		}
		bad(hint)
		return
	}
	if n.kind != number {
		bad("")
		return
	}
	v := n.value
	if hostileNumber(v) {
		bad("")
		return
	}
	if plain := strings.ReplaceAll(v, "_", ""); plain != v {
		bad("write " + plain)
		return
	}
	unsigned := strings.TrimLeft(v, "+-")
	mode := strings.HasSuffix(strings.ToLower(path), "mode")
	if len(unsigned) > 1 && unsigned[0] == '0' && unsigned[1] != '.' && !mode {
		bad("write it in decimal, without leading zero")
		return
	}
	i, ok := new(big.Int).SetString(strings.TrimPrefix(v, "+"), 0)
	if !ok {
		f, _, err := big.ParseFloat(v, 10, 128, big.ToNearestEven)
		if err != nil || !f.IsInt() {
			bad("")
			return
		}
		i, _ = f.Int(nil)
		n.value = i.String() // 1e3, 80.0
	}
	limit := new(big.Int).Lsh(big.NewInt(1), uint(bits-1))
	if i.Cmp(limit) >= 0 || i.Cmp(new(big.Int).Neg(limit)) < 0 {
		d.fail(n, path, fmt.Sprintf("is too large a number (%s)", short40(v)), "")
	}
}

func (d *decoder) intOrString(n *node, path string) {
	switch n.kind {
	case text:
		if n.value != "" && strings.Trim(n.value, "0123456789") == "" {
			d.fail(n, path, "is "+n.describe()+", which would be a name", "write "+n.value+" without quotes")
		}
	case number:
		d.integer(n, path, 32)
	default:
		d.fail(n, path, "is "+n.describe()+", not a number or a name", "")
	}
}

func (d *decoder) time(n *node, path string) {
	if n.kind != text {
		d.fail(n, path, "is "+n.describe()+", not a time", "write it as 2026-01-31T12:00:00Z")
		return
	}
	if _, err := time.Parse(time.RFC3339, n.value); err != nil {
		d.fail(n, path, "is "+n.describe()+", not a time", "write it as 2026-01-31T12:00:00Z")
	}
}

func (d *decoder) base64(n *node, path string) {
	if n.kind != text {
		d.fail(n, path, "is "+n.describe()+", not base64 text", "")
		return
	}
	if _, err := base64.StdEncoding.DecodeString(n.value); err != nil {
		hint := ""
		if strings.HasPrefix(path, "data[") || strings.Contains(path, ".data[") {
			hint = "plain text goes under stringData"
		}
		d.fail(n, path, "is not base64", hint) // the value may be a secret: not shown
	}
}

// memoryLike says whether a quantity's path counts bytes.
func memoryLike(path string) bool {
	key := path
	if i := strings.LastIndexByte(path, '['); i >= 0 && strings.HasSuffix(path, "]") {
		key = path[i+1 : len(path)-1]
	} else if i := strings.LastIndexByte(path, '.'); i >= 0 {
		key = path[i+1:]
	}
	key = strings.TrimPrefix(strings.TrimPrefix(key, "requests."), "limits.")
	return slices.Contains([]string{"memory", "ephemeral-storage", "storage", "sizeLimit"}, key) || strings.HasPrefix(key, "hugepages-")
}

// units that people write for those that exist.
var units = map[string]string{
	"g": "G or Gi", "K": "k or Ki", "KB": "k or Ki", "kb": "k or Ki", "KiB": "Ki", "kib": "Ki", "ki": "Ki", "KI": "Ki",
	"MB": "M or Mi", "mb": "M or Mi", "MiB": "Mi", "mib": "Mi", "mi": "Mi", "MI": "Mi",
	"GB": "G or Gi", "gb": "G or Gi", "GiB": "Gi", "gib": "Gi", "gi": "Gi", "GI": "Gi", "t": "T or Ti", "TB": "T or Ti",
	"TiB": "Ti", "ti": "Ti", "p": "P or Pi", "b": "none for bytes", "B": "none for bytes",
}

// quantity wants an amount such as 250m, 0.5, 64Mi.
func (d *decoder) quantity(n *node, path string) {
	if n.kind != number && n.kind != text {
		d.fail(n, path, "is "+n.describe()+", not a quantity", "write a number with a unit, such as 250m or 64Mi")
		return
	}
	v := n.value
	fail := func(hint string) { d.fail(n, path, "is "+n.describe()+", not a quantity", hint) }
	digits := strings.TrimLeft(v, "+-.0123456789")
	switch unsigned := strings.TrimLeft(v, "+-"); {
	case v == "":
		fail("leave the field out")
		return
	case strings.Contains(v, "_"):
		fail("write " + strings.ReplaceAll(v, "_", ""))
		return
	case len(unsigned) > 1 && unsigned[0] == '0' && unsigned[1] >= '0' && unsigned[1] <= '9' && digits == "",
		strings.HasPrefix(unsigned, "0x"), strings.HasPrefix(unsigned, "0X"), strings.HasPrefix(unsigned, "0o"), strings.HasPrefix(unsigned, "0b"):
		fail("write it in decimal, without leading zero")
		return
	}
	if hostileNumber(v) {
		d.hostile = true
		fail("no quantity needs so many digits")
		return
	}
	q, err := resource.ParseQuantity(v)
	if err != nil {
		if better := units[digits]; better != "" {
			fail(fmt.Sprintf("the unit %q does not exist; write %s", digits, better))
		} else {
			fail("write a number with a unit, such as 250m or 64Mi")
		}
		return
	}
	number := strings.TrimSuffix(v, digits)
	switch {
	case overflows(v):
		d.fail(n, path, "is "+n.describe()+", more than a quantity can hold", "the largest is 8Ei - 1")
	case memoryLike(path) && digits == "m":
		d.fail(n, path, fmt.Sprintf("%s is thousandths of a byte", v), fmt.Sprintf("did you mean %sMi or %sM?", number, number))
	case memoryLike(path) && q.Sign() > 0 && q.CmpInt64(wholeBytesBelow) < 0 && q.MilliValue()%1000 != 0:
		d.fail(n, path, fmt.Sprintf("%s is a fraction of a byte", v), fmt.Sprintf("did you mean %sGi or %sMi?", number, number))
	}
}

// hostileNumber: exponents of more than two digits, or hundreds of digits.
// resource.ParseQuantity works for minutes on 1e999999999.
func hostileNumber(v string) bool {
	if len(v) > 100 {
		return true
	}
	e := strings.LastIndexAny(v, "eE")
	if e < 0 {
		return false
	}
	exponent := strings.TrimLeft(v[e+1:], "+-")
	return len(exponent) > 2 && strings.Trim(exponent, "0123456789") == ""
}

// overflows: ParseQuantity cuts what is larger than an int64 in silence.
func overflows(v string) bool {
	q, err := resource.ParseQuantity(v)
	if err != nil {
		return false
	}
	top := resource.NewQuantity(1<<63-1, resource.DecimalSI)
	low := resource.NewQuantity(-(1<<63 - 1), resource.DecimalSI)
	return q.Cmp(*top) >= 0 || q.Cmp(*low) <= 0
}
