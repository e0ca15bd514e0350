// Package version names this build.
package version

import (
	"runtime"
	"runtime/debug"
)

// Version is set by the Makefile with -ldflags; "dev" otherwise.
var Version = "dev"

// Kubernetes is the version of the Kubernetes API that is spoken.
const Kubernetes = "v1.37.2"

// Git is what the API reports: a version that clients parse as Kubernetes'.
func Git() string { return Kubernetes + "+dunlin." + Version }

// Revision is the commit that the binary was built from, if known.
func Revision() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return ""
}

// Platform is os/arch of this build's user space.
func Platform() string { return runtime.GOOS + "/" + runtime.GOARCH }
