// Package oci runs OCI containers without a daemon: a bundle (runtime-spec)
// on an overlay of the image's layers, runc or crun to create it, and one
// conmon per container, which owns its output and its exit code and survives
// the agent.
package oci

import (
	"context"
	"errors"
	"log/slog"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Handler is the RuntimeClass handler of this runtime, that of the class oci.
// crun is called as runc is, so it is the same handler.
const Handler = "runc"

// Images are the images of this node; implemented by images.Puller.
type Images interface {
	// Image makes the image that a pod asks for available.
	Image(ctx context.Context, req workload.ImageRequest, progress workload.Progress) (*images.Image, error)
	// Lookup returns an image that is here, unpacked and verified.
	Lookup(ctx context.Context, name, digest string) (*images.Image, error)
}

// Config of a Runtime.
type Config struct {
	// StateDir keeps what containers write ("/var/lib/dunlin/oci").
	StateDir string
	// RunDir keeps one folder per container attempt ("/run/dunlin/oci"). It
	// should not survive a reboot.
	RunDir string
	// Images are required.
	Images Images
	// Cgroups is required: an OCI runtime always makes groups.
	Cgroups *cgroup.Tree
	// Programs as Find found them.
	Programs Programs
	// ProfileDir holds seccomp profiles of type Localhost.
	ProfileDir string
	// Host is the Wasm host program, which also is the watchdog of containers
	// with a stop deadline; empty is none.
	Host   string
	Logger *slog.Logger
}

// Reasons of ended containers.
const (
	reasonCompleted = "Completed"
	reasonError     = "Error"
	reasonOOM       = "OOMKilled"
	reasonHostLost  = "HostLost"
	reasonMonitor   = "MonitorLost"
	reasonStart     = "StartError"
	reasonDeadline  = "DeadlineExceeded"
)

var errNotRunning = errors.New("the container is not running")
