// Package logs reads container logs in the CRI format
// ("2026-01-02T15:04:05.000000000Z stdout F line"), rotated files included,
// the way kubectl logs asks for them. The writing side is the process that
// owns the container (runtime/wasm/host; conmon for OCI).
package logs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// maxLine bounds one CRI line; longer ones are cut by the writer (P flag).
const maxLine = 1 << 20

// pollInterval is how often a followed file is looked at again. Polling
// needs no inotify watch a container and survives rotation.
const pollInterval = 200 * time.Millisecond

// entry is one parsed line.
type entry struct {
	at      []byte // RFC 3339, as written
	content []byte // without newline
	partial bool   // the line goes on in the next entry
	stream  []byte
}

var errFormat = errors.New("not a CRI log line")

func parse(line []byte) (entry, error) {
	at, rest, ok := bytes.Cut(line, []byte{' '})
	if !ok {
		return entry{}, errFormat
	}
	stream, rest, ok := bytes.Cut(rest, []byte{' '})
	if !ok {
		return entry{}, errFormat
	}
	tag, content, _ := bytes.Cut(rest, []byte{' '})
	if len(tag) == 0 || (tag[0] != 'F' && tag[0] != 'P') || (string(stream) != "stdout" && string(stream) != "stderr") {
		return entry{}, errFormat
	}
	return entry{at: at, content: content, partial: tag[0] == 'P', stream: stream}, nil
}

// files lists the log's rotated files and itself, oldest first. Rotated
// files are PATH.1 (youngest), PATH.2, ...
func files(path string) []string {
	matches, err := filepath.Glob(path + ".[0-9]*")
	if err != nil {
		matches = nil
	}
	sort.Slice(matches, func(i, j int) bool {
		if len(matches[i]) != len(matches[j]) {
			return len(matches[i]) > len(matches[j])
		}
		return matches[i] > matches[j]
	})
	return append(matches, path)
}

// Read writes the log to w as the options ask. With Follow it goes on until
// ctx ends or, when ended() says that the container will write no more, the
// end of the file. A missing file is an empty log.
func Read(ctx context.Context, path string, o *corev1.PodLogOptions, ended func() bool, w io.Writer) error {
	if o == nil {
		o = &corev1.PodLogOptions{}
	}
	p := &printer{w: w, timestamps: o.Timestamps, limit: -1, lineStart: true}
	if o.Stream != nil && *o.Stream != corev1.LogStreamAll {
		p.stream = map[string]string{corev1.LogStreamStdout: "stdout", corev1.LogStreamStderr: "stderr"}[*o.Stream]
	}
	if o.LimitBytes != nil {
		p.limit = *o.LimitBytes
	}
	switch {
	case o.SinceTime != nil:
		p.since = o.SinceTime.Time
	case o.SinceSeconds != nil:
		p.since = time.Now().Add(-time.Duration(*o.SinceSeconds) * time.Second)
	}
	pos, err := history(path, o.TailLines, p)
	if err != nil || !o.Follow || p.full() {
		return err
	}
	return follow(ctx, path, pos, ended, p)
}

// Follow writes what is written from now on, until ctx ends or ended() says
// that the container writes no more.
func Follow(ctx context.Context, path string, ended func() bool, stdout, stderr io.Writer) error {
	var pos position
	if info, err := os.Stat(path); err == nil {
		pos = position{info: info, offset: info.Size()}
	}
	return follow(ctx, path, pos, ended, &printer{w: stdout, stderr: stderr, limit: -1, lineStart: true})
}

// position is where reading of the live file stopped.
type position struct {
	info   fs.FileInfo // nil: it did not exist
	offset int64
}

// history prints what is there, and returns where the live file was left.
func history(path string, tail *int64, p *printer) (position, error) {
	all := files(path)
	skip := int64(0)
	if tail != nil {
		total, err := countLines(all, p)
		if err != nil {
			return position{}, err
		}
		skip = max(0, total-*tail)
	}
	var pos position
	for i, name := range all {
		f, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // rotated away while we read, or never written
		}
		if err != nil {
			return pos, fmt.Errorf("open log: %w", err)
		}
		n, err := scan(f, func(e entry) error {
			if !p.wants(e) {
				return nil
			}
			if skip > 0 {
				if !e.partial {
					skip--
				}
				return nil
			}
			return p.print(e)
		})
		if i == len(all)-1 {
			info, statErr := f.Stat()
			pos = position{info: info, offset: n}
			err = errors.Join(err, statErr)
		}
		_ = f.Close()
		if err != nil {
			return pos, fmt.Errorf("read log: %w", err)
		}
		if p.full() {
			return pos, nil
		}
	}
	return pos, nil
}

func countLines(names []string, p *printer) (int64, error) {
	var total int64
	for _, name := range names {
		f, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("open log: %w", err)
		}
		_, err = scan(f, func(e entry) error {
			if p.wants(e) && !e.partial {
				total++
			}
			return nil
		})
		_ = f.Close()
		if err != nil {
			return 0, fmt.Errorf("read log: %w", err)
		}
	}
	return total, nil
}

// scan calls f for every complete line and returns how many bytes they were;
// a line still being written is left for later, a damaged one is skipped.
func scan(r io.Reader, f func(entry) error) (int64, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	var consumed int64
	var line []byte
	for {
		part, err := br.ReadSlice('\n')
		if len(line)+len(part) <= maxLine {
			line = append(line, part...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			consumed += int64(len(part))
			continue
		}
		if errors.Is(err, io.EOF) {
			return consumed - int64(len(line)-len(part)), nil
		}
		if err != nil {
			return consumed, err
		}
		consumed += int64(len(part))
		if e, perr := parse(bytes.TrimSuffix(line, []byte{'\n'})); perr == nil {
			if err := f(e); err != nil {
				return consumed, err
			}
		}
		line = line[:0]
	}
}

// follow prints what is appended, across rotations.
func follow(ctx context.Context, path string, pos position, ended func() bool, p *printer) error {
	t := time.NewTicker(pollInterval)
	defer t.Stop()
	for {
		last := ended != nil && ended() // before reading, so that nothing is missed
		next, err := advance(path, pos, p)
		if err != nil {
			return err
		}
		pos = next
		if p.full() || last {
			return nil
		}
		if err := p.flush(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// advance reads what is new since pos. If the live file was rotated, the
// rest of the old one (now PATH.1) comes first.
func advance(path string, pos position, p *printer) (position, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return pos, nil
	}
	if err != nil {
		return pos, fmt.Errorf("follow log: %w", err)
	}
	if pos.info != nil && !os.SameFile(pos.info, info) {
		if old, err := os.Stat(path + ".1"); err == nil && os.SameFile(pos.info, old) {
			if _, err := readFrom(path+".1", pos.offset, p); err != nil {
				return pos, err
			}
		}
		pos = position{}
	}
	if pos.info != nil && info.Size() < pos.offset {
		pos.offset = 0 // truncated in place
	}
	n, err := readFrom(path, pos.offset, p)
	return position{info: info, offset: pos.offset + n}, err
}

func readFrom(path string, offset int64, p *printer) (int64, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("follow log: %w", err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return 0, fmt.Errorf("follow log: %w", err)
	}
	n, err := scan(f, func(e entry) error {
		if !p.wants(e) {
			return nil
		}
		return p.print(e)
	})
	if err != nil {
		return n, fmt.Errorf("follow log: %w", err)
	}
	return n, nil
}

// printer applies the options that concern the output.
type printer struct {
	w          io.Writer
	stderr     io.Writer // where error output goes to; nil is w
	timestamps bool
	since      time.Time
	stream     string
	limit      int64 // bytes left; -1 is none
	lineStart  bool
}

func (p *printer) full() bool { return p.limit == 0 }

func (p *printer) wants(e entry) bool {
	if p.stream != "" && string(e.stream) != p.stream {
		return false
	}
	if p.since.IsZero() {
		return true
	}
	at, err := time.Parse(time.RFC3339Nano, string(e.at))
	return err != nil || !at.Before(p.since)
}

func (p *printer) print(e entry) error {
	var b []byte
	if p.timestamps && p.lineStart {
		b = append(append(b, e.at...), ' ')
	}
	b = append(b, e.content...)
	if !e.partial {
		b = append(b, '\n')
	}
	p.lineStart = !e.partial
	if p.limit >= 0 {
		b = b[:min(int64(len(b)), p.limit)]
		p.limit -= int64(len(b))
	}
	w := p.w
	if p.stderr != nil && string(e.stream) == "stderr" {
		w = p.stderr
	}
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("write log to client: %w", err)
	}
	return nil
}

func (p *printer) flush() error {
	if f, ok := p.w.(interface{ Flush() error }); ok {
		return f.Flush()
	}
	return nil
}
