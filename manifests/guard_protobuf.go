package manifests

import (
	"reflect"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// protobufMagic begins a protobuf body; a runtime.Unknown follows
// (https://kubernetes.io/docs/reference/using-api/api-concepts, "Alternate
// representations of resources").
var protobufMagic = []byte("k8s\x00")

// hostileProtobuf walks the message along the Go type's field numbers and
// looks at what stands where a quantity is read. What it cannot walk counts
// as hostile, since the decoders may read it all the same.
func hostileProtobuf(unknown []byte, k *Kind) bool {
	var apiVersion, kind string
	var raw []byte
	readable := eachField(unknown, func(num protowire.Number, v []byte) bool {
		switch num {
		case 1: // TypeMeta
			return eachField(v, func(num protowire.Number, v []byte) bool {
				switch num {
				case 1:
					apiVersion = string(v)
				case 2:
					kind = string(v)
				}
				return true
			})
		case 2:
			raw = v
		}
		return true
	})
	if own := kindNamed(apiVersion, kind); own != nil {
		k = own // the decoder goes by what the body names
	}
	return !readable || k == nil || !harmless(raw, typeOfObject(k.New()))
}

// harmless walks one message of the type; false if it is not readable or
// holds a quantity that must not be parsed.
func harmless(message []byte, t reflect.Type) bool {
	if t == quantityType {
		return eachField(message, func(num protowire.Number, v []byte) bool { return num != 1 || !hostileNumber(string(v)) })
	}
	if t.Kind() != reflect.Struct || !holdsQuantity(t, map[reflect.Type]bool{}) {
		return true
	}
	fields := protobufFields(t)
	return eachField(message, func(num protowire.Number, v []byte) bool {
		f, ok := fields[num]
		if !ok {
			return true
		}
		if f.Kind() == reflect.Map { // an entry is a message: 1 is the key, 2 the value
			return eachField(v, func(num protowire.Number, v []byte) bool { return num != 2 || harmless(v, elem(f.Elem())) })
		}
		return harmless(v, elem(f))
	})
}

// eachField calls f for each length-delimited field; false if the message is
// not readable or f says so.
func eachField(message []byte, f func(protowire.Number, []byte) bool) bool {
	for len(message) > 0 {
		num, typ, n := protowire.ConsumeTag(message)
		if n < 0 {
			return false
		}
		message = message[n:]
		if typ != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(num, typ, message); n < 0 {
				return false
			}
			message = message[n:]
			continue
		}
		v, n := protowire.ConsumeBytes(message)
		if n < 0 || !f(num, v) {
			return false
		}
		message = message[n:]
	}
	return true
}

// protobufFields gives a struct's fields by number, from its tags.
func protobufFields(t reflect.Type) map[protowire.Number]reflect.Type {
	fields := map[protowire.Number]reflect.Type{}
	for i := range t.NumField() {
		f := t.Field(i)
		if parts := strings.Split(f.Tag.Get("protobuf"), ","); len(parts) > 1 {
			if num, err := strconv.ParseInt(parts[1], 10, 32); err == nil {
				fields[protowire.Number(num)] = f.Type
			}
		}
	}
	return fields
}

// elem strips lists and pointers.
func elem(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Slice || t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t
}
