package oci

import (
	"context"
	"io"
	"os"
	"sync/atomic"
	"time"
)

// outletIdle is how long a command's output may say nothing after the command
// has ended: a process that it left behind may hold it open for ever.
const outletIdle = 2 * time.Second

// outlets are the outputs of a command on their way to whoever wants them,
// who may be slow: what was written before the end arrives, however long that
// takes.
type outlets struct {
	all   []*outlet
	files []*os.File // the program's ends, until it has them
}

type outlet struct {
	r    *os.File
	busy atomic.Bool // a write is under way
	last atomic.Int64
	done chan struct{}
}

// pipe makes the program's end of an output.
func (o *outlets) pipe(to io.Writer) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	o.files = append(o.files, w)
	o.copy(r, to)
	return w, nil
}

// started closes what the program has now, or never will.
func (o *outlets) started() {
	for _, f := range o.files {
		_ = f.Close()
	}
}

// copy reads from r, which it closes, until that ends.
func (o *outlets) copy(r *os.File, to io.Writer) {
	x := &outlet{r: r, done: make(chan struct{})}
	o.all = append(o.all, x)
	go x.run(to)
}

func (x *outlet) run(to io.Writer) {
	defer close(x.done)
	defer func() { _ = x.r.Close() }()
	buf := make([]byte, 16<<10)
	for {
		n, err := x.r.Read(buf)
		if n > 0 {
			x.busy.Store(true)
			_, werr := to.Write(buf[:n])
			x.last.Store(time.Now().UnixNano())
			x.busy.Store(false)
			if werr != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// end waits, after the program's end, for what it wrote.
func (o *outlets) end(ctx context.Context) {
	ended := time.Now()
	t := time.NewTicker(outletIdle / 8)
	defer t.Stop()
	for _, x := range o.all {
		for over := false; !over; {
			select {
			case <-x.done:
				over = true
			case <-ctx.Done():
				_ = x.r.Close()
				x.ended()
				over = true
			case <-t.C:
				last := time.Unix(0, max(x.last.Load(), ended.UnixNano()))
				if !x.busy.Load() && time.Since(last) > outletIdle {
					_ = x.r.Close()
				}
			}
		}
	}
}

// ended waits for a write that is under way: the writer is its owner's again
// afterwards. One that waits itself, for a reader that does not read, ends with
// that reader.
func (x *outlet) ended() {
	t := time.NewTimer(outletIdle)
	defer t.Stop()
	select {
	case <-x.done:
	case <-t.C:
	}
}
