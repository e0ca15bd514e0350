package board

import (
	"errors"
	"strings"
)

// ErrNoName says that nothing of a hostname can be used.
var ErrNoName = errors.New("no letter or digit to make a node name of")

// maxName is the longest DNS subdomain (RFC 1123).
const maxName = 253

// NodeName makes a valid node name (RFC 1123 subdomain) of a hostname:
// lower case, everything else to '-', trimmed; changed says that it differs.
func NodeName(hostname string) (name string, changed bool, err error) {
	labels := strings.Split(strings.ToLower(strings.TrimSuffix(strings.TrimSpace(hostname), ".")), ".")
	out := make([]string, 0, len(labels))
	for _, l := range labels {
		l = strings.Map(func(r rune) rune {
			if (r >= 'a' && r <= 'z') || (r >= '0' && r <= '9') {
				return r
			}
			return '-'
		}, l)
		if len(l) > 63 {
			l = l[:63]
		}
		if l = strings.Trim(l, "-"); l != "" {
			out = append(out, l)
		}
	}
	name = strings.Join(out, ".")
	if len(name) > maxName {
		name = strings.Trim(name[:maxName], "-.")
	}
	if name == "" {
		return "", false, ErrNoName
	}
	return name, name != hostname, nil
}
