package consensus

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/segment"
)

// What raft-wal's files are made of: a header, and frames whose headers have
// eight bytes, as has what frames are a multiple of.
const (
	walHeader = 32
	walFrame  = 8
)

// behindEnd returns the highest entry that the file which is written to holds
// behind the end of the log, 0 if there is none: raft-wal takes NULs for the
// end, also where a lost block has put them into the middle. What a torn write
// left there does not count.
func (l *logStore) behindEnd() (uint64, error) {
	if len(l.listed) == 0 {
		return 0, nil
	}
	tail := l.listed[len(l.listed)-1]
	if !tail.SealTime.IsZero() {
		return 0, nil
	}
	b, err := os.ReadFile(filepath.Join(l.dir, segment.FileName(tail)))
	if err != nil {
		return 0, fmt.Errorf("check log: %w", err)
	}
	if highest := behindEnd(b); highest > l.last.Load() {
		return highest, nil
	}
	return 0, nil
}

// behindEnd looks in a segment, past the first thing that is no frame, for
// whole writes that follow the end of another one: a write begins when the one
// before is synced, so that one was acknowledged. Within the good part it goes
// from frame to frame: what looks like a write in somebody's data is none.
func behindEnd(b []byte) (highest uint64) {
	used := len(bytes.TrimRight(b, "\x00"))
	b = b[:min(len(b), (used+walFrame-1)/walFrame*walFrame)]
	at := walHeader
	for at < len(b) {
		n := frameSize(b[at:])
		if n == 0 {
			break
		}
		at += n
	}
	for at+walFrame < len(b) {
		n := 0
		if bytes.HasPrefix(b[at:], commitMark[:4]) {
			var last uint64
			n, last = wholeWrite(b[at+walFrame:])
			highest = max(highest, last)
		}
		at += walFrame + n
	}
	return highest
}

// frameSize is that of the frame at the beginning of b, 0 if there is none.
func frameSize(b []byte) int {
	if len(b) < walFrame {
		return 0
	}
	switch b[0] {
	case segment.FrameCommit:
		return walFrame
	case segment.FrameEntry, segment.FrameIndex:
		n := (uint64(binary.LittleEndian.Uint32(b[4:])) + 2*walFrame - 1) / walFrame * walFrame
		if n <= uint64(len(b)) {
			return int(n)
		}
	}
	return 0
}

// wholeWrite returns the size of the write at the beginning of b without its
// commit frame, and its last entry; zeros if it is none, or not as it was
// written.
func wholeWrite(b []byte) (size int, last uint64) {
	for at := 0; ; {
		n := frameSize(b[at:])
		switch {
		case n == 0:
			return 0, 0
		case b[at] == segment.FrameCommit:
			if last == 0 || crc32.Checksum(b[:at], castagnoli) != binary.LittleEndian.Uint32(b[at+4:]) {
				return 0, 0
			}
			return at, last
		case b[at] == segment.FrameEntry:
			size := binary.LittleEndian.Uint32(b[at+4:])
			if last = entryIn(b[at+walFrame:][:size]); last == 0 {
				return 0, 0
			}
		}
		at += n
	}
}

// entryIn is the index of an encoded entry, 0 if it is not as it was written.
func entryIn(b []byte) (index uint64) {
	defer func() {
		if recover() != nil { // damaged bytes
			index = 0
		}
	}()
	var (
		codec wal.BinaryCodec
		e     raft.Log
	)
	if codec.Decode(b, &e) != nil || unseal(e.Index, &e) != nil {
		return 0
	}
	return e.Index
}
