package clock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// Floor is a wall clock that never shows less than the latest time that is
// known to have been: a board without a battery does not boot in 1970 again.
// What is known comes from servers, and is kept on disk, once a day at most.
// Safe for concurrent use; it owns no goroutine.
type Floor struct {
	wall Clock
	path string

	mu      sync.Mutex
	follows bool      // see Follow
	reached bool      // the wall clock was not behind the floor
	floor   time.Time // zero: nothing is known
	at      time.Time // monotonic: when floor held
	written time.Time // what the file says
}

const (
	floorDay = 24 * time.Hour
	// floorSlack is how far a server may be behind this node before its word
	// lowers the floor.
	floorSlack = time.Minute
)

// OpenFloor reads what was kept at path; a file that is missing or damaged is
// no floor.
func OpenFloor(wall Clock, path string) (*Floor, error) {
	f := &Floor{wall: wall, path: path, at: time.Now()}
	b, err := atomicfile.Read(path)
	switch {
	case err == nil && len(b) == 8:
		f.floor = time.Unix(int64(binary.BigEndian.Uint64(b)), 0)
		f.written = f.floor
	case err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, atomicfile.ErrCorrupt):
		return nil, fmt.Errorf("time floor: %w", err)
	}
	return f, nil
}

// Now implements Clock.
func (f *Floor) Now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now()
}

func (f *Floor) now() time.Time {
	w, least := f.wall.Now(), f.least()
	f.reached = f.reached || !w.Before(least)
	if w.Before(least) && (!f.follows || !f.reached || w.Before(plausible())) {
		return least
	}
	return w
}

// Follow is for a machine whose clock is watched by a Guard, which it shall
// see: once the clock was seen to be no less than the floor, what moves it
// back is a repair, of a clock that was ahead. The floor then falls with the
// next Believe. Only to a time that cannot have been nobody repairs a clock.
func (f *Floor) Follow() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.follows = true
}

// Doubt says why the machine's clock is not what Now shows, or cannot be
// right; nil if there is nothing to doubt. To whom it is shown may want to know
// that the file is what must go where the clock is right.
func (f *Floor) Doubt() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	w, now := f.wall.Now(), f.now()
	switch {
	case now.Sub(w) > floorSlack:
		return fmt.Errorf("this machine's clock says %s, and it was %s before: that is gone by until the clock is past it (check the time service; if the clock is right, stop this, remove %s and start again)",
			w.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339), f.path)
	case w.Before(plausible()):
		return fmt.Errorf("this machine's clock says %s, and it is after %s (check the time service)", w.UTC().Format(time.RFC3339), plausible().UTC().Format(time.RFC3339))
	}
	return nil
}

func (f *Floor) least() time.Time {
	if f.floor.IsZero() {
		return f.floor
	}
	return f.floor.Add(time.Since(f.at))
}

// Known is the latest time that is known to have been; zero if none is.
func (f *Floor) Known() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.least()
}

// Observe takes a server's word, authenticated, with how far off it may be.
// The floor rises by at most the time that passed plus a day, so that a
// server with a wrong clock cannot carry this node years ahead; it falls to
// whatever the server says. The first word is taken as it is.
func (f *Floor) Observe(server time.Time, off time.Duration) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	said, least := server.Add(-off.Abs()), f.least()
	switch {
	case least.IsZero():
		f.set(said)
	case said.After(least):
		if most := least.Add(floorDay); said.After(most) {
			said = most
		}
		f.set(said)
	case server.Add(off.Abs() + floorSlack).Before(least):
		f.set(server)
		return f.write() // a floor that was too high is worth a write
	}
	return f.keep()
}

// Believe takes the machine's own clock for right, as a server does whose
// clock runs evenly.
func (f *Floor) Believe() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.set(f.now())
	if f.written.Sub(f.floor) > floorSlack { // a floor that was too high is worth a write
		return f.write()
	}
	return f.keep()
}

func (f *Floor) set(t time.Time) { f.floor, f.at = t, time.Now() }

// Keep writes the floor if a day passed; called now and then by a node that
// stays connected, to which nobody tells the time.
func (f *Floor) Keep() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.keep()
}

func (f *Floor) keep() error {
	least := f.least()
	if least.IsZero() || (!f.written.IsZero() && least.Sub(f.written) < floorDay) {
		return nil
	}
	return f.write()
}

func (f *Floor) write() error {
	t := f.least()
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(t.Unix()))
	if err := atomicfile.Write(f.path, b[:], 0o600); err != nil {
		return fmt.Errorf("time floor: %w", err)
	}
	f.written = t
	return nil
}
