package balance

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/wire"
)

var readyState = wire.EndpointReady | wire.EndpointServing

func TestNearOnesFirstThenSpill(t *testing.T) {
	list := []candidate{{tier: elsewhere, weight: 1, state: readyState}, {tier: sameZone, weight: 1, state: readyState}, {tier: sameNode, weight: 1, state: readyState}}
	var got []int
	for range 12 {
		i := choose(len(list), func(i int) candidate { return list[i] }, wire.TrafficDefault, false)
		list[i].active++
		got = append(got, list[i].active*0+i)
	}
	// Here, here or the next by turns once they are level, and elsewhere last.
	if got[0] != 2 || got[1] == 0 || list[2].active < list[1].active || list[1].active <= list[0].active {
		t.Fatalf("order %v, loads %d %d %d", got, list[2].active, list[1].active, list[0].active)
	}
	for _, c := range []struct {
		traffic wire.Traffic
		want    int
	}{{wire.TrafficSameNode, 2}, {wire.TrafficSameZone, 1}} {
		if i := choose(len(list), func(i int) candidate { return list[i] }, c.traffic, false); i != c.want {
			t.Errorf("traffic %d goes to %d", c.traffic, i)
		}
	}
}

// Where weights differ they alone say who gets how many connections: of those
// that end at once, of those that stay, and of few at a time; near and far.
func TestWeightsShare(t *testing.T) {
	for name, ends := range map[string]int{"at once": 0, "after two": 2, "after ten": 10, "never": 1 << 30} {
		list := []candidate{{weight: 90, state: readyState, shared: true, tier: elsewhere}, {weight: 10, state: readyState, shared: true}}
		var open []int
		n := [2]int{}
		for range 1000 {
			i := choose(len(list), func(i int) candidate { return list[i] }, wire.TrafficDefault, false)
			n[i]++
			list[i].pass += 1 / list[i].weight
			list[i].active++
			if open = append(open, i); len(open) > ends {
				list[open[0]].active--
				open = open[1:]
			}
		}
		if n[0] < 895 || n[0] > 905 {
			t.Errorf("connections that end %s: shares %v", name, n)
		}
	}
}

// Whatever the endpoints are: one that may not be used is never chosen, one
// is chosen whenever any may be, and a worse class only without a better one.
func TestChooseProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := make([]candidate, rapid.IntRange(0, 6).Draw(t, "n"))
		shared := rapid.Bool().Draw(t, "shared")
		for i := range list {
			list[i] = candidate{
				tier: tier(rapid.IntRange(0, 2).Draw(t, "tier")), weight: float64(rapid.IntRange(1, 5).Draw(t, "weight")),
				state: uint8(rapid.IntRange(0, 7).Draw(t, "state")), active: rapid.IntRange(0, 5).Draw(t, "active"), shared: shared,
				failed: rapid.Bool().Draw(t, "failed"), tried: rapid.Bool().Draw(t, "tried"), silent: rapid.Bool().Draw(t, "silent"),
			}
		}
		local := rapid.Bool().Draw(t, "local")
		class := func(c candidate) int { // smaller is better, 9 is never
			switch {
			case c.tried || (local && c.tier != sameNode):
				return 9
			case c.state&wire.EndpointReady == 0 && (c.state&wire.EndpointServing == 0 || c.state&wire.EndpointTerminating == 0):
				return 9
			}
			class := 0
			switch {
			case c.silent:
				class = 4
			case c.state&wire.EndpointReady == 0:
				class = 2
			}
			if c.failed {
				class++
			}
			return class
		}
		best := 9
		for _, c := range list {
			best = min(best, class(c))
		}
		i := choose(len(list), func(i int) candidate { return list[i] }, wire.Traffic(rapid.IntRange(0, 2).Draw(t, "traffic")), local)
		switch {
		case i < 0 && best != 9:
			t.Fatalf("nobody, of %+v", list)
		case i >= 0 && class(list[i]) != best:
			t.Fatalf("%d of %+v", i, list)
		}
	})
}
