package node

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// Bounds of one report and of what waits for one.
const (
	reportPods    = 200
	reportBytes   = 1 << 20
	reportEvents  = 200
	reportVolumes = 100
	reportGather  = 10 * time.Millisecond // what comes together is sent together
	reportTimeout = 30 * time.Second
	reportFirst   = 500 * time.Millisecond
	reportMax     = 30 * time.Second
)

// report is the newest that is to be said about one pod.
type report struct {
	namespace, name, uid string
	status               []byte
	terminal             bool
	gone                 bool
	mirror               []byte
	ports                map[int32]int32

	version uint64 // rises with every change
	acked   uint64 // version that is committed
}

// reports gathers news and hands them to the link until they are committed.
// It holds one entry a pod, the newest, and a bounded number of events: a
// long outage costs no more than a short one.
type reports struct {
	mu      sync.Mutex
	pods    map[string]*report
	order   []string // uids with news, oldest first
	node    []byte
	nodeNew bool
	events  events
	volumes map[string]wire.VolumeReport // by uid; what is not committed yet
	news    chan struct{}                // 1
	seq     uint64
}

func newReports() *reports {
	return &reports{pods: map[string]*report{}, volumes: map[string]wire.VolumeReport{}, news: make(chan struct{}, 1)}
}

func (r *reports) wake() {
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// pod takes the newest status. Nothing replaces Gone.
func (r *reports) pod(n report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.pods[n.uid]
	if old != nil {
		if old.gone && !n.gone {
			return
		}
		n.version, n.acked = old.version, old.acked
		n.terminal = n.terminal || old.terminal && n.gone
	}
	n.version++
	r.pods[n.uid] = &n
	r.queue(n.uid)
	r.wake()
}

func (r *reports) queue(uid string) {
	if !slices.Contains(r.order, uid) {
		r.order = append(r.order, uid)
	}
}

func (r *reports) setNode(b []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.node, r.nodeNew = b, true
	r.wake()
}

// resendNode makes the Node go out again.
func (r *reports) resendNode() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.node != nil {
		r.nodeNew = true
		r.wake()
	}
}

func (r *reports) event(e wire.EventReport) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.events.add(e, time.Now()) {
		r.wake()
	}
}

// volume says that a volume was removed, until that is committed.
func (r *reports) volume(v wire.VolumeReport) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, said := r.volumes[v.UID]; said || len(r.volumes) >= reportVolumes {
		return // the rest is said when these are committed: they stay in the assignment
	}
	r.volumes[v.UID] = v
	r.wake()
}

// pending is one report under way.
type pending struct {
	versions map[string]uint64
	events   []wire.EventReport
	node     bool
}

// build makes the next report; nil when there is nothing to say.
func (r *reports) build(boot string) (*wire.Report, pending) {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := &wire.Report{BootID: boot}
	p := pending{versions: map[string]uint64{}}
	size := 0
	for _, uid := range r.order {
		e := r.pods[uid]
		if e == nil {
			continue
		}
		if size += len(e.status) + len(e.mirror) + 100; len(out.Pods) > 0 && (size > reportBytes || len(out.Pods) == reportPods) {
			break
		}
		out.Pods = append(out.Pods, wire.PodReport{
			Namespace: e.namespace, Name: e.name, UID: uid, Status: e.status,
			Terminal: e.terminal, Gone: e.gone, Mirror: e.mirror, Ports: e.ports,
		})
		p.versions[uid] = e.version
	}
	if r.nodeNew {
		out.Node, p.node = r.node, true
		r.nodeNew = false
	}
	for _, uid := range slices.Sorted(maps.Keys(r.volumes)) {
		out.Volumes = append(out.Volumes, r.volumes[uid])
		p.versions[uid] = 0
	}
	out.Events = r.events.take(reportEvents)
	p.events = out.Events
	if len(out.Pods) == 0 && out.Node == nil && len(out.Events) == 0 && len(out.Volumes) == 0 {
		return nil, p
	}
	r.seq++
	out.Seq = r.seq
	return out, p
}

// failed puts back what was not taken.
func (r *reports) failed(p pending) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodeNew = r.nodeNew || p.node
	r.events.restore(p.events)
}

// answered notes what is committed. It returns the pods whose last word is
// acknowledged, those that the cluster does not know, and whether something
// has to be sent again.
func (r *reports) answered(p pending, a *wire.ReportReply) (gone, unknown []string, again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, list := range [][]string{a.Committed, a.Unknown} {
		for _, uid := range list {
			v, sent := p.versions[uid]
			if _, volume := r.volumes[uid]; volume && sent {
				delete(r.volumes, uid)
				delete(p.versions, uid)
				continue
			}
			e := r.pods[uid]
			if !sent || e == nil {
				continue
			}
			e.acked = v
			if e.version == v {
				r.order = slices.DeleteFunc(r.order, func(u string) bool { return u == uid })
				if e.gone {
					delete(r.pods, uid)
					gone = append(gone, uid)
				}
			}
			delete(p.versions, uid)
		}
	}
	return gone, a.Unknown, len(p.versions) > 0
}

// all marks everything that was never acknowledged as to be sent (again).
func (r *reports) all() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, e := range r.pods {
		if e.acked != e.version {
			r.queue(uid)
		}
	}
	if len(r.order) > 0 || len(r.volumes) > 0 || r.nodeNew || r.events.len() > 0 {
		r.wake()
	}
}

// backlog is what waits to be said.
type backlog struct {
	pods, events int
	dropped      uint64
}

func (r *reports) waiting() backlog {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := backlog{events: r.events.len(), dropped: r.events.dropped}
	for _, e := range r.pods {
		if e.acked != e.version {
			b.pods++
		}
	}
	return b
}

// resend makes one pod's status go out again.
func (r *reports) resend(uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.pods[uid]; e != nil {
		e.version++
		r.queue(uid)
		r.wake()
	}
}

// reportLoop sends news until ctx ends. hints fires on a reconnect.
func (a *Agent) reportLoop(ctx context.Context, hints <-chan struct{}) {
	if a.c.Link == nil {
		return
	}
	wait := newBackoff(reportFirst, reportMax, a.c.Jitter)
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.reports.news:
		case <-hints:
			a.reports.all()
			continue
		}
		if !sleep(ctx, reportGather, nil) {
			return
		}
		for {
			again, err := a.reportOnce(ctx)
			if ctx.Err() != nil {
				return
			}
			if err == nil && !again {
				wait.reset()
				break
			}
			// A hint (the link is back) ends the wait; so does news of others
			// while the server answers: one pod that it cannot take yet holds up
			// nobody.
			var news <-chan struct{}
			if err == nil {
				news = a.reports.news
			}
			if !sleepUntil(ctx, wait.next(), hints, news) {
				return
			}
		}
	}
}

// reportOnce sends until nothing is left that was not answered.
func (a *Agent) reportOnce(ctx context.Context) (again bool, err error) {
	for {
		rep, p := a.reports.build(a.c.BootID)
		if rep == nil {
			return false, nil
		}
		rctx, cancel := context.WithTimeout(ctx, reportTimeout)
		reply, err := a.c.Link.Report(rctx, rep)
		cancel()
		if err != nil {
			a.reports.failed(p)
			a.reported(resultError)
			return true, err
		}
		if reply.Refused != "" {
			a.reports.failed(p)
			a.reported(resultRefused)
			if a.refused.due(time.Now()) {
				a.log.Warn("the server refuses this node's report", "reason", reply.Refused)
			}
			return true, nil
		}
		a.reported(resultOK)
		gone, unknown, again := a.reports.answered(p, reply)
		a.acknowledged(gone, unknown, reply.Epoch)
		if again {
			return true, nil
		}
	}
}

// sleep waits for d or an early wake; false when ctx ended.
func sleep(ctx context.Context, d time.Duration, early <-chan struct{}) bool {
	return sleepUntil(ctx, d, early, nil)
}

// sleepUntil is sleep with two early wakes; either may be nil.
func sleepUntil(ctx context.Context, d time.Duration, early, or <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
	case <-early:
	case <-or:
	}
	return true
}

// backoff doubles with jitter.
type backoff struct {
	first, max, now time.Duration
	jitter          func(time.Duration) time.Duration
}

func newBackoff(first, most time.Duration, jitter func(time.Duration) time.Duration) *backoff {
	return &backoff{first: first, max: most, jitter: jitter}
}

func (b *backoff) reset() { b.now = 0 }

func (b *backoff) next() time.Duration {
	b.now = min(max(b.first, 2*b.now), b.max)
	return b.jitter(b.now)
}
