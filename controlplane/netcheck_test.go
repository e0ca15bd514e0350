package controlplane

import (
	"testing"

	"github.com/dunlin-project/dunlin/gossip"
)

// TestEachPathOnce: a server and its node, which are one process, both report;
// others do, too, and may have the same name.
func TestEachPathOnce(t *testing.T) {
	ok := func(to ...string) (out []gossip.Dial) {
		for _, a := range to {
			out = append(out, gossip.Dial{Address: a})
		}
		return out
	}
	member := []gossip.Path{{Address: "g2"}}
	reports := []gossip.NetReport{
		{From: "s1", Address: "g1", Servers: ok("s2", "s3"), Members: member},
		{From: "s1", Address: "g1", Servers: ok("s1", "s2", "s3"), Members: member},
		{From: "s2", Address: "g2", Servers: ok("s1", "s3"), Members: []gossip.Path{{Address: "g1"}}},
		{From: "s3", Servers: ok("s1", "s2")}, // without gossip
		{From: "s3", Servers: []gossip.Dial{{Address: "s1"}, {Address: "s2", Error: "refused"}}},
	}
	eachOnce(reports)
	got := map[string]int{}
	for _, r := range reports {
		for _, p := range r.Members {
			got[r.From+" "+p.Address]++
		}
		for _, d := range r.Servers {
			got[r.From+" "+d.Address+" "+d.Error]++
		}
	}
	want := []string{"s1 g2", "s1 s1 ", "s1 s2 ", "s1 s3 ", "s2 g1", "s2 s1 ", "s2 s3 ", "s3 s1 ", "s3 s2 ", "s3 s2 refused"}
	for _, w := range want {
		if got[w] != 1 {
			t.Errorf("%q %d times", w, got[w])
		}
	}
	if len(got) != len(want) {
		t.Errorf("%v", got)
	}
}
