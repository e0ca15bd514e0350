package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// Engine compiles and runs one module. A second engine is an addition.
type Engine interface {
	// Compile fills dir with machine code of the module. A nil error with
	// nothing written is right for an engine that interprets.
	Compile(ctx context.Context, module []byte, dir string) error
	// Load makes the module ready to run, from compiled code in g.CacheDir
	// where there is some.
	Load(ctx context.Context, g *Guest) (Program, error)
}

// Program is one loaded guest.
type Program interface {
	// Run runs it to its end.
	Run(ctx context.Context) Outcome
	// Drain refuses new connections to its listeners. Safe to call while Run
	// runs.
	Drain()
}

// Guest is everything that a module gets.
type Guest struct {
	Module      []byte
	Args        []string
	Env         []string // KEY=VALUE
	Mounts      []preopen
	Listeners   []Listener
	Sockets     [][]int // host descriptors of each listener
	Outbound    Outbound
	Refused     func([]Refusal) // hears of destinations that are refused; may be nil
	Stdin       *os.File
	Stdout      io.Writer
	Stderr      io.Writer
	MemoryLimit uint64 // bytes, 0 = none
	// Record hears what there is to say of its memory; may be nil.
	Record   *memoryRecord
	CacheDir string
}

// Outcome is how a guest ended.
type Outcome struct {
	ExitCode   int
	Trap       string // cause and function names; empty when it exited
	MemoryPeak uint64
	// MemoryRefused says that the guest wanted more memory than its limit.
	MemoryRefused bool
}

// trapExitCode is what a trapped guest ends with: SIGABRT of a native
// program, as other Wasm runtimes have it.
const trapExitCode = 134

// errNoMemory says that the system refused what the module starts with.
var errNoMemory = errors.New("the system refused the module's initial memory (is the memory limit too small for the host process itself?)")

// errMinimumMemory says that a module cannot even start below its limit.
var errMinimumMemory = errors.New("the module's initial memory is larger than its memory limit")

// maxFrames of a trap are named.
const maxFrames = 12

// explainTrap makes one line of wazero's error: the cause, then the function
// names from the innermost out.
func explainTrap(err error) string {
	text := err.Error()
	cause, trace, _ := strings.Cut(text, "\nwasm stack trace:")
	if i := strings.Index(cause, "wasm error: "); i >= 0 && strings.HasPrefix(cause, "start function[") {
		cause = cause[i:] // it traps while it is instantiated
	}
	cause = strings.TrimPrefix(strings.TrimSpace(firstLine(cause)), "wasm error: ")
	cause = strings.TrimSuffix(cause, " (recovered by wazero)")
	var names []string
	more := 0
	for _, line := range strings.Split(trace, "\n") {
		line = strings.TrimSpace(line)
		name, _, ok := strings.Cut(line, "(")
		if !ok || strings.HasPrefix(line, "0x") || strings.HasPrefix(line, "...") {
			continue
		}
		name = strings.TrimPrefix(name, ".")
		if len(names) == maxFrames {
			more++
			continue
		}
		names = append(names, name)
	}
	if len(names) == 0 {
		return cause
	}
	s := fmt.Sprintf("%s in %s", cause, strings.Join(names, " <- "))
	if more > 0 {
		s += fmt.Sprintf(" <- %d more", more)
	}
	return s
}

func firstLine(s string) string {
	l, _, _ := strings.Cut(s, "\n")
	return l
}

// listenEnv tells a guest which descriptors its listeners have.
func listenEnv(mounts int, listeners []Listener) []string {
	if len(listeners) == 0 {
		return nil
	}
	names := make([]string, len(listeners))
	for i, l := range listeners {
		names[i] = l.Name
	}
	return []string{
		fmt.Sprintf("LISTEN_FDS=%d", len(listeners)),
		"LISTEN_FDNAMES=" + strings.Join(names, ":"),
		fmt.Sprintf("DUNLIN_LISTEN_FD=%d", 3+mounts),
	}
}
