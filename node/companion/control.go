package companion

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/wire"
)

// command is what the agent, or a successor, says on the control socket.
type command[S any] struct {
	Settings *S                 `cbor:"1,keyasint,omitempty"`
	Items    []wire.ServiceItem `cbor:"2,keyasint,omitempty"`
	Gone     []string           `cbor:"3,keyasint,omitempty"`
	// Last ends a delta. The first one of a connection is everything.
	Last bool `cbor:"4,keyasint,omitempty"`
	Ask  bool `cbor:"5,keyasint,omitempty"` // for a Status
	Stop bool `cbor:"6,keyasint,omitempty"` // end now, with all connections
	// HandOver asks for the listeners: Taken, and their descriptors, follow.
	HandOver bool `cbor:"7,keyasint,omitempty"`
}

// taken names the listeners whose descriptors come with it.
type taken struct {
	Places []string `cbor:"1,keyasint,omitempty"`
	Last   bool     `cbor:"2,keyasint,omitempty"`
}

const (
	maxFrame = 8 << 20
	// fdsAtOnce is below what the kernel passes in one message (SCM_MAX_FD, 253).
	fdsAtOnce = 64
)

func writeFrame(w io.Writer, v any) error {
	b, err := wire.EncodeItem(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...))
	return err
}

func readFrame(r io.Reader, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxFrame {
		return fmt.Errorf("a message of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return err
	}
	return wire.DecodeItem(b, v)
}

// sendListeners hands copies of the listeners to a successor.
func (p *process[S]) sendListeners(c *net.UnixConn) error {
	type one struct {
		place string
		file  *os.File
	}
	open, err := p.worker.Listeners()
	defer func() {
		for _, f := range open {
			_ = f.Close()
		}
	}()
	if err != nil {
		return fmt.Errorf("copy a listener: %w", err)
	}
	var all []one
	for place, f := range open {
		all = append(all, one{place, f})
	}
	for at := 0; ; at += fdsAtOnce {
		part := all[min(at, len(all)):min(at+fdsAtOnce, len(all))]
		t := taken{Last: at+fdsAtOnce >= len(all)}
		var fds []int
		for _, o := range part {
			t.Places = append(t.Places, o.place)
			rc, err := o.file.SyscallConn()
			if err != nil {
				return err
			}
			// Not Fd(), which would make the socket blocking, for us too.
			if err := rc.Control(func(fd uintptr) { fds = append(fds, int(fd)) }); err != nil {
				return err
			}
		}
		if len(fds) > 0 {
			// One byte carries the descriptors; the frame follows.
			if _, _, err := c.WriteMsgUnix([]byte{1}, unix.UnixRights(fds...), nil); err != nil {
				return fmt.Errorf("hand over listeners: %w", err)
			}
		} else if _, err := c.Write([]byte{0}); err != nil {
			return err
		}
		if err := writeFrame(c, &t); err != nil {
			return err
		}
		if t.Last {
			return nil
		}
	}
}

// takeOver asks a predecessor for its listeners. Without one there are none.
func takeOver(socket string) (map[string]*os.File, error) {
	out := map[string]*os.File{}
	x, err := net.Dial("unix", socket)
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) {
		return out, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reach the predecessor: %w", err)
	}
	defer func() { _ = x.Close() }()
	c := x.(*net.UnixConn)
	if err := writeFrame(c, &command[struct{}]{HandOver: true}); err != nil {
		return nil, err
	}
	for {
		b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4*fdsAtOnce))
		n, oobn, _, _, err := c.ReadMsgUnix(b, oob)
		if err != nil || n == 0 {
			return out, fmt.Errorf("listeners of the predecessor: %w", errors.Join(err, io.ErrUnexpectedEOF))
		}
		fds, err := rights(oob[:oobn])
		if err != nil {
			return out, err
		}
		var t taken
		if err := readFrame(c, &t); err != nil || len(t.Places) != len(fds) {
			return out, fmt.Errorf("listeners of the predecessor: %d places, %d descriptors: %w", len(t.Places), len(fds), err)
		}
		for i, fd := range fds {
			_ = unix.SetNonblock(fd, true)
			out[t.Places[i]] = os.NewFile(uintptr(fd), t.Places[i])
		}
		if t.Last {
			return out, writeFrame(c, &taken{Last: true})
		}
	}
}

func rights(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var out []int
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return nil, err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
		}
		out = append(out, fds...)
	}
	return out, nil
}
