package host

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"
)

const wasmPage = 64 << 10

// memoryLimit is the guest memory cap of one container, in bytes; it counts
// what it refused, so that a failing guest's message can say so.
type memoryLimit struct {
	limit   uint64
	peak    *atomic.Uint64
	refused atomic.Uint64
}

// memoryRecord is what a host leaves in its run folder about memory, so that
// it can be said why the kernel killed it. It is a mapped file: what stands
// in it outlives the process, and the numbers are written by stores alone.
type memoryRecord struct {
	limit atomic.Uint64 // of the container, bytes
	base  atomic.Uint64 // what the host held before the guest ran
	peak  atomic.Uint64 // the guest's own memory, at most
	stack atomic.Uint64 // the most that its call stack may hold; 0 = no bound of ours
}

const memoryRecordSize = int(unsafe.Sizeof(memoryRecord{}))

// newMemoryRecord makes the file in the working folder. Without it (a full
// disk) the record is in memory alone.
func newMemoryRecord() *memoryRecord {
	fd, err := unix.Open(MemoryFile, unix.O_RDWR|unix.O_CREAT|unix.O_TRUNC|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &memoryRecord{}
	}
	defer func() { _ = unix.Close(fd) }()
	// Written, not just made longer: a store into a hole on a full disk is a
	// SIGBUS.
	if n, err := unix.Write(fd, make([]byte, memoryRecordSize)); err != nil || n != memoryRecordSize {
		return &memoryRecord{}
	}
	b, err := unix.Mmap(fd, 0, memoryRecordSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return &memoryRecord{}
	}
	return (*memoryRecord)(unsafe.Pointer(&b[0])) // page-aligned and large enough
}

// begin notes what there is before the guest runs. statm is this process's
// file of that name in /proc, opened before the sandbox closed that off; not
// getrusage(2), whose maximum a process inherits from the agent that started
// it.
func (m *memoryRecord) begin(limit int64, statm int) {
	var b [128]byte
	if n, err := unix.Pread(statm, b[:], 0); err == nil {
		m.base.Store(privateBytes(string(b[:n])))
	}
	m.limit.Store(uint64(max(limit, 0)))
}

// privateBytes is what a process has in memory that is its own, by its statm:
// size, resident, shared and more, in pages.
func privateBytes(statm string) uint64 {
	f := strings.Fields(statm)
	if len(f) < 3 {
		return 0
	}
	resident, err := strconv.ParseUint(f[1], 10, 40)
	shared, err2 := strconv.ParseUint(f[2], 10, 40)
	if err != nil || err2 != nil || shared > resident {
		return 0
	}
	return (resident - shared) * uint64(os.Getpagesize())
}

// MemoryUse is what a host's record says of its memory, in bytes.
type MemoryUse struct {
	Limit, Base, Peak, Stack uint64
}

// ReadMemoryUse reads the record in a run folder.
func ReadMemoryUse(dir string) (u MemoryUse, ok bool) {
	b, err := os.ReadFile(filepath.Join(dir, MemoryFile))
	if err != nil || len(b) < memoryRecordSize-8 {
		return u, false
	}
	u.Limit, u.Base, u.Peak = binary.NativeEndian.Uint64(b), binary.NativeEndian.Uint64(b[8:]), binary.NativeEndian.Uint64(b[16:])
	if len(b) >= memoryRecordSize { // hosts of earlier builds have no fourth number
		u.Stack = binary.NativeEndian.Uint64(b[24:])
	}
	return u, u.Limit > 0 && u.Base > 0
}

// Overflowed says whether a host that the kernel killed for its memory died
// of its guest's call stack: no bound of ours held it, the record explains
// less than half of the limit, and beside the guest's own memory only the
// stack grows without a bound, and tables of a guest that means to. So it is
// with functions that run before _start, and where the engine's fields are
// not those that boundStack knows.
func (u MemoryUse) Overflowed() (message string, ok bool) {
	if u.Stack > 0 || u.Base+u.Peak > u.Limit/2 {
		return "", false
	}
	return fmt.Sprintf("stack overflow: its calls nest deeper, or its tables are larger, than its memory limit of %s has room for (its own memory was %s, its host program's %s)",
		bytesText(u.Limit), bytesText(u.Peak), bytesText(u.Base)), true
}

// String says where the memory of a host that the kernel killed was.
func (u MemoryUse) String() string {
	s := fmt.Sprintf("of its limit of %s, its own memory had %s", bytesText(u.Limit), bytesText(u.Peak))
	if u.Stack > 0 {
		s += fmt.Sprintf(", its call stack %s at most", bytesText(u.Stack))
	}
	s += ", its host program " + bytesText(u.Base)
	if u.Base+u.Peak+u.Stack < u.Limit-u.Limit/8 {
		s += "; its tables had the rest"
	}
	return s
}

// Allocate implements experimental.MemoryAllocator. Address space for the
// whole memory is reserved once, so that growing never copies and what the
// guest does not touch costs nothing.
func (m *memoryLimit) Allocate(_, maxBytes uint64) experimental.LinearMemory {
	for size := min(maxBytes, m.limit); ; size /= 2 {
		if size > math.MaxInt/2 {
			continue
		}
		b, err := unix.Mmap(-1, 0, int(max(size, wasmPage)), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
		if err == nil {
			return &linearMemory{owner: m, reserved: b}
		}
		if size <= wasmPage {
			panic("no address space for the guest's memory: " + err.Error())
		}
	}
}

type linearMemory struct {
	owner    *memoryLimit
	reserved []byte
	size     uint64
}

// Reallocate implements experimental.LinearMemory; nil refuses.
func (l *linearMemory) Reallocate(size uint64) []byte {
	if size > l.owner.limit || size > uint64(len(l.reserved)) {
		l.owner.refused.Add(1)
		if l.size == 0 {
			// The module's own minimum does not fit; wazero cannot take no for
			// an answer here.
			panic(errMinimumMemory)
		}
		return nil
	}
	if size > l.size {
		grown := roundUp(size)
		if grown > uint64(len(l.reserved)) {
			grown = uint64(len(l.reserved))
		}
		if err := unix.Mprotect(l.reserved[:grown], unix.PROT_READ|unix.PROT_WRITE); err != nil {
			l.owner.refused.Add(1)
			if l.size == 0 {
				panic(errNoMemory)
			}
			return nil
		}
		l.size = size
		if size > l.owner.peak.Load() {
			l.owner.peak.Store(size)
		}
	}
	return l.reserved[:size:size]
}

// Free implements experimental.LinearMemory.
func (l *linearMemory) Free() {
	if l.reserved != nil {
		_ = unix.Munmap(l.reserved)
		l.reserved = nil
	}
}

func roundUp(n uint64) uint64 { return (n + wasmPage - 1) &^ (wasmPage - 1) }
