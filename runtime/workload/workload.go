// Package workload holds what the node agent and every runtime agree on: the
// description of one container to start, its observed state, and the Runtime
// interface. Implemented by runtime/wasm (and later runtime/oci); the agent
// depends on nothing else of a runtime.
package workload

import (
	"context"
	"io"
	"os"
	"time"
)

// ID names one attempt of one container of one pod on this node. It is also
// the name of the run folder and of the cgroup, so that what survives an
// agent can be adopted by name alone.
type ID struct {
	PodUID    string
	Container string
	Attempt   int // how often this container was started before in this pod
}

// Listener is a socket that the agent opened (in the pod network) and hands
// to the guest, in containerPort order.
type Listener struct {
	Name string // port name, may be empty
	Port int32  // containerPort
	File *os.File
}

// Mount makes a host folder or file visible to the guest.
type Mount struct {
	Source   string // absolute host path, already prepared
	Target   string // absolute guest path
	ReadOnly bool
}

// Resources are one container's. 0 is "not set".
type Resources struct {
	CPURequestMilli int64
	CPULimitMilli   int64
	MemoryRequest   int64 // bytes
	MemoryLimit     int64 // bytes
	PidsLimit       int64
	OOMScoreAdj     int
}

// Identity is what the process runs as; nil UID keeps the runtime's default
// (an unprivileged uid when the agent is root, the agent's own otherwise).
type Identity struct {
	UID, GID *int64
	Groups   []int64
}

// Spec describes one container to start.
type Spec struct {
	ID           ID
	PodNamespace string
	PodName      string
	NodeName     string
	Image        string // as written in the manifest
	Digest       string // what Prepare resolved it to: "sha256:..."
	Command      []string
	Args         []string
	Env          []string // KEY=VALUE, in order, already expanded
	WorkingDir   string
	Mounts       []Mount
	Listeners    []Listener
	Resources    Resources
	Identity     Identity
	Stdin        bool
	TTY          bool
	ReadOnlyRoot bool
	Hostname     string
	// CgroupParent is the pod's cgroup, relative to the agent's root cgroup
	// ("pods/<qos>/<uid>"); the container's cgroup is made below it.
	CgroupParent string
	LogPath      string // CRI format, absolute; rotated files stand beside it
	LogMaxBytes  int64  // of one file
	LogMaxFiles  int
	// StopDeadline, when > 0, stops the workload by itself that long after
	// the last extension (at-most-one pods with a finite deadline), measured
	// on CLOCK_BOOTTIME by the process that survives the agent.
	StopDeadline time.Duration
	Annotations  map[string]string
}

// Phase of a container attempt.
type Phase string

// Phases.
const (
	Created Phase = "created"
	Running Phase = "running"
	Exited  Phase = "exited"
	Unknown Phase = "unknown" // its record is lost or unreadable
)

// State is what is known of one attempt.
type State struct {
	ID         ID
	Phase      Phase
	PID        int
	StartedAt  time.Time
	FinishedAt time.Time
	ExitCode   int
	Signal     int
	// Reason is a CamelCase word for the pod's status: Completed, Error,
	// OOMKilled, Trap, DeadlineExceeded, StartError, HostLost.
	Reason string
	// Message is for people: trap cause and function names, missing imports,
	// last stderr lines. At most 4 KiB.
	Message string
	Digest  string
	LogPath string
}

// ImageState is the outcome of Prepare.
type ImageState struct {
	Digest string
	Size   int64
}

// Progress reports a slow Prepare (pull, compile); may be nil.
type Progress func(message string)

// Runtime starts and watches containers. All methods are idempotent, safe to
// call again after a crash at any point, and safe for concurrent use on
// different IDs.
type Runtime interface {
	// Name is the RuntimeClass handler: "wazero".
	Name() string
	// Prepare makes the image usable offline: fetched or imported, verified by
	// digest, compiled. policy is the pod's imagePullPolicy.
	// A *StartError tells why in the user's words.
	Prepare(ctx context.Context, image, policy string, progress Progress) (ImageState, error)
	// Start starts the attempt, unless it already exists (then it is adopted).
	// It takes over Listeners' files: they are closed in the agent on return.
	Start(ctx context.Context, s Spec) (State, error)
	// State reads one attempt; ok is false when nothing is known of it.
	State(ctx context.Context, id ID) (st State, ok bool, err error)
	// Stop asks it to end (a Wasm guest: listeners closed to new connections,
	// stdin ended) and kills it after grace. Returns when it has ended.
	Stop(ctx context.Context, id ID, grace time.Duration) error
	// Kill ends it now.
	Kill(ctx context.Context, id ID) error
	// Remove deletes what is left of an ended attempt (run folder, cgroup),
	// but not its log.
	Remove(ctx context.Context, id ID) error
	// List returns every attempt that exists on this machine, from disk.
	List(ctx context.Context) ([]State, error)
	// Exits delivers hints that an attempt ended: read State again.
	Exits() <-chan ID
	// Close stops watching; workloads go on.
	Close() error
}

// Extender is the optional ability to move stop deadlines.
type Extender interface {
	Extend(ctx context.Context, id ID, until time.Duration) error
}

// Execer is the optional ability to run another command beside a container.
type Execer interface {
	Exec(ctx context.Context, id ID, command []string, stdin io.Reader, stdout, stderr io.Writer) (exitCode int, err error)
}

// StatsReader is the optional ability to read an attempt's usage.
type StatsReader interface {
	Stats(ctx context.Context, id ID) (Stats, error)
}

// Stats is resource usage of one attempt.
type Stats struct {
	CPUNanos    uint64 // cumulative
	MemoryBytes uint64 // working set
	PIDs        uint64
}

// StartError is a failure to prepare or start that has a name for the pod's
// status and a hint for its owner.
type StartError struct {
	Reason  string // ErrImageNeverPull, InvalidModule, ImagePullBackOff, CreateContainerError, ...
	Message string
	Hint    string
	Fatal   bool // trying again cannot help until the spec changes
	Err     error
}

// Error implements error.
func (e *StartError) Error() string {
	s := e.Message
	if s == "" && e.Err != nil {
		s = e.Err.Error()
	}
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// Unwrap gives the cause.
func (e *StartError) Unwrap() error { return e.Err }
