package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental/sys"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
)

var le = binary.LittleEndian

// Numbers of the WASI preview 1 ABI (witx/typenames.witx).
const (
	filetypeSocketStream = 6
	fdflagNonblock       = 1 << 2
	rightsReadWrite      = 1<<1 | 1<<6
	// read, write, fdstat_set_flags, poll_fd_readwrite, sock_shutdown, sock_accept
	rightsSocket = 1<<1 | 1<<3 | 1<<6 | 1<<27 | 1<<28 | 1<<29
)

// Error numbers of the WASI preview 1 ABI.
const (
	eAcces       = 2
	eAgain       = 6
	eBadf        = 8
	eConnaborted = 13
	eConnreset   = 15
	eExist       = 20
	eFault       = 21
	eIntr        = 27
	eInval       = 28
	eIo          = 29
	eIsdir       = 31
	eLoop        = 32
	eNametoolong = 37
	eNoent       = 44
	eNosys       = 52
	eNotconn     = 53
	eNotdir      = 54
	eNotempty    = 55
	eNotsock     = 57
	eNotsup      = 58
	ePerm        = 63
	ePipe        = 64
	eRange       = 68
	eRofs        = 69
	eTimedout    = 73
)

var wireErrno = map[sys.Errno]uint32{
	0: 0, sys.EACCES: eAcces, sys.EAGAIN: eAgain, sys.EBADF: eBadf, sys.EEXIST: eExist, sys.EFAULT: eFault,
	sys.EINTR: eIntr, sys.EINVAL: eInval, sys.EIO: eIo, sys.EISDIR: eIsdir, sys.ELOOP: eLoop,
	sys.ENAMETOOLONG: eNametoolong, sys.ENOENT: eNoent, sys.ENOSYS: eNosys, sys.ENOTDIR: eNotdir,
	sys.ERANGE: eRange, sys.ENOTEMPTY: eNotempty, sys.ENOTSOCK: eNotsock, sys.ENOTSUP: eNotsup,
	sys.EPERM: ePerm, sys.EROFS: eRofs,
}

// wire is the ABI's number of an error.
func wire(e sys.Errno) uint32 {
	if n, ok := wireErrno[e]; ok {
		return n
	}
	return eIo
}

// wireOf is wire for an error of a system call.
func wireOf(err error) uint32 {
	var e syscall.Errno
	if errors.As(err, &e) {
		switch e {
		case syscall.ECONNRESET:
			return eConnreset
		case syscall.ECONNABORTED:
			return eConnaborted
		case syscall.ENOTCONN:
			return eNotconn
		case syscall.EPIPE:
			return ePipe
		case syscall.ETIMEDOUT:
			return eTimedout
		case syscall.EINPROGRESS:
			return eInprogress
		case syscall.EALREADY:
			return eAlready
		case syscall.EISCONN:
			return eIsconn
		case syscall.ECONNREFUSED:
			return eConnrefused
		case syscall.EHOSTUNREACH:
			return eHostunreach
		case syscall.ENETUNREACH:
			return eNetunreach
		case syscall.ENETDOWN:
			return eNetdown
		case syscall.EDESTADDRREQ:
			return eDestaddrreq
		case syscall.EMSGSIZE:
			return eMsgsize
		case syscall.EADDRNOTAVAIL:
			return eAddrnotavail
		case syscall.EAFNOSUPPORT:
			return eAfnosupport
		}
	}
	return wire(errnoOf(err))
}

// errnoOf maps an error of the os package to wazero's.
func errnoOf(err error) sys.Errno {
	if err == nil {
		return 0
	}
	var e syscall.Errno
	if errors.As(err, &e) {
		return sys.UnwrapOSError(e)
	}
	return sys.UnwrapOSError(err)
}

// wasiFunc is a WASI function that answers with the ABI's error number.
type wasiFunc func(ctx context.Context, mod api.Module, stack []uint64) uint32

// wasiTable is wazero's WASI with some functions replaced.
type wasiTable struct {
	defs map[string]api.FunctionDefinition
	fns  map[string]api.GoModuleFunction
}

// newWASITable reads wazero's own functions from r without instantiating
// them: the public way to call the original from a replacement.
func newWASITable(ctx context.Context, r wazero.Runtime) (*wasiTable, error) {
	b := r.NewHostModuleBuilder("wasi")
	wasi_snapshot_preview1.NewFunctionExporter().ExportFunctions(b)
	c, err := b.Compile(ctx)
	if err != nil {
		return nil, fmt.Errorf("wasi: %w", err)
	}
	w := &wasiTable{defs: c.ExportedFunctions(), fns: map[string]api.GoModuleFunction{}}
	for name, d := range w.defs {
		f, ok := d.GoFunction().(api.GoModuleFunction)
		if !ok {
			return nil, fmt.Errorf("wasi: %s is a %T", name, d.GoFunction())
		}
		w.fns[name] = f
	}
	return w, nil
}

// checkImports refuses a module that imports a function of WASI with other
// parameters or results than it has: it could be compiled and never started.
func checkImports(ctx context.Context, r wazero.Runtime, guest wazero.CompiledModule) error {
	w, err := newWASITable(ctx, r)
	if err != nil {
		return err
	}
	var wrong []string
	for _, f := range guest.ImportedFunctions() {
		module, name, _ := f.Import()
		d, known := w.defs[name]
		if module != wasi_snapshot_preview1.ModuleName || extended(f) != "" {
			continue
		}
		switch {
		case !known && Extends(name):
			wrong = append(wrong, fmt.Sprintf("%s%s, which no known form of it is", name, signature(f)))
		case known && signature(f) != signature(d):
			wrong = append(wrong, fmt.Sprintf("%s%s, which is %s", name, signature(f), signature(d)))
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("the module imports %s: its compiler or bindings are of another WASI", strings.Join(wrong, "; "))
	}
	return nil
}

func signature(f api.FunctionDefinition) string {
	names := func(types []api.ValueType) string {
		out := make([]string, len(types))
		for i, t := range types {
			out[i] = api.ValueTypeName(t)
		}
		return "(" + strings.Join(out, " ") + ")"
	}
	return names(f.ParamTypes()) + " -> " + names(f.ResultTypes())
}

// original is the function as it is now.
func (w *wasiTable) original(name string) api.GoModuleFunction { return w.fns[name] }

// replace puts f in name's place.
func (w *wasiTable) replace(name string, f wasiFunc) {
	w.fns[name] = api.GoModuleFunc(func(ctx context.Context, mod api.Module, stack []uint64) {
		stack[0] = uint64(f(ctx, mod, stack))
	})
}

// wrap lets f answer for name; ok false leaves the answer to what was there.
func (w *wasiTable) wrap(name string, f func(mod api.Module, stack []uint64) (errno uint32, ok bool)) {
	orig := w.fns[name]
	w.fns[name] = api.GoModuleFunc(func(ctx context.Context, mod api.Module, stack []uint64) {
		if e, ok := f(mod, stack); ok {
			stack[0] = uint64(e)
			return
		}
		orig.Call(ctx, mod, stack)
	})
}

// instantiate makes the functions that the guest imports available to it,
// each calling before first. more answers nil for those of WASI alone.
func (w *wasiTable) instantiate(ctx context.Context, r wazero.Runtime, guest wazero.CompiledModule, before func(), more func(api.FunctionDefinition) wasiFunc) error {
	b := r.NewHostModuleBuilder(wasi_snapshot_preview1.ModuleName)
	wanted := map[string]bool{}
	for _, f := range guest.ImportedFunctions() {
		module, name, _ := f.Import()
		if module != wasi_snapshot_preview1.ModuleName || wanted[name] {
			continue
		}
		wanted[name] = true
		if own := more(f); own != nil {
			b.NewFunctionBuilder().WithGoModuleFunction(api.GoModuleFunc(func(ctx context.Context, mod api.Module, stack []uint64) {
				before()
				stack[0] = uint64(own(ctx, mod, stack))
			}), f.ParamTypes(), f.ResultTypes()).Export(name)
			continue
		}
		d, ok := w.defs[name]
		if !ok {
			continue // reported by the check of imports, or by wazero
		}
		fn := w.fns[name]
		b.NewFunctionBuilder().WithGoModuleFunction(api.GoModuleFunc(func(ctx context.Context, mod api.Module, stack []uint64) {
			before()
			fn.Call(ctx, mod, stack)
		}), d.ParamTypes(), d.ResultTypes()).Export(name)
	}
	if _, err := b.Instantiate(ctx); err != nil {
		return fmt.Errorf("wasi: %w", err)
	}
	return nil
}
