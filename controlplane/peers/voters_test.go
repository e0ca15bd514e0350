package peers

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// A server in short: "V" votes, "n" does not; "*" leads, "!" is not well, "~"
// is well since a moment, "-" was removed.
func standings(list ...string) []Standing {
	var out []Standing
	for i, s := range list {
		st := Standing{ID: fmt.Sprintf("s%d", i), Voter: s[0] == 'V', Well: true, Since: time.Minute}
		for _, c := range s[1:] {
			switch c {
			case '*':
				st.Self = true
			case '!':
				st.Well, st.Trouble = false, "silent"
			case '~':
				st.Since = time.Second
			case '-':
				st.Removed = true
			}
		}
		out = append(out, st)
	}
	return out
}

func TestDecide(t *testing.T) {
	for name, c := range map[string]struct {
		list []string
		want string // kind and id
		why  map[string]string
	}{
		"alone":                               {list: []string{"V*"}, want: "0 "},
		"a second stays without a vote":       {list: []string{"V*", "n"}, want: "0 ", why: map[string]string{"s1": "2 voters would tolerate no more failures than 1"}},
		"a third: the first of the pair":      {list: []string{"V*", "n", "n"}, want: "1 s1"},
		"a third: the second of the pair":     {list: []string{"V*", "V", "n"}, want: "1 s2"},
		"the third is not ready":              {list: []string{"V*", "n", "n!"}, want: "0 ", why: map[string]string{"s1": "once there is one server more", "s2": "silent"}},
		"the third has just come":             {list: []string{"V*", "n", "n~"}, want: "0 ", why: map[string]string{"s2": "just now"}},
		"three":                               {list: []string{"V*", "V", "V"}, want: "0 "},
		"one of three is away":                {list: []string{"V*", "V", "V!"}, want: "0 "},
		"one of three is away, one spare":     {list: []string{"V*", "V", "V!", "n"}, want: "0 ", why: map[string]string{"s3": "4 voters would tolerate no more"}},
		"one of three was removed":            {list: []string{"V*", "V", "V-"}, want: "3 s2"},
		"removed before anything else":        {list: []string{"V*", "n", "n", "n-"}, want: "3 s3"},
		"two are left":                        {list: []string{"V*", "V"}, want: "2 s1"},
		"two are left, one is away":           {list: []string{"V*", "V!"}, want: "0 "},
		"two are left, and one to follow":     {list: []string{"V*", "V", "n"}, want: "1 s2"},
		"two are left, the other comes soon":  {list: []string{"V*", "V", "n~"}, want: "2 s1"},
		"the pair's second was lost half-way": {list: []string{"V*", "V", "n!"}, want: "2 s1"},
		"the leader was removed":              {list: []string{"V-*", "V", "V"}, want: "0 "},
		"five":                                {list: []string{"V*", "V", "V", "V", "V"}, want: "0 "},
		"more than five":                      {list: []string{"V*", "V", "V", "V", "V", "n", "n"}, want: "0 ", why: map[string]string{"s5": "is enough", "s6": "is enough"}},
	} {
		next, why := Decide(standings(c.list...))
		if got := fmt.Sprintf("%d %s", next.Kind, next.ID); got != c.want {
			t.Errorf("%s: %s (%s), want %s", name, got, next.Why, c.want)
		}
		for id, want := range c.why {
			if !strings.Contains(why[id], want) {
				t.Errorf("%s: %s: %q, want %q", name, id, why[id], want)
			}
		}
	}
}

// Whatever the servers are: following the decisions ends, with an odd number
// of voters unless one of them is away, and never takes the leader's vote.
func TestDecideEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := standings("V*")
		for i := range rapid.IntRange(0, 7).Draw(t, "others") {
			list = append(list, Standing{ID: fmt.Sprintf("s%d", i+1), Voter: rapid.Bool().Draw(t, "voter"), Well: rapid.Bool().Draw(t, "well"),
				Since: time.Minute, Trouble: "away", Removed: rapid.IntRange(0, 5).Draw(t, "removed") == 0})
		}
		for range 20 {
			next, why := Decide(list)
			if next.Kind == NoChange {
				voters, away := 0, false
				for _, s := range list {
					if s.Removed {
						t.Fatalf("%s is still there", s.ID)
					}
					if s.Voter {
						voters++
						away = away || !s.Well
					} else if why[s.ID] == "" {
						t.Fatalf("nothing says why %s has no vote: %+v", s.ID, list)
					}
				}
				if voters%2 == 0 && !away {
					t.Fatalf("%d voters: %+v", voters, list)
				}
				return
			}
			at := 0
			for i := range list {
				if list[i].ID == next.ID {
					at = i
				}
			}
			if list[at].Self {
				t.Fatalf("%+v of the leader", next)
			}
			switch next.Kind {
			case Promote:
				list[at].Voter = true
			case Demote:
				list[at].Voter = false
			case Remove:
				list = append(list[:at], list[at+1:]...)
			}
		}
		t.Fatalf("no end: %+v", list)
	})
}
