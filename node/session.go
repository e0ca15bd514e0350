package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/node/logs"
	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

const (
	// sessionOpen is how long the control plane may take to say what to do: its
	// client opens streams of its own first.
	sessionOpen = time.Minute
	// sessionCheck is how often the pod's end is looked for.
	sessionCheck = time.Second
	// sessionEnd is how many checks a session whose container has ended may
	// take to end by itself, with an exit code.
	sessionEnd = 5
	// attachStall is how long a client that attached may take nothing: what
	// reads the container's output may wait for it.
	attachStall = 10 * time.Second
)

// Session implements SessionServer.
func (a *Agent) Session(ctx context.Context, r *wire.StreamRequest, begin func() (*mux.Mux, error)) error {
	info, uid, err := a.find(r.Namespace, r.Pod, r.UID)
	if err != nil {
		return err
	}
	if r.Kind == "portforward" {
		return a.forward(ctx, info, uid, begin)
	}
	c, err := a.container(info, uid, r.Container)
	if err != nil {
		return err
	}
	switch r.Kind {
	case "exec":
		x, ok := c.rt.(workload.Execer)
		if !ok {
			return apierrors.NewBadRequest(fmt.Sprintf("container %q of pod %q is a Wasm guest: it is one module, with no shell and no other programs beside it that a command could be, so there is no exec; 'logs', 'attach' and 'port-forward' work", r.Container, r.Pod))
		}
		return c.serve(ctx, begin, func(ctx context.Context, o *wire.ExecOpen, s workload.Streams) (int, error) {
			if len(o.Command) == 0 {
				return 0, errors.New("no command was given")
			}
			return x.Exec(ctx, c.id, o.Command, s)
		})
	case "attach":
		return c.serve(ctx, begin, func(ctx context.Context, _ *wire.ExecOpen, s workload.Streams) (int, error) {
			return 0, c.attach(ctx, s)
		})
	}
	return apierrors.NewBadRequest("this node does not serve " + r.Kind)
}

// sessionContainer is the running attempt that a session is about.
type sessionContainer struct {
	id    workload.ID
	rt    workload.Runtime
	log   string
	input bool        // it was started with a standard input
	ended func() bool // the attempt is over
}

// container finds a running container.
func (a *Agent) container(info podInfo, uid, name string) (*sessionContainer, error) {
	st := containerStatusOf(info.status, name)
	switch {
	case st == nil:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("container %s is not valid for pod %s", name, info.pod.Name))
	case st.State.Waiting != nil:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("container %q in pod %q is waiting to start: %s", name, info.pod.Name, st.State.Waiting.Reason))
	case st.State.Running == nil || info.worker == nil || info.worker.rt == nil:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("container %q in pod %q is not running: there is nothing to join (its output: 'logs')", name, info.pod.Name))
	}
	attempt := int(st.RestartCount)
	c := &sessionContainer{
		id: workload.ID{PodUID: uid, Container: name, Attempt: attempt}, rt: info.worker.rt,
		log: a.logPath(info.pod.Namespace, info.pod.Name, uid, name, attempt),
	}
	for _, list := range [][]corev1.Container{info.pod.Spec.InitContainers, info.pod.Spec.Containers} {
		for i := range list {
			c.input = c.input || list[i].Name == name && list[i].Stdin
		}
	}
	c.ended = func() bool {
		a.mu.RLock()
		defer a.mu.RUnlock()
		now := containerStatusOf(a.known[uid].status, name)
		return now == nil || now.State.Running == nil || int(now.RestartCount) != attempt
	}
	return c, nil
}

// serve runs one command, or attaches, over streams that the control plane
// opens.
func (c *sessionContainer) serve(ctx context.Context, begin func() (*mux.Mux, error), run func(context.Context, *wire.ExecOpen, workload.Streams) (int, error)) error {
	m, err := begin()
	if err != nil {
		return err
	}
	defer m.Close("")
	late := time.AfterFunc(sessionOpen, func() { m.Close("the node waited too long to hear what to do") })
	defer late.Stop()
	ctl, o, ends, err := accept(m)
	if err != nil {
		return err
	}
	late.Stop()
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() { // whoever asked is gone
		select {
		case <-m.Done():
			cancel(m.Err())
		case <-ctx.Done():
		}
	})
	wg.Go(func() { watchEnd(ctx, m, sessionEnd, c.ended, "the container has ended") })
	s := workload.Streams{TTY: o.TTY}
	// An interface that holds a nil pointer is not nil.
	if st := ends[wire.StreamStdin]; st != nil {
		s.Stdin = st
	}
	if st := ends[wire.StreamStdout]; st != nil {
		s.Stdout = st
	}
	if st := ends[wire.StreamStderr]; st != nil {
		s.Stderr = st
	}
	sizes := make(chan workload.Size, 1)
	s.Resize = sizes
	wg.Go(func() { readSizes(ctl, sizes) })
	code, err := run(ctx, o, s)
	if ctx.Err() != nil {
		m.Close("")
		return context.Cause(ctx)
	}
	if st := ends[wire.StreamStdin]; st != nil {
		st.Reset("it has ended")
	}
	for _, name := range []string{wire.StreamStdout, wire.StreamStderr} {
		if st := ends[name]; st != nil {
			_ = st.CloseWrite()
		}
	}
	end := &wire.ExecEnd{ExitCode: int32(code)}
	if err != nil {
		end.Error = err.Error()[:min(len(err.Error()), 2048)]
	}
	if err := wire.WriteMessage(ctl, end); err != nil {
		return err
	}
	_ = ctl.CloseWrite()
	// The control plane ends it when its client has read everything.
	select {
	case <-m.Done():
	case <-ctx.Done():
	}
	return nil
}

// accept takes the control stream, what it asks for, and the streams for
// that.
func accept(m *mux.Mux) (*mux.Stream, *wire.ExecOpen, map[string]*mux.Stream, error) {
	ends := map[string]*mux.Stream{}
	ctl, err := m.Accept()
	if err != nil {
		return nil, nil, nil, err
	}
	o := new(wire.ExecOpen)
	if name := string(ctl.What()); name != wire.StreamControl {
		return nil, nil, nil, fmt.Errorf("a session begins with a stream %q", name)
	}
	if err := wire.ReadMessage(ctl, o); err != nil {
		return nil, nil, nil, err
	}
	want := map[string]bool{wire.StreamStdin: o.Stdin, wire.StreamStdout: o.Stdout, wire.StreamStderr: o.Stderr}
	n := 0
	for _, yes := range want {
		if yes {
			n++
		}
	}
	for len(ends) < n {
		st, err := m.Accept()
		if err != nil {
			return nil, nil, nil, err
		}
		name := string(st.What())
		if !want[name] || ends[name] != nil {
			return nil, nil, nil, fmt.Errorf("a stream %q that was not announced", name)
		}
		ends[name] = st
	}
	return ctl, o, ends, nil
}

// readSizes hands on the newest size of the terminal, and closes sizes at
// the end.
func readSizes(ctl *mux.Stream, sizes chan workload.Size) {
	defer close(sizes)
	for {
		z := new(wire.TerminalSize)
		if err := wire.ReadMessage(ctl, z); err != nil {
			return // no more of them, or the whole session is over
		}
		select { // nobody else sends
		case <-sizes:
		default:
		}
		sizes <- workload.Size{Width: z.Width, Height: z.Height}
	}
}

// watchEnd cuts a session at the given check after its pod has ended.
func watchEnd(ctx context.Context, m *mux.Mux, checks int, ended func() bool, reason string) {
	t := time.NewTicker(sessionCheck)
	defer t.Stop()
	for over := 0; over < checks; {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if ended() {
			over++
		}
	}
	m.Close(reason)
}

// attach joins a container's own input and output, from now on.
func (c *sessionContainer) attach(ctx context.Context, s workload.Streams) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	hurry := func(w io.Writer) io.Writer {
		if w == nil {
			return nil
		}
		return &hurried{w: w, cancel: cancel}
	}
	s.Stdout, s.Stderr = hurry(s.Stdout), hurry(s.Stderr)
	if !c.input {
		s.Stdin = nil
	}
	err := c.join(ctx, s)
	if errors.Is(context.Cause(ctx), errStalled) {
		err = errStalled
	}
	return err
}

func (c *sessionContainer) join(ctx context.Context, s workload.Streams) error {
	if x, ok := c.rt.(workload.Attacher); ok {
		return x.Attach(ctx, c.id, s)
	}
	// Its output is what its log gets.
	if in, ok := c.rt.(workload.Inputter); ok && s.Stdin != nil {
		w, err := in.Input(ctx, c.id)
		if err != nil {
			return err
		}
		defer func() { _ = w.Close() }()
		go func() { _, _ = io.Copy(w, s.Stdin) }() // ends with the session's stream, or with w
	}
	out, errs := s.Stdout, s.Stderr
	if out == nil {
		out = io.Discard
	}
	if errs == nil {
		errs = io.Discard
	}
	return logs.Follow(ctx, c.log, c.ended, out, errs)
}

// errStalled ends an attach whose client does not read.
var errStalled = fmt.Errorf("the client took nothing for %s: the container shall not wait for it, so it was let go; its log goes on", attachStall)

// hurried gives up on a client that does not read.
type hurried struct {
	w      io.Writer
	cancel context.CancelCauseFunc
}

// Write implements io.Writer.
func (h *hurried) Write(p []byte) (int, error) {
	t := time.AfterFunc(attachStall, func() {
		h.cancel(errStalled)
		if s, ok := h.w.(*mux.Stream); ok {
			s.Reset(errStalled.Error())
		}
	})
	defer t.Stop()
	return h.w.Write(p)
}
