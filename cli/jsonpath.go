package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/util/jsonpath"
)

// template is a parsed -o jsonpath=TEMPLATE: kubectl's language.
func template(text string) (*jsonpath.JSONPath, error) {
	p := jsonpath.New("out").AllowMissingKeys(true)
	if err := p.Parse(text); err != nil {
		return nil, usagef("-o jsonpath=%s: %w (for example: -o jsonpath='{.items[*].metadata.name}')", text, err)
	}
	return p, nil
}

// execute prints what the template finds. Whole numbers stay whole: a JSON
// decoder that knows only floats would print 1e+06.
func execute(w io.Writer, p *jsonpath.JSONPath, v any) error {
	exact, err := exactly(v)
	if err != nil {
		return err
	}
	if err := p.Execute(w, exact); err != nil {
		return fmt.Errorf("jsonpath: %w", err)
	}
	return nil
}

func exactly(v any) (any, error) {
	b, ok := v.([]byte)
	if !ok {
		var err error
		if b, err = json.Marshal(v); err != nil {
			return nil, fmt.Errorf("read object: %w", err)
		}
	}
	var out any
	if err := utiljson.Unmarshal(b, &out); err != nil {
		return nil, fmt.Errorf("read object: %w", err)
	}
	return out, nil
}

// order sorts objects by what a path finds in them.
type order struct {
	path string
	p    *jsonpath.JSONPath
}

// orderBy reads --sort-by: {.status.startTime}, .status.startTime or
// status.startTime, as kubectl does. "" is nil: no order.
func orderBy(text string) (*order, error) {
	if text == "" {
		return nil, nil //nolint:nilnil // no order is no error
	}
	path := strings.TrimSuffix(strings.TrimPrefix(text, "{"), "}")
	p := jsonpath.New("sort").AllowMissingKeys(true)
	if err := p.Parse("{." + strings.TrimPrefix(path, ".") + "}"); err != nil || path == "" {
		return nil, usagef("--sort-by=%s: a path such as .metadata.creationTimestamp is wanted", text)
	}
	return &order{text, p}, nil
}

// sorted is the order in which the objects, given as JSON or as maps, come:
// indexes. Objects without the field come first. It is an error if none has
// it, since that is most likely a slip of the pen.
func (o *order) sorted(objects []any) ([]int, error) {
	index := make([]int, len(objects))
	keys := make([]any, len(objects))
	found := len(objects) == 0
	for i := range objects {
		index[i] = i
		exact, err := exactly(objects[i])
		if err != nil {
			return nil, err
		}
		results, err := o.p.FindResults(exact)
		if err != nil {
			return nil, fmt.Errorf("--sort-by=%s: %w", o.path, err)
		}
		if len(results) > 0 && len(results[0]) > 0 {
			keys[i], found = results[0][0].Interface(), true
		}
	}
	if !found {
		return nil, usagef("--sort-by=%s: no object has this field", o.path)
	}
	slices.SortStableFunc(index, func(i, j int) int { return compareFields(keys[i], keys[j]) })
	return index, nil
}

// compareFields: numbers as numbers, quantities as quantities, all else as
// text.
func compareFields(a, b any) int {
	if a == nil || b == nil {
		return cmp.Compare(number(a != nil), number(b != nil))
	}
	x, y := reflect.ValueOf(a), reflect.ValueOf(b)
	if x.CanInt() && y.CanInt() {
		return cmp.Compare(x.Int(), y.Int())
	}
	if isNumber(x) && isNumber(y) {
		return cmp.Compare(toFloat(x), toFloat(y))
	}
	s, t := fmt.Sprint(a), fmt.Sprint(b)
	if q, err := resource.ParseQuantity(s); err == nil {
		if r, err := resource.ParseQuantity(t); err == nil {
			return q.Cmp(r)
		}
	}
	return cmp.Compare(s, t)
}

func isNumber(v reflect.Value) bool { return v.CanInt() || v.CanFloat() }

func toFloat(v reflect.Value) float64 {
	if v.CanInt() {
		return float64(v.Int())
	}
	return v.Float()
}
