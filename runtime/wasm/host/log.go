package host

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"
)

// maxLine is where a line without an end is cut into partial ones, as the
// CRI log format has it.
const maxLine = 16 << 10

// criLog writes the guest's output in the CRI log format and rotates it:
// PATH, then PATH.1 (youngest) to PATH.N. It is called on the guest's own
// goroutine, so a slow disk slows its guest and nobody else.
type criLog struct {
	dir      *os.Root
	name     string
	maxBytes int64
	maxFiles int
	now      func() time.Time

	mu   sync.Mutex
	file *os.File
	size int64
	buf  []byte
	lost uint64
}

// openLog opens path for appending. Its folder stays open, so that rotation
// works after the process has given up the right to reach it by path.
func openLog(path string, maxBytes int64, maxFiles int) (*criLog, error) {
	if maxBytes <= 0 {
		maxBytes = 10 << 20
	}
	if maxFiles <= 0 {
		maxFiles = 5
	}
	dir, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	l := &criLog{dir: dir, name: filepath.Base(path), maxBytes: maxBytes, maxFiles: maxFiles, now: time.Now}
	return l, l.open()
}

func (l *criLog) open() error {
	f, err := l.dir.OpenFile(l.name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("open log: %w", err)
	}
	l.file, l.size = f, st.Size()
	return nil
}

// stream is one of the guest's outputs.
type stream struct {
	log  *criLog
	name string
	line []byte // an unfinished line
	tail *tail  // keeps the last of it, may be nil
}

// Write implements io.Writer. It never fails: output that cannot be written
// is counted and dropped, since a full disk must not end a guest.
func (s *stream) Write(p []byte) (int, error) {
	n := len(p)
	if s.tail != nil {
		s.tail.add(p)
	}
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = l.buf[:0]
	at := l.now().UTC()
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		part, rest, end := p, []byte(nil), false
		if i >= 0 {
			part, rest, end = p[:i], p[i+1:], true
		}
		for len(s.line)+len(part) > maxLine {
			k := maxLine - len(s.line)
			s.line = append(s.line, part[:k]...)
			part = part[k:]
			l.entry(at, s.name, 'P', s.line)
			s.line = s.line[:0]
		}
		s.line = append(s.line, part...)
		if end {
			l.entry(at, s.name, 'F', s.line)
			s.line = s.line[:0]
		}
		p = rest
		if len(l.buf) >= 4*maxLine {
			l.flush()
		}
	}
	l.flush()
	return n, nil
}

// finish writes what is left of an unfinished line.
func (s *stream) finish() {
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(s.line) > 0 {
		l.entry(l.now().UTC(), s.name, 'F', s.line)
		s.line = nil
	}
	l.flush()
}

func (l *criLog) entry(at time.Time, stream string, tag byte, line []byte) {
	l.buf = at.AppendFormat(l.buf, "2006-01-02T15:04:05.000000000Z07:00")
	l.buf = append(l.buf, ' ')
	l.buf = append(l.buf, stream...)
	l.buf = append(l.buf, ' ', tag, ' ')
	l.buf = append(l.buf, line...)
	l.buf = append(l.buf, '\n')
}

// flush writes buf, rotating between entries.
func (l *criLog) flush() {
	defer func() { l.buf = l.buf[:0] }() // keeps its room: see collector
	for rest := l.buf; len(rest) > 0; {
		part := rest
		if l.size > 0 && l.size+int64(len(part)) > l.maxBytes {
			l.rotate()
		}
		if int64(len(part)) > l.maxBytes {
			// Cut at the last entry that fits, at least one.
			i := bytes.LastIndexByte(part[:l.maxBytes], '\n')
			if i < 0 {
				i = bytes.IndexByte(part, '\n')
			}
			part = part[:i+1]
		}
		rest = rest[len(part):]
		if l.file == nil && l.open() != nil {
			l.lost += uint64(len(part))
			continue
		}
		n, err := l.file.Write(part)
		l.size += int64(n)
		if err != nil {
			l.lost += uint64(len(part) - n)
		}
	}
}

// rotate moves the files on by one. If it cannot, the current file is cut, so
// that the bound holds whatever happens.
func (l *criLog) rotate() {
	if l.maxFiles > 1 {
		_ = l.dir.Remove(l.name + "." + strconv.Itoa(l.maxFiles-1))
		for i := l.maxFiles - 2; i >= 1; i-- {
			_ = l.dir.Rename(l.name+"."+strconv.Itoa(i), l.name+"."+strconv.Itoa(i+1))
		}
		if err := l.dir.Rename(l.name, l.name+".1"); err == nil || errors.Is(err, fs.ErrNotExist) {
			_ = l.file.Close()
			l.file, l.size = nil, 0
			return
		}
	}
	if l.file != nil && l.file.Truncate(0) == nil {
		l.size = 0
	}
}

func (l *criLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		_ = l.file.Close()
		l.file = nil
	}
}

// tail keeps the last bytes of what was added.
type tail struct {
	mu  sync.Mutex
	buf []byte
	max int
}

func (t *tail) add(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(p) >= t.max {
		t.buf = append(t.buf[:0], p[len(p)-t.max:]...)
		return
	}
	if over := len(t.buf) + len(p) - t.max; over > 0 {
		t.buf = t.buf[:copy(t.buf, t.buf[over:])]
	}
	t.buf = append(t.buf, p...)
}

// text is the kept text from the first whole line on.
func (t *tail) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buf
	if len(b) == t.max {
		if i := bytes.IndexByte(b, '\n'); i >= 0 && i < len(b)-1 {
			b = b[i+1:]
		}
	}
	return string(bytes.ToValidUTF8(bytes.TrimSpace(b), []byte("?")))
}
