package consensus

import "errors"

// What Open refuses with; each wrapped in one line that names the file and
// what to do.
var (
	// ErrLocked: another process holds the state folder.
	ErrLocked = errors.New("state folder is in use")
	// ErrNewerVersion: a newer version wrote the folder.
	ErrNewerVersion = errors.New("written by a newer version: upgrade dunlin")
	// ErrOtherCluster: the folder belongs to another cluster.
	ErrOtherCluster = errors.New("state folder of another cluster")
	// ErrDamaged: what is left is not enough to go on without losing what
	// was acknowledged, and no good copy replaces it.
	ErrDamaged = errors.New("state folder is damaged")
	// ErrImageDamaged: a saved snapshot is not what was written; no folder is.
	ErrImageDamaged = errors.New("the file is damaged")
	// ErrNoImage: a file is something else than a saved snapshot.
	ErrNoImage = errors.New("it is no snapshot of dunlin's")
	// ErrClosed: the Node was closed.
	ErrClosed = errors.New("consensus: closed")
	// ErrHalted: the log holds what this version does not understand.
	ErrHalted = errors.New("consensus: halted")
)
