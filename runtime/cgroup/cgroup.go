// Package cgroup makes one group per container, with limits, on whatever
// control group hierarchy the machine really has: version 1, version 2, a
// hybrid of both, or none. It reports what is missing and never touches a
// group that it did not make.
package cgroup

import (
	"context"
	"errors"
)

// Mode is the kind of hierarchy in use.
type Mode string

// Modes. Hybrid is version 1 controllers beside a version 2 tree without
// them; its limits are those of version 1.
const (
	V1     Mode = "v1"
	V2     Mode = "v2"
	Hybrid Mode = "hybrid"
	None   Mode = "none"
)

// ErrNone is returned where a group would be needed and there are none.
var ErrNone = errors.New("no usable control groups")

// Facts says what can be enforced here, tested by using it and not by what
// the command line asks for.
type Facts struct {
	Mode   Mode
	Memory bool // memory limits are enforced
	Swap   bool // swap use can be limited
	CPU    bool
	PIDs   bool
	// MemoryReason says, in words for the operator, why Memory is false and
	// which file to edit. Empty when Memory is true.
	MemoryReason string
	// Reason says why Mode is None.
	Reason string
}

// Limits of one group; 0 is "not set".
type Limits struct {
	CPURequestMilli int64
	CPULimitMilli   int64
	MemoryRequest   int64 // bytes, protected where the hierarchy can
	MemoryLimit     int64 // bytes
	PIDs            int64
}

// Stats is a group's usage.
type Stats struct {
	CPUNanos    uint64
	MemoryBytes uint64 // working set: usage without inactive file pages
	PIDs        uint64
	OOMKills    uint64
}

// Group is one control group that Tree made.
type Group interface {
	// Path is relative to the tree's root group.
	Path() string
	// Add moves a process into it.
	Add(pid int) error
	// Set changes limits.
	Set(Limits) error
	Stats() (Stats, error)
	// OOM is what the kernel did to it for memory; zero where nothing is known.
	OOM() OOM
	// Kill sends SIGKILL to all that is in it and waits until it is empty.
	Kill(ctx context.Context) error
	// Remove deletes it and the groups below; its processes must be gone.
	Remove() error
}
