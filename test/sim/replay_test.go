package sim

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/deployment"
	"github.com/dunlin-project/dunlin/controlplane/controllers/endpoints"
	"github.com/dunlin-project/dunlin/controlplane/controllers/gc"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/podgc"
	"github.com/dunlin-project/dunlin/controlplane/controllers/replicaset"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

var replayOps = flag.Int("ops", 10_000, "operations of one replayed run")

var (
	podGK        = schema.GroupKind{Kind: "Pod"}
	deploymentGK = schema.GroupKind{Group: "apps", Kind: "Deployment"}
)

// eventLoop is a cluster without goroutines: the state machine, the
// controllers, the scheduler and every pod's step are called one after the
// other, as a seed says. The same seed gives the same run, to the byte.
type eventLoop struct {
	r       *rand.Rand
	machine *state.Machine
	store   *registry.Registry
	env     loop.Env
	nodes   []*loopNode
	trace   []string
	faults  []string
	version int
}

// loopNode is a machine with an agent's pods.
type loopNode struct {
	l     *eventLoop
	name  string
	boot  int
	procs map[workload.ID]*workload.State
	image map[workload.ID]string
	pods  map[string]*loopPod // by uid
	recs  map[string]store.Pod
	next  byte
	begun map[string]int // starts since the machine's boot
}

type loopPod struct {
	step            *node.Stepped
	namespace, name string
}

func newEventLoop(seed uint64) (*eventLoop, error) {
	l := &eventLoop{r: rand.New(rand.NewPCG(seed, 11)), machine: state.NewMachine(state.Options{})}
	local, soft := state.NewLocal(l.machine), state.NewSoft(1, state.SoftOptions{})
	var err error
	wall := clock.Func(func() time.Time { return time.Now().Round(0) })
	l.store, err = registry.New(registry.Config{
		Durable: l.machine, Proposer: local, Soft: soft, SoftProposer: registry.LocalSoft(soft, local), Clock: wall, Random: randomBytes{l.r},
	})
	if err != nil {
		return nil, err
	}
	l.env = loop.Env{Store: l.store, Reader: l.machine, Term: 1, Clock: wall, Events: events.Discard, Log: slog.New(slog.DiscardHandler), Rand: l.r.Float64}
	ctx := context.Background()
	if _, err := l.store.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, registry.WriteOptions{}); err != nil {
		return nil, err
	}
	for i := range 4 {
		n := &loopNode{l: l, name: fmt.Sprintf("n%d", i+1), boot: 1, procs: map[workload.ID]*workload.State{}, image: map[workload.ID]string{},
			pods: map[string]*loopPod{}, recs: map[string]store.Pod{}, begun: map[string]int{}}
		l.nodes = append(l.nodes, n)
		_, err := l.store.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: map[string]string{"dunlin.dev/runtime.wazero": "true"}},
			Status: corev1.NodeStatus{
				Allocatable: corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("4Gi"), "pods": resource.MustParse("110")},
				Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			}}, registry.WriteOptions{})
		if err != nil {
			return nil, err
		}
	}
	return l, nil
}

type randomBytes struct{ r *rand.Rand }

// Read implements io.Reader.
func (b randomBytes) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(b.r.Uint32())
	}
	return len(p), nil
}

var _ io.Reader = randomBytes{}

func (l *eventLoop) say(format string, a ...any) {
	l.trace = append(l.trace, fmt.Sprintf("%d %s ", l.machine.Snapshot().ResourceVersion(), time.Now().Format("15:04:05.000"))+fmt.Sprintf(format, a...))
}

func (l *eventLoop) wrong(format string, a ...any) {
	l.say("WRONG "+format, a...)
	l.faults = append(l.faults, fmt.Sprintf(format, a...))
}

// op is one operation.
func (l *eventLoop) op() {
	switch x := l.r.IntN(100); {
	case x < 8:
		l.user()
	case x < 30:
		l.control(1 + l.r.IntN(2))
	case x < 40:
		l.schedule()
	case x < 90:
		l.agent(l.nodes[l.r.IntN(len(l.nodes))])
	case x < 97:
		sleep(time.Duration(l.r.IntN(8000)) * time.Millisecond)
	case x < 99:
		n := l.nodes[l.r.IntN(len(l.nodes))]
		n.pods = map[string]*loopPod{}
		l.say("%s: the agent is killed", n.name)
	default:
		n := l.nodes[l.r.IntN(len(l.nodes))]
		n.pods, n.procs, n.begun = map[string]*loopPod{}, map[workload.ID]*workload.State{}, map[string]int{}
		n.boot++
		l.say("%s: power is lost", n.name)
	}
	for _, d := range recount(l.machine.Snapshot()) {
		l.wrong("totals: %s", d)
	}
}

func (l *eventLoop) user() {
	ctx := context.Background()
	name := fmt.Sprintf("app%d", l.r.IntN(4))
	_, err := l.store.Get(deploymentGK, "default", name)
	l.version++
	v := want{seq: fmt.Sprint(l.version), image: image([...]string{imageOK, imageOK, imageOK, imageCrash, imageUnready, imageMissing}[l.r.IntN(6)], l.version), replicas: int32(l.r.IntN(6))}
	switch {
	case apierrors.IsNotFound(err):
		surge := l.r.IntN(2)
		_, err = l.store.Create(ctx, (&client{probe: 5}).deployment(name, v, surge, 1-surge), registry.WriteOptions{})
		l.say("create %s: %v: %v", name, v, err)
	case l.r.IntN(8) == 0:
		_, _, err = l.store.Delete(ctx, deploymentGK, "default", name, registry.DeleteOptions{})
		l.say("delete %s: %v", name, err)
	default:
		l.change(name, v, l.r.IntN(2) == 0)
	}
}

func (l *eventLoop) change(name string, v want, roll bool) {
	_, err := l.store.Update(context.Background(), deploymentGK, "default", name, registry.Main, func(o runtime.Object) (runtime.Object, error) {
		d := o.(*appsv1.Deployment)
		if roll {
			d.Spec.Template.Spec.Containers[0].Image = v.image
		} else {
			d.Spec.Replicas = &v.replicas
		}
		return d, nil
	}, registry.WriteOptions{})
	l.say("change %s: roll %v, %v: %v", name, roll, v, err)
}

// control lets the controllers reconcile, from whatever state there is.
func (l *eventLoop) control(rounds int) {
	err := loop.Settle(context.Background(), l.env, rounds,
		deployment.New(l.env), replicaset.New(l.env), endpoints.New(l.env), gc.New(l.env), podgc.New(l.env, podgc.Config{}))
	if err != nil && !errors.Is(err, loop.ErrNotSettled) {
		l.wrong("controllers: %v", err)
	}
	l.say("controllers")
}

func (l *eventLoop) schedule() {
	s := scheduler.New(scheduler.Config{Store: l.store, Term: 1, Clock: l.env.Clock, Log: l.env.Log, Rand: l.r.Float64, Writers: 1})
	if err := s.Settle(context.Background()); err != nil {
		l.wrong("scheduler: %v", err)
	}
	l.say("scheduler")
}

// agent takes one step with one of the node's pods.
func (l *eventLoop) agent(n *loopNode) {
	assigned := map[string]*corev1.Pod{}
	var uids []string
	l.machine.Snapshot().PodsOnNode(n.name, func(r *state.Record) bool {
		if o, err := l.store.Decode(r); err == nil {
			assigned[r.Header.UID] = o.(*corev1.Pod)
			uids = append(uids, r.Header.UID)
		}
		return true
	})
	for uid := range n.recs {
		if assigned[uid] == nil {
			uids = append(uids, uid)
		}
	}
	if len(uids) == 0 {
		return
	}
	slices.Sort(uids)
	n.step(uids[l.r.IntN(len(uids))], assigned)
}

func (n *loopNode) step(uid string, assigned map[string]*corev1.Pod) {
	now, pod := time.Now(), assigned[uid]
	p := n.pods[uid]
	if p == nil {
		rec, known := n.recs[uid]
		if pod == nil {
			delete(n.recs, uid) // gone while the agent was: its processes are strays
			n.removeStrays(uid)
			return
		}
		p = &loopPod{namespace: pod.Namespace, name: pod.Name}
		if known {
			p.step = node.NewStepped(pod, &rec, n.bootID(), now)
		} else {
			p.step = node.NewStepped(pod, nil, n.bootID(), now)
		}
		n.pods[uid] = p
	}
	rec, act, gone := p.step.Decide(pod, pod == nil, n, now)
	n.recs[uid] = rec
	n.l.say("%s: %s: %s", n.name, p.name, act)
	if gone {
		delete(n.recs, uid)
		delete(n.pods, uid)
		n.gone(p, uid)
		return
	}
	if n.l.r.IntN(50) == 0 {
		n.l.say("%s: the agent is killed before it acts", n.name)
		n.pods = map[string]*loopPod{}
		return
	}
	p.step.Act(n, now)
	if pod != nil {
		n.report(pod, p.step.Status(now))
	}
}

func (n *loopNode) removeStrays(uid string) {
	for id, st := range n.procs {
		if id.PodUID == uid {
			st.Phase = workload.Exited
			delete(n.procs, id)
		}
	}
}

func (n *loopNode) gone(p *loopPod, uid string) {
	zero, pre := int64(0), types.UID(uid)
	_, _, err := n.l.store.Delete(context.Background(), podGK, p.namespace, p.name, registry.DeleteOptions{GracePeriodSeconds: &zero, UID: &pre})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		n.l.wrong("%s: final delete of %s: %v", n.name, p.name, err)
	}
}

// report writes the node's word; what others own of the status stays.
func (n *loopNode) report(pod *corev1.Pod, st corev1.PodStatus) {
	_, err := n.l.store.Update(context.Background(), podGK, pod.Namespace, pod.Name, registry.Status, func(o runtime.Object) (runtime.Object, error) {
		p := o.(*corev1.Pod)
		if p.UID != pod.UID {
			return nil, loop.ErrMoved
		}
		for _, c := range p.Status.Conditions {
			if !slices.ContainsFunc(st.Conditions, func(x corev1.PodCondition) bool { return x.Type == c.Type }) {
				st.Conditions = append(st.Conditions, c)
			}
		}
		slices.SortFunc(st.Conditions, func(a, b corev1.PodCondition) int {
			if a.Type < b.Type {
				return -1
			}
			return 1
		})
		p.Status = st
		return p, nil
	}, registry.WriteOptions{})
	if err != nil && !apierrors.IsNotFound(err) && !errors.Is(err, loop.ErrMoved) {
		n.l.wrong("%s: status of %s: %v", n.name, pod.Name, err)
	}
}

func (n *loopNode) bootID() string { return fmt.Sprintf("%s-%d", n.name, n.boot) }

// Look implements node.Hands.
func (n *loopNode) Look(id workload.ID) (workload.State, bool) {
	st := n.procs[id]
	if st == nil {
		return workload.State{}, false
	}
	if behaviour(n.image[id]) == imageCrash && st.Phase == workload.Running && time.Since(st.StartedAt) > time.Second {
		st.Phase, st.ExitCode, st.FinishedAt, st.Reason = workload.Exited, 1, st.StartedAt.Add(time.Second), "Error"
	}
	return *st, true
}

// Prepare implements node.Hands.
func (n *loopNode) Prepare(image string) (workload.ImageState, error) {
	if behaviour(image) == imageMissing {
		return workload.ImageState{}, &workload.StartError{Reason: "ErrImagePull", Message: "no such module"}
	}
	return workload.ImageState{Digest: "sha256:" + image}, nil
}

// Start implements node.Hands.
func (n *loopNode) Start(id workload.ID, image string) (workload.State, error) {
	if st := n.procs[id]; st != nil {
		return *st, nil
	}
	key := id.PodUID + "/" + id.Container
	if n.begun[key]++; n.begun[key] > 1 && behaviour(image) != imageCrash {
		n.l.wrong("%s: healthy pod %s was started again", n.name, id.PodUID)
	}
	n.procs[id], n.image[id] = &workload.State{ID: id, Phase: workload.Running, PID: 1, StartedAt: time.Now()}, image
	return *n.procs[id], nil
}

// Stop implements node.Hands.
func (n *loopNode) Stop(id workload.ID) error {
	if st := n.procs[id]; st != nil && st.Phase == workload.Running {
		if r, ok := n.l.machine.Snapshot().ByUID(id.PodUID); ok && r.Header.Deleted == 0 && behaviour(n.image[id]) != imageCrash {
			n.l.wrong("%s: pod %s is stopped and nobody deleted it", n.name, id.PodUID)
		}
		st.Phase, st.FinishedAt, st.Reason = workload.Exited, time.Now(), "Completed"
	}
	return nil
}

// Kill implements node.Hands.
func (n *loopNode) Kill(id workload.ID) error { return n.Stop(id) }

// Remove implements node.Hands.
func (n *loopNode) Remove(id workload.ID) error {
	delete(n.procs, id)
	return nil
}

// Probe implements node.Hands.
func (n *loopNode) Probe(id workload.ID) (bool, string) {
	return behaviour(n.image[id]) == imageOK || behaviour(n.image[id]) == imageCrash, "connection refused"
}

// Address implements node.Hands.
func (n *loopNode) Address(string) netip.Addr {
	n.next++
	return netip.AddrFrom4([4]byte{10, 42, n.name[1] - '0', n.next})
}

// end lets everything come to rest with good versions, and checks it.
func (l *eventLoop) end() {
	for i := range 4 {
		name := fmt.Sprintf("app%d", i)
		if _, err := l.store.Get(deploymentGK, "default", name); err == nil {
			l.change(name, want{image: image(imageOK, 1_000_000)}, true)
			l.change(name, want{replicas: 3}, false)
		}
	}
	for range 400 {
		if len(l.unsettled()) == 0 {
			break
		}
		l.control(3)
		l.schedule()
		for _, n := range l.nodes {
			for range 12 {
				l.agent(n)
			}
		}
		sleep(2 * time.Second)
	}
	for _, why := range l.unsettled() {
		l.wrong("at the end %s", why)
	}
}

// unsettled says what is not yet as it shall be at the end.
func (l *eventLoop) unsettled() (why []string) {
	pods, running := 0, 0
	snap := l.machine.Snapshot()
	snap.Range("Pod", "", state.Key{}, func(r *state.Record) bool {
		pods++
		if !r.Header.Ready || r.Header.Deleted != 0 {
			why = append(why, fmt.Sprintf("pod %s is ready=%v deleting=%v", r.Header.Key.Name, r.Header.Ready, r.Header.Deleted != 0))
		}
		return true
	})
	for _, n := range l.nodes {
		running += len(n.procs)
	}
	if want := 3 * snap.Len("Deployment.apps", ""); pods != want || running != want {
		why = append(why, fmt.Sprintf("there are %d pods and %d containers, not %d", pods, running, want))
	}
	return why
}

type replayed struct {
	trace, faults []string
	hash          [sha256.Size]byte
	rv            uint64
}

func replay(t *testing.T, seed uint64, ops int) (out replayed) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l, err := newEventLoop(seed)
		must(t, err)
		for range ops {
			l.op()
		}
		l.end()
		out.trace, out.faults, out.rv = l.trace, l.faults, l.machine.Snapshot().ResourceVersion()
		out.hash, err = l.machine.Hash()
		must(t, err)
	})
	return out
}

// TestEventLoopReplays: two runs of one seed are the same to the byte.
func TestEventLoopReplays(t *testing.T) {
	ops := *replayOps
	if testing.Short() || raced {
		ops = min(ops, 1000)
	}
	for _, seed := range []uint64{*seedFirst} {
		a, b := replay(t, seed, ops), replay(t, seed, ops)
		for i := range min(len(a.trace), len(b.trace)) {
			if a.trace[i] != b.trace[i] {
				t.Fatalf("seed %d: line %d of the trace is %q, then %q; before it: %q", seed, i, a.trace[i], b.trace[i], a.trace[max(i-5, 0):i])
			}
		}
		if len(a.trace) != len(b.trace) || a.hash != b.hash || a.rv != b.rv {
			t.Fatalf("seed %d: %d and %d lines, versions %d and %d, hashes %x and %x", seed, len(a.trace), len(b.trace), a.rv, b.rv, a.hash, b.hash)
		}
		for _, f := range a.faults {
			t.Errorf("seed %d: %s", seed, f)
		}
		if t.Failed() {
			for _, line := range a.trace[max(len(a.trace)-2000, 0):] {
				fmt.Println(line)
			}
		}
		t.Logf("seed %d: %d operations, %d versions, %d lines", seed, ops, a.rv, len(a.trace))
	}
}
