// Package version names this build.
package version

import (
	"runtime"
	"runtime/debug"
	"strconv"
	"time"
)

// Version is set by the Makefile with -ldflags; "dev" otherwise.
var Version = "dev"

// built is the Unix time of the commit, set by the Makefile with -ldflags.
var built string

// Built is a time that is over: when the source of this binary was committed.
// Zero if that is not known.
func Built() time.Time {
	s := built
	if s == "" {
		if t, err := time.Parse(time.RFC3339, setting("vcs.time")); err == nil {
			return t
		}
		return time.Time{}
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(n, 0)
}

// Kubernetes is the version of the Kubernetes API that is spoken.
const Kubernetes = "v1.37.2"

// Git is what the API reports: a version that clients parse as Kubernetes'.
func Git() string { return Kubernetes + "+dunlin." + Version }

// Revision is the commit that the binary was built from, if known.
func Revision() string { return setting("vcs.revision") }

func setting(key string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}

// Platform is os/arch of this build's user space.
func Platform() string { return runtime.GOOS + "/" + runtime.GOARCH }
