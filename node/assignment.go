package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/wire"
)

const (
	pullTimeout = time.Minute
	pullFirst   = time.Second
	pullMax     = time.Minute
)

func (a *Agent) setAssignment(asg store.Assignment) {
	index := make(map[wire.Ref]string, len(asg.Objects))
	for uid, o := range asg.Objects {
		index[o.Ref] = uid
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if refsChanged(a.asg.Objects, asg.Objects) {
		a.refsSerial++
	}
	if len(a.asg.Held) > 0 || len(asg.Held) > 0 {
		signal(a.heldNews)
	}
	a.asg, a.index = asg, index
	signal(a.assigned)
	signal(a.volumesNews)
}

// refsChanged says whether anything that pods may refer to is different.
func refsChanged(old, next map[string]wire.Object) bool {
	count := func(m map[string]wire.Object) (n int) {
		for _, o := range m {
			if o.Ref.Kind != "Pod" && o.Ref.Kind != "Node" {
				n++
			}
		}
		return n
	}
	if count(old) != count(next) {
		return true
	}
	for uid, o := range next {
		if o.Ref.Kind != "Pod" && o.Ref.Kind != "Node" && old[uid].ResourceVersion != o.ResourceVersion {
			return true
		}
	}
	return false
}

func (a *Agent) assignmentKnown() bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.asg.Known
}

// pullLoop fetches the assignment on hints and, rarely, without any.
func (a *Agent) pullLoop(ctx context.Context, hints <-chan struct{}) {
	if a.c.Link == nil {
		return
	}
	wait := newBackoff(pullFirst, pullMax, a.c.Jitter)
	full := false
	for {
		err := a.pull(ctx, full)
		full = errors.Is(err, errIncomplete)
		d := a.c.Jitter(a.c.Resync)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			d = wait.next()
			a.log.Debug("assignment not pulled", "err", err, "again_in", d)
		} else {
			wait.reset()
		}
		if !sleepUntil(ctx, d, hints, a.pullNow) {
			return
		}
	}
}

var (
	errIncomplete = errors.New("the assignment refers to objects that this node does not hold")
	errOldEpoch   = errors.New("the server belongs to a cluster state from before a recovery")
)

// Stopped tells the agent that what the cluster gave this node runs
// elsewhere, and why; "" that it is welcome again. The next pull, which a hint
// causes, acts on it.
func (a *Agent) Stopped(reason string) {
	if a.stopped.Swap(reason != "") == (reason != "") {
		return
	}
	a.Refresh() // its Node says so
	if reason != "" {
		a.log.Error("the pods that the cluster gave this node are stopped here; static pods go on", "reason", reason)
	}
}

// drop makes the assignment one of nothing, also for the next start. Secrets
// and the site's keys go, too.
func (a *Agent) drop() error {
	a.mu.RLock()
	old := a.asg
	a.mu.RUnlock()
	if old.Known && len(old.Objects) == 0 {
		return nil
	}
	next := store.Assignment{Epoch: old.Epoch, Known: true, PodCIDRs: old.PodCIDRs, Servers: old.Servers, Site: old.Site, Objects: map[string]wire.Object{}}
	if err := a.c.Store.SaveAssignment(next); err != nil {
		return fmt.Errorf("save an assignment of nothing: %w", err)
	}
	a.setAssignment(next)
	signal(a.changed)
	return nil
}

func (a *Agent) pull(ctx context.Context, full bool) error {
	if a.stopped.Load() {
		return a.drop()
	}
	a.mu.RLock()
	req := wire.PullRequest{}
	if !full {
		req.Generation, req.Have = a.asg.Generation, make(map[string]uint64, len(a.asg.Objects))
		for uid, o := range a.asg.Objects {
			req.Have[uid] = o.ResourceVersion
		}
	}
	old := a.asg
	a.mu.RUnlock()
	pctx, cancel := context.WithTimeout(ctx, pullTimeout)
	defer cancel()
	a.hear()
	asked := a.quiet.asked()
	reply, err := a.c.Link.Pull(pctx, req)
	if err != nil {
		a.pulled(resultError)
		return fmt.Errorf("pull: %w", err)
	}
	next, err := merge(old, reply)
	if err != nil {
		a.pulled(resultError)
		return err
	}
	if next == nil {
		a.pulled(resultUnchanged)
		a.answered.Store(asked)
		signal(a.changed)
		return nil
	}
	hold(old, next, reply.Lost, a.running, a.c.NodeName)
	// Durable first: what is acted on is what an offline boot will find.
	if err := a.c.Store.SaveAssignment(*next); err != nil {
		a.pulled(resultError)
		a.log.Error("assignment cannot be saved and is not acted on", "generation", next.Generation, "err", err)
		a.Refresh() // the Node tells
		return err
	}
	a.pulled(resultOK)
	a.setAssignment(*next)
	a.answered.Store(asked)
	a.tellHeld(&old, next)
	if err := a.c.Network.SetCIDRs(next.PodCIDRs); err != nil {
		a.log.Error("pod address ranges cannot be used", "cidrs", next.PodCIDRs, "err", err)
	}
	if !a.object("Node", "", a.c.NodeName, &corev1.Node{}) {
		a.reports.resendNode() // the cluster lost it, or never had it
	}
	signal(a.changed)
	return nil
}

// merge computes the assignment after a reply; nil when nothing changed.
func merge(old store.Assignment, r *wire.Assignment) (*store.Assignment, error) {
	if r.Epoch < old.Epoch {
		return nil, fmt.Errorf("%w: epoch %d, seen %d", errOldEpoch, r.Epoch, old.Epoch)
	}
	if r.Unchanged {
		if r.Epoch == old.Epoch && old.Known {
			return nil, nil
		}
		next := old
		next.Epoch, next.Known = r.Epoch, true
		return &next, nil
	}
	next := store.Assignment{
		Epoch: r.Epoch, Generation: r.Generation, Known: true, PodCIDRs: r.PodCIDRs, Servers: r.Servers,
		Keyring: r.Keyring, Site: r.Site, Seeds: r.Seeds,
		Objects: make(map[string]wire.Object, len(r.Objects)+len(r.Keep)),
	}
	for _, uid := range r.Keep {
		o, ok := old.Objects[uid]
		if !ok {
			return nil, fmt.Errorf("%w: %s", errIncomplete, uid)
		}
		next.Objects[uid] = o
	}
	for _, o := range r.Objects {
		next.Objects[o.UID] = o
	}
	return &next, nil
}

// object decodes one object of the assignment into out.
func (a *Agent) object(kind, namespace, name string, out any) bool {
	a.mu.RLock()
	o, ok := a.asg.Objects[a.index[wire.Ref{Kind: kind, Namespace: namespace, Name: name}]]
	a.mu.RUnlock()
	if !ok {
		return false
	}
	if err := direct.Unmarshal(o.Data, out); err != nil {
		a.log.Error("an assigned object cannot be decoded", "kind", kind, "namespace", namespace, "name", name, "err", err)
		return false
	}
	return true
}

// ConfigMap implements volumes.Source.
func (a *Agent) ConfigMap(namespace, name string) (*corev1.ConfigMap, bool) {
	cm := &corev1.ConfigMap{}
	return cm, a.object("ConfigMap", namespace, name, cm)
}

// Secret implements volumes.Source.
func (a *Agent) Secret(namespace, name string) (*corev1.Secret, bool) {
	s := &corev1.Secret{}
	return s, a.object("Secret", namespace, name, s)
}

// whyMissing says of a Secret that is missing whether the node has it and
// cannot open it.
func (a *Agent) whyMissing(err error) error {
	var m *volumes.MissingError
	if !errors.As(err, &m) {
		return err
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	if !slices.Contains(a.asg.Lost, wire.Ref{Kind: m.Kind, Namespace: m.Namespace, Name: m.Name}) {
		return err
	}
	return fmt.Errorf("%w: this node's copy is sealed for another board or key; it is fetched again as soon as a server answers", err)
}

// Token implements volumes.Source.
func (a *Agent) Token(pod *corev1.Pod, p *corev1.ServiceAccountTokenProjection) (string, bool) {
	var seconds int64
	if p.ExpirationSeconds != nil {
		seconds = *p.ExpirationSeconds
	}
	s, ok := a.Secret(pod.Namespace, wire.TokenSecretName(string(pod.UID), p.Audience, seconds))
	if !ok || len(s.Data["token"]) == 0 {
		return "", false
	}
	return string(s.Data["token"]), true
}

// handler resolves a pod's RuntimeClass as admission wrote it, or as
// admission would for a static pod.
func (a *Agent) handler(pod *corev1.Pod) string {
	class := ""
	if pod.Spec.RuntimeClassName != nil {
		class = *pod.Spec.RuntimeClassName
	}
	if class == "" {
		class = "oci"
		if len(pod.Spec.Containers) > 0 && manifests.IsWasmImage(pod.Spec.Containers[0].Image) {
			class = "wasm"
		}
	}
	rc := &nodev1.RuntimeClass{}
	if a.object("RuntimeClass.node.k8s.io", "", class, rc) && rc.Handler != "" {
		return rc.Handler
	}
	// The two that exist from the first start are known without a server.
	switch class {
	case "wasm":
		return wasmHandler
	case "oci":
		return ociHandler
	}
	return class
}

// labels of the node: its own, and those of its object in the cluster.
func (a *Agent) labels() map[string]string {
	out := map[string]string{}
	n := &corev1.Node{}
	if a.object("Node", "", a.c.NodeName, n) {
		maps.Copy(out, n.Labels)
	}
	maps.Copy(out, a.ownLabels())
	return out
}
