package controlplane

import "testing"

// One node alone cannot stop a server of a larger cluster.
func TestFence(t *testing.T) {
	type claim struct {
		node  string
		nodes int
		stop  bool
	}
	for name, claims := range map[string][]claim{
		"one node, one voice":           {{"a", 1, true}},
		"no Node object yet":            {{"a", 0, true}},
		"one voice of many, repeatedly": {{"a", 5, false}, {"a", 5, false}, {"a", 2, false}},
		"two voices":                    {{"a", 5, false}, {"b", 5, true}, {"c", 5, true}},
	} {
		var f fence
		for i, c := range claims {
			if got := f.claims(c.node, c.nodes); got != c.stop {
				t.Errorf("%s: claim %d: %v", name, i, got)
			}
		}
	}
}
