// Package process names processes of this machine so that a recycled number
// is never mistaken for one of ours, and waits for the end of processes that
// need not be children: what survived an earlier agent is watched like what
// this one started.
package process

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// StartTime is when a process started, in clock ticks since boot
// (proc_pid_stat(5), field 22). fs.ErrNotExist if there is none.
func StartTime(pid int) (uint64, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			err = os.ErrNotExist
		}
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	// The command, in parentheses, may hold anything.
	s := string(b)
	i := strings.LastIndexByte(s, ')')
	fields := strings.Fields(s[i+1:])
	if i < 0 || len(fields) < 20 {
		return 0, fmt.Errorf("process %d: stat is %q", pid, s)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, fmt.Errorf("process %d: %w", pid, os.ErrNotExist)
	}
	t, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	return t, nil
}

// BootID changes with every boot; empty when it cannot be read.
func BootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
