package cli

import (
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/node/view"
)

func TestNextOfLink(t *testing.T) {
	for want, s := range map[string]view.Status{
		"":                     {Connected: true, Server: "10.0.0.1:6443"},
		"connecting is tried":  {Connected: true, Reason: "the key of n1 was revoked"},
		"look at the network":  {Reason: "connect: connection refused", Servers: []string{"10.0.0.1:6443"}},
		"(10.0.0.1:6443)":      {Servers: []string{"10.0.0.1:6443"}},
		"refuse this node for": {Reason: "node n1 was declared dead on 2026-06-01: its pods are stopped here; run 'dunlin agent reset'"},
	} {
		if got := nextOfLink(&s); !strings.Contains(got, want) || (want == "") != (got == "") {
			t.Errorf("%+v: %q, want %q", s, got, want)
		}
	}
}
