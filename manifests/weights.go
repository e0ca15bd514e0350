package manifests

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// MaxWeight is the highest weight of an endpoint.
const MaxWeight = 10000

var errWeight = fmt.Errorf("must be a whole number from 1 to %d (100 is what pods without it have; for none at all, let the Service not select the pod)", MaxWeight)

// ParseWeight reads AnnotationWeight. An error is for people.
func ParseWeight(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n < 1 || n > MaxWeight {
		return 0, errWeight
	}
	return uint16(n), nil
}

// ParseWeights reads AnnotationWeights: weights by address. An error is for
// people.
func ParseWeights(text string) (map[string]uint16, error) {
	if text == "" {
		return nil, nil
	}
	var out map[string]uint16
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		return nil, errors.New(`must be a JSON object of weights by address, such as {"10.1.2.3":50}`)
	}
	for a, n := range out {
		if n < 1 || n > MaxWeight {
			return nil, fmt.Errorf("%s: %w", a, errWeight)
		}
	}
	return out, nil
}

// FormatWeights is what ParseWeights reads; "" is no weights.
func FormatWeights(w map[string]uint16) string {
	if len(w) == 0 {
		return ""
	}
	text, err := json.Marshal(w) // with sorted keys
	if err != nil {
		return "" // not with these types
	}
	return string(text)
}
