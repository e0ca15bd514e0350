// Package feature numbers what the parts of a cluster understand of each
// other. A change of what is written to the Raft log, to snapshots or to the
// wire, which an older build could not read, raises Level by one and is used
// only once the other side is known to have that level: for the state, the
// cluster's feature level, which an administrator raises; on a connection,
// what both sides said in their Hello.
package feature

import "fmt"

// Oldest is the lowest level that is still spoken: that of two releases ago.
const Oldest = max(Level, 3) - 2

// Common is the level at which two builds speak, of which the other one said
// theirs. An error says which of the two must be upgraded.
func Common(theirs uint32, version string) (uint32, error) {
	if theirs < Oldest {
		return 0, &TooOldError{Version: version, Level: theirs, Needed: Oldest}
	}
	return min(Level, theirs), nil
}

// Behind is the error of a server that met a cluster's feature level above its
// own.
func Behind(level uint32) error {
	return fmt.Errorf("the cluster's feature level is %d and this build understands %d: install the version that the other servers run ('dunlin server list' on one of them); the cluster's state is as it was", level, Level)
}

// TooOldError says that a build understands too little.
type TooOldError struct {
	Version string
	Level   uint32 // what it understands
	Needed  uint32
}

// Error implements error.
func (e *TooOldError) Error() string {
	return fmt.Sprintf("%s is too old: it understands feature level %d, and %d is needed", Build(e.Version), e.Level, e.Needed)
}

// Build names a version in a sentence; "" is that of a build that told none.
func Build(version string) string {
	if version == "" {
		return "unknown version"
	}
	return fmt.Sprintf("version %q", version)
}
