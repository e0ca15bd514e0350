package workload

import "testing"

func TestIsUID(t *testing.T) {
	for s, want := range map[string]bool{
		"a14ff9c8-7d34-4a5e-9b5f-0123456789ab":  true,
		"":                                      false,
		"photos":                                false,
		"A14FF9C8-7D34-4A5E-9B5F-0123456789AB":  false,
		"a14ff9c8-7d34-4a5e-9b5f-0123456789abc": false,
		"a14ff9c8-7d34-4a5e-9b5f-0123456789ag":  false,
		"a14ff9c807d34-4a5e-9b5f-0123456789ab":  false,
		"a14ff9c8-7d34-4a5e-9b5f-01234567-9ab":  false,
	} {
		if got := IsUID(s); got != want {
			t.Errorf("%q: %v", s, got)
		}
	}
}
