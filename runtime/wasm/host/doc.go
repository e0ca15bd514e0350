// Package host is the program that runs one Wasm guest: what dunlin-wasm and
// the re-executed form of dunlin share. It is started by runtime/wasm with a
// Spec on an inherited descriptor, leads its own session so that it survives
// the agent, owns the guest's output, log rotation and stop deadline, and
// leaves an exit record in its run folder.
//
// Nothing here may import more than it needs: every container pays for it.
package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Sub-commands of the host program.
const (
	CommandRun     = "run"
	CommandCompile = "compile"
)

// argv0 marks a re-executed main program; see MaybeRun.
const argv0 = "dunlin-wasm"

// Names of the files in a run folder.
const (
	// RecordFile is written by the agent before it starts the host.
	RecordFile = "record.json"
	// HostFile is written by the host once it has its Spec: HostRecord.
	HostFile = "host.json"
	// RefusedFile is written by the host when the guest was refused a
	// destination: a list of Refusal.
	RefusedFile = "refused.json"
	// ExitFile is written by the host at the end: ExitRecord.
	ExitFile = "exit.json"
	// MemoryFile is kept by the host while it runs; see MemoryUse.
	MemoryFile = "memory"
	// ControlSocket takes Requests.
	ControlSocket = "ctl"
	// StderrFile is the host program's own standard error.
	StderrFile = "host.err"
)

// Inherited descriptors, in this order.
const (
	fdSpec    = 3 // a pipe to read the Spec from
	fdReply   = 4 // a pipe to write one Reply to
	fdModule  = 5 // the module, opened for reading
	fdRunDir  = 6 // the run folder (run), or the cache folder to fill (compile)
	fdStderr  = 6 // in the foreground, which has no run folder: the guest's standard error; descriptor 2 is the host's own
	fdSockets = 7 // listeners follow
)

// maxSpec bounds what is read as a Spec.
const maxSpec = 4 << 20

// Spec is all that the host knows of its container. It travels over a pipe,
// since the environment may hold secrets.
type Spec struct {
	Name      string     `json:"name"` // for messages: namespace/pod/container
	Digest    string     `json:"digest"`
	Args      []string   `json:"args"` // with argv[0]
	Env       []string   `json:"env"`
	Mounts    []Mount    `json:"mounts"`
	Listeners []Listener `json:"listeners"`
	// Sockets says which listener each inherited socket belongs to; a
	// listener may have several (pod address and host port).
	Sockets []int `json:"sockets"`

	MemoryLimit int64 `json:"memoryLimit"` // bytes, 0 = the module's own maximum

	LogPath     string `json:"logPath"` // empty: guest output goes to our own stdout and stderr
	LogMaxBytes int64  `json:"logMaxBytes"`
	LogMaxFiles int    `json:"logMaxFiles"`

	// StopDeadline, when > 0, ends the guest that long after the last Extend.
	StopDeadline time.Duration `json:"stopDeadline"`

	// CacheDir holds compiled code; empty compiles (or interprets) each time.
	CacheDir string `json:"cacheDir"`
	// CacheSum is the checksum that the compiled code must have.
	CacheSum string `json:"cacheSum"`

	Outbound Outbound `json:"outbound"`

	Sandbox Identity `json:"sandbox"`
	// Stdin makes the guest's standard input a named pipe (StdinPipe) that
	// others may write to.
	Stdin bool `json:"stdin,omitempty"`
	// Foreground keeps stdin, has no control socket and no run folder.
	Foreground bool `json:"foreground"`
}

// Identity is what the process becomes.
type Identity struct {
	UID    int   `json:"uid"` // -1 keeps
	GID    int   `json:"gid"`
	Groups []int `json:"groups"`
	// Data limits private memory (RLIMIT_DATA) where no control group does.
	Data uint64 `json:"data"`
}

// Mount makes a host folder or file visible to the guest.
type Mount struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly"`
}

// Listener is one pre-opened listener of the guest.
type Listener struct {
	Name string `json:"name"`
	Port int32  `json:"port"`
}

// Reply is the host's one answer to its Spec.
type Reply struct {
	Running bool     `json:"running"`
	Reason  string   `json:"reason,omitempty"`  // of a failure
	Message string   `json:"message,omitempty"` // of a failure
	Missing []string `json:"missing,omitempty"` // isolation that this machine cannot give
	// CacheBad says that the compiled code did not verify and was not used.
	CacheBad bool `json:"cacheBad,omitempty"`
}

// HostRecord identifies the host process, so that a recycled pid is never
// taken for it.
type HostRecord struct {
	PID       int       `json:"pid"`
	StartTime uint64    `json:"startTime"` // clock ticks since boot, /proc/PID/stat
	BootID    string    `json:"bootID"`
	StartedAt time.Time `json:"startedAt"`
}

// ExitRecord is how a guest ended.
type ExitRecord struct {
	ExitCode   int       `json:"exitCode"`
	Signal     int       `json:"signal,omitempty"`
	Reason     string    `json:"reason"`
	Message    string    `json:"message,omitempty"`
	FinishedAt time.Time `json:"finishedAt"`
	// MemoryPeak is the largest size of the guest's memory, in bytes.
	MemoryPeak uint64 `json:"memoryPeak,omitempty"`
	LogLost    uint64 `json:"logLost,omitempty"` // bytes of output that could not be written
}

// Request is one line of JSON to the control socket; the answer is one line.
type Request struct {
	Command string        `json:"command"`         // stop, extend
	Grace   time.Duration `json:"grace,omitempty"` // stop: until the kill
	Until   time.Duration `json:"until,omitempty"` // extend: from now
}

// Reasons of a Reply and an ExitRecord.
const (
	ReasonCompleted = "Completed"
	ReasonError     = "Error"
	ReasonTrap      = "Trap"
	ReasonDeadline  = "DeadlineExceeded"
	ReasonStart     = "StartError"
	ReasonNoSpace   = "NoSpace" // of a compilation: says nothing about the module
)

// MessageLimit is the most that a message holds, in bytes.
const MessageLimit = 4 << 10

// errNoSpec says that the agent went away before it sent the Spec.
var errNoSpec = errors.New("no spec was sent")

// ReadSpec decodes a Spec, refusing anything that is not whole.
func ReadSpec(r io.Reader) (Spec, error) {
	var s Spec
	b, err := io.ReadAll(io.LimitReader(r, maxSpec+1))
	if err != nil {
		return s, fmt.Errorf("read spec: %w", err)
	}
	if len(b) == 0 {
		return s, errNoSpec
	}
	if len(b) > maxSpec {
		return s, fmt.Errorf("read spec: more than %d bytes", maxSpec)
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("read spec: %w", err)
	}
	for _, i := range s.Sockets {
		if i < 0 || i >= len(s.Listeners) {
			return s, fmt.Errorf("read spec: socket of listener %d of %d", i, len(s.Listeners))
		}
	}
	return s, nil
}
