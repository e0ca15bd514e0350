// Package resident keeps the pages of the program itself that are in memory
// to those in use.
package resident

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	look  = 10 * time.Second
	quiet = look / 50 // of CPU time between two looks
	// Commands that run the same program fill the page cache with its file, of
	// which the kernel then maps large pieces for each page that is used.
	settled = time.Minute      // after pages were given back, those in use are back
	pause   = 10 * time.Minute // between two times, or
	longest = 24 * time.Hour   // where as many were back at once
	calm    = 6                // looks in a row
	many    = 16 << 10         // KiB: an idle server and agent use 10 MiB
)

// Keep returns what only the start of the process needed, free heap and pages
// of the program, to the kernel, as soon as the process has had little to do
// for ten seconds; and again when pages of files have become many since, and
// it has had little to do for a minute. It ends with ctx, or with an error.
func Keep(ctx context.Context) error {
	tick := time.NewTicker(look)
	defer tick.Stop()
	var s schedule
	start, before := time.Now(), cpu()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		now := cpu()
		due := s.next(time.Since(start), now-before, fileKB)
		before = now
		if !due {
			continue
		}
		debug.FreeOSMemory()
		if err := Program(); err != nil {
			return err
		}
	}
}

// schedule decides when; the zero value is that of a start.
type schedule struct {
	done   bool
	last   time.Duration // since the start
	wait   time.Duration // until the next time
	judged bool          // wait is known
	calms  int
}

// next is asked at every look, with the CPU time since the one before, and
// says whether pages are to be given back now. It reads how much of files is
// in memory only where that matters.
func (s *schedule) next(at, used time.Duration, files func() int) bool {
	if s.calms++; used > quiet {
		s.calms = 0
	}
	switch {
	case !s.done:
		if s.calms == 0 {
			return false
		}
	case !s.judged:
		if at-s.last < settled {
			return false
		}
		s.judged = true
		if files() < many {
			s.wait = pause
		} else {
			s.wait = min(2*max(s.wait, pause/2), longest)
		}
		return false
	case at-s.last < s.wait || s.calms < calm || files() < many:
		return false
	}
	s.done, s.last, s.judged = true, at, false
	return true
}

// fileKB is how much of files this process has mapped and in memory; 0 is
// unknown.
func fileKB() int {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(b), "\nRssFile:")
	n := 0
	_, _ = fmt.Sscan(after, &n)
	return n
}

// cpu is the time that this process has used.
func cpu() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Program takes the pages of the running program's file out of memory, and
// has those that are used again read one by one, without what lies around
// them. Pages that another process maps stay, as do all on kernels before 5.4
// and where the file is not this user's: the kernel says nothing then.
//
// They are clean, so that the kernel could take them whenever it is short of
// memory; but the start of a Go program touches most of its file, and what is
// mapped is taken last.
func Program() error {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("name of the program: %w", err)
	}
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return fmt.Errorf("pages of the program: %w", err)
	}
	defer func() { _ = f.Close() }()
	var errs []error
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		at, size := fileMapping(sc.Text(), exe)
		if size == 0 {
			continue
		}
		for _, advice := range []uintptr{unix.MADV_PAGEOUT, unix.MADV_RANDOM} {
			// EINVAL: a kernel that does not know the advice.
			if _, _, e := unix.Syscall(unix.SYS_MADVISE, at, size, advice); e != 0 && e != unix.EINVAL {
				errs = append(errs, fmt.Errorf("madvise %d: %w", advice, e))
			}
		}
	}
	return errors.Join(append(errs, sc.Err())...)
}

// fileMapping is the range of a line of /proc/self/maps (proc_pid_maps(5)),
// when it is one of the file and not writable; size is 0 for any other.
func fileMapping(line, file string) (at, size uintptr) {
	const path = 5 // fields before it: range, permissions, offset, device, inode
	f := strings.Fields(line)
	if len(f) <= path || strings.Contains(f[1], "w") || !strings.HasSuffix(line, " "+file) {
		return 0, 0
	}
	from, to, ok := strings.Cut(f[0], "-")
	if !ok {
		return 0, 0
	}
	a, err := strconv.ParseUint(from, 16, strconv.IntSize)
	if err != nil {
		return 0, 0
	}
	b, err := strconv.ParseUint(to, 16, strconv.IntSize)
	if err != nil || b <= a {
		return 0, 0
	}
	return uintptr(a), uintptr(b - a)
}
