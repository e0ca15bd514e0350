package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
)

// verify walks a bbolt file's pages as plain bytes, so that nothing in them
// can make bbolt itself panic or fault later: both meta pages' choice, every
// reachable page once and inside the file, element bounds, key order, and
// the free list. The format is bbolt's version 2, in native byte order.
func verify(b []byte) error {
	v := verifier{b: b, seen: map[uint64]string{}}
	if err := v.meta(); err != nil {
		return err
	}
	if v.root != 0 {
		if err := v.page(v.root, 0, "tree"); err != nil {
			return err
		}
	}
	return v.freelist()
}

type verifier struct {
	b              []byte
	size           uint64 // page size
	root, free, hi uint64 // pages
	seen           map[uint64]string
}

const (
	pageHeader   = 16
	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagMeta     = 0x04
	flagFreelist = 0x10

	boltMagic   = 0xED0CDAED
	boltVersion = 2
	metaLen     = 64
	maxDepth    = 64
)

var ne = binary.NativeEndian

// meta chooses the newest valid meta page, as bbolt does.
func (v *verifier) meta() error {
	var best uint64
	found := false
	try := func(off uint64) {
		if off+pageHeader+metaLen > uint64(len(v.b)) {
			return
		}
		m := v.b[off+pageHeader:]
		h := fnv.New64a()
		_, _ = h.Write(m[:metaLen-8])
		if ne.Uint32(m) != boltMagic || ne.Uint32(m[4:]) != boltVersion || ne.Uint64(m[metaLen-8:]) != h.Sum64() {
			return
		}
		size := uint64(ne.Uint32(m[8:]))
		if size < 512 || size > 1<<20 || size&(size-1) != 0 || (off != 0 && off != size) {
			return
		}
		tx := ne.Uint64(m[48:])
		if found && tx <= best {
			return
		}
		found, best = true, tx
		v.size, v.root, v.free, v.hi = size, ne.Uint64(m[16:]), ne.Uint64(m[32:]), ne.Uint64(m[40:])
	}
	try(0)
	for size := uint64(512); size <= 1<<20; size *= 2 {
		try(size)
	}
	if !found {
		return errors.New("no valid meta page")
	}
	if v.hi < 3 || v.hi > uint64(len(v.b))/v.size {
		return fmt.Errorf("%d pages expected, the file has %d: truncated", v.hi, uint64(len(v.b))/v.size)
	}
	return nil
}

// head returns the page's bytes (with its overflow), after checking that it
// lies inside the file and was not met before.
func (v *verifier) head(id uint64, what string) ([]byte, uint16, int, error) {
	if id < 2 || id >= v.hi {
		return nil, 0, 0, fmt.Errorf("page %d of the %s is outside the file", id, what)
	}
	p := v.b[id*v.size:]
	if ne.Uint64(p) != id {
		return nil, 0, 0, fmt.Errorf("page %d of the %s calls itself %d", id, what, ne.Uint64(p))
	}
	pages := uint64(ne.Uint32(p[12:])) + 1
	if id+pages > v.hi {
		return nil, 0, 0, fmt.Errorf("page %d of the %s overflows the file", id, what)
	}
	for i := id; i < id+pages; i++ {
		if was, ok := v.seen[i]; ok {
			return nil, 0, 0, fmt.Errorf("page %d is in the %s and in the %s", i, was, what)
		}
		v.seen[i] = what
	}
	return p[:pages*v.size], ne.Uint16(p[8:]), int(ne.Uint16(p[10:])), nil
}

func (v *verifier) page(id uint64, depth int, what string) error {
	if depth > maxDepth {
		return errors.New("the tree is too deep")
	}
	p, flags, count, err := v.head(id, what)
	if err != nil {
		return err
	}
	return v.elements(p, flags, count, id, depth)
}

// elements checks one branch or leaf page, or an inline bucket's (id 0).
func (v *verifier) elements(p []byte, flags uint16, count int, id uint64, depth int) error {
	if flags != flagBranch && flags != flagLeaf {
		return fmt.Errorf("page %d has unexpected flags %#x", id, flags)
	}
	if flags == flagBranch && count == 0 {
		return fmt.Errorf("branch page %d is empty", id)
	}
	var prev []byte
	for i := range count {
		at := uint64(pageHeader + 16*i)
		if at+16 > uint64(len(p)) {
			return fmt.Errorf("page %d has too many elements", id)
		}
		e := p[at:]
		var pos, klen, vlen uint64
		if flags == flagBranch {
			pos, klen = uint64(ne.Uint32(e)), uint64(ne.Uint32(e[4:]))
		} else {
			pos, klen, vlen = uint64(ne.Uint32(e[4:])), uint64(ne.Uint32(e[8:])), uint64(ne.Uint32(e[12:]))
		}
		if klen == 0 || at+pos+klen+vlen > uint64(len(p)) || at+pos < uint64(pageHeader+16*count) {
			return fmt.Errorf("element %d of page %d is out of bounds", i, id)
		}
		key, value := e[pos:pos+klen], e[pos+klen:pos+klen+vlen]
		if i > 0 && string(prev) >= string(key) {
			return fmt.Errorf("keys of page %d are out of order", id)
		}
		prev = key
		var err error
		switch {
		case flags == flagBranch:
			err = v.page(ne.Uint64(e[8:]), depth+1, "tree")
		case ne.Uint32(e)&0x01 != 0:
			err = v.bucket(value, id, depth+1)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (v *verifier) bucket(value []byte, id uint64, depth int) error {
	if len(value) < 16 {
		return fmt.Errorf("bucket in page %d is cut off", id)
	}
	if depth > maxDepth {
		return errors.New("buckets are nested too deep")
	}
	if root := ne.Uint64(value); root != 0 {
		return v.page(root, depth, "tree")
	}
	inline := value[16:]
	if len(inline) < pageHeader {
		return fmt.Errorf("inline bucket in page %d is cut off", id)
	}
	if ne.Uint16(inline[8:]) != flagLeaf {
		return fmt.Errorf("inline bucket in page %d has unexpected flags", id)
	}
	return v.elements(inline, flagLeaf, int(ne.Uint16(inline[10:])), id, depth)
}

func (v *verifier) freelist() error {
	if v.free == ^uint64(0) {
		return nil // not kept on disk
	}
	p, flags, n, err := v.head(v.free, "free list")
	if err != nil {
		return err
	}
	if flags != flagFreelist {
		return fmt.Errorf("free list page %d has unexpected flags %#x", v.free, flags)
	}
	count, first := uint64(n), uint64(0)
	if n == 0xFFFF {
		count, first = ne.Uint64(p[pageHeader:]), 1
	}
	if count > uint64(len(p)-pageHeader)/8-first {
		return errors.New("free list is longer than its page")
	}
	for i := range count {
		id := ne.Uint64(p[pageHeader+8*(first+i):])
		if id < 2 || id >= v.hi {
			return fmt.Errorf("free page %d is outside the file", id)
		}
		if was, ok := v.seen[id]; ok {
			return fmt.Errorf("free page %d is in the %s", id, was)
		}
		v.seen[id] = "free list"
	}
	return nil
}
