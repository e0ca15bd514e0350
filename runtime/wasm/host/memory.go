package host

import (
	"math"
	"sync/atomic"

	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"
)

const wasmPage = 64 << 10

// memoryLimit is the guest memory cap of one container, in bytes; it counts
// what it refused, so that a failing guest's message can say so.
type memoryLimit struct {
	limit   uint64
	peak    atomic.Uint64
	refused atomic.Uint64
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
