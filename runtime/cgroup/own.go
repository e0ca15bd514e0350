package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Own reads the usage of the control group that this process runs in, which
// need not be one of ours: a service's, a session's. What a hierarchy does
// not tell is 0; ErrNone where the process is in no group with figures (the
// root group of version 2 has none).
func Own() (Stats, error) {
	mounts, err := readMounts("/sys/fs/cgroup")
	if err != nil {
		return Stats{}, err
	}
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return Stats{}, fmt.Errorf("control groups: %w", err)
	}
	t := &Tree{roots: map[string]string{}}
	v2 := len(mounts.v1) == 0
	for c, at := range parseOwn(string(b)) {
		switch mount := mounts.v1[c]; {
		case v2 && c == "":
			t.roots["v2"] = filepath.Join(mounts.v2, at)
		case !v2 && mount != "":
			// In a container the path is that of the host, and what is mounted
			// is this group itself.
			dir := filepath.Join(mount, at)
			if !exists(dir) {
				dir = mount
			}
			t.roots[c] = dir
		}
	}
	s, err := (&group{tree: t, v2: v2}).Stats()
	if err != nil {
		return Stats{}, err
	}
	if s.MemoryBytes == 0 && s.CPUNanos == 0 {
		return Stats{}, ErrNone
	}
	return s, nil
}

// parseOwn reads proc_pid_cgroup(5): controller to path; version 2 is "".
func parseOwn(text string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 {
			continue
		}
		for _, c := range strings.Split(f[1], ",") {
			out[c] = f[2]
		}
	}
	return out
}
