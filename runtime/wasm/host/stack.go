package host

import (
	"fmt"
	"reflect"
	"unsafe"

	"github.com/tetratelabs/wazero/api"
	"golang.org/x/sys/unix"
)

const (
	// mostStack is a call stack's bound where memory is plenty.
	mostStack = 80 << 20
	// leastStack is a call stack's bound however small the memory limit is.
	leastStack = 512 << 10
	// hostRoom is what the host program needs of a memory limit, at least, and
	// hostMargin what it may need beside what it has when the guest begins.
	hostRoom, hostMargin = 8 << 20, 4 << 20
	// engineCeiling is above the length from which wazero does not grow a
	// stack any more, but says that it overflowed (50 MB).
	engineCeiling = 64 << 20
)

// stackBound is the most that a guest's calls may nest, in bytes of stack:
// half of what a memory limit leaves beside the host, of which base is in
// memory, and the memory that the guest begins with. So endless recursion
// ends before the kernel ends the process, and a guest that grew its memory
// by as much again still may nest as deep. A limit of 0 is none.
func stackBound(limit, base, initial uint64) uint64 {
	used := initial + max(hostRoom, base+hostMargin)
	switch {
	case limit == 0:
		return mostStack
	case limit <= used:
		return leastStack
	}
	return min(max((limit-used)/2, leastStack), mostStack) &^ (wasmPage - 1)
}

// boundStack gives a function of the guest's a stack of its own that cannot
// grow beyond bound. Left alone, wazero begins with 10 KiB and copies to a
// stack of twice the size whenever one is full, which needs both at once and
// leaves garbage that cannot be collected meanwhile (see collector): 160 MiB
// for 80 MiB of stack. This one is address space, of which what is touched
// costs memory.
//
// wazero has no option for it, so its fields are set by their names. False
// says that this build of wazero has other fields; then its stack grows as
// wazero has it.
func boundStack(f api.Function, bound uint64) bool {
	s, ok := stackOf(f)
	if !ok || bound == 0 || bound > mostStack {
		return false
	}
	// What lies below the bound is only there for the length, which says to
	// wazero that the stack may not grow.
	size := max(engineCeiling, int(bound))
	b, err := unix.Mmap(-1, 0, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return false
	}
	bottom := size - int(bound)
	if err := unix.Mprotect(b[bottom:], unix.PROT_READ|unix.PROT_WRITE); err != nil {
		_ = unix.Munmap(b)
		return false
	}
	_ = unix.Madvise(b, unix.MADV_NOHUGEPAGE) // most guests touch one page
	*s.stack, *s.bottom = b, &b[bottom]
	*s.top = uintptr(unsafe.Pointer(&b[size-1])) &^ 15
	return true
}

// stackFields are those of a function that say where its stack is.
type stackFields struct {
	stack  *[]byte
	top    *uintptr
	bottom **byte
}

// stackOf finds the fields of wazero's callEngine.
func stackOf(f api.Function) (s stackFields, ok bool) {
	v := reflect.ValueOf(f)
	if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
		return s, false
	}
	field := func(of reflect.Value, name string, t reflect.Type) unsafe.Pointer {
		if of.Kind() != reflect.Struct {
			return nil
		}
		if x := of.FieldByName(name); x.IsValid() && x.Type() == t && x.CanAddr() {
			return unsafe.Pointer(x.UnsafeAddr())
		}
		return nil
	}
	e := v.Elem()
	s.stack = (*[]byte)(field(e, "stack", reflect.TypeFor[[]byte]()))
	s.top = (*uintptr)(field(e, "stackTop", reflect.TypeFor[uintptr]()))
	s.bottom = (**byte)(field(e.FieldByName("execCtx"), "stackBottomPtr", reflect.TypeFor[*byte]()))
	return s, s.stack != nil && s.top != nil && s.bottom != nil
}

// overflowText words the end of a guest whose calls nest deeper than bound.
func overflowText(trap string, bound, limit uint64) string {
	if bound == 0 {
		return trap
	}
	text := fmt.Sprintf("%s: its calls nest deeper than its stack of %s has room for", trap, bytesText(bound))
	if limit > 0 && bound < mostStack {
		text += ", which follows from its memory limit of " + bytesText(limit)
	}
	return text
}
