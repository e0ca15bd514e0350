package host

import (
	"context"
	"math"
	"time"

	"github.com/tetratelabs/wazero/api"
	"golang.org/x/sys/unix"
)

// wazero's poll_oneoff calls every non-blocking descriptor ready at once and
// never waits for a socket, so that a server spins or hangs. This one waits
// in ppoll(2) for standard input, listeners and connections, and sleeps
// without using the CPU.

// Layout of subscription_t and event_t (witx/typenames.witx).
const (
	subscriptionSize = 48
	eventSize        = 32

	eventClock = 0
	eventRead  = 1
	eventWrite = 2

	// maxSubscriptions bounds what one call may ask for.
	maxSubscriptions = 4096

	clockRealtime  = 0
	clockMonotonic = 1

	abstime = 1

	eventHangup = 1
)

// poller answers poll_oneoff for one guest. Its buffers are reused: a guest
// in a loop must not make garbage.
type poller struct {
	sockets *sockets
	stdin   int // host descriptor, -1 for none
	known   func(ctx context.Context, mod api.Module, fd int32) bool

	fds    []unix.PollFd
	owner  []int // fds[i] belongs to subscription owner[i]
	states []subState
}

type subState struct {
	ready  bool
	errno  uint32
	hangup bool
	clock  bool
	due    time.Duration
}

func (p *poller) oneoff(ctx context.Context, mod api.Module, stack []uint64) uint32 {
	in, out, n, result := uint32(stack[0]), uint32(stack[1]), uint32(stack[2]), uint32(stack[3])
	if n == 0 || n > maxSubscriptions {
		return eInval
	}
	mem := mod.Memory()
	subs, ok1 := mem.Read(in, n*subscriptionSize)
	events, ok2 := mem.Read(out, n*eventSize)
	if !ok1 || !ok2 {
		return eFault
	}
	p.fds, p.owner, p.states = p.fds[:0], p.owner[:0], p.states[:0]
	wait := time.Duration(math.MaxInt64)
	start := time.Now()
	anyReady := false
	for i := range int(n) {
		st, errno := p.subscribe(ctx, mod, i, subs[i*subscriptionSize:(i+1)*subscriptionSize], start)
		if errno != 0 {
			return errno
		}
		if st.clock && st.errno == 0 {
			wait = min(wait, st.due)
		}
		anyReady = anyReady || st.ready
		p.states = append(p.states, st)
	}
	if anyReady {
		wait = 0
	}
	if errno := p.wait(wait); errno != 0 {
		return errno
	}
	passed := time.Since(start)
	count := uint32(0)
	// events may overlap subs in the guest's memory only if it asked for
	// that; userdata is copied before its event is written.
	for i := range int(n) {
		st := &p.states[i]
		if st.clock && passed >= st.due {
			st.ready = true
		}
		if !st.ready {
			continue
		}
		sub := subs[i*subscriptionSize:]
		userdata, kind := le.Uint64(sub), sub[8]
		ev := events[count*eventSize : (count+1)*eventSize]
		clear(ev)
		le.PutUint64(ev, userdata)
		le.PutUint16(ev[8:], uint16(st.errno))
		ev[10] = kind
		if kind != eventClock && st.errno == 0 {
			le.PutUint64(ev[16:], 1)
			if st.hangup {
				ev[24] = eventHangup
			}
		}
		count++
	}
	if !mem.WriteUint32Le(result, count) {
		return eFault
	}
	return 0
}

// subscribe decodes one subscription and says whether it is ready already.
func (p *poller) subscribe(ctx context.Context, mod api.Module, i int, sub []byte, now time.Time) (subState, uint32) {
	switch sub[8] {
	case eventClock:
		return clockState(le.Uint32(sub[16:]), le.Uint64(sub[24:]), le.Uint16(sub[40:]), now), 0
	case eventRead, eventWrite:
		fd := int32(le.Uint32(sub[16:]))
		events := int16(unix.POLLIN)
		if sub[8] == eventWrite {
			events = unix.POLLOUT
		}
		if fd == 0 && p.stdin >= 0 && sub[8] == eventRead {
			p.add(i, p.stdin, events)
			return subState{}, 0
		}
		if c := p.sockets.conn(fd); c != nil && c.fd == noSocket {
			return subState{ready: true}, 0 // as one that was never connected
		} else if c != nil {
			p.add(i, c.fd, events)
			return subState{}, 0
		}
		if l := p.sockets.listener(fd); l != nil {
			for _, h := range l.fds {
				p.add(i, h, events)
			}
			return subState{}, 0
		}
		if fd < 0 || !p.known(ctx, mod, fd) {
			return subState{ready: true, errno: eBadf}, 0
		}
		return subState{ready: true}, 0 // files and output are always ready
	}
	return subState{}, eInval
}

func (p *poller) add(owner, fd int, events int16) {
	p.fds = append(p.fds, unix.PollFd{Fd: int32(fd), Events: events})
	p.owner = append(p.owner, owner)
}

// clockState is when a clock subscription is due, from now.
func clockState(id uint32, timeout uint64, flags uint16, now time.Time) subState {
	st := subState{clock: true}
	if id > clockMonotonic {
		return subState{ready: true, errno: eNotsup}
	}
	if timeout > math.MaxInt64 {
		timeout = math.MaxInt64
	}
	st.due = time.Duration(timeout)
	if flags&abstime != 0 {
		switch id {
		case clockRealtime:
			st.due = time.Unix(0, int64(timeout)).Sub(now)
		case clockMonotonic:
			st.due = time.Duration(int64(timeout) - nanotime())
		}
	}
	st.due = max(st.due, 0)
	return st
}

// wait blocks until a descriptor is ready or d has passed.
func (p *poller) wait(d time.Duration) uint32 {
	deadline := time.Now().Add(d)
	for {
		var ts *unix.Timespec
		if d != math.MaxInt64 {
			t := unix.NsecToTimespec(max(0, int64(time.Until(deadline))))
			ts = &t
		}
		n, err := unix.Ppoll(p.fds, ts, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return wireOf(err)
		}
		if n == 0 && d == math.MaxInt64 {
			continue
		}
		break
	}
	for i, f := range p.fds {
		if f.Revents == 0 {
			continue
		}
		st := &p.states[p.owner[i]]
		st.ready = true
		if f.Revents&(unix.POLLHUP|unix.POLLERR) != 0 {
			st.hangup = true
		}
		if f.Revents&unix.POLLNVAL != 0 {
			st.errno = eBadf
		}
	}
	return 0
}
