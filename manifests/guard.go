package manifests

import (
	"bytes"
	"errors"
)

// ErrHostileNumber is CheckNumbers' answer.
var ErrHostileNumber = errors.New("a quantity has an exponent that would take minutes to compute")

// CheckNumbers looks for quantities such as 1e-999999999 in the body of a
// request before it is decoded: parsing or comparing one keeps a processor
// busy for minutes (in apimachinery's resource.Quantity), for any client that
// may write at all.
//
// It is one pass over the bytes; only where it finds such a number standing
// alone does it look closer. In JSON and YAML objects of a known kind then
// only quantities count (a label may be a hash such as 1e1234567); in other
// bodies (k nil, patches that are lists, protobuf, CBOR) the number is
// refused wherever it stands.
func CheckNumbers(body []byte, k *Kind) error {
	if !standsAlone(body) {
		return nil
	}
	trimmed := bytes.TrimLeft(body, " \t\r\n")
	if k == nil || looksCBOR(body) || bytes.HasPrefix(body, []byte("k8s\x00")) || bytes.HasPrefix(trimmed, []byte("[")) {
		return ErrHostileNumber
	}
	d := &decoder{o: Options{MaxDocuments: 1, Lenient: true}, budget: maxErrors}
	var root *node
	d.root = func(n *node) { root = n }
	d.stream(body)
	if root == nil {
		return nil // not readable: the decoder of the request will say why
	}
	d.check(root, typeOfObject(k.New()), "", "")
	if d.hostile {
		return ErrHostileNumber
	}
	return nil
}

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
		if k >= 0 && (int(body[k]) == 0x60+j-k-1 || int(body[k]) == 0x40+j-k-1) {
			return true // a CBOR string of just this length
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
