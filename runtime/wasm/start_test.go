package wasm

import (
	"errors"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
)

type killedGroup struct{ cgroup.Group }

func (killedGroup) Stats() (cgroup.Stats, error) { return cgroup.Stats{OOMKills: 1}, nil }

// What is advised is more than what was too little.
func TestAdviceIsAboveTheLimit(t *testing.T) {
	for limit, want := range map[int64]string{0: "32Mi", 8 << 20: "32Mi", 16 << 20: "32Mi", 32 << 20: "64Mi", 33 << 20: "128Mi", 100 << 20: "256Mi"} {
		err := explainEarlyDeath(killedGroup{}, limit, t.TempDir(), "killed", errors.New("gone"))
		if err == nil || !strings.Contains(err.Error(), "to "+want+" say") {
			t.Errorf("%d: %v, want %s", limit, err, want)
		}
	}
}
