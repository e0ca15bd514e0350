package manifests

import (
	"bytes"
	"errors"
	"reflect"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// ErrHostileNumber is CheckNumbers' answer.
var ErrHostileNumber = errors.New("a quantity has an exponent that would take minutes to compute")

// CheckNumbers looks for quantities such as 1e-999999999 in the body of a
// request before it is decoded: parsing or comparing one keeps a processor
// busy for minutes (in apimachinery's resource.Quantity), for any client that
// may write at all.
//
// It is one pass over the bytes; only where it finds such a number standing
// alone does it look closer. Then only quantities count: a label may be a
// hash such as 1e1234567, and about one uid in two hundred begins like
// 1e123456-. Bodies that cannot be read so closely, or whose kind is not
// known, are refused: the number stands in them for no reason that we know.
func CheckNumbers(body []byte, k *Kind) error {
	if !standsAlone(body) && !escaped.Match(body) {
		return nil
	}
	hostile := false
	if bytes.HasPrefix(body, protobufMagic) {
		hostile = hostileProtobuf(body[len(protobufMagic):], k)
	} else {
		hostile = hostileText(body, k)
	}
	if hostile {
		return ErrHostileNumber
	}
	return nil
}

// hostileText looks closer at JSON, YAML and CBOR.
func hostileText(body []byte, k *Kind) bool {
	d := &decoder{o: Options{MaxDocuments: 1, Lenient: true}, budget: maxErrors}
	var root *node
	d.root = func(n *node) { root = n }
	d.stream(body)
	switch {
	case root == nil:
		// Unreadable text stays unread: the decoder of the request will say
		// why. CBOR has decoders that read more than ours.
		return looksCBOR(body)
	case root.kind == sequence:
		return hostilePatch(root, k)
	}
	if own := kindNamed(scalarAt(root, "apiVersion"), scalarAt(root, "kind")); own != nil && own != k {
		// The kind that a body names is decoded before it is refused.
		if d.check(root, typeOfObject(own.New()), "", ""); d.hostile {
			return true
		}
	} else if k == nil {
		return hostileAnywhere(root)
	}
	if k != nil {
		d.check(root, typeOfObject(k.New()), "", "")
	}
	return d.hostile
}

// hostilePatch looks at a JSON Patch (RFC 6902). What its operations write
// outside of metadata may become a quantity, if the kind has any.
func hostilePatch(root *node, k *Kind) bool {
	if k != nil && !holdsQuantity(typeOfObject(k.New()), map[reflect.Type]bool{}) {
		return false
	}
	for _, op := range root.items {
		if path := scalarAt(op, "path"); strings.HasPrefix(path, "/metadata/") {
			continue
		}
		for _, p := range op.pairs {
			if p.key.value == "value" && hostileAnywhere(p.value) {
				return true
			}
		}
	}
	return false
}

// hostileAnywhere: some value is, as a whole, such a number.
func hostileAnywhere(n *node) bool {
	if (n.kind == text || n.kind == number) && strings.Trim(n.value, "+-.eE0123456789") == "" && hostileNumber(n.value) {
		return true
	}
	for _, it := range n.items {
		if hostileAnywhere(it) {
			return true
		}
	}
	for _, p := range n.pairs {
		if p.key.value != "metadata" && hostileAnywhere(p.value) {
			return true
		}
	}
	return false
}

func scalarAt(n *node, key string) string {
	for _, p := range n.pairs {
		if p.key.value == key {
			return p.value.value
		}
	}
	return ""
}

func kindNamed(apiVersion, kind string) *Kind {
	if gv, err := schema.ParseGroupVersion(apiVersion); err == nil {
		return ByGVK(gv.WithKind(kind))
	}
	return nil
}

// holdsQuantity: a value of the type can have a quantity inside.
func holdsQuantity(t reflect.Type, seen map[reflect.Type]bool) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map:
		return holdsQuantity(t.Elem(), seen)
	case reflect.Struct:
		if t == quantityType {
			return true
		}
		if seen[t] {
			return false
		}
		seen[t] = true
		for i := range t.NumField() {
			if holdsQuantity(t.Field(i).Type, seen) {
				return true
			}
		}
	}
	return false
}

// escaped: a JSON or YAML string that writes a digit, a sign or the e of a
// number as an escape, or breaks a line, for which nobody has a good reason.
var escaped = regexp.MustCompile(`\\(?:(?:x|u00|U000000)(?:3[0-9]|2[bBdDeE]|[46]5)|\r?\n)`)

// standsAlone finds a number with an exponent of five digits and more that
// is not part of a longer word, such as an image's tag.
func standsAlone(body []byte) bool {
	for i := 1; i < len(body); i++ {
		if body[i] != 'e' && body[i] != 'E' || !numeral(body[i-1]) {
			continue
		}
		j := i + 1
		if j < len(body) && (body[j] == '-' || body[j] == '+') {
			j++
		}
		first := j
		for j < len(body) && body[j] >= '0' && body[j] <= '9' {
			j++
		}
		if j-first < 5 || j < len(body) && wordByte(body[j]) {
			i = j - 1
			continue
		}
		k := i - 1
		for k >= 0 && (numeral(body[k]) || body[k] == '-' || body[k] == '+') {
			k--
		}
		if length := j - k - 1; k >= 0 && (int(body[k]) == 0x60+length || int(body[k]) == 0x40+length || int(body[k]) == length) {
			return true // a CBOR or protobuf string of just this length
		}
		inside := k >= 0 && (wordByte(body[k]) || body[k] == '/' || body[k] == '@' || body[k] == ':' && k > 0 && wordByte(body[k-1]))
		if !inside {
			return true
		}
		i = j - 1
	}
	return false
}

func numeral(c byte) bool { return c >= '0' && c <= '9' || c == '.' }

func wordByte(c byte) bool { return isAlnum(c) || c == '_' }
