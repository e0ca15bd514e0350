package manifests

import (
	"errors"
	"strconv"
	"strings"
)

// errAutoRollback says what the annotation may hold.
var errAutoRollback = errors.New(`must be "true", "false" or a percentage from 1% to 100%`)

// AutoRollback reads AnnotationAutoRollback: whether it is on, and the
// percentage of failing pods that is too many, 0 for the deadline alone.
func AutoRollback(annotations map[string]string) (on bool, percent int, err error) {
	v, ok := annotations[AnnotationAutoRollback]
	switch {
	case !ok || v == "false":
		return false, 0, nil
	case v == "true":
		return true, 0, nil
	}
	n, isPercent := strings.CutSuffix(v, "%")
	percent, err = strconv.Atoi(n)
	if err != nil || !isPercent || percent < 1 || percent > 100 {
		return false, 0, errAutoRollback
	}
	return true, percent, nil
}
