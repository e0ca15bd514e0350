package sim

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// podView is what the checker knows of a pod, in commit order.
type podView struct {
	name, app, node string
	created         uint64 // version
	ready, marked   bool   // marked: being deleted
	mark            bool   // of a lost pod
	lost, terminal  bool
	evicted         bool   // by the eviction API
	set             string // uid of its controller
	claims          []string
	readyAt         time.Time
	unreadyAt       time.Time
	// returned: it was lost and is counted again. Then it is kept rather than
	// its replacement.
	returned bool
}

func (p *podView) counts() bool { return !p.marked && !p.lost && !p.terminal }

// appView is a Deployment with the bounds that hold since it was last
// complete: whoever changes it in the middle widens them.
type appView struct {
	replicas, surge, unavailable int
	least, most                  int // replicas since it was complete
	armed                        bool
	deleted, complete            bool
}

// checker follows what every server applies and holds it against the rules.
type checker struct {
	w *world

	mu      sync.Mutex
	follows map[*server]follow
	seen    uint64
	digests map[uint64][sha256.Size]byte
	leaders map[uint64]string
	pods    map[string]*podView
	apps    map[string]*appView
	jobs    map[string]*jobView // by uid
	bound   claimViews
	ticks   map[string]bool // Jobs of the CronJob, ever
	freed   map[string]bool // pods that a client deleted
	dropped []drop
	lost    int // times that a pod was marked as lost
	// restFrom is since when no server was in trouble; zero is not now.
	restFrom time.Time
	// calmFrom is when the last storm's aftermath is over.
	calmFrom time.Time
	second   time.Time // since when writes counts
	writes   int
	// calm is false while a fault is active that takes pods down: then the
	// floor is not the rollout's to keep.
	calm bool
	// strict holds the rollout to its bounds also while nodes fail: it may not
	// take what the failure left. What failed within news is not known yet.
	strict bool
}

// news is how long a failure may take to reach whoever decides.
const news = 2 * time.Second

type follow struct {
	machine *state.Machine
	stop    context.CancelFunc
	ended   chan struct{}
}

func newChecker(w *world) *checker {
	return &checker{w: w, follows: map[*server]follow{}, digests: map[uint64][sha256.Size]byte{}, leaders: map[uint64]string{},
		pods: map[string]*podView{}, apps: map[string]*appView{}, jobs: map[string]*jobView{}, bound: newClaimViews(), ticks: map[string]bool{}, freed: map[string]bool{}, calm: true, restFrom: time.Now()}
}

// follow watches one server until unfollow.
func (c *checker) follow(s *server, srv *controlplane.Server) {
	ctx, cancel := context.WithCancel(context.Background())
	f := follow{machine: srv.Consensus().State(), stop: cancel, ended: make(chan struct{})}
	c.mu.Lock()
	c.follows[s] = f
	c.mu.Unlock()
	go func() {
		defer close(f.ended)
		after := uint64(0)
		for ctx.Err() == nil {
			err := c.watch(ctx, s, srv, &after)
			if errors.Is(err, state.ErrTooOld) {
				after = c.relist(srv, f.machine.Snapshot())
			}
		}
	}()
}

func (c *checker) unfollow(s *server) {
	c.mu.Lock()
	f := c.follows[s]
	c.mu.Unlock()
	f.stop()
	<-f.ended // the machine stays known: it is the newest that was seen of it
}

func (c *checker) watch(ctx context.Context, s *server, srv *controlplane.Server, after *uint64) error {
	watch, err := srv.Consensus().State().Watch("", "", *after)
	if err != nil {
		return err
	}
	for {
		batch, progressed, err := watch.Next(ctx)
		for _, ev := range batch {
			c.event(s, srv, ev)
		}
		*after = max(*after, progressed)
		if err != nil {
			return err
		}
	}
}

// relist takes a state as it is, without judging how it came to be so.
func (c *checker) relist(srv *controlplane.Server, snap state.Snapshot) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if snap.ResourceVersion() < c.seen {
		return snap.ResourceVersion() // an old view: what follows is compared only
	}
	for uid := range c.pods {
		if _, ok := snap.ByUID(uid); !ok {
			delete(c.pods, uid)
		}
	}
	for uid := range c.jobs {
		if _, ok := snap.ByUID(uid); !ok {
			delete(c.jobs, uid)
		}
	}
	for uid := range c.bound.claims {
		if _, ok := snap.ByUID(uid); !ok {
			delete(c.bound.claims, uid)
		}
	}
	for _, kind := range []string{"Pod", "Deployment.apps", "Job.batch"} {
		snap.Range(kind, "", state.Key{}, func(r *state.Record) bool {
			c.learn(srv, r)
			return true
		})
	}
	for _, a := range c.apps {
		a.armed = false
	}
	c.seen = snap.ResourceVersion()
	return c.seen
}

func (c *checker) event(s *server, srv *controlplane.Server, ev state.Event) {
	b, err := state.EncodeRecord(ev.Record)
	if err != nil {
		c.w.violated("record of version %d cannot be encoded: %v", ev.ResourceVersion, err)
		return
	}
	d := sha256.Sum256(append(b, byte(ev.Type)))
	c.mu.Lock()
	defer c.mu.Unlock()
	h := &ev.Record.Header
	if was, ok := c.digests[ev.ResourceVersion]; ok && was != d {
		c.w.violated("version %d has two meanings; on %s it is %v of %v", ev.ResourceVersion, s.name(), ev.Type, h.Key)
	}
	c.digests[ev.ResourceVersion] = d
	if ev.ResourceVersion <= c.seen {
		return
	}
	c.seen = ev.ResourceVersion
	c.trace(ev)
	c.storming()
	switch h.Key.Kind {
	case "Pod":
		if ev.Type == state.Deleted {
			c.removed(h.UID)
			return
		}
		c.podChanged(srv, ev)
	case "Node":
		c.nodeChanged(srv, ev)
	case "Job.batch":
		c.jobChanged(srv, ev)
	case "PersistentVolumeClaim":
		c.claimChanged(srv, ev)
	case "PersistentVolume":
		c.volumeChanged(srv, ev)
	case "Deployment.apps":
		if ev.Type == state.Deleted {
			delete(c.apps, h.Key.Name)
			return
		}
		c.learn(srv, ev.Record)
	}
}

// mostWrites is what a cluster of this size may write in a second. Two
// writers that undo each other reach any number of it, since in a bubble
// time stands still while anybody is busy.
const mostWrites = 3000

// storming ends the process when writers do not come to rest: nothing else
// would end it.
func (c *checker) storming() {
	if now := time.Now(); now.Sub(c.second) > time.Second {
		c.second, c.writes = now, 0
	}
	if c.writes++; c.writes > mostWrites {
		_, lines := c.w.verdict()
		panic(fmt.Sprintf("sim: seed %d: more than %d writes in a second; the trace ends with\n%s", c.w.seed, mostWrites, strings.Join(lines[max(len(lines)-200, 0):], "\n")))
	}
}

func (c *checker) trace(ev state.Event) {
	h := &ev.Record.Header
	verb := [...]string{"?", "added", "changed", "deleted"}[ev.Type]
	more := ""
	switch h.Key.Kind {
	case "Pod":
		more = fmt.Sprintf(" %s ready=%v node=%s deleting=%v uid=%s", h.Phase, h.Ready, h.NodeName, h.Deleted != 0, h.UID)
	case "Event", "Lease.coordination.k8s.io":
		return
	}
	c.w.say("state %d: %s %s %s%s", ev.ResourceVersion, verb, h.Key.Kind, h.Key.Name, more)
}

// removed is the end of a pod object.
func (c *checker) removed(uid string) { delete(c.pods, uid) }

func (c *checker) podChanged(srv *controlplane.Server, ev state.Event) {
	h := &ev.Record.Header
	before := c.pods[h.UID]
	var was podView
	if before != nil {
		was = *before
	}
	c.learn(srv, ev.Record)
	now := c.pods[h.UID]
	if now.lost != was.lost {
		c.w.say("pod %s is lost: %v", now.name, now.lost)
		if now.lost {
			c.lost++
			if c.calm && !time.Now().Before(c.calmFrom) && !c.restFrom.IsZero() && time.Since(c.restFrom) > aftermath {
				c.w.violated("pod %s on %s is thought lost, and nothing kept its node's leases back", now.name, now.node)
			}
		}
	}
	if ev.Type == state.Added {
		c.jobPod(now)
	}
	if now.node != was.node {
		c.beside(now)
	}
	if was.ready && !was.marked && now.marked && now.evicted {
		c.evicted(now)
	}
	a := c.apps[now.app]
	if a == nil || a.deleted {
		return
	}
	if ev.Type == state.Added && a.armed && c.quiet() {
		if n, most := c.count(now.app, false), a.most+a.surge; n > most {
			c.w.violated("%s: %d pods, at most %d are allowed (replicas %d since complete, surge %d)", now.app, n, most, a.most, a.surge)
		}
	}
	if !was.ready || was.marked || was.lost || !now.marked || c.freed[h.UID] {
		return
	}
	if now.returned {
		c.drop(now)
	}
	if a.armed && c.quiet() {
		if n, least := c.count(now.app, true), a.least-a.unavailable; n < least {
			c.w.violated("%s: deletion of %s leaves %d ready pods, %d are the least (replicas %d since complete, unavailable %d): %s", now.app, now.name, n, least, a.least, a.unavailable, c.describe(now.app))
		}
	}
}

// losses counts how often a pod was marked as lost.
func (c *checker) losses() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lost
}

// count counts an app's pods, or the ready ones.
func (c *checker) count(app string, ready bool) int {
	n := 0
	for _, p := range c.pods {
		fresh := c.strict && !p.unreadyAt.IsZero() && time.Since(p.unreadyAt) < news
		if p.app == app && !p.marked && !p.terminal && (!p.lost || (ready && fresh)) && (!ready || p.ready || fresh) {
			n++
		}
	}
	return n
}

func (c *checker) describe(app string) string {
	var out []string
	for _, p := range c.pods {
		if p.app == app {
			out = append(out, fmt.Sprintf("%s ready=%v deleting=%v lost=%v ended=%v", p.name, p.ready, p.marked, p.lost, p.terminal))
		}
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

// learn takes in a record.
func (c *checker) learn(srv *controlplane.Server, r *state.Record) {
	obj, err := srv.Store().Decode(r)
	if err != nil {
		c.w.violated("decode %v: %v", r.Header.Key, err)
		return
	}
	switch o := obj.(type) {
	case *corev1.Pod:
		p := c.pods[r.Header.UID]
		if p == nil {
			p = &podView{created: r.Header.ResourceVersion}
			c.pods[r.Header.UID] = p
		}
		p.name, p.app, p.node = o.Name, o.Labels["app"], o.Spec.NodeName
		p.claims = claimNames(o)
		if r.Header.Ready && !p.ready {
			p.readyAt = time.Now()
		}
		if !r.Header.Ready && p.ready {
			p.unreadyAt = time.Now()
		}
		p.ready, p.marked = r.Header.Ready, r.Header.Deleted != 0
		mark := lost.Is(o)
		p.returned = p.returned || (p.mark && (!mark || p.ready))
		p.mark, p.lost = mark, mark && !p.ready // counted from its first word on
		p.evicted = slices.ContainsFunc(o.Status.Conditions, func(c corev1.PodCondition) bool { return c.Reason == "EvictionByEvictionAPI" })
		for _, owner := range r.Header.Owners {
			if owner.Controller {
				p.set = owner.UID
			}
		}
		p.terminal = o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed
	case *appsv1.Deployment:
		c.app(o)
	case *batchv1.Job:
		c.jobs[r.Header.UID] = &jobView{o.Name, o.Status.Succeeded, isComplete(o)}
		c.ticks[o.Name] = true
	}
}

func (c *checker) app(d *appsv1.Deployment) {
	a := c.apps[d.Name]
	n := int(*d.Spec.Replicas)
	if a == nil {
		a = &appView{least: n, most: n}
		c.apps[d.Name] = a
	}
	a.replicas, a.deleted = n, d.DeletionTimestamp != nil
	if ru := d.Spec.Strategy.RollingUpdate; ru != nil {
		a.surge, _ = intstr.GetScaledValueFromIntOrPercent(ru.MaxSurge, n, true)
		a.unavailable, _ = intstr.GetScaledValueFromIntOrPercent(ru.MaxUnavailable, n, false)
	}
	a.least, a.most = min(a.least, n), max(a.most, n)
	a.complete = complete(d)
	if a.complete {
		a.least, a.most = n, n
		a.armed = c.quiet()
	}
}

func complete(d *appsv1.Deployment) bool {
	s, n := d.Status, *d.Spec.Replicas
	return s.ObservedGeneration == d.Generation && s.UpdatedReplicas == n && s.Replicas == n && s.AvailableReplicas == n
}

// drop is the deletion of a pod that had come back from a silent node.
type drop struct {
	at     time.Time
	pod    string
	others []string // uids of pods of the same set that never were away
}

// drop notes such a deletion; a moment later those others must be deleted
// too, since the original is kept rather than its replacement.
func (c *checker) drop(p *podView) {
	d := drop{at: time.Now(), pod: p.name}
	for uid, o := range c.pods {
		if o.set == p.set && o != p && o.counts() && !o.returned && o.ready && time.Since(o.readyAt) > 2*time.Second {
			d.others = append(d.others, uid)
		}
	}
	if len(d.others) > 0 {
		c.dropped = append(c.dropped, d)
	}
}

func (c *checker) judgeDrops() {
	c.mu.Lock()
	defer c.mu.Unlock()
	var rest []drop
	for _, d := range c.dropped {
		if time.Since(d.at) < 2*time.Second {
			rest = append(rest, d)
			continue
		}
		for _, uid := range d.others {
			if o := c.pods[uid]; o != nil && !o.marked {
				c.w.violated("%s came back and was deleted, %s of the same set never was away and was kept", d.pod, o.name)
			}
		}
	}
	c.dropped = rest
}

// aftermath is how long after a storm pods still come back.
const aftermath = 35 * time.Second

func (c *checker) quiet() bool {
	if c.strict {
		return true
	}
	return c.calm && !time.Now().Before(c.calmFrom)
}

// storm begins or ends a time in which faults take pods down.
func (c *checker) storm(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calm, c.calmFrom = !on, time.Now().Add(aftermath)
	if on && !c.strict {
		for _, a := range c.apps {
			a.armed = false
		}
	}
}

// unrest begins or ends a time in which servers are in trouble.
func (c *checker) unrest(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.restFrom = time.Now()
	if on {
		c.restFrom = time.Time{}
	}
}

// free notes that a client is about to delete a pod itself.
func (c *checker) free(uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.freed[uid] = true
}

// wanted says that neither the checker nor any server knows of a deletion.
func (c *checker) wanted(uid string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pods[uid]
	if p == nil || p.marked {
		return false
	}
	for _, f := range c.follows {
		snap := f.machine.Snapshot()
		r, ok := snap.ByUID(uid)
		if (ok && r.Header.Deleted != 0) || (!ok && snap.ResourceVersion() >= p.created) {
			return false
		}
	}
	return true
}

// look checks what must hold at any moment.
func (c *checker) look() {
	c.judgeDrops()
	for _, s := range c.w.servers {
		srv := s.now()
		if srv == nil {
			continue
		}
		if term, leading := srv.Consensus().Leadership(); leading {
			c.mu.Lock()
			if was := c.leaders[term]; was != "" && was != s.name() {
				c.w.violated("%s and %s both lead term %d", was, s.name(), term)
			}
			c.leaders[term] = s.name()
			c.mu.Unlock()
		}
		for _, diff := range recount(srv.Consensus().State().Snapshot()) {
			c.w.violated("%s: totals: %s", s.name(), diff)
		}
	}
}

// recount compares the running totals of nodes with a sum over their pods.
func recount(snap state.Snapshot) (diffs []string) {
	snap.Range("Node", "", state.Key{}, func(n *state.Record) bool {
		want := map[string]int64{}
		snap.PodsOnNode(n.Header.Key.Name, func(p *state.Record) bool {
			if ph := p.Header.Phase; ph != string(corev1.PodSucceeded) && ph != string(corev1.PodFailed) {
				for _, q := range p.Header.Requests {
					want[q.Name] += q.Value
				}
			}
			return true
		})
		got, _ := snap.NodeTotals(n.Header.Key.Name)
		for _, q := range got {
			if want[q.Name] != q.Value {
				diffs = append(diffs, fmt.Sprintf("%s: %s is %d, its pods ask for %d", n.Header.Key.Name, q.Name, q.Value, want[q.Name]))
			}
			delete(want, q.Name)
		}
		for name, v := range want {
			if v != 0 {
				diffs = append(diffs, fmt.Sprintf("%s: %s is missing, its pods ask for %d", n.Header.Key.Name, name, v))
			}
		}
		return true
	})
	slices.Sort(diffs)
	return diffs
}

// unsettled says what is not yet as it shall be; "" is converged.
func (w *world) unsettled(apps map[string]int, jobs bool) string {
	srv := w.leading()
	if srv == nil {
		return "no leader"
	}
	snap := srv.Consensus().State().Snapshot()
	var why []string
	add := func(format string, a ...any) { why = append(why, fmt.Sprintf(format, a...)) }
	for _, s := range w.servers {
		if s.now() == nil {
			add("%s is down", s.name())
		}
	}
	if n := w.voters(); n != len(w.servers) {
		add("%d of %d servers vote", n, len(w.servers))
	}
	snap.Range("Node", "", state.Key{}, func(r *state.Record) bool {
		obj, err := srv.Store().Decode(r)
		if err != nil {
			add("node %s: %v", r.Header.Key.Name, err)
			return true
		}
		n := obj.(*corev1.Node)
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
				add("node %s is Ready=%s", n.Name, c.Status)
			}
		}
		if len(n.Spec.Taints) > 0 {
			add("node %s has taints %v", n.Name, n.Spec.Taints)
		}
		return true
	})
	snap.Range("Deployment.apps", "", state.Key{}, func(r *state.Record) bool {
		obj, err := srv.Store().Decode(r)
		if err != nil {
			add("deployment %s: %v", r.Header.Key.Name, err)
			return true
		}
		d := obj.(*appsv1.Deployment)
		if want, ok := apps[d.Name]; !ok || int(*d.Spec.Replicas) != want || !complete(d) || d.DeletionTimestamp != nil {
			add("deployment %s: %d of %d ready, %d updated, %d in all, observed %d of %d", d.Name, d.Status.AvailableReplicas, *d.Spec.Replicas, d.Status.UpdatedReplicas, d.Status.Replicas, d.Status.ObservedGeneration, d.Generation)
		}
		return true
	})
	if n := snap.Len("Deployment.apps", ""); n != len(apps) {
		add("%d deployments, not %d", n, len(apps))
	}
	onNode := map[string][]string{}
	known := map[string]bool{}
	others := map[string]bool{} // of Jobs
	count := map[string]int{}
	snap.Range("Pod", "", state.Key{}, func(r *state.Record) bool {
		h := &r.Header
		if jobs && (h.Labels["app"] == jobName || h.Labels["app"] == cronName) {
			known[h.UID] = true
			others[h.UID+"/c"] = true
			return true // they come and go
		}
		if h.NodeName == "" || !h.Ready || h.Deleted != 0 {
			add("pod %s: node %q, ready %v, deleting %v", h.Key.Name, h.NodeName, h.Ready, h.Deleted != 0)
		}
		if lost.MayBe(r) {
			add("pod %s is marked as lost", h.Key.Name)
		}
		known[h.UID] = true
		count[h.Labels["app"]]++
		onNode[h.NodeName] = append(onNode[h.NodeName], h.UID+"/c")
		return true
	})
	for app, n := range count {
		if want := apps[app] + w.sets[app]; n != want {
			add("%d pods of %s, not %d", n, app, want)
		}
	}
	if l := w.check.unbound(); l != "" {
		add("%s", l)
	}
	for app, n := range w.sets {
		if count[app] != n {
			add("%d pods of %s, not %d", count[app], app, n)
		}
	}
	for _, h := range w.hosts {
		if !h.connected() {
			add("%s is not connected", h.name)
		}
		want := onNode[h.name]
		slices.Sort(want)
		got := slices.DeleteFunc(h.m.running(), func(p string) bool { return others[p] })
		if !slices.Equal(got, want) {
			add("%s runs %v, should run %v", h.name, got, want)
		}
		if l := h.m.left(known); len(l) > 0 {
			add("%s keeps %v", h.name, l)
		}
		if g, err := h.disk.Gones(); err != nil || len(g) > 0 {
			add("%s has %d tombstones", h.name, len(g))
		}
	}
	return strings.Join(why, "; ")
}

// settle waits until everything is as it shall be.
func (w *world) settle(within time.Duration, apps map[string]int) (time.Duration, bool) {
	return w.settleBut(within, apps, false)
}

// settleBut is settle; jobs says whether Jobs' pods may be there.
func (w *world) settleBut(within time.Duration, apps map[string]int, jobs bool) (time.Duration, bool) {
	start := time.Now()
	for {
		why := w.unsettled(apps, jobs)
		if why == "" {
			return time.Since(start), true
		}
		if time.Since(start) > within {
			w.violated("not converged %s after the last fault: %s", within, why)
			return within, false
		}
		sleep(250 * time.Millisecond)
		w.check.look()
	}
}
