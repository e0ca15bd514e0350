package link

import (
	"slices"
	"testing"
	"time"
)

func TestRoutes(t *testing.T) {
	list := func(leader []string, via, last string, others, silent []string) []string {
		var out []string
		for _, r := range routes(leader, via, last, others, func(a string) (at time.Time) {
			if i := slices.Index(silent, a); i >= 0 {
				at = at.Add(time.Duration(i + 1))
			}
			return at
		}) {
			out = append(out, r.String())
		}
		return out
	}
	for name, c := range map[string]struct{ got, want []string }{
		"first":                 {list(nil, "", "", []string{"a", "b"}, nil), []string{"a", "b"}},
		"last first":            {list(nil, "", "b", []string{"a", "b"}, nil), []string{"b", "a"}},
		"old via is no relay":   {list(nil, "c", "", []string{"a"}, nil), []string{"a"}},
		"redirect":              {list([]string{"l"}, "b", "", []string{"a", "l", "b"}, nil), []string{"l", "relay b", "a", "b"}},
		"the leader was silent": {list([]string{"l"}, "b", "", []string{"a", "l"}, []string{"l"}), []string{"relay b", "a", "l"}},
		"all were, l first":     {list([]string{"l"}, "b", "", nil, []string{"l", "b"}), []string{"l", "relay b"}},
		"all were, l last":      {list([]string{"l"}, "b", "", nil, []string{"b", "l"}), []string{"relay b", "l"}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}
}
