package node

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

var t0 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(d time.Duration) moment { return moment{mono: t0.Add(d), wall: t0.Add(d)} }

// sim drives step by hand: an action in, its outcome back.
type sim struct {
	s   podState
	now time.Duration
}

func (m *sim) step(o observed) action {
	var a action
	m.s, a = step(m.s, o, at(m.now))
	return a
}

func (m *sim) apply(r result) { m.s, _ = m.s.apply(r, at(m.now)) }

func (m *sim) runs(i int, ph workload.Phase, code int) observed {
	st := workload.State{ID: m.s.id(i), Phase: ph, ExitCode: code, StartedAt: t0}
	if ph == workload.Exited {
		st.FinishedAt = t0.Add(m.now)
	}
	return observed{runs: map[int]run{i: {st, true}}}
}

// TestStepTable walks a pod's life one transition a call.
func TestStepTable(t *testing.T) {
	pod := wasmPod("a", func(p *corev1.Pod) {
		p.Spec.InitContainers = []corev1.Container{{Name: "init"}}
		p.Spec.Volumes = []corev1.Volume{{Name: "v"}}
	})
	m := &sim{s: newPodState(pod, nil, "boot", at(0))}
	running := func(i int) workload.State {
		return workload.State{ID: m.s.id(i), Phase: workload.Running, StartedAt: t0.Add(m.now)}
	}
	refused := errors.New("refused")
	for i, row := range []struct {
		name    string
		wait    time.Duration
		observe func() observed
		want    actionKind
		result  func() result // of want
		phase   corev1.PodPhase
	}{
		{name: "volumes first", want: actMount, result: func() result { return result{kind: actMount, err: refused} }, phase: corev1.PodPending},
		{name: "wait to retry", want: actNone},
		{name: "retry", wait: 3 * time.Second, want: actMount, result: func() result { return result{kind: actMount} }},
		{name: "then an address", want: actNetwork, result: func() result { return result{kind: actNetwork, alloc: &network.Allocation{}} }},
		{name: "image of init", want: actPrepare, result: func() result { return result{kind: actPrepare, image: workload.ImageState{Digest: "d"}} }},
		{name: "start init", want: actStart, result: func() result { return result{kind: actStart, state: running(0)} }, phase: corev1.PodPending},
		{name: "init runs", want: actNone},
		{name: "init ended", wait: time.Second, observe: func() observed { return m.runs(0, workload.Exited, 0) }, want: actRemove, result: func() result { return result{kind: actRemove} }},
		{name: "image of main", want: actPrepare, result: func() result { return result{kind: actPrepare, ctr: 1} }},
		{name: "start main", want: actStart, result: func() result { return result{kind: actStart, ctr: 1, state: running(1)} }, phase: corev1.PodRunning},
		{name: "runs", want: actNone},
		{name: "crash", wait: time.Second, observe: func() observed { return m.runs(1, workload.Exited, 2) }, want: actRemove, result: func() result { return result{kind: actRemove, ctr: 1} }},
		{name: "prepare at once", want: actPrepare, result: func() result { return result{kind: actPrepare, ctr: 1} }},
		{name: "first restart", want: actStart, result: func() result { return result{kind: actStart, ctr: 1, state: running(1)} }},
		{name: "second crash", wait: time.Second, observe: func() observed { return m.runs(1, workload.Exited, 2) }, want: actRemove, result: func() result { return result{kind: actRemove, ctr: 1} }},
		{name: "back-off", want: actNone},
		{name: "still", wait: 9 * time.Second, want: actNone, phase: corev1.PodRunning},
		{name: "over", wait: time.Second, want: actPrepare, result: func() result { return result{kind: actPrepare, ctr: 1} }},
		{name: "second restart", want: actStart, result: func() result { return result{kind: actStart, ctr: 1, state: running(1)} }},
		{name: "deleted", observe: func() observed { return observed{pod: deleted(pod, 10)} }, want: actStop, result: func() result { return result{kind: actStop, ctr: 1, id: m.s.id(1)} }},
		{name: "read again", want: actNone},
		{name: "ended", observe: func() observed { return m.runs(1, workload.Exited, 0) }, want: actRemove, result: func() result { return result{kind: actRemove, ctr: 1} }, phase: corev1.PodSucceeded},
		{name: "volumes", want: actUnmount, result: func() result { return result{kind: actUnmount} }},
		{name: "address", want: actTeardown, result: func() result { return result{kind: actTeardown, err: refused} }},
		{name: "not yet", want: actNone},
		{name: "again", wait: 3 * time.Second, want: actTeardown, result: func() result { return result{kind: actTeardown} }},
		{name: "gone", want: actFinish, result: func() result { return result{kind: actFinish} }},
		{name: "nothing more", want: actNone},
	} {
		m.now += row.wait
		var o observed
		if row.observe != nil {
			o = row.observe()
		}
		a := m.step(o)
		if a.kind != row.want {
			t.Fatalf("%d %s: %v, want %v", i, row.name, a.kind, row.want)
		}
		if row.result != nil {
			m.apply(row.result())
		}
		if row.phase != "" && m.s.phase() != row.phase {
			t.Fatalf("%d %s: phase %s, want %s", i, row.name, m.s.phase(), row.phase)
		}
	}
	if !m.s.gone {
		t.Fatal("not gone")
	}
}

// TestWhatNeverStartedIsPending: the runtime refuses the container, for this
// agent and for the next one; once it has run the pod runs, whatever follows.
func TestWhatNeverStartedIsPending(t *testing.T) {
	pod := wasmPod("a")
	m := &sim{s: newPodState(pod, nil, "boot", at(0))}
	nothing := observed{runs: map[int]run{0: {}}} // the runtime has it not
	for range 3 {
		for a := m.step(nothing); a.kind != actNone; a = m.step(nothing) {
			switch a.kind {
			case actStart:
				m.apply(result{kind: actStart, ctr: a.ctr, err: errors.New("no such program")})
			default:
				m.apply(result{kind: a.kind, ctr: a.ctr, alloc: &network.Allocation{}})
			}
		}
		for who, s := range map[string]podState{"this agent": m.s, "the next one": newPodState(pod, new(m.s.record()), "boot", at(m.now)),
			"one after a boot": newPodState(pod, new(m.s.record()), "another boot", at(m.now))} {
			if got := s.phase(); got != corev1.PodPending {
				t.Errorf("for %s it is %s", who, got)
			}
		}
		m = &sim{s: newPodState(pod, new(m.s.record()), "boot", at(m.now)), now: m.now}
		m.now += 10 * time.Minute
	}
	for a := m.step(nothing); a.kind != actNone; a = m.step(nothing) {
		r := result{kind: a.kind, ctr: a.ctr, alloc: &network.Allocation{}}
		if a.kind == actStart {
			r.state = workload.State{ID: m.s.id(a.ctr), Phase: workload.Running, StartedAt: t0.Add(m.now)}
		}
		m.apply(r)
		if a.kind == actStart {
			break
		}
	}
	back := newPodState(pod, new(m.s.record()), "boot", at(m.now))
	if now, next := m.s.phase(), back.phase(); now != corev1.PodRunning || next != corev1.PodRunning {
		t.Errorf("it runs: %s, for the next agent %s", now, next)
	}
}

// TestPodOfSomeContainersIsPending: who waits for a pod to run may then ask
// for the log of each of its containers.
func TestPodOfSomeContainersIsPending(t *testing.T) {
	pod := wasmPod("a", func(p *corev1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "second"})
	})
	m := &sim{s: newPodState(pod, nil, "boot", at(0))}
	m.apply(result{kind: actMount})
	m.apply(result{kind: actNetwork, alloc: &network.Allocation{}})
	begun := map[int]run{}
	for range 9 {
		a := m.step(observed{runs: begun})
		switch a.kind {
		case actPrepare:
			m.apply(result{kind: actPrepare, ctr: a.ctr, image: workload.ImageState{Digest: "d"}})
		case actStart:
			if got := m.s.phase(); got != corev1.PodPending {
				t.Fatalf("%d of 2 containers run: %s", len(begun), got)
			}
			back := newPodState(pod, new(m.s.record()), "boot", at(m.now))
			if len(begun) == 1 && len(back.ctrs) == 2 && !back.ctrs[1].rec.Begun && back.phase() != corev1.PodPending {
				t.Errorf("for the next agent it is %s", back.phase())
			}
			st := workload.State{ID: m.s.id(a.ctr), Phase: workload.Running, StartedAt: t0}
			m.apply(result{kind: actStart, ctr: a.ctr, state: st})
			begun[a.ctr] = run{st, true}
		}
	}
	if got := m.s.phase(); len(begun) != 2 || got != corev1.PodRunning {
		t.Errorf("%d of 2 containers run: %s", len(begun), got)
	}
	back := newPodState(pod, new(m.s.record()), "boot", at(m.now))
	if got := back.phase(); got != corev1.PodRunning {
		t.Errorf("for the next agent it is %s", got)
	}
}

// TestStepIsPure: the state handed in is not changed.
func TestStepIsPure(t *testing.T) {
	s := newPodState(wasmPod("a"), nil, "boot", at(0))
	before := fmt.Sprintf("%+v", s.record())
	next, a := step(s, observed{}, at(0))
	if fmt.Sprintf("%+v", s.record()) != before || s.volumes.busy || !next.volumes.busy || a.kind != actMount {
		t.Fatal("step changed its input")
	}
	again, b := step(s, observed{}, at(0))
	if !reflect.DeepEqual(a, b) || !reflect.DeepEqual(again.record(), next.record()) {
		t.Fatal("step is not a function")
	}
}

// TestStepProperties throws random worlds at a pod and checks what must hold
// in each: one action a container at a time, nothing starts once the pod is
// over, attempts only grow, no start without a record of it, and a deleted
// pod always ends when the world stops failing.
func TestStepProperties(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		always := corev1.ContainerRestartPolicyAlways
		pod := wasmPod("a", func(p *corev1.Pod) {
			p.Spec.RestartPolicy = rapid.SampledFrom([]corev1.RestartPolicy{"Always", "OnFailure", "Never"}).Draw(rt, "policy")
			for i := range rapid.IntRange(0, 2).Draw(rt, "inits") {
				c := corev1.Container{Name: fmt.Sprint("i", i)}
				if rapid.Bool().Draw(rt, "sidecar") {
					c.RestartPolicy = &always
				}
				p.Spec.InitContainers = append(p.Spec.InitContainers, c)
			}
			if rapid.Bool().Draw(rt, "two") {
				p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "second"})
			}
			if rapid.Bool().Draw(rt, "probe") {
				p.Spec.Containers[0].LivenessProbe, p.Spec.Containers[0].ReadinessProbe = tcpProbe(5, 1), tcpProbe(3, 1)
			}
		})
		w := &world{rt: rt, m: &sim{s: newPodState(pod, nil, "boot", at(0))}, states: map[workload.ID]*workload.State{}, fails: true}
		steps := rapid.IntRange(1, 80).Draw(rt, "steps")
		for range steps {
			w.tick()
		}
		w.fails = false
		w.news = deleted(pod, 5)
		for range 400 {
			w.tick()
			if w.m.s.gone {
				if len(w.states) != 0 {
					rt.Fatalf("gone with %v left", w.states)
				}
				return
			}
		}
		rt.Fatalf("a deleted pod does not end: %+v", w.m.s)
	})
}

type world struct {
	rt      *rapid.T
	m       *sim
	states  map[workload.ID]*workload.State
	pending []action
	fails   bool
	news    *corev1.Pod
}

func (w *world) fail(what string) error {
	if w.fails && rapid.IntRange(0, 3).Draw(w.rt, what) == 0 {
		return errors.New("refused")
	}
	return nil
}

func (w *world) tick() {
	m := w.m
	o := observed{pod: w.news, runs: map[int]run{}}
	w.news = nil
	for i := range m.s.ctrs {
		c := &m.s.ctrs[i]
		if !c.live() || c.op == opStart {
			continue
		}
		st := w.states[m.s.id(i)]
		if st != nil && st.Phase == workload.Running && w.fails && rapid.IntRange(0, 5).Draw(w.rt, "exit") == 0 {
			st.Phase, st.ExitCode, st.FinishedAt = workload.Exited, rapid.IntRange(0, 1).Draw(w.rt, "code"), t0.Add(m.now)
		}
		if st == nil {
			o.runs[i] = run{}
		} else {
			o.runs[i] = run{*st, true}
		}
	}
	before := m.s
	a := m.step(o)
	for i := range m.s.ctrs {
		if i < len(before.ctrs) && m.s.ctrs[i].rec.Attempt < before.ctrs[i].rec.Attempt {
			w.rt.Fatal("an attempt went back")
		}
	}
	switch a.kind {
	case actNone:
		m.now += time.Duration(rapid.IntRange(1, 400).Draw(w.rt, "seconds")) * time.Second
	case actStart:
		c := &m.s.ctrs[a.ctr]
		if m.s.over() || !c.rec.Begun || c.rec.Attempt != a.id.Attempt || slices.ContainsFunc(w.pending, func(p action) bool { return p.ctr == a.ctr && p.kind != actProbe && perContainer(p.kind) }) {
			w.rt.Fatalf("a start that must not be: %+v with %+v pending", a, w.pending)
		}
		w.pending = append(w.pending, a)
	default:
		if perContainer(a.kind) && a.kind != actKill && a.kind != actProbe &&
			slices.ContainsFunc(w.pending, func(p action) bool { return p.ctr == a.ctr && perContainer(p.kind) && p.kind != actProbe }) {
			w.rt.Fatalf("two actions for one container: %+v with %+v pending", a, w.pending)
		}
		w.pending = append(w.pending, a)
	}
	for len(w.pending) > 0 && (a.kind == actNone || rapid.Bool().Draw(w.rt, "answer")) {
		p := w.pending[0]
		w.pending = w.pending[1:]
		w.answer(p)
	}
}

func perContainer(k actionKind) bool {
	return k == actPrepare || k == actStart || k == actStop || k == actKill || k == actRemove || k == actProbe
}

func (w *world) answer(p action) {
	r := result{kind: p.kind, ctr: p.ctr, id: p.id, probe: p.probe}
	switch p.kind {
	case actNetwork:
		r.alloc = &network.Allocation{}
		r.err = w.fail("network")
	case actStart:
		if r.err = w.fail("start"); r.err == nil {
			if w.states[p.id] == nil {
				w.states[p.id] = &workload.State{ID: p.id, Phase: workload.Running, StartedAt: t0.Add(w.m.now)}
			}
			r.state = *w.states[p.id]
		}
	case actStop, actKill:
		if r.err = w.fail("stop"); r.err == nil {
			if st := w.states[p.id]; st != nil && st.Phase == workload.Running {
				st.Phase, st.FinishedAt = workload.Exited, t0.Add(w.m.now)
			}
		}
	case actRemove:
		if r.err = w.fail("remove"); r.err == nil {
			delete(w.states, p.id)
		}
	case actProbe:
		r.ok = w.fail("probe") == nil
	default:
		r.err = w.fail("other")
	}
	w.m.apply(r)
}

func TestAdopt(t *testing.T) {
	pod := wasmPod("a", func(p *corev1.Pod) { p.Spec.InitContainers = []corev1.Container{{Name: "init"}} })
	st := func(c string, attempt int) found {
		return found{state: workload.State{ID: workload.ID{PodUID: "uid-a", Container: c, Attempt: attempt}, Phase: workload.Running}}
	}
	rec := func(attempt int, begun bool) *store.Pod {
		return &store.Pod{Containers: []store.Container{{Name: "main", Attempt: attempt, Begun: begun, Backoff: 1}}}
	}
	for name, tc := range map[string]struct {
		rec     *store.Pod
		states  []found
		attempt int
		begun   bool
		extra   int
	}{
		"nothing runs":        {rec: rec(2, false), attempt: 2},
		"as recorded":         {rec: rec(2, true), states: []found{st("main", 2)}, attempt: 2, begun: true},
		"record lost":         {states: []found{st("main", 5), st("main", 4)}, attempt: 5, begun: true, extra: 1},
		"record behind":       {rec: rec(2, false), states: []found{st("main", 3)}, attempt: 3, begun: true},
		"leftover":            {rec: rec(2, true), states: []found{st("main", 1), st("main", 2)}, attempt: 2, begun: true, extra: 1},
		"unknown container":   {rec: rec(0, true), states: []found{st("other", 0)}, begun: true, extra: 1},
		"behind with its own": {rec: rec(2, true), states: []found{st("main", 2), st("main", 3)}, attempt: 3, begun: true, extra: 1},
	} {
		got, extra := adopt(tc.rec, pod, tc.states, "boot")
		c := got.Containers[0]
		if c.Attempt != tc.attempt || c.Begun != tc.begun || len(extra) != tc.extra {
			t.Errorf("%s: %+v, extra %v", name, c, extra)
		}
	}
}

func TestExpand(t *testing.T) {
	e := &environment{}
	e.set("A", "1")
	e.set("B", "$(A)") // values are not expanded twice
	for in, want := range map[string]string{
		"": "", "$": "$", "$(A)": "1", "x$(A)y": "x1y", "$$(A)": "$(A)", "$(NO)": "$(NO)", "$(A": "$(A", "$A": "$A", "$(B)": "$(A)", "a$$": "a$",
	} {
		if got := e.expand(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestEnvironmentOrderAndPrefix(t *testing.T) {
	pod := wasmPod("a", func(p *corev1.Pod) {
		p.UID = types.UID("u")
		p.Spec.Containers[0].Env = []corev1.EnvVar{
			{Name: "ONE", Value: "1"}, {Name: "TWO", Value: "$(ONE)2"}, {Name: "ONE", Value: "again"},
			{Name: "NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
		}
	})
	e, err := resolveEnv(pod, &pod.Spec.Containers[0], [][2]string{{"KUBERNETES_SERVICE_HOST", "h"}}, nil, volumes.Facts{})
	if err != nil {
		t.Fatal(err)
	}
	if got := e.list(); !slices.Equal(got, []string{"KUBERNETES_SERVICE_HOST=h", "ONE=again", "TWO=12", "NAME=a"}) {
		t.Fatalf("%q", got)
	}
}

func TestEventsBounds(t *testing.T) {
	var e events
	now := t0
	for i := range 10_000 {
		n := eventReport{UID: fmt.Sprint(i % 500), Type: "Normal", Reason: "R", Message: fmt.Sprint(i)}
		if i%100 == 0 {
			n.Type = "Warning"
		}
		e.add(n, now)
	}
	if e.len() != eventsMax {
		t.Fatalf("%d wait", e.len())
	}
	warnings := 0
	for _, q := range e.take(eventsMax) {
		if q.Type == "Warning" {
			warnings++
		}
	}
	if warnings < 90 {
		t.Fatalf("only %d warnings were kept", warnings)
	}
	for range 100 {
		e.add(eventReport{UID: "x", Message: "same"}, now)
	}
	if e.len() != 1 || e.queue[0].Count != 100 {
		t.Fatalf("not aggregated: %+v", e.queue)
	}
}

func TestCrashDelay(t *testing.T) {
	want := []time.Duration{0, 10, 20, 40, 80, 160, 300, 300}
	for n, w := range want {
		if got := crashDelay(n); got != w*time.Second {
			t.Errorf("restart %d waits %v, want %v s", n, got, w)
		}
	}
}

// TestGraceOfAPodThatIsNoMore: who deletes by force does not wait for the whole
// grace period; a static pod whose file goes has its own.
func TestGraceOfAPodThatIsNoMore(t *testing.T) {
	for _, static := range []bool{false, true} {
		pod := wasmPod("a", func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = new(int64(600)) })
		m := &sim{s: newPodState(pod, nil, "boot", at(0))}
		m.s.rec.Static = static
		for a := m.step(observed{}); a.kind != actNone; a = m.step(observed{}) {
			r := result{kind: a.kind, ctr: a.ctr, alloc: &network.Allocation{}}
			if a.kind == actStart {
				r.state = workload.State{ID: m.s.id(a.ctr), Phase: workload.Running, StartedAt: t0}
			}
			m.apply(r)
		}
		want := goneGrace
		if static {
			want = 600 * time.Second
		}
		if a := m.step(observed{removed: true}); a.kind != actStop || a.grace != want {
			t.Errorf("static %v: %v within %v, want %v", static, a.kind, a.grace, want)
		}
	}
}
