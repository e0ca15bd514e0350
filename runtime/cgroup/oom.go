package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// OOM is what the kernel did to a group for memory.
type OOM struct {
	Kills uint64
	// Own says that the limit of the group, or of the pod above it, was
	// reached; otherwise that of all pods, or the machine's memory, was.
	Own bool
	// Limit of the group and the most that it used, in bytes; 0: none, or not
	// known.
	Limit, Peak uint64
}

// unlimited is above what anybody may have; v1 says "none" by a number near
// 2^63.
const unlimited = 1 << 60

// OOM implements Group.
func (g *group) OOM() OOM {
	dir, ok := g.dir("memory")
	if !ok {
		return OOM{}
	}
	at := func(dir string) (o OOM) {
		read := func(file string) []byte {
			b, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil {
				return nil
			}
			return b
		}
		if g.v2 {
			o.Kills = field(read("memory.events"), "oom_kill")
			o.Limit, o.Peak = number(read("memory.max")), number(read("memory.peak"))
			events := read("memory.events.local") // since Linux 5.2
			if events == nil {
				events = read("memory.events")
			}
			o.Own = field(events, "oom") > 0
			return o
		}
		o.Kills = field(read("memory.oom_control"), "oom_kill")
		o.Limit, o.Peak = number(read("memory.limit_in_bytes")), number(read("memory.max_usage_in_bytes"))
		if o.Limit > unlimited {
			o.Limit = 0
		}
		o.Own = o.Limit > 0 && o.Peak >= o.Limit-o.Limit/100
		return o
	}
	root := strings.TrimSuffix(dir, g.path)
	o := at(dir)
	if pod := filepath.Dir(dir); !o.Own && len(pod) > len(root) {
		o.Own = at(pod).Own
	}
	return o
}

// String says why the kernel killed something, for a container's status.
func (o OOM) String() string {
	switch {
	case o.Own:
		return "it used more memory than its limit and was killed by the kernel"
	case o.Kills == 0:
		return "it ran out of memory and was killed by the kernel"
	case o.Limit == 0:
		return "the pods of this node used all memory that they may, and the kernel killed this one (it has no limit of its own)"
	}
	return fmt.Sprintf("the pods of this node used all memory that they may, and the kernel killed this one, though it had used %d MiB at most of its limit of %d MiB", o.Peak>>20, o.Limit>>20)
}
