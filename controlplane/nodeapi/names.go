package nodeapi

import "strings"

// namesFor are the names that a node may get, best first.
func namesFor(want, uid string) []string {
	name := CleanName(want)
	if name == "" {
		name = "node"
	}
	return []string{name, suffixed(name, uid[:5]), suffixed(name, uid[:10])}
}

// CleanName makes a host name a valid Node name: lower case, and whatever is
// not a letter, digit, dot or dash becomes a dash. "" if nothing is left.
func CleanName(s string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(s) {
		if (r >= 'a' && r <= 'z') || (r >= '0' && r <= '9') || r == '.' || r == '-' {
			b.WriteRune(r)
		} else {
			b.WriteByte('-')
		}
	}
	parts := strings.Split(b.String(), ".")
	var kept []string
	for _, p := range parts {
		p = strings.Trim(p, "-")
		if len(p) > 63 {
			p = strings.Trim(p[:63], "-")
		}
		if p != "" {
			kept = append(kept, p)
		}
	}
	out := strings.Join(kept, ".")
	if len(out) > 63 { // it is a label's value too
		out = strings.Trim(out[:63], "-.")
	}
	return out
}

func suffixed(name, suffix string) string {
	if n := 63 - len(suffix) - 1; len(name) > n {
		name = strings.TrimRight(name[:n], "-.")
	}
	return name + "-" + suffix
}
