package host

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"runtime/metrics"
	"strings"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"github.com/tetratelabs/wazero/experimental/sysfs"
	wsys "github.com/tetratelabs/wazero/sys"
	"golang.org/x/sys/unix"
)

// Version names the engine in cache keys.
const Version = "wazero-1.12.0"

// Wazero is the engine: a compiler on amd64 and arm64, an interpreter
// elsewhere.
type Wazero struct{}

// config is the one place that chooses the engine's options. Not
// NewRuntimeConfigCompiler, which panics on arm and riscv64. No
// WithCloseOnContextDone: a guest is stopped by ending its process.
func (Wazero) config() wazero.RuntimeConfig {
	return wazero.NewRuntimeConfig().
		WithCoreFeatures(api.CoreFeaturesV2 | experimental.CoreFeaturesTailCall | experimental.CoreFeaturesExtendedConst).
		WithDebugInfoEnabled(false) // DWARF would be held in memory; function names come from the name section
}

// Compile implements Engine.
func (e Wazero) Compile(ctx context.Context, module []byte, dir string) error {
	cache, err := wazero.NewCompilationCacheWithDir(dir)
	if err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	r := wazero.NewRuntimeWithConfig(ctx, e.config().WithCompilationCache(cache))
	guest, err := r.CompileModule(experimental.WithCompilationWorkers(ctx, 1), module)
	if err == nil {
		err = errors.Join(checkImports(ctx, r, guest), checkStart(guest))
	}
	return errors.Join(err, r.Close(ctx), cache.Close(ctx))
}

// checkStart refuses an entry point that nobody can call.
func checkStart(guest wazero.CompiledModule) error {
	f, ok := guest.ExportedFunctions()["_start"]
	switch {
	case !ok:
		return errors.New("no _start function is exported")
	case len(f.ParamTypes())+len(f.ResultTypes()) > 0:
		return fmt.Errorf("its _start is %s, a program's takes and returns nothing", signature(f))
	}
	return nil
}

// program is a loaded module.
type program struct {
	mod         api.Module // nil: Run instantiates it
	instantiate func(context.Context) (api.Module, error)
	memory      *memoryLimit
	sockets     *sockets
	limit       uint64 // Guest.MemoryLimit
	record      *memoryRecord
}

// stackOverflow is how explainTrap words wazero's ErrRuntimeStackOverflow.
const stackOverflow = "stack overflow"

// Load implements Engine.
func (e Wazero) Load(ctx context.Context, g *Guest) (_ Program, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("load module: %v", v)
		}
	}()
	cfg := e.config()
	if g.CacheDir != "" {
		cache, err := wazero.NewCompilationCacheWithDir(g.CacheDir)
		if err != nil {
			return nil, fmt.Errorf("compiled code: %w", err)
		}
		cfg = cfg.WithCompilationCache(cache)
	}
	r := wazero.NewRuntimeWithConfig(ctx, cfg)
	compiled, err := r.CompileModule(ctx, g.Module)
	if err != nil {
		return nil, fmt.Errorf("load module: %w", err)
	}
	if err := checkStart(compiled); err != nil {
		return nil, fmt.Errorf("load module: %w", err)
	}
	s := newSockets()
	first := int32(3 + len(g.Mounts))
	for i, fds := range g.Sockets {
		s.listeners[first+int32(i)] = &listener{set: s, fds: fds}
	}
	if connects(compiled) {
		s.hidden = first + int32(len(g.Sockets))
	}
	table, err := newWASITable(ctx, r)
	if err != nil {
		return nil, err
	}
	fdstat, pathOpen := table.original("fd_fdstat_get"), table.original("path_open")
	s.override(table)
	stdin := -1
	if g.Stdin != nil {
		stdin = int(g.Stdin.Fd())
	}
	poll := &poller{sockets: s, stdin: stdin, known: knownBy(fdstat)}
	table.replace("poll_oneoff", poll.oneoff)
	d := &dialer{s: s, folder: s.hidden, open: pathOpen, table: table}
	if d.gate, err = newGate(g.Outbound, g.Stderr); err != nil {
		return nil, err
	}
	d.gate.note = g.Refused
	if err := table.instantiate(ctx, r, compiled, (&collector{}).tick, d.function); err != nil {
		return nil, err
	}
	record := g.Record
	if record == nil {
		record = &memoryRecord{}
	}
	mem := &memoryLimit{limit: g.MemoryLimit, peak: &record.peak}
	if mem.limit == 0 {
		mem.limit = math.MaxUint32 + 1
	}
	p := &program{memory: mem, sockets: s, limit: g.MemoryLimit, record: record, instantiate: func(ctx context.Context) (mod api.Module, err error) {
		defer func() {
			if v := recover(); v != nil {
				if v == errMinimumMemory { //nolint:errorlint // identity of a panic value
					err = fmt.Errorf("%w of %s", errMinimumMemory, bytesText(g.MemoryLimit))
					return
				}
				err = fmt.Errorf("load module: %v", v)
			}
		}()
		return r.InstantiateModule(experimental.WithMemoryAllocator(ctx, mem), compiled, moduleConfig(g, s))
	}}
	if hasStartSection(g.Module) {
		return p, nil // its code runs while it is instantiated: that is the guest, not the loading
	}
	if p.mod, err = p.instantiate(ctx); err != nil {
		return nil, fmt.Errorf("load module: %w", err)
	}
	return p, nil
}

// hasStartSection says whether a valid module has a function that runs when it
// is instantiated, before _start (section 8 of the binary format).
func hasStartSection(module []byte) bool {
	for b := module[min(8, len(module)):]; len(b) > 1; {
		size, n := binary.Uvarint(b[1:])
		switch rest := b[1+max(n, 0):]; {
		case n <= 0 || size > uint64(len(rest)):
			return false
		case b[0] == 8:
			return true
		default:
			b = rest[size:]
		}
	}
	return false
}

// moduleConfig is the one constructor of what a guest sees of the world: the
// real clocks and sleep, real randomness, its output, its files, its
// listeners. wazero's own defaults are a clock that stands in 2022, a sleep
// that returns at once and the same random bytes every time.
func moduleConfig(g *Guest, s *sockets) wazero.ModuleConfig {
	files := wazero.NewFSConfig()
	for _, m := range g.Mounts {
		files = files.(sysfs.FSConfig).WithSysFSMount(m.fs, m.path)
	}
	for i := range g.Sockets {
		l := s.listeners[int32(3+len(g.Mounts)+i)]
		files = files.(sysfs.FSConfig).WithSysFSMount(l, fmt.Sprintf("/.listener/%d", i))
	}
	if s.hidden >= 0 { // the last one, so that no other descriptor moves
		files = files.(sysfs.FSConfig).WithSysFSMount(&dialFolder{set: s}, "/.outbound")
	}
	c := wazero.NewModuleConfig().
		WithName("").
		WithStartFunctions(). // run later, once the agent knows that we are there
		WithArgs(g.Args...).
		WithFSConfig(files).
		WithStdout(g.Stdout).
		WithStderr(g.Stderr).
		WithRandSource(rand.Reader).
		WithWalltime(walltime, 1).
		WithNanotime(nanotime, 1).
		WithNanosleep(func(ns int64) { time.Sleep(time.Duration(ns)) }). //nolint:forbidigo // it is the guest's own sleep
		WithOsyield(runtime.Gosched)
	if g.Stdin != nil {
		c = c.WithStdin(g.Stdin)
	}
	seen := map[string]bool{}
	env := append(append([]string{}, g.Env...), listenEnv(len(g.Mounts), g.Listeners)...)
	for i := len(env) - 1; i >= 0; i-- { // the last one of a name counts
		k, v, _ := strings.Cut(env[i], "=")
		if k == "" || seen[k] || strings.ContainsRune(env[i], 0) {
			continue
		}
		seen[k] = true
		c = c.WithEnv(k, v)
	}
	return c
}

func walltime() (int64, int32) {
	t := time.Now()
	return t.Unix(), int32(t.Nanosecond())
}

func nanotime() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return time.Now().UnixNano()
	}
	return ts.Nano()
}

// Run implements Program.
func (p *program) Run(ctx context.Context) Outcome {
	var err error
	if p.mod == nil {
		p.mod, err = p.instantiate(ctx)
	}
	var bound uint64
	if err == nil {
		start := p.mod.ExportedFunction("_start")
		if b := stackBound(p.limit, p.record.base.Load(), p.record.peak.Load()); boundStack(start, b) {
			bound = b
		}
		p.record.stack.Store(bound)
		_, err = start.Call(ctx)
	}
	o := Outcome{MemoryPeak: p.memory.peak.Load(), MemoryRefused: p.memory.refused.Load() > 0}
	var exit *wsys.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit):
		o.ExitCode = int(exit.ExitCode() & 0xff)
	default:
		o.ExitCode = trapExitCode
		if o.Trap = explainTrap(err); o.Trap == stackOverflow {
			o.Trap = overflowText(o.Trap, bound, p.limit)
		}
	}
	return o
}

// Drain implements Program.
func (p *program) Drain() { p.sockets.drain() }

// knownBy says whether a descriptor is open by asking WASI itself, which
// wants 24 bytes of the guest's memory for its answer: the last ones, which
// then get back what they held.
func knownBy(fdstat api.GoModuleFunction) func(context.Context, api.Module, int32) bool {
	var keep [24]byte
	return func(ctx context.Context, mod api.Module, fd int32) bool {
		at := mod.Memory().Size() - 24 // also right for 4 GiB, whose size reads as 0
		b, ok := mod.Memory().Read(at, 24)
		if !ok {
			return true // no memory at all
		}
		copy(keep[:], b)
		stack := [2]uint64{uint64(uint32(fd)), uint64(at)}
		fdstat.Call(ctx, mod, stack[:])
		copy(b, keep[:])
		return stack[0] == 0
	}
}

// collector runs the garbage collector on the guest's own goroutine, inside
// its calls to WASI. The collector must stop all goroutines, and one that is
// in the guest's machine code cannot be stopped: with the collector left to
// itself, a guest in a tight loop would freeze the whole process, stop
// deadline and all.
type collector struct {
	calls  int
	target uint64
	sample []metrics.Sample
}

const (
	collectEvery = 256     // calls between looks at the heap
	collectFloor = 4 << 20 // bytes of heap that are not worth a collection
)

func (c *collector) tick() {
	c.calls++
	if c.calls%collectEvery != 0 {
		return
	}
	heap := c.heap()
	if c.target == 0 {
		c.target = heap + collectFloor
	}
	if heap < c.target {
		return
	}
	runtime.GC()
	c.target = 2*c.heap() + collectFloor
}

func (c *collector) heap() uint64 {
	if c.sample == nil {
		c.sample = newHeapSample()
	}
	metrics.Read(c.sample)
	return c.sample[0].Value.Uint64()
}

func newHeapSample() []metrics.Sample {
	return []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
}

func heapBytes() uint64 {
	s := newHeapSample()
	metrics.Read(s)
	return s[0].Value.Uint64()
}

func bytesText(n uint64) string {
	switch {
	case n >= 1<<30 && n%(1<<30) == 0:
		return fmt.Sprintf("%dGi", n>>30)
	case n >= 1<<20:
		return fmt.Sprintf("%.4gMi", float64(n)/(1<<20))
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%dKi", n>>10)
	}
	return fmt.Sprintf("%d bytes", n)
}
