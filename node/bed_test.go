package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

// stubLink is the control plane: it holds the assignment and what was
// reported.
type stubLink struct {
	mu      sync.Mutex
	asg     wire.Assignment
	cut     bool
	noPull  bool // only reports get through
	hints   chan struct{}
	pulls   int
	reports []*wire.Report
	status  map[string]corev1.PodStatus
	history map[string][]string // of phases and readiness
	gone    map[string]bool
	unknown map[string]bool
	node    *corev1.Node
	events  []wire.EventReport
	mirrors map[string]*corev1.Pod
	rv      uint64
}

func newStubLink() *stubLink {
	return &stubLink{
		hints: make(chan struct{}, 1), status: map[string]corev1.PodStatus{}, history: map[string][]string{},
		gone: map[string]bool{}, unknown: map[string]bool{}, mirrors: map[string]*corev1.Pod{},
		asg: wire.Assignment{Epoch: 1, Generation: 1, PodCIDRs: []string{"10.42.0.0/24"}},
	}
}

var errCut = errors.New("offline")

func (l *stubLink) Pull(_ context.Context, r wire.PullRequest) (*wire.Assignment, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut || l.noPull {
		return nil, errCut
	}
	l.pulls++
	if r.Generation == l.asg.Generation {
		return &wire.Assignment{Epoch: l.asg.Epoch, Unchanged: true}, nil
	}
	out := l.asg
	out.Objects, out.Keep = nil, nil
	for _, o := range l.asg.Objects {
		if r.Have[o.UID] == o.ResourceVersion {
			out.Keep = append(out.Keep, o.UID)
		} else {
			out.Objects = append(out.Objects, o)
		}
	}
	return &out, nil
}

func (l *stubLink) Report(_ context.Context, r *wire.Report) (*wire.ReportReply, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, errCut
	}
	l.reports = append(l.reports, r)
	reply := &wire.ReportReply{Seq: r.Seq}
	for _, p := range r.Pods {
		if l.unknown[p.UID] {
			reply.Unknown = append(reply.Unknown, p.UID)
			continue
		}
		if len(p.Status) > 0 {
			var st corev1.PodStatus
			if err := direct.Unmarshal(p.Status, &st); err != nil {
				return nil, err
			}
			l.status[p.UID] = st
			l.history[p.UID] = append(l.history[p.UID], short(st))
		}
		if p.Gone {
			l.gone[p.UID] = true
		}
		if len(p.Mirror) > 0 {
			m := &corev1.Pod{}
			if err := direct.Unmarshal(p.Mirror, m); err != nil {
				return nil, err
			}
			l.mirrors[p.UID] = m
		}
		reply.Committed = append(reply.Committed, p.UID)
	}
	if r.Node != nil {
		l.node = &corev1.Node{}
		if err := direct.Unmarshal(r.Node, l.node); err != nil {
			return nil, err
		}
	}
	l.events = append(l.events, r.Events...)
	return reply, nil
}

func short(st corev1.PodStatus) string {
	s := string(st.Phase)
	if condition(st, corev1.PodReady) == corev1.ConditionTrue {
		s += "+Ready"
	}
	return s
}

func condition(st corev1.PodStatus, t corev1.PodConditionType) corev1.ConditionStatus {
	for _, c := range st.Conditions {
		if c.Type == t {
			return c.Status
		}
	}
	return ""
}

func (l *stubLink) Hints() <-chan struct{} { return l.hints }
func (l *stubLink) Connected() bool        { l.mu.Lock(); defer l.mu.Unlock(); return !l.cut }

func (l *stubLink) setCut(cut bool) {
	l.mu.Lock()
	l.cut = cut
	l.mu.Unlock()
	if !cut {
		l.hint()
	}
}

func (l *stubLink) setNoPull(no bool) {
	l.mu.Lock()
	l.noPull = no
	l.mu.Unlock()
	l.hint()
}

func (l *stubLink) hint() {
	select {
	case l.hints <- struct{}{}:
	default:
	}
}

// put adds or replaces an object of the assignment.
func (l *stubLink) put(kind string, o metav1.Object) {
	l.mu.Lock()
	l.rv++
	o.SetResourceVersion(fmt.Sprint(l.rv))
	data, err := direct.Marshal(o)
	if err != nil {
		panic(err)
	}
	obj := wire.Object{Ref: wire.Ref{Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName()}, UID: string(o.GetUID()), ResourceVersion: l.rv, Data: data}
	l.asg.Objects = slices.DeleteFunc(slices.Clone(l.asg.Objects), func(x wire.Object) bool { return x.UID == obj.UID })
	l.asg.Objects = append(l.asg.Objects, obj)
	l.asg.Generation++
	l.mu.Unlock()
	l.hint()
}

func (l *stubLink) drop(uid string) {
	l.mu.Lock()
	l.asg.Objects = slices.DeleteFunc(slices.Clone(l.asg.Objects), func(x wire.Object) bool { return x.UID == uid })
	l.asg.Generation++
	l.mu.Unlock()
	l.hint()
}

func (l *stubLink) statusOf(uid string) corev1.PodStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status[uid]
}

type stubMachine struct {
	mu sync.Mutex
	f  MachineFacts
}

func (m *stubMachine) Facts() MachineFacts {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.f
}

// bed is a node on a stub machine.
type bed struct {
	t       *testing.T
	c       Config
	rt      *stubRuntime
	net     *stubNetwork
	vols    *stubVolumes
	link    *stubLink
	db      *store.Memory
	agent   *Agent
	cancel  context.CancelFunc
	stopped chan struct{}
	offset  time.Duration // of the wall clock
}

func newBed(t *testing.T) *bed {
	b := &bed{
		t: t, rt: newStubRuntime(), net: &stubNetwork{pods: map[string]network.Allocation{}},
		vols: &stubVolumes{pods: map[string]bool{}}, link: newStubLink(), db: store.NewMemory(),
	}
	b.c = Config{
		NodeName: "n1", MachineBoot: "boot-1", Link: b.link, Store: b.db,
		Runtimes: map[string]workload.Runtime{wasmHandler: b.rt}, Network: b.net, Volumes: b.vols,
		Machine: &stubMachine{f: MachineFacts{CPUMilli: 2000, Memory: 1 << 30, Storage: 1 << 33, Addresses: []string{"192.0.2.1"}}},
		Clock:   clock.Func(func() time.Time { return time.Now().Add(b.offset) }),
		Logger:  slog.New(slog.NewTextHandler(testWriter{t}, nil)), StateDir: t.TempDir(),
		Jitter: func(d time.Duration) time.Duration { return d },
	}
	return b
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", p)
	return len(p), nil
}

func (b *bed) start() {
	b.t.Helper()
	c := b.c
	c.BootID = ""
	a, err := New(c)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.t.Context())
	b.agent, b.cancel, b.stopped = a, cancel, make(chan struct{})
	go func() {
		defer close(b.stopped)
		if err := a.Run(ctx); err != nil {
			b.t.Error(err)
		}
	}()
}

func (b *bed) stop() {
	b.cancel()
	<-b.stopped
	b.db.Reopen()
}

// after lets virtual time pass. What the test read before happens before what
// the stubs write then: that is what the locks say.
func (b *bed) after(d time.Duration) {
	for _, mu := range []*sync.Mutex{&b.rt.mu, &b.net.mu, &b.vols.mu, &b.link.mu} {
		mu.Lock()
		mu.Unlock()
	}
	time.Sleep(d)
	synctest.Wait()
}

func (b *bed) want(uid, phase string) corev1.PodStatus {
	b.t.Helper()
	st := b.link.statusOf(uid)
	if got := short(st); got != phase {
		b.t.Fatalf("pod %s is %q, want %q: %+v", uid, got, phase, st)
	}
	return st
}

func wasmPod(name string, edit ...func(*corev1.Pod)) *corev1.Pod {
	class := "wasm"
	grace := int64(30)
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name), Generation: 1},
		Spec: corev1.PodSpec{
			RuntimeClassName: &class, NodeName: "n1", RestartPolicy: corev1.RestartPolicyAlways, TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{Name: "main", Image: "app.wasm"}},
		},
	}
	for _, f := range edit {
		f(p)
	}
	return p
}

func deleted(p *corev1.Pod, grace int64) *corev1.Pod {
	p = p.DeepCopy()
	now := metav1.Now()
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &now, &grace
	return p
}
