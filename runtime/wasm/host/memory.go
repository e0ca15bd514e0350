package host

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
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

// begin notes what there is before the guest runs.
func (m *memoryRecord) begin(limit int64) {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) == nil {
		m.base.Store(uint64(u.Maxrss) << 10)
	}
	m.limit.Store(uint64(max(limit, 0)))
}

// StackOverflow says whether a host that the kernel killed for its memory
// died of its guest's call stack: the record in dir explains less than half
// of the limit, and beside the guest's own memory only its stack grows
// without a bound (wazero lets it have 100 MB), and tables of a guest that
// means to.
func StackOverflow(dir string) (message string, ok bool) {
	b, err := os.ReadFile(filepath.Join(dir, MemoryFile))
	if err != nil || len(b) != memoryRecordSize {
		return "", false
	}
	limit, base, peak := binary.NativeEndian.Uint64(b), binary.NativeEndian.Uint64(b[8:]), binary.NativeEndian.Uint64(b[16:])
	if limit == 0 || base == 0 || base+peak > limit/2 {
		return "", false
	}
	return fmt.Sprintf("stack overflow: its calls nest deeper, or its tables are larger, than its memory limit of %s has room for (its own memory was %s, its host program's %s)",
		bytesText(limit), bytesText(peak), bytesText(base)), true
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
