package link

import (
	"testing"

	"github.com/dunlin-project/dunlin/wire"
)

// Servers rely on the bound: until it is over, silence says nothing of a node.
func TestReconnectMost(t *testing.T) {
	for try := range 200 {
		if d := backoff(try, backoffMax) + dialTimeout; d > wire.ReconnectMost {
			t.Fatalf("attempt %d comes after %s, the bound is %s", try, d, wire.ReconnectMost)
		}
	}
	if most := backoffMax + backoffMax/8 + dialTimeout; most > wire.ReconnectMost {
		t.Fatalf("an attempt may come after %s, the bound is %s", most, wire.ReconnectMost)
	}
}
