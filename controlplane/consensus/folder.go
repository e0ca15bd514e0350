package consensus

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/fxamacker/cbor/v2"
	"golang.org/x/sys/unix"
)

// folderLock holds the state folder for this process. The kernel gives it
// back however the process ends.
type folderLock struct{ f *os.File }

func lockFolder(dir string) (*folderLock, error) {
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock state folder: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		b := make([]byte, 32)
		n, _ := f.ReadAt(b, 0)
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: %w by process %s; stop it first", dir, ErrLocked, strings.TrimSpace(string(b[:n])))
		}
		return nil, fmt.Errorf("lock state folder %s: %w", dir, err)
	}
	// Only to be shown to the next one who tries: neither synced nor vital.
	_ = f.Truncate(0)
	_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return &folderLock{f}, nil
}

func (l *folderLock) release() { _ = l.f.Close() }

// identity says whose folder this is. It is kept twice.
type identity struct {
	Cluster string `cbor:"1,keyasint"`
	Server  string `cbor:"2,keyasint"`
	// Recover asks for a recovery epoch at the next leadership: the folder
	// was found to hold less than was once acknowledged.
	Recover bool `cbor:"3,keyasint,omitempty"`
	// Joined: the folder was made for a cluster that existed already.
	Joined bool `cbor:"4,keyasint,omitempty"`
	// Epoch is the least recovery epoch, whatever the state says.
	Epoch uint64 `cbor:"5,keyasint,omitempty"`
}

type identityFile struct {
	slots *slots
	id    identity                 // changed by save only
	shown atomic.Pointer[identity] // a copy of id, for any goroutine
	epoch atomic.Uint64            // what id says of the epoch, for any goroutine
	// recovering is id.Recover: one more epoch than the state shows.
	recovering atomic.Bool
	mu         sync.Mutex // update
}

// update changes the identity once the node runs; it is written only if it
// differs.
func (f *identityFile) update(change func(*identity)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	id := f.id
	change(&id)
	if id == f.id {
		return nil
	}
	return f.save(id)
}

func (f *identityFile) publish() {
	id := f.id
	f.shown.Store(&id)
	f.epoch.Store(f.id.Epoch)
	f.recovering.Store(f.id.Recover)
}

func (f *identityFile) load() (found bool, err error) {
	b, err := f.slots.load()
	if err != nil || b == nil {
		return false, err
	}
	if err := cbor.Unmarshal(b, &f.id); err != nil {
		return false, fmt.Errorf("%s: %w: %w", f.slots.path, ErrDamaged, err)
	}
	f.publish()
	return true, nil
}

// save writes both copies.
func (f *identityFile) save(id identity) error {
	b, err := cbor.Marshal(id)
	if err != nil {
		return fmt.Errorf("encode identity: %w", err)
	}
	for range f.slots.files {
		if err := f.slots.store(b); err != nil {
			return fmt.Errorf("identity: %w", err)
		}
	}
	f.id = id
	f.publish()
	return nil
}

// repair writes a copy that is missing or damaged again.
func (f *identityFile) repair() error {
	for i := range f.slots.files {
		b, err := os.ReadFile(f.slots.name(i))
		if err == nil {
			_, _, err = unframe(b)
		}
		if err != nil {
			return f.save(f.id)
		}
	}
	return nil
}
