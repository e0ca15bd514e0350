// Package wasm runs WebAssembly modules (WASI preview 1) as containers: a
// content-addressed module store, a cache of compiled code, and one host
// process per container that survives the agent and is adopted after it.
package wasm

import (
	"context"
	"log/slog"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Handler is the RuntimeClass handler of this runtime.
const Handler = "wazero"

// Config of a Runtime.
type Config struct {
	// StateDir keeps modules and compiled code ("/var/lib/dunlin/wasm").
	StateDir string
	// RunDir keeps one folder per container attempt ("/run/dunlin/wasm"). It
	// should not survive a reboot.
	RunDir string
	// HostBinary is the program that runs guests; empty looks for dunlin-wasm
	// beside the running program and else re-executes the program itself,
	// whose main must call host.MaybeRun first.
	HostBinary string
	// Cgroups is where containers are limited; nil means no control groups.
	Cgroups *cgroup.Tree
	// Fetcher gets modules that no file or imported name stands for; nil
	// refuses them.
	Fetcher Fetcher
	// MaxModuleBytes bounds one module; 0 is 256 MiB.
	MaxModuleBytes int64
	// CacheBytes bounds the compiled code on disk; 0 is 1 GiB.
	CacheBytes int64
	// BaseUID is where the unprivileged uids of pods begin when the agent is
	// root; 0 is 1,000,000,000. One million from there on are used.
	BaseUID int
	Logger  *slog.Logger
}

// Fetcher gets modules from registries; implemented by images.Puller.
type Fetcher interface {
	// Module makes the module that the request's image names available, by its
	// pull policy. Errors are *workload.StartError.
	Module(ctx context.Context, req workload.ImageRequest, progress workload.Progress) (images.Module, error)
}
