package oci

import (
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// What a disk has left at which it counts as full: programs remove what they
// could not finish, so that a moment later some of it is free again.
const (
	fullFiles = 8
	fullBytes = 64 << 10
)

// full names the folder of these whose disk is full, or is empty.
func full(dirs ...string) string {
	for _, d := range dirs {
		var st unix.Statfs_t
		if unix.Statfs(d, &st) != nil {
			continue
		}
		if st.Files > 0 && st.Ffree < fullFiles || int64(st.Bavail)*int64(st.Bsize) < fullBytes { //nolint:unconvert // differs by architecture
			return d
		}
	}
	return ""
}

// noSpace is the likely cause that runc and conmon do not always tell, or
// empty: they did, or no disk that the container needs is full.
func (r *Runtime) noSpace(message, log string) string {
	if strings.Contains(strings.ToLower(message), "no space left") {
		return ""
	}
	if d := full(r.cfg.RunDir, r.cfg.StateDir, filepath.Dir(log)); d != "" {
		return "no space left at " + d
	}
	return ""
}
