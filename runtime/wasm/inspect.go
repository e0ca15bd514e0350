package wasm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sort"
	"strings"
	"unicode/utf8"

	"github.com/dunlin-project/dunlin/runtime/wasm/host"
)

// ErrInvalidModule says that a file is not a module that can run here; the
// text says what it is instead, and what to do.
var ErrInvalidModule = errors.New("not a WebAssembly module that can run here")

// ModuleInfo is what a look at a module's outline tells.
type ModuleInfo struct {
	// MemoryMin is the size that its memory starts with, in bytes.
	MemoryMin uint64
	Functions int
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalidModule}, args...)...)
}

var wasmMagic = []byte("\x00asm")

// sniff recognises what people hand over instead of a module.
func sniff(head []byte, size int64) error {
	switch {
	case size == 0:
		return invalid("the file is empty")
	case bytes.HasPrefix(head, []byte("\x00asm\x01\x00\x00\x00")):
		return nil
	case bytes.HasPrefix(head, []byte("\x00asm\x0d\x00\x01\x00")):
		return invalid("this is a component (WASI 0.2); a core module is needed: build it for wasm32-wasip1 (Go: GOOS=wasip1), or take the core module out of it with `wasm-tools component unbundle`")
	case bytes.HasPrefix(head, wasmMagic) && len(head) >= 8:
		return invalid("this is WebAssembly of a version that is not known here (header % x)", head[:8])
	case bytes.HasPrefix(head, wasmMagic[:min(len(head), 4)]) && size < 8:
		return invalid("the file is cut off after %d bytes", size)
	case bytes.HasPrefix(head, []byte("\x7fELF")):
		return invalid("this is a native Linux program (ELF); build it for Wasm (Go: GOOS=wasip1 GOARCH=wasm, Rust: --target wasm32-wasip1, C: --target=wasm32-wasi)")
	case bytes.HasPrefix(head, []byte("\x1f\x8b")):
		return invalid("this is gzip-compressed; unpack it first")
	case bytes.HasPrefix(head, []byte("\x28\xb5\x2f\xfd")):
		return invalid("this is zstd-compressed; unpack it first")
	case bytes.HasPrefix(head, []byte("PK\x03\x04")):
		return invalid("this is a zip archive; unpack it first")
	case bytes.HasPrefix(head, []byte("BC\xc0\xde")):
		return invalid("this is LLVM bitcode; link it into a module first")
	case bytes.HasPrefix(head, []byte("!<arch>\n")):
		return invalid("this is a static library; link it into a module first")
	case len(bytes.TrimLeft(head, "\x00")) == 0:
		return invalid("the file holds only zero bytes, as after a power cut; copy it again")
	}
	text := bytes.ToLower(bytes.TrimSpace(bytes.TrimPrefix(head, []byte("\xef\xbb\xbf"))))
	switch {
	case bytes.HasPrefix(text, []byte("<!doctype html")), bytes.HasPrefix(text, []byte("<html")):
		return invalid("this is a web page (HTML), perhaps an error page of the server it was downloaded from")
	case bytes.HasPrefix(text, []byte("(module")), bytes.HasPrefix(text, []byte(";;")), bytes.HasPrefix(text, []byte("(;")), bytes.HasPrefix(text, []byte("(component")):
		return invalid("this is WebAssembly text (.wat); assemble it with `wat2wasm` first")
	case bytes.HasPrefix(text, []byte("version https://git-lfs")):
		return invalid("this is a Git LFS pointer; fetch the real file with `git lfs pull`")
	case utf8.Valid(trimRune(head)) && !bytes.ContainsRune(head, 0):
		// Not what it says: who may name a file need not be one who may read it.
		return invalid("this is a text file")
	}
	return invalid("the file begins with % x, a module with 00 61 73 6d", head[:min(len(head), 4)])
}

func trimRune(b []byte) []byte {
	for i := 0; i < utf8.UTFMax && len(b) > 0; i++ {
		if r, n := utf8.DecodeLastRune(b); r != utf8.RuneError || n > 1 {
			break
		}
		b = b[:len(b)-1]
	}
	return b
}

// section numbers of the binary format.
const (
	sectionCustom   = 0
	sectionType     = 1
	sectionImport   = 2
	sectionFunction = 3
	sectionMemory   = 5
	sectionExport   = 7
	sectionCode     = 10
	sectionMax      = 13
)

// Limits of a module's outline; far above what compilers make.
const (
	maxImports = 100_000
	maxExports = 1_000_000
	maxName    = 100_000
)

// Inspect reads the outline of a module of size bytes: enough to say in the
// user's words why it cannot run. It never reads more than one section that
// matters at a time, and whatever it is given, it ends.
func Inspect(r io.ReaderAt, size int64) (ModuleInfo, error) {
	var info ModuleInfo
	head := make([]byte, min(size, 64))
	if _, err := r.ReadAt(head, 0); err != nil && !errors.Is(err, io.EOF) {
		return info, fmt.Errorf("read module: %w", err)
	}
	if err := sniff(head, size); err != nil {
		return info, err
	}
	var missing []string
	start, code, functions := false, false, 0
	for at := int64(8); at < size; {
		id, body, next, err := section(r, at, size)
		if err != nil {
			return info, err
		}
		s := &outline{b: body}
		switch id {
		case sectionImport:
			missing = s.imports(&info)
		case sectionFunction:
			functions = int(s.u32())
		case sectionMemory:
			if s.u32() > 0 {
				s.limits(&info)
			}
		case sectionExport:
			start = s.exportsStart()
		case sectionCode:
			code = true
		}
		if s.err {
			return info, invalid("section %d at byte %d is damaged", id, at)
		}
		at = next
	}
	info.Functions = functions
	switch {
	case functions > 0 && !code:
		return info, invalid("the file is cut off: the code of its %d functions is missing", functions)
	case len(missing) > 0:
		return info, invalid("it needs what no WASI preview 1 host has: %s", strings.Join(missing, ", "))
	case !start:
		return info, invalid("it exports no _start function: build it as a command (a program with main), not as a library or reactor")
	}
	return info, nil
}

// section reads one section's header, and its body where it matters.
func section(r io.ReaderAt, at, size int64) (id byte, body []byte, next int64, err error) {
	var h [6]byte
	n, err := r.ReadAt(h[:min(int64(len(h)), size-at)], at)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, nil, 0, fmt.Errorf("read module: %w", err)
	}
	s := &outline{b: h[1:n]}
	length := int64(s.u32())
	begin := at + int64(1+s.at)
	if s.err && begin >= size {
		return 0, nil, 0, invalid("the file is cut off at byte %d", size)
	}
	if s.err || h[0] > sectionMax {
		return 0, nil, 0, invalid("there is no section at byte %d where one must be: the file is damaged", at)
	}
	next = begin + length
	if next > size {
		return 0, nil, 0, invalid("the file is cut off: section %d should go on to byte %d, and the file ends at %d", h[0], next, size)
	}
	want := length
	switch h[0] {
	case sectionImport, sectionMemory, sectionExport:
	case sectionFunction:
		want = min(length, 5)
	default:
		want = 0
	}
	if want > 16<<20 {
		return 0, nil, 0, invalid("its section %d of %d bytes is larger than any program needs", h[0], length)
	}
	body = make([]byte, want)
	if _, err := io.ReadFull(io.NewSectionReader(r, begin, want), body); err != nil {
		return 0, nil, 0, fmt.Errorf("read module: %w", err)
	}
	return h[0], body, next, nil
}

// outline decodes one section; a fault sticks.
type outline struct {
	b   []byte
	at  int
	err bool
}

func (o *outline) byte() byte {
	if o.at >= len(o.b) {
		o.err = true
		return 0
	}
	o.at++
	return o.b[o.at-1]
}

func (o *outline) u64() uint64 {
	var v uint64
	for shift := 0; shift < 64; shift += 7 {
		c := o.byte()
		v |= uint64(c&0x7f) << shift
		if c&0x80 == 0 {
			return v
		}
	}
	o.err = true
	return 0
}

func (o *outline) u32() uint32 {
	v := o.u64()
	if v > math.MaxUint32 {
		o.err = true
		return 0
	}
	return uint32(v)
}

func (o *outline) name() string {
	n := int(o.u32())
	if o.err || n > maxName || n > len(o.b)-o.at {
		o.err = true
		return ""
	}
	o.at += n
	return string(o.b[o.at-n : o.at])
}

func (o *outline) limits(info *ModuleInfo) {
	flags := o.byte()
	info.MemoryMin = o.u64() * 65536
	if flags&1 != 0 {
		o.u64()
	}
}

// imports returns those that are missing here, as module.name.
func (o *outline) imports(info *ModuleInfo) []string {
	n := o.u32()
	if n > maxImports {
		o.err = true
	}
	var missing []string
	for i := uint32(0); i < n && !o.err; i++ {
		module, name := o.name(), o.name()
		kind := o.byte()
		switch kind {
		case 0:
			o.u32()
		case 1:
			o.byte()
			o.limits(&ModuleInfo{})
		case 2:
			o.limits(info)
		case 3:
			o.byte()
			o.byte()
		case 4:
			o.byte()
			o.u32()
		default:
			o.err = true
		}
		if kind == 0 && module == "wasi_snapshot_preview1" && (wasiFunctions[name] || host.Extends(name)) {
			continue
		}
		missing = append(missing, printable(module+"."+name))
	}
	if len(missing) > 0 && slices.ContainsFunc(missing, func(s string) bool { return strings.HasPrefix(s, "wasi_unstable.") }) {
		missing = append(missing, "(wasi_unstable is older than preview 1: rebuild it with a newer compiler)")
	}
	return missing
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < 0x20 || r == 0x7f || r == utf8.RuneError {
			return '?'
		}
		return r
	}, s)
}

func (o *outline) exportsStart() bool {
	n := o.u32()
	if n > maxExports {
		o.err = true
	}
	found := false
	for i := uint32(0); i < n && !o.err; i++ {
		name, kind := o.name(), o.byte()
		o.u32()
		found = found || (name == "_start" && kind == 0)
	}
	return found
}

// wasiFunctions are those of WASI preview 1 (witx/wasi_snapshot_preview1.witx).
var wasiFunctions = func() map[string]bool {
	m := map[string]bool{}
	for _, n := range strings.Fields(`args_get args_sizes_get clock_res_get clock_time_get environ_get environ_sizes_get
		fd_advise fd_allocate fd_close fd_datasync fd_fdstat_get fd_fdstat_set_flags fd_fdstat_set_rights fd_filestat_get
		fd_filestat_set_size fd_filestat_set_times fd_pread fd_prestat_dir_name fd_prestat_get fd_pwrite fd_read fd_readdir
		fd_renumber fd_seek fd_sync fd_tell fd_write path_create_directory path_filestat_get path_filestat_set_times path_link
		path_open path_readlink path_remove_directory path_rename path_symlink path_unlink_file poll_oneoff proc_exit proc_raise
		random_get sched_yield sock_accept sock_recv sock_send sock_shutdown`) {
		m[n] = true
	}
	return m
}()

// WASIFunctions lists what a guest may import, sorted.
func WASIFunctions() []string {
	out := make([]string, 0, len(wasiFunctions))
	for n := range wasiFunctions {
		out = append(out, n)
	}
	sort.Strings(out)
	return out
}
