// Package workload holds what the node agent and every runtime agree on: the
// description of one container to start, its observed state, and the Runtime
// interface. Implemented by runtime/wasm (and later runtime/oci); the agent
// depends on nothing else of a runtime.
package workload

import (
	"context"
	"crypto"
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
	// Recursive applies ReadOnly to what is mounted below Source, too.
	Recursive bool
	// Propagation of mounts made below it later: "" (none), "rslave" (from the
	// host), "rshared" (both ways).
	Propagation string
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

// Security is what a container may do. A Wasm guest can do none of it, and
// its runtime ignores this.
type Security struct {
	Privileged bool
	// Capabilities by their names without "CAP_"; "ALL" is all.
	AddCapabilities, DropCapabilities []string
	NoNewPrivileges                   bool
	RunAsNonRoot                      bool // refuse to start as uid 0
	// Seccomp is "" or "RuntimeDefault" for the runtime's profile,
	// "Unconfined", or the absolute path of a profile on the node.
	Seccomp string
	// ProcUnmasked shows all of /proc.
	ProcUnmasked bool
	Sysctls      map[string]string
	// StrictGroups ignores the groups that the image gives the user.
	StrictGroups bool
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
	Security     Security
	// Namespace is the network namespace's path; empty is the host's network.
	// A Wasm guest has no use for it.
	Namespace string
	Stdin     bool
	// StdinOnce closes standard input when the first client that attached
	// leaves.
	StdinOnce    bool
	TTY          bool
	ReadOnlyRoot bool
	Hostname     string
	// StopSignal ("SIGTERM") that asks it to end; empty is the image's.
	StopSignal string
	// TerminationPath is a file in the container whose content becomes the
	// State's Message; empty is none. TerminationFallback takes the end of the
	// log when the file is empty and the container failed.
	TerminationPath     string
	TerminationFallback bool
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
	// StopGrace is what it then gets between being asked to end and its end; a
	// Wasm guest gets none.
	StopGrace time.Duration
	// Outbound is what a Wasm guest may connect to (annotation
	// dunlin.dev/outbound); containers have a network of their own.
	Outbound    Outbound
	Annotations map[string]string
}

// Outbound is a guest's way out.
type Outbound struct {
	Allow  string   // the annotation; "" is nothing
	DNS    []string // servers, ip:port
	Search []string // domains in which short names are looked for
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
	// Refused are the destinations that a guest asked for and may not reach.
	Refused []Refusal
}

// Refusal is a destination, why it is refused, and the entry of the annotation
// dunlin.dev/outbound that would allow it.
type Refusal struct{ What, Why, Entry string }

// ImageRequest asks for an image on behalf of a pod.
type ImageRequest struct {
	Image        string // as written in the manifest
	Policy       string // the pod's imagePullPolicy: Always, IfNotPresent, Never
	PodNamespace string
	// Credentials are the pod's imagePullSecrets, in order; those that match
	// the registry are tried one after the other.
	Credentials []RegistryCredential
	// SignedBy are the keys of which one must have signed it; none is no demand.
	SignedBy []crypto.PublicKey
}

// RegistryCredential is what one entry of a pull secret says.
type RegistryCredential struct {
	Registry string // "registry.example:5000", or with the beginning of a path
	Username string
	Password string
	Token    string // an identity token instead of a password
}

// ImageState is the outcome of Prepare.
type ImageState struct {
	Digest string
	Size   int64
}

// Progress reports a slow Prepare (pull, compile); may be nil.
type Progress func(message string)

// Words that Progress messages are, or begin with.
const (
	// Compiling is told before a module is compiled.
	Compiling = "compiling"
	// Pulling begins what is told while an image is on its way.
	Pulling = "pulling: "
	// Kept begins what is told when the registry could not be asked whether a
	// tag has moved, and what is here is used.
	Kept = "kept: "
)

// Runtime starts and watches containers. All methods are idempotent, safe to
// call again after a crash at any point, and safe for concurrent use on
// different IDs.
type Runtime interface {
	// Name is the RuntimeClass handler: "wazero".
	Name() string
	// Prepare makes the image usable offline: fetched or imported, verified by
	// digest, compiled or unpacked. A *StartError tells why in the user's words.
	Prepare(ctx context.Context, r ImageRequest, progress Progress) (ImageState, error)
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

// PodRemover is the optional ability of a runtime whose containers share more
// than their network.
type PodRemover interface {
	// RemovePod deletes what the containers of a pod shared, once none is left.
	RemovePod(ctx context.Context, podUID string) error
}

// Size of a terminal, in characters.
type Size struct {
	Width, Height uint16
}

// Streams are the ends of a process's input and output; nil ones are not
// used. With TTY there is no Stderr.
type Streams struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	TTY            bool
	Resize         <-chan Size // closed at the end, may be nil
}

// Execer is the optional ability to run another command beside a container.
type Execer interface {
	// Exec returns when the command has ended and its output is written, or
	// kills it when ctx ends.
	Exec(ctx context.Context, id ID, command []string, io Streams) (exitCode int, err error)
}

// Attacher is the optional ability to join a container's own input and
// output, from now on.
type Attacher interface {
	// Attach returns when the container ended or ctx does.
	Attach(ctx context.Context, id ID, io Streams) error
}

// Inputter is the optional ability to write to a container's standard input.
// A runtime that has it and is no Attacher is attached to by way of its log.
type Inputter interface {
	// Input fails when the container was started without Stdin, or is gone.
	Input(ctx context.Context, id ID) (io.WriteCloser, error)
}

// ImageCounter is the optional ability to tell what a runtime's images take.
type ImageCounter interface {
	Images() (ImageUsage, error)
}

// ImageUsage is what a runtime's images take on this node.
type ImageUsage struct {
	Images        int
	Bytes         int64
	CompiledBytes int64 // machine code made of them
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
	// Ended: the container was made, and could not be started for a reason of
	// its own. That is an attempt which ended, as for upstream (StartError).
	Ended bool
	// RetryAfter is how long whoever refused asks to wait; 0 is not said.
	RetryAfter time.Duration
	Err        error
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
