package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/probe"
	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Handlers of the two RuntimeClasses that exist from the first start.
const (
	wasmHandler = "wazero"
	ociHandler  = "runc"
)

// act does one action in a goroutine of its own and sends its outcome back.
// It works on a copy of the state, which nobody changes.
func (w *worker) act(ctx context.Context, a action) {
	s, paths := w.state.clone(), w.paths
	hook := ctx
	if a.kind == actPrepare || a.kind == actStop || a.kind == actStart {
		var cancel context.CancelFunc
		hook, cancel = context.WithCancel(ctx)
		w.cancels[doing{a.kind, a.ctr}] = cancel
		if a.kind != actStart { // a start under way is never cut
			ctx = hook
		}
	}
	if a.kind == actStop {
		n := s.ctrs[a.ctr].note(false, "Killing", "Stopping container "+a.id.Container)
		if s.ctrs[a.ctr].kill == nil {
			w.event(n)
		}
	}
	w.ops.Go(func() {
		r := result{kind: a.kind, ctr: a.ctr, id: a.id, probe: a.probe}
		w.do(ctx, hook, a, &s, paths, &r)
		w.send(r)
	})
}

func (w *worker) send(r result) {
	select {
	case w.results <- r:
	case <-w.done:
	}
}

// do works under ctx; hook ends earlier, when the pod is to stop.
func (w *worker) do(ctx, hook context.Context, a action, s *podState, paths map[string]string, r *result) {
	if w.rt == nil && a.kind != actFinish && a.kind != actUnmount && a.kind != actTeardown {
		r.err = errors.New("no runtime for the pod on this node")
		return
	}
	switch a.kind {
	case actMount:
		if r.claims, r.err = w.a.takeVolumes(s.pod); r.err == nil {
			r.paths, r.err = w.a.c.Volumes.Prepare(ctx, s.pod, volumeSource{w.a, w, s}, w.a.fieldFactsFor(s, w.rt))
		}
	case actNetwork:
		var al network.Allocation
		al, r.err = w.a.setupNetwork(ctx, s, w.rt)
		r.alloc = &al
		if r.err == nil {
			w.a.noteAddress(s.rec.UID, al)
		}
	case actPrepare:
		if r.image, r.err = w.prepare(ctx, s, &s.ctrs[a.ctr]); ctx.Err() == nil {
			w.a.fig.prepared(r.err)
		}
		r.spread = w.a.c.Jitter
	case actStart:
		w.start(ctx, a, s, paths, r)
		w.postStart(hook, a, s, r)
	case actStop:
		r.err = w.stop(ctx, a, s)
	case actKill:
		r.err = w.rt.Kill(ctx, a.id)
	case actRemove:
		r.err = w.rt.Remove(ctx, a.id)
		w.trimLogs(s, a.id)
	case actProbe:
		c := &s.ctrs[a.ctr]
		if r.ok, r.text = probe.Run(ctx, c.probeSpec(a.probe), w.dialer(s), portsOf(c.spec), w.execer(a.id)); ctx.Err() == nil {
			w.a.fig.probed(a.probe, r.ok)
		}
	case actUnmount:
		r.err = w.a.c.Volumes.Teardown(ctx, s.rec.UID)
	case actTeardown:
		if p, ok := w.rt.(workload.PodRemover); ok {
			r.err = p.RemovePod(ctx, s.rec.UID)
		}
		// Before its address is another's.
		if r.err = errors.Join(r.err, w.a.endLeft(ctx, s.rec.UID)); r.err == nil {
			r.err = errors.Join(w.a.c.Network.Teardown(ctx, s.rec.UID), w.a.forgetAddress(s.rec.UID))
		}
	case actFinish:
		r.err = os.RemoveAll(w.a.podLogs(s.rec.Namespace, s.rec.Name, s.rec.UID))
	}
	r.err = w.a.whyMissing(r.err)
}

// prepare looks on the node first, so that what is here never waits behind
// pulls that hang.
func (w *worker) prepare(ctx context.Context, s *podState, c *ctrState) (workload.ImageState, error) {
	policy := pullPolicy(c.spec)
	if policy != corev1.PullAlways {
		st, err := w.prepareIn(ctx, w.a.slots, s, c, corev1.PullNever)
		if err == nil || policy == corev1.PullNever || !notHere(err) {
			return st, err
		}
	}
	if w.needsRegistry(c.spec.Image) {
		// Pulls are counted where they happen: asking whether a tag has moved
		// must not wait behind them.
		return w.prepareIn(ctx, nil, s, c, policy)
	}
	return w.prepareIn(ctx, w.a.pulls, s, c, policy)
}

func (w *worker) prepareIn(ctx context.Context, slots chan struct{}, s *podState, c *ctrState, policy corev1.PullPolicy) (workload.ImageState, error) {
	if slots != nil {
		if err := acquire(ctx, slots); err != nil {
			return workload.ImageState{}, err
		}
		defer func() { <-slots }()
	}
	req := workload.ImageRequest{Image: c.spec.Image, Policy: string(policy), PodNamespace: s.pod.Namespace}
	var err error
	if req.SignedBy, err = w.signedBy(s, c.spec.Image); err != nil {
		return workload.ImageState{}, err
	}
	if policy != corev1.PullNever {
		req.Credentials = w.pullCredentials(s.pod, c)
	}
	return w.rt.Prepare(ctx, req, func(m string) { w.preparing(s, c, m) })
}

// notHere: the registry may have what is not on this node, the image or its
// signature.
func notHere(err error) bool {
	var se *workload.StartError
	return errors.As(err, &se) && (se.Reason == images.ReasonNeverPull || se.Reason == images.ReasonSignature)
}

// pullPolicy defaults as upstream, for static pods that were not defaulted.
func pullPolicy(c *corev1.Container) corev1.PullPolicy {
	switch {
	case c.ImagePullPolicy != "":
		return c.ImagePullPolicy
	case strings.HasSuffix(c.Image, ":latest"):
		return corev1.PullAlways
	}
	return corev1.PullIfNotPresent
}

// start opens the listeners, makes their ports durable, and starts.
func (w *worker) start(ctx context.Context, a action, s *podState, paths map[string]string, r *result) {
	if err := acquire(ctx, w.a.slots); err != nil {
		r.err = err
		return
	}
	defer func() { <-w.a.slots }()
	c := &s.ctrs[a.ctr]
	spec, err := w.a.containerSpec(s, c, a.id, paths)
	if err != nil {
		r.err = err
		return
	}
	if err := os.MkdirAll(filepath.Dir(spec.LogPath), 0o750); err != nil {
		r.err = fmt.Errorf("log folder: %w", err)
		return
	}
	if w.rt.Name() == wasmHandler && s.rec.Allocation != nil {
		al := copyAllocation(s.rec.Allocation)
		spec.Listeners, err = w.listen(ctx, c.spec, al)
		if err == nil && len(al.Ports) != len(s.rec.Allocation.Ports) {
			err = w.noteAllocation(a, al)
		}
		if err != nil {
			closeListeners(spec.Listeners)
			r.err = err
			return
		}
	}
	if err := w.stillSigned(ctx, s, c, spec.Digest); err != nil {
		closeListeners(spec.Listeners)
		r.err = err
		return
	}
	whole := spec.StopDeadline
	if err := w.limitStart(&spec); err != nil {
		closeListeners(spec.Listeners)
		r.err = err
		return
	}
	began := time.Now()
	if r.state, r.err = w.rt.Start(ctx, spec); r.err == nil {
		w.a.fig.started(a.id.Attempt, time.Since(began))
		if whole > 0 {
			w.extend(ctx, a.id, whole) // its own began to count when it was up
		}
	}
}

func copyAllocation(a *network.Allocation) *network.Allocation {
	c := *a
	c.Ports = make(map[int32]int32, len(a.Ports))
	for k, v := range a.Ports {
		c.Ports[k] = v
	}
	return &c
}

func (w *worker) listen(ctx context.Context, c *corev1.Container, al *network.Allocation) ([]workload.Listener, error) {
	var out []workload.Listener
	for _, p := range c.Ports {
		files, err := w.a.c.Network.Listen(ctx, al, p.ContainerPort, p.HostPort, string(p.Protocol))
		if err != nil {
			se := &workload.StartError{Reason: "CreateContainerError", Message: err.Error(), Err: err}
			if errors.Is(err, network.ErrUDP) {
				se.Reason, se.Fatal = "CreateContainerConfigError", true
			}
			return out, se
		}
		for _, f := range files {
			out = append(out, workload.Listener{Name: p.Name, Port: p.ContainerPort, File: f})
		}
	}
	return out, nil
}

func closeListeners(ls []workload.Listener) {
	for _, l := range ls {
		_ = l.File.Close()
	}
}

// noteAllocation has the worker make chosen ports durable before a guest
// listens on them.
func (w *worker) noteAllocation(a action, al *network.Allocation) error {
	w.a.noteAddress(w.uid, *al)
	noted := make(chan error, 1)
	select {
	case w.results <- result{kind: actStart, ctr: a.ctr, id: a.id, alloc: al, noted: noted}:
		return <-noted
	case <-w.done:
		return context.Canceled
	}
}

// stop runs the preStop hook within grace, then stops with what is left.
func (w *worker) stop(ctx context.Context, a action, s *podState) error {
	c := &s.ctrs[a.ctr]
	began := time.Now()
	if a.hooks(c.spec) {
		hctx, cancel := context.WithTimeout(ctx, a.grace)
		err := w.hook(hctx, c.spec.Lifecycle.PreStop, a.id, s, c)
		cancel()
		if err != nil && ctx.Err() == nil {
			w.a.reports.event(w.a.podEvent(s.pod, c.note(true, "FailedPreStopHook", "preStop: "+err.Error())))
		}
		w.send(result{kind: actAsked, ctr: a.ctr, id: a.id})
	}
	left := a.grace - time.Since(began)
	if a.grace > 0 {
		left = max(left, 2*time.Second) // upstream's floor after a hook
		left = min(left, a.grace)
	}
	return w.rt.Stop(ctx, a.id, max(left, 0))
}

// postStart runs the hook of a container that was just started. When it
// fails the container is stopped, and counts as crashed.
func (w *worker) postStart(ctx context.Context, a action, s *podState, r *result) {
	c := &s.ctrs[a.ctr]
	if r.err != nil || r.state.Phase != workload.Running || c.spec.Lifecycle == nil || c.spec.Lifecycle.PostStart == nil {
		return
	}
	err := w.hook(ctx, c.spec.Lifecycle.PostStart, a.id, s, c)
	if err == nil || ctx.Err() != nil {
		return
	}
	w.a.reports.event(w.a.podEvent(s.pod, c.note(true, "FailedPostStartHook", "postStart: "+err.Error())))
	_ = w.rt.Stop(ctx, a.id, s.grace()) // what it came to is read next
	if st, ok, err := w.rt.State(ctx, a.id); err == nil && ok {
		r.state = st
	}
}

func (w *worker) hook(ctx context.Context, h *corev1.LifecycleHandler, id workload.ID, s *podState, c *ctrState) error {
	switch {
	case h.Sleep != nil:
		t := time.NewTimer(time.Duration(h.Sleep.Seconds) * time.Second)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		return nil
	case h.HTTPGet != nil:
		return probe.HTTPGet(ctx, h.HTTPGet, w.dialer(s), portsOf(c.spec))
	case h.Exec != nil:
		x, ok := w.rt.(workload.Execer)
		if !ok {
			return errors.New("exec hooks are not supported by this runtime")
		}
		code, err := x.Exec(ctx, id, h.Exec.Command, workload.Streams{})
		if err == nil && code != 0 {
			err = fmt.Errorf("command ended with exit code %d", code)
		}
		return err
	}
	return nil // tcpSocket hooks do nothing, as upstream
}

// execer runs the command of an exec probe; nil where the runtime cannot.
func (w *worker) execer(id workload.ID) probe.ExecFunc {
	x, ok := w.rt.(workload.Execer)
	if !ok {
		return nil
	}
	return func(ctx context.Context, command []string, out io.Writer) (int, error) {
		return x.Exec(ctx, id, command, workload.Streams{Stdout: out, Stderr: out})
	}
}

func (w *worker) dialer(s *podState) probe.DialFunc {
	return func(ctx context.Context, nw string, port int32) (net.Conn, error) {
		if s.rec.Allocation == nil {
			return nil, errors.New("the pod has no address yet")
		}
		return w.a.c.Network.Dial(ctx, *s.rec.Allocation, nw, port)
	}
}

func portsOf(c *corev1.Container) probe.PortFunc {
	return func(p intstr.IntOrString) (int32, error) {
		if p.Type == intstr.Int {
			return p.IntVal, nil
		}
		for _, cp := range c.Ports {
			if cp.Name == p.StrVal {
				return cp.ContainerPort, nil
			}
		}
		n, err := strconv.ParseInt(p.StrVal, 10, 32)
		if err != nil {
			return 0, fmt.Errorf("container %s has no port named %q", c.Name, p.StrVal)
		}
		return int32(n), nil
	}
}

// trimLogs keeps the logs of the ended attempt and of the one before.
func (w *worker) trimLogs(s *podState, id workload.ID) {
	if id.Attempt < 2 {
		return
	}
	old := w.a.logPath(s.rec.Namespace, s.rec.Name, s.rec.UID, id.Container, id.Attempt-2)
	names, _ := filepath.Glob(old + "*")
	for _, n := range names {
		_ = os.Remove(n)
	}
}
