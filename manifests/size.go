package manifests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// MaxEntries is how many entries one map or list of an object may have. The
// work to track who set which field grows with the square of it.
const MaxEntries = 10_000

// MaxAllEntries is how many entries all maps and lists of an object may have
// together.
const MaxAllEntries = 50_000

// TooManyEntriesError says which map or list is too long, or made the object
// so.
type TooManyEntriesError struct {
	Path string // such as data, or spec.containers[0].env
	Most int    // MaxEntries or MaxAllEntries
}

// Error implements error.
func (e *TooManyEntriesError) Error() string {
	return fmt.Sprintf("%s: too many entries, %s: split the object", e.Path, e.Limit())
}

// Limit says what is allowed.
func (e *TooManyEntriesError) Limit() string {
	if e.Most == MaxAllEntries {
		return fmt.Sprintf("%d are the most in all maps and lists of an object", e.Most)
	}
	return fmt.Sprintf("%d are the most in one map or list", e.Most)
}

// CheckEntries returns a *TooManyEntriesError if a map or list anywhere in
// the object, also in raw JSON that it carries, has more than MaxEntries, or
// all of them more than MaxAllEntries. It takes typed and unstructured
// objects.
func CheckEntries(obj runtime.Object) error {
	c := &counting{}
	if u, ok := obj.(runtime.Unstructured); ok {
		return c.value(reflect.ValueOf(u.UnstructuredContent()), nil)
	}
	return c.value(reflect.ValueOf(obj), nil)
}

// counting is one walk over an object.
type counting struct{ all int }

// add counts n entries of one map or list, whose own are now so many.
func (c *counting) add(n, own int, at *step) error {
	if c.all += n; own > MaxEntries {
		return &TooManyEntriesError{at.String(), MaxEntries}
	}
	if c.all > MaxAllEntries {
		return &TooManyEntriesError{at.String(), MaxAllEntries}
	}
	return nil
}

// step is one step of a path, linked to where it came from: most walks end
// without a path being asked for.
type step struct {
	up   *step
	name string // of a field or key
	at   int    // in a list, if name is ""
}

func (s *step) String() string {
	if s == nil {
		return ""
	}
	up := s.up.String()
	switch {
	case s.name == "":
		return up + "[" + strconv.Itoa(s.at) + "]"
	case up == "":
		return s.name
	}
	return up + "." + s.name
}

func (c *counting) value(v reflect.Value, at *step) error {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			return nil
		}
		return c.value(v.Elem(), at)
	case reflect.Struct:
		return c.fields(v, at)
	case reflect.Map:
		if err := c.add(v.Len(), v.Len(), at); err != nil {
			return err
		}
		if plain(v.Type().Elem()) {
			return nil
		}
		for it := v.MapRange(); it.Next(); {
			if err := c.value(it.Value(), &step{up: at, name: it.Key().String()}); err != nil {
				return err
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return nil // bytes are one value
		}
		if err := c.add(v.Len(), v.Len(), at); err != nil {
			return err
		}
		if plain(v.Type().Elem()) {
			return nil
		}
		for i := range v.Len() {
			if err := c.value(v.Index(i), &step{up: at, at: i}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *counting) fields(v reflect.Value, at *step) error {
	t := v.Type()
	switch t {
	case quantityType, timeType, microTimeType, intOrStringType:
		return nil
	case rawType:
		raw, _ := v.Interface().(runtime.RawExtension)
		return c.json(raw.Raw, at)
	case fieldsType:
		f, _ := v.Interface().(metav1.FieldsV1)
		return c.json(f.GetRawBytes(), at)
	}
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() || plain(f.Type) || v.Field(i).IsZero() {
			continue
		}
		next := at
		if name := jsonName(f); name != "" {
			next = &step{up: at, name: name}
		}
		if err := c.value(v.Field(i), next); err != nil {
			return err
		}
	}
	return nil
}

// plain types have nothing below them.
func plain(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Interface, reflect.Struct, reflect.Map:
		return false
	case reflect.Slice:
		return t.Elem().Kind() == reflect.Uint8
	}
	return true
}

// jsonName is the name under which a field is written, "" for one whose
// fields stand with its parent's.
func jsonName(f reflect.StructField) string {
	tag, _, _ := bytes.Cut([]byte(f.Tag.Get("json")), []byte(","))
	if len(tag) == 0 && !f.Anonymous {
		return f.Name
	}
	return string(tag)
}

// countJSON counts the entries of each map and list of a document. What is
// no JSON is left to whoever reads it.
func (c *counting) json(raw []byte, at *step) error {
	const small = 4 << 10 // most managedFields are; the walk is not free
	if len(raw) < small {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	var open []int // entries of the collections that are not closed yet
	for {
		tok, err := d.Token()
		if err != nil {
			return nil //nolint:nilerr // its end, or not ours to report
		}
		delim, _ := tok.(json.Delim)
		if delim == '}' || delim == ']' {
			open = open[:len(open)-1]
			continue
		}
		// A map shows keys and values as tokens: two make an entry. One entry
		// more is for the collection itself, which managedFields also name.
		if n := len(open); n > 0 {
			open[n-1]++
			if err := c.add(open[n-1]%2, open[n-1]/2-1, at); err != nil {
				return err
			}
		}
		if delim != 0 {
			open = append(open, 0)
		}
	}
}
