package gossip

import (
	"slices"
	"strings"
	"testing"
)

// Each of the four directions is found by itself from what was asked and
// answered.
func TestAnswersTellDirections(t *testing.T) {
	for out := range 4 { // bit 0: UDP gets there, bit 1: TCP
		for in := range 4 {
			p := &Pool{checks: newChecks()}
			path := &Path{}
			p.checks.paths[7] = path
			for i, asked := range []byte{viaUDP, viaTCP} {
				if out&(1<<i) == 0 {
					continue
				}
				for j, by := range []byte{viaUDP, viaTCP} {
					if in&(1<<j) != 0 {
						p.answered([]byte{asked, by, 0, 0, 0, 0, 0, 0, 0, 7})
					}
				}
			}
			if out == 0 || in == 0 {
				if *path != (Path{}) {
					t.Errorf("out %d, in %d: %+v", out, in, path)
				}
				continue
			}
			want := Path{UDPOut: out&1 != 0, TCPOut: out&2 != 0, UDPIn: in&1 != 0, TCPIn: in&2 != 0}
			if *path != want {
				t.Errorf("out %d, in %d: %+v", out, in, path)
			}
		}
	}
	p := &Pool{checks: newChecks()}
	for _, junk := range [][]byte{nil, {viaUDP}, make([]byte, 11), {viaUDP, viaUDP, 0, 0, 0, 0, 0, 0, 0, 9}} {
		p.answered(junk)
	}
}

func TestBlockedNamesBothEnds(t *testing.T) {
	got := (&Path{UDPIn: true, TCPOut: true, TCPIn: true}).Blocked("n1 (10.0.0.1:7946)", "n2 (10.0.0.2:7946)")
	if !slices.Equal(got, []string{"UDP from n1 (10.0.0.1:7946) to n2 (10.0.0.2:7946) is blocked"}) {
		t.Error(got)
	}
	both := (&Path{}).Blocked("n1", "n2")
	if len(both) != 1 || !strings.Contains(both[0], "between n1 and n2") || !slices.Equal(both, (&Path{}).Blocked("n2", "n1")) {
		t.Error(both)
	}
	if got := (&Path{UDPOut: true, UDPIn: true, TCPOut: true, TCPIn: true}).Blocked("a", "b"); len(got) != 0 {
		t.Error(got)
	}
}

// Who has moved is not missed where it was.
func TestFormerAddressesAreNoFault(t *testing.T) {
	got := withoutFormer([]Path{
		{Member: "moved", Address: "10.0.0.1:7946"}, {Member: "moved", Address: "10.0.0.2:7946", TCPIn: true},
		{Member: "cut", Address: "10.0.0.3:7946"}, {Member: "well", Address: "10.0.0.4:7946", UDPIn: true, UDPOut: true, TCPIn: true, TCPOut: true},
	})
	var at []string
	for _, p := range got {
		at = append(at, p.Address)
	}
	if want := []string{"10.0.0.2:7946", "10.0.0.3:7946", "10.0.0.4:7946"}; !slices.Equal(at, want) {
		t.Errorf("%v, want %v", at, want)
	}
}
