package wasm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/cpu"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/scratch"
	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Limits of a compilation, in the child that does it.
const (
	compileTimeout = 5 * time.Minute
	compileMemory  = 1 << 30
)

// cache keeps machine code by module, engine and CPU. It is never needed to
// start a guest: what does not verify is removed and made again.
type cache struct {
	dir      string
	maxBytes int64
	binary   string
	uid      int // of the compiling child, -1 keeps
	log      *slog.Logger
	turn     chan struct{} // one compilation at a time: it takes a core and much memory
}

// cacheEntry verifies and sizes one entry.
type cacheEntry struct {
	Digest string `json:"digest"`
	Sum    string `json:"sum"`
	Size   int64  `json:"size"`
}

// compiled is machine code that a host may use; the zero value is "none".
type compiled struct {
	dir, sum string
}

func newCache(dir string, maxBytes int64, binary string, uid int, log *slog.Logger) (*cache, error) {
	if maxBytes <= 0 {
		maxBytes = 1 << 30
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("compile cache: %w", err)
	}
	scratch.Sweep(dir, compiling)
	return &cache{dir: dir, maxBytes: maxBytes, binary: binary, uid: uid, log: log, turn: make(chan struct{}, 1)}, nil
}

// compiling is the name of code that is still being made.
const compiling = ".new-*"

// interpreted says that there is no machine code on this architecture.
func interpreted() bool { return runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" }

// key names an entry: machine code is good for one module, engine, and set
// of CPU features, since a card may move to another board.
func key(digest string) string {
	h := sha256.New()
	_, _ = fmt.Fprintf(h, "%s|%s|%s|%v|%v", digest, host.Version, runtime.GOARCH, cpu.X86, cpu.ARM64)
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// lookup returns the code of a module, if it is there.
func (c *cache) lookup(digest string) (compiled, bool) {
	dir := filepath.Join(c.dir, key(digest))
	b, err := atomicfile.Read(filepath.Join(dir, "entry.json"))
	var e cacheEntry
	if err == nil {
		err = json.Unmarshal(b, &e)
	}
	if err == nil && e.Digest != digest {
		err = fmt.Errorf("entry is of %s", e.Digest)
	}
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			c.log.Warn("compiled code removed", "digest", digest, "err", err)
		}
		_ = os.RemoveAll(dir)
		return compiled{}, false
	}
	now := time.Now()
	if st, err := os.Stat(dir); err == nil && now.Sub(st.ModTime()) > 24*time.Hour {
		_ = os.Chtimes(dir, now, now) // used lately, at the price of one write a day
	}
	return compiled{dir: filepath.Join(dir, "code"), sum: e.Sum}, true
}

// drop removes the code of a module.
func (c *cache) drop(digest string) { _ = os.RemoveAll(filepath.Join(c.dir, key(digest))) }

// ensure compiles the module if its code is not there. module is read from
// its beginning.
func (c *cache) ensure(ctx context.Context, digest string, open func() (*os.File, error), progress workload.Progress) (compiled, error) {
	if interpreted() {
		return compiled{}, nil
	}
	if got, ok := c.lookup(digest); ok {
		return got, nil
	}
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return compiled{}, fmt.Errorf("compile: %w", context.Cause(ctx))
	}
	defer func() { <-c.turn }()
	if got, ok := c.lookup(digest); ok {
		return got, nil
	}
	if progress != nil {
		progress(workload.Compiling)
	}
	start := time.Now()
	if err := c.compile(ctx, digest, open); err != nil {
		return compiled{}, err
	}
	c.log.Info("module compiled", "digest", digest, "took", time.Since(start).Round(time.Millisecond))
	c.evict(digest)
	got, _ := c.lookup(digest)
	return got, nil
}

func (c *cache) compile(ctx context.Context, digest string, open func() (*os.File, error)) (err error) {
	scratch.Sweep(c.dir, compiling)
	tmp, release, err := scratch.Folder(c.dir, compiling)
	if err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	defer release()
	defer func() {
		if err != nil {
			_ = os.RemoveAll(tmp)
		}
	}()
	code := filepath.Join(tmp, "code")
	if err := os.Mkdir(code, 0o700); err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	if c.uid >= 0 {
		if err := os.Chown(code, c.uid, c.uid); err != nil {
			return fmt.Errorf("compile: %w", err)
		}
	}
	if err := c.runChild(ctx, code, tmp, open); err != nil {
		return err
	}
	size, err := seal(code)
	if err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	sum, err := host.SumDir(code)
	if err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	b, err := json.Marshal(cacheEntry{Digest: digest, Sum: sum, Size: size})
	if err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	if err := atomicfile.Write(filepath.Join(tmp, "entry.json"), b, 0o644); err != nil {
		return err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	to := filepath.Join(c.dir, key(digest))
	_ = os.RemoveAll(to)
	if err := os.Rename(tmp, to); err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	return atomicfile.SyncDir(c.dir)
}

// runChild compiles in a process that a bad module may take down.
func (c *cache) runChild(ctx context.Context, code, tmp string, open func() (*os.File, error)) error {
	module, err := open()
	if err != nil {
		return err
	}
	defer func() { _ = module.Close() }()
	dir, err := os.Open(code)
	if err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	defer func() { _ = dir.Close() }()
	stderrPath := filepath.Join(tmp, "stderr")
	stderr, err := os.Create(stderrPath)
	if err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	defer func() {
		_ = stderr.Close()
		_ = os.Remove(stderrPath)
	}()
	outer := ctx
	ctx, cancel := context.WithTimeoutCause(ctx, compileTimeout, fmt.Errorf("compiling took longer than %s", compileTimeout))
	defer cancel()
	p, err := spawn(c.binary, host.CommandCompile, module, dir, stderr, nil, nil)
	if err != nil {
		return err
	}
	oomScore(p.pid, compilerScore)
	reply, err := p.send(ctx, host.Spec{Sandbox: host.Identity{UID: c.uid, GID: c.uid, Data: compileMemory}})
	ws := killChild(p.pid)
	if err != nil {
		if outer.Err() != nil { // says nothing about the module
			return fmt.Errorf("compile: %w", context.Cause(outer))
		}
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		why := firstLines(stderrPath, 512)
		if strings.Contains(why, "out of memory") || strings.Contains(why, "cannot allocate") {
			why = fmt.Sprintf("it needs more than %d MiB of memory", compileMemory>>20)
		}
		return &workload.StartError{Reason: ReasonInvalidModule, Err: err,
			Message: strings.TrimSpace(fmt.Sprintf("the module could not be compiled: %v (%s) %s", err, describe(ws), why))}
	}
	if reply.Reason == host.ReasonNoSpace {
		return fmt.Errorf("compile: the disk is full, and the compiled module does not fit into %s: %w", c.dir, unix.ENOSPC)
	}
	if !reply.Running {
		return &workload.StartError{Reason: ReasonInvalidModule, Message: "the module is not valid: " + strings.TrimPrefix(reply.Message, "compile: ")}
	}
	return nil
}

// seal takes the files back from the uid that compiled: no guest may change
// what another will execute.
func seal(dir string) (size int64, err error) {
	root := os.Geteuid() == 0
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !d.IsDir() && !d.Type().IsRegular() {
			return fmt.Errorf("%s is neither a file nor a folder", path)
		}
		if root {
			if err := os.Lchown(path, 0, 0); err != nil {
				return err
			}
		}
		if d.IsDir() {
			return os.Chmod(path, 0o755)
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		size += st.Size()
		return os.Chmod(path, 0o644)
	})
	return size, err
}

// evict removes what was not used for longest until the cap holds; never
// keep. Running guests do not need the files.
func (c *cache) evict(keep string) {
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return
	}
	type entry struct {
		path string
		size int64
		used time.Time
	}
	var all []entry
	var total int64
	for _, d := range entries {
		if _, err := hex.DecodeString(d.Name()); err != nil || len(d.Name()) != len(key("")) || !d.IsDir() {
			continue // not ours
		}
		path := filepath.Join(c.dir, d.Name())
		st, err := os.Stat(path)
		var e cacheEntry
		b, rerr := atomicfile.Read(filepath.Join(path, "entry.json"))
		if err != nil || rerr != nil || json.Unmarshal(b, &e) != nil {
			_ = os.RemoveAll(path)
			continue
		}
		total += e.Size
		if d.Name() != key(keep) {
			all = append(all, entry{path, e.Size, st.ModTime()})
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].used.Before(all[j].used) })
	for _, e := range all {
		if total <= c.maxBytes {
			return
		}
		if os.RemoveAll(e.path) == nil {
			total -= e.size
			c.log.Info("compiled code evicted", "bytes", e.size)
		}
	}
}
