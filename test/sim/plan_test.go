package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/wire/memnet"
)

// step is one thing that happens at a moment of a run.
type step struct {
	at   time.Duration
	name string
	do   func(w *world)
}

// plan is everything that a seed decides.
type plan struct {
	size   size
	faults []step
	// ops of each client, run one after the other.
	ops  [][]op
	apps []appPlan
	more workloads
	last time.Duration // when the last fault is over
}

type appPlan struct {
	name               string
	surge, unavailable int
	replicas           int32
}

// op is one thing that a client does to an app.
type op struct {
	wait time.Duration
	app  int
	kind string // scale, roll, delete, kill
	n    int    // replicas, or which pod
	what string // behaviour of the image
}

// faultTime is how long faults go on.
const faultTime = 150 * time.Second

// newPlan makes the plan of a seed. It draws everything here, so that how
// goroutines are interleaved changes nothing of it.
func newPlan(seed uint64, sz size) plan {
	r := rand.New(rand.NewPCG(seed, 1))
	p := plan{size: sz}
	for i := range 1 + r.IntN(3) {
		s := r.IntN(3)
		u := r.IntN(2)
		if s == 0 {
			u = 1
		}
		p.apps = append(p.apps, appPlan{fmt.Sprintf("app%d", i), s, u, int32(1 + r.IntN(5))})
		var ops []op
		for range 3 + r.IntN(6) {
			o := op{wait: time.Duration(1+r.IntN(40)) * time.Second, app: i}
			switch x := r.IntN(10); {
			case x < 4:
				o.kind, o.what = "roll", [...]string{imageOK, imageOK, imageOK, imageCrash, imageUnready, imageMissing, imageSlow}[r.IntN(7)]
			case x < 7:
				o.kind, o.n = "scale", r.IntN(8)
			case x < 8:
				o.kind = "delete"
			default:
				o.kind, o.n = "kill", r.IntN(8)
			}
			ops = append(ops, o)
		}
		p.ops = append(p.ops, ops)
	}
	at := time.Duration(0)
	for at < faultTime {
		at += time.Duration(1+r.IntN(30000)) * time.Millisecond
		p.faults = append(p.faults, p.fault(r, at)...)
	}
	p.further(seed)
	p.more = newWorkloads(seed)
	slices.SortStableFunc(p.faults, func(a, b step) int { return int(a.at - b.at) })
	for _, f := range p.faults {
		p.last = max(p.last, f.at)
	}
	return p
}

// span draws how long a fault lasts: often about as long as a lease.
func span(r *rand.Rand) time.Duration {
	return [...]time.Duration{time.Second, 4 * time.Second, 7 * time.Second, 12 * time.Second, 30 * time.Second, 75 * time.Second}[r.IntN(6)] +
		time.Duration(r.IntN(2000))*time.Millisecond
}

// fault draws one fault as its beginning and its end.
func (p *plan) fault(r *rand.Rand, at time.Duration) []step {
	n, d := r.IntN(p.size.nodes), span(r)
	s := r.IntN(p.size.servers)
	end := at + d
	pair := func(name string, on, off func(w *world)) []step {
		return []step{{at, name, on}, {end, "end of: " + name, off}}
	}
	node := func(w *world) *host { return w.hosts[n] }
	addr := memnet.Addr(fmt.Sprintf("n%d", n+1))
	kinds := 13
	if p.size.servers > 1 {
		kinds = 17
	}
	switch r.IntN(kinds) {
	case 13:
		a := serverAddr(s)
		return pair(fmt.Sprintf("cut s%d for %s", s, d),
			func(w *world) { w.unrest(1); w.net.Cut(a, true) }, func(w *world) { w.net.Cut(a, false); w.unrest(-1) })
	case 14:
		a, b := serverAddr(s), serverAddr((s+1)%p.size.servers)
		both := func(on bool) func(w *world) {
			return func(w *world) { w.unrest(sign(on)); w.net.Block(a, b, on); w.net.Block(b, a, on) }
		}
		return pair(fmt.Sprintf("%s and %s cannot reach each other for %s", a, b, d), both(true), both(false))
	case 15:
		a := serverAddr(s)
		return pair(fmt.Sprintf("s%d hears nothing for %s", s, d),
			func(w *world) { w.unrest(1); w.net.Deafen(a, true) }, func(w *world) { w.net.Deafen(a, false); w.unrest(-1) })
	case 16:
		a := serverAddr(s)
		return pair(fmt.Sprintf("s%d is not heard for %s", s, d),
			func(w *world) { w.unrest(1); w.net.Block(a, "", true) }, func(w *world) { w.net.Block(a, "", false); w.unrest(-1) })
	case 0, 1:
		return pair(fmt.Sprintf("cut n%d for %s", n+1, d),
			func(w *world) { w.storm(1); w.net.Cut(addr, true) }, func(w *world) { w.net.Cut(addr, false); w.storm(-1) })
	case 2:
		return pair(fmt.Sprintf("n%d hears nothing for %s", n+1, d),
			func(w *world) { w.storm(1); w.net.Deafen(addr, true) }, func(w *world) { w.net.Deafen(addr, false); w.storm(-1) })
	case 3:
		return pair(fmt.Sprintf("n%d is not heard for %s", n+1, d),
			func(w *world) { w.storm(1); w.net.Block(addr, "", true) }, func(w *world) { w.net.Block(addr, "", false); w.storm(-1) })
	case 4:
		return pair(fmt.Sprintf("agent of n%d is killed, back after %s", n+1, d),
			func(w *world) { w.storm(1); node(w).down() }, func(w *world) { node(w).up(); w.storm(-1) })
	case 5:
		return []step{{at, fmt.Sprintf("agent of n%d is killed and starts at once", n+1), func(w *world) { node(w).down(); node(w).up() }}}
	case 6:
		return pair(fmt.Sprintf("n%d loses power for %s", n+1, d),
			func(w *world) { w.storm(1); node(w).down(); node(w).m.powerCut() }, func(w *world) { node(w).up(); w.storm(-1) })
	case 7, 8:
		return pair(fmt.Sprintf("s%d is killed, back after %s", s, d),
			func(w *world) { w.unrest(1); w.servers[s].down() }, func(w *world) { w.servers[s].up(); w.unrest(-1) })
	case 9:
		lat, loss := time.Duration(r.IntN(1500))*time.Millisecond, float64(r.IntN(30))/100
		return pair(fmt.Sprintf("latency up to %s, loss %.0f %% for %s", lat, 100*loss, d),
			func(w *world) { w.storm(1); w.weather(lat, loss) }, func(w *world) { w.weather(0, 0); w.storm(-1) })
	case 10:
		return pair(fmt.Sprintf("disk of n%d is full for %s", n+1, d),
			func(w *world) { node(w).full(1) }, func(w *world) { node(w).full(-1) })
	case 11:
		return pair(fmt.Sprintf("disk of s%d is full for %s", s, d),
			func(w *world) { w.unrest(1); w.servers[s].full(1) }, func(w *world) { w.servers[s].full(-1); w.unrest(-1) })
	}
	by := [...]time.Duration{time.Hour, -time.Hour, 17 * 24 * time.Hour, -40 * 365 * 24 * time.Hour, 2 * 365 * 24 * time.Hour, 90 * time.Second}[r.IntN(6)]
	if r.IntN(2) == 0 {
		return pair(fmt.Sprintf("clock of n%d jumps by %s for %s", n+1, by, d),
			func(w *world) { node(w).clock.jump(by) }, func(w *world) { node(w).clock.jump(-by) })
	}
	return pair(fmt.Sprintf("clock of s%d jumps by %s for %s", s, by, d),
		func(w *world) { w.servers[s].clock.jump(by) }, func(w *world) { w.servers[s].clock.jump(-by) })
}

// storm counts the faults that may make pods look dead.
func (w *world) storm(by int) {
	w.storms += by
	w.check.storm(w.storms > 0)
}

// unrest counts the faults of servers, in which a node may be thought silent
// while pods are not to be touched.
func (w *world) unrest(by int) {
	w.rests += by
	w.check.unrest(w.rests > 0)
}

func sign(on bool) int {
	if on {
		return 1
	}
	return -1
}

// Overlapping faults of one kind nest: the last end ends it.

func (h *host) down() {
	h.downs++
	h.crash()
}

func (h *host) up() {
	if h.downs--; h.downs == 0 {
		if err := h.start(); err != nil {
			h.w.violated("%s does not start: %v", h.name, err)
		}
	}
}

func (h *host) full(by int) {
	h.fulls += by
	h.setDisk()
}

func (h *host) setDisk() {
	if h.fulls > 0 {
		h.disk.FailWrites(errNoSpace)
	} else {
		h.disk.FailWrites(nil)
	}
}

func (s *server) down() {
	s.downs++
	s.crash()
}

func (s *server) up() {
	if s.downs--; s.downs > 0 {
		return
	}
	if err := s.start(); err != nil {
		s.w.violated("%s does not start: %v", s.name(), err)
	}
}

func (s *server) full(by int) {
	s.fulls += by
	if s.now() == nil {
		return
	}
	if s.fulls > 0 {
		s.setFault(errNoSpace)
	} else {
		s.setFault(nil)
	}
}

// run executes the plan and leaves the world healed and at rest; it returns
// how long it took to converge.
func (p *plan) run(w *world) time.Duration {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	apps := make([]*keeper, len(p.apps))
	var wg sync.WaitGroup
	var clients []*client
	stop := make(chan struct{})
	for i, a := range p.apps {
		c, err := w.newClient(fmt.Sprintf("client-%d", i))
		if err != nil {
			w.violated("client: %v", err)
			return 0
		}
		clients = append(clients, c)
		apps[i] = c.newApp(a.name, a.surge, a.unavailable)
		wg.Go(func() { p.user(ctx, c, apps[i], a, p.ops[i]) })
		conf := c.newConfig("conf-" + a.name)
		wg.Go(func() { writer(ctx, conf, stop) })
	}
	other, err := w.newClient("client-other")
	if err != nil {
		w.violated("client: %v", err)
		return 0
	}
	clients = append(clients, other)
	wg.Go(func() { p.more.run(ctx, other, stop) })
	wg.Go(func() { // what must hold at any moment
		for {
			select {
			case <-stop:
				return
			case <-time.After(500 * time.Millisecond):
				w.check.look()
			}
		}
	})
	start := time.Now()
	for _, f := range p.faults {
		sleep(time.Until(start.Add(f.at)))
		w.say("FAULT %s", f.name)
		f.do(w)
	}
	close(stop)
	w.say("FAULTS OVER")
	wg.Wait()
	// Whatever state that was: now everything shall be well.
	expect := map[string]int{}
	for i, a := range p.apps {
		expect[a.name] = int(a.replicas)
		if err := apps[i].put(ctx, want{exists: true, image: image(imageOK, 1000), replicas: a.replicas}, false); err != nil {
			w.violated("%s: the last write: %v", a.name, err)
		}
	}
	w.sets = map[string]int{dbName: dbSize, soloName: 1}
	took, _ := w.settleBut(convergence, expect, true)
	p.more.evictAll(ctx, other)
	p.more.end(ctx, other)
	w.settle(convergence, expect)
	w.say("CONVERGED after %s", took)
	w.acquainted(wholePool)
	for _, c := range clients {
		c.close()
	}
	return took
}

// convergence is the bound after the last fault: the longest lease, the back
// off of a connection (20 s), of a crashing container that a rollout waits
// for, and some.
const convergence = 3 * time.Minute

// user runs one app's operations.
func (p *plan) user(ctx context.Context, c *client, k *keeper, a appPlan, ops []op) {
	v := want{exists: true, image: image(imageOK, 0), replicas: a.replicas}
	if err := k.put(ctx, v, false); err != nil {
		c.w.violated("%s: %v", k.name, err)
		return
	}
	for i, o := range ops {
		if pause(ctx, o.wait) != nil {
			return
		}
		switch o.kind {
		case "scale":
			v.replicas = int32(o.n)
		case "roll":
			v.image = image(o.what, i+1)
		case "delete":
			v.exists = false
		case "kill":
			c.killPod(ctx, k.name, o.n)
			continue
		}
		if err := k.put(ctx, v, true); err != nil {
			c.w.violated("%s: %v", k.name, err)
			return
		}
		v.exists = true
	}
}

// writer writes to a ConfigMap until stop closes.
func writer(ctx context.Context, k *keeper, stop chan struct{}) {
	for {
		select {
		case <-stop:
			if _, _, err := k.look(ctx); err != nil {
				k.c.w.violated("%s: %v", k.name, err)
			}
			return
		case <-time.After(3 * time.Second):
			if err := k.put(ctx, want{exists: true}, true); err != nil {
				k.c.w.violated("%s: %v", k.name, err)
				return
			}
		}
	}
}
