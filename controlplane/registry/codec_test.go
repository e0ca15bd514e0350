package registry

import (
	"errors"

	"k8s.io/apimachinery/pkg/api/resource"
)

func quantity(s string) resource.Quantity { return resource.MustParse(s) }

func asError[T error](err error, into *T) bool { return errors.As(err, into) }
