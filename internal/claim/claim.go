// Package claim marks something of this machine as held by one process: a
// folder, a network namespace. The kernel gives it back however that process
// ends, so a successor never waits and nothing is ever cleaned up by hand.
package claim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrHeld says that another process holds the claim.
var ErrHeld = errors.New("in use")

// Holder is who holds a claim, shown to the next one who tries.
type Holder struct {
	PID      int    `json:"pid"`
	StateDir string `json:"stateDir,omitempty"`
	RunDir   string `json:"runDir,omitempty"`
}

// String names the holder for people.
func (h Holder) String() string {
	if h.PID == 0 {
		return "another process"
	}
	s := fmt.Sprintf("process %d", h.PID)
	if h.StateDir != "" {
		s += fmt.Sprintf(" (--state-dir %s --run-dir %s)", h.StateDir, h.RunDir)
	}
	return s
}

// HeldError is ErrHeld with the holder, as far as it has said who it is.
type HeldError struct{ By Holder }

func (e *HeldError) Error() string { return ErrHeld.Error() + " by " + e.By.String() }

// Is makes every HeldError an ErrHeld.
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// Claim is held until Release or the end of the process.
type Claim struct {
	path string
	me   Holder

	mu sync.Mutex
	f  *os.File
}

// maxTries bounds how often a folder may vanish while a claim is taken, and
// pause is between two tries: a folder that somebody is about to remove is
// there for mkdir, and not for the file in it, until that process has run
// again, which on a busy machine takes longer than any number of tries.
const (
	maxTries = 5000
	pause    = time.Millisecond
)

// vanished says whether err comes of a folder that went while it was used,
// and whether that is worth another try; then it has waited.
func vanished(err error, try int) bool {
	gone := errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist)
	if !gone || try >= maxTries {
		return false
	}
	<-time.After(pause)
	return true
}

// Take claims what the file at path stands for, or does not: it waits for no
// holder, only (seconds at most) for one who is removing the folder. The
// file is made, with its folder, and is there until Release; after a kill it
// stays, and means nothing: a claim is the lock on it. The error is a
// *HeldError when another process has it.
func Take(path string, me Holder) (*Claim, error) {
	for try := 0; ; try++ {
		err := os.MkdirAll(filepath.Dir(path), 0o711)
		if vanished(err, try) {
			continue // it was there, and the last one who used it removed it
		}
		if err != nil {
			return nil, fmt.Errorf("claim: %w", err)
		}
		// Not inherited by children (O_CLOEXEC): guests outlive their agent and
		// must not hold on for it.
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if vanished(err, try) {
			continue // the same
		}
		if err != nil {
			return nil, fmt.Errorf("claim: %w", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			by := read(f)
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, &HeldError{By: by}
			}
			return nil, fmt.Errorf("claim %s: %w", path, err)
		}
		if same, err := isAt(f, path); err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("claim %s: %w", path, err)
		} else if !same { // removed since it was opened: the lock means nothing
			_ = f.Close()
			continue
		}
		me.PID = os.Getpid()
		if b, err := json.Marshal(me); err == nil {
			// Only to be shown: neither synced nor vital.
			_ = f.Truncate(0)
			_, _ = f.WriteAt(append(b, '\n'), 0)
		}
		return &Claim{path: path, me: me, f: f}, nil
	}
}

func read(f *os.File) (h Holder) {
	b := make([]byte, 4096)
	n, _ := f.ReadAt(b, 0)
	_ = json.Unmarshal(b[:n], &h)
	return h
}

func isAt(f *os.File, path string) (bool, error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(mine, there), err
}

// Release gives the claim back and removes its file; it may be called more
// than once, and on nil. Whoever opened the file before sees that it is gone,
// and makes a new one.
func (c *Claim) Release() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if same, err := isAt(c.f, c.path); err == nil && same {
		_ = os.Remove(c.path)
	}
	_ = c.f.Close()
}

// Renew makes the file, and its folder, again if somebody removed them, and
// says whether it did: until then another process could take the claim. If one
// has, that is a *HeldError, and this claim holds nothing until a later Renew.
func (c *Claim) Renew() (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if same, err := isAt(c.f, c.path); err == nil && same {
		return false, nil
	}
	again, err := Take(c.path, c.me)
	if err != nil {
		return false, err
	}
	_ = c.f.Close() // of a file without a name
	c.f = again.f
	return true, nil
}

// Held says whether another process holds the claim. Nothing is made.
func Held(path string) bool {
	_, held := By(path)
	return held
}

// By is Held, and by whom, as far as that one has said.
func By(path string) (Holder, bool) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return Holder{}, errors.Is(err, fs.ErrPermission)
	}
	defer func() { _ = f.Close() }() // gives back the lock
	if !errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK) {
		return Holder{}, false
	}
	return read(f), true
}
