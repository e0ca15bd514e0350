package sim

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// story is a world with two Deployments at rest, told by hand.
type story struct {
	*world
	t    *testing.T
	c    *client
	apps map[string]*keeper
	size map[string]int
	ctx  context.Context
}

// tell makes the world with two Deployments, tells the story, and judges the
// end.
func tell(t *testing.T, sz size, f func(s *story)) {
	t.Helper()
	tellOf(t, sz, 5, []appPlan{{"web", 1, 1, 6}, {"back", 1, 0, 4}}, f)
}

func tellOf(t *testing.T, sz size, probe int32, apps []appPlan, f func(s *story)) {
	t.Helper()
	pulse := &pulse{}
	defer pulse.watch(t.Name())()
	synctest.Test(t, func(t *testing.T) {
		w, err := newWorld(sz, 1, pulse)
		must(t, err)
		c, err := w.newClient("client")
		must(t, err)
		s := &story{world: w, t: t, c: c, apps: map[string]*keeper{}, size: map[string]int{}, ctx: context.Background()}
		c.probe = probe
		for _, a := range apps {
			s.deploy(a.name, int(a.replicas), a.surge, a.unavailable)
		}
		s.rest(2 * time.Minute)
		f(s)
		s.rest(2 * time.Minute)
		w.idle(time.Minute)
		c.close()
		w.finish()
		violations, lines := w.verdict()
		for _, v := range violations {
			t.Error(v)
		}
		if t.Failed() {
			for _, l := range lines[max(len(lines)-3000, 0):] {
				fmt.Println(l)
			}
		}
	})
}

func (s *story) deploy(name string, n, surge, unavailable int) {
	s.apps[name], s.size[name] = s.c.newApp(name, surge, unavailable), n
	s.roll(name, 1)
}

func (s *story) roll(name string, version int) {
	s.t.Helper()
	must(s.t, s.apps[name].put(s.ctx, want{exists: true, image: image(imageOK, version), replicas: int32(s.size[name])}, false))
}

func (s *story) rest(within time.Duration) {
	s.t.Helper()
	if took, ok := s.settle(within, s.size); ok {
		s.say("AT REST after %s", took)
	}
}

// after lets time pass while the rules are looked at.
func (s *story) after(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		sleep(min(time.Until(end), max(d/200, 500*time.Millisecond)))
		s.check.look()
	}
}

// started counts all starts of containers since the machines' last boots.
func (s *story) started() map[string]int {
	out := map[string]int{}
	for _, h := range s.hosts {
		h.m.mu.Lock()
		maps.Copy(out, h.m.starts)
		h.m.mu.Unlock()
	}
	return out
}

// same checks that since before nothing was started.
func (s *story) same(before map[string]int, what string) {
	s.t.Helper()
	if now := s.started(); !maps.Equal(now, before) {
		s.violated("%s: containers were started: %d before, %d now", what, len(before), len(now))
	}
}

// E1: all servers die; everything runs on, and nothing changes until they are
// back.
func TestServersAwayForAnHour(t *testing.T) {
	tell(t, size{1, 5}, func(s *story) {
		before := s.started()
		for _, srv := range s.servers {
			srv.down()
		}
		s.after(time.Hour)
		s.same(before, "without servers")
		for _, srv := range s.servers {
			srv.up()
		}
		s.after(time.Minute)
		s.same(before, "servers are back")
	})
}

// E5: all agents restart at once, three times.
func TestAllAgentsRestart(t *testing.T) {
	tell(t, size{1, 5}, func(s *story) {
		before := s.started()
		for range 3 {
			for _, h := range s.hosts {
				h.down()
			}
			s.after(time.Second)
			for _, h := range s.hosts {
				h.up()
			}
			s.rest(30 * time.Second)
		}
		s.same(before, "agents restarted")
	})
}

// condition reads why a pod is not scheduled.
func (s *story) condition(name string) string {
	s.t.Helper()
	var p corev1.Pod
	_, _, err := s.c.call(s.ctx, http.MethodGet, "/api/v1/namespaces/default/pods/"+name, jsonType, nil, &p)
	must(s.t, err)
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c.Reason + ": " + c.Message
		}
	}
	return ""
}

// E7: an impossible spec has a reason within two seconds, still an hour
// later, and it is true then.
func TestImpossibleSpec(t *testing.T) {
	tell(t, size{1, 5}, func(s *story) {
		pod := &corev1.Pod{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "huge"},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: image(imageOK, 1),
				Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("100")}}}}},
		}
		_, _, err := s.c.call(s.ctx, http.MethodPost, "/api/v1/namespaces/default/pods", jsonType, pod, nil)
		must(s.t, err)
		s.after(2 * time.Second)
		if got := s.condition("huge"); !strings.HasPrefix(got, "Unschedulable: 0/5 nodes are available: 5 Insufficient cpu (needs 100") {
			s.violated("after two seconds: %q", got)
		}
		s.after(time.Hour)
		if got := s.condition("huge"); !strings.HasPrefix(got, "Unschedulable: 0/5 nodes are available: 5 Insufficient cpu (needs 100") {
			s.violated("after an hour: %q", got)
		}
		// The truth changes: a node is cordoned.
		_, _, err = s.c.call(s.ctx, http.MethodPatch, "/api/v1/nodes/n1", mergePatch, map[string]any{"spec": map[string]any{"unschedulable": true}}, nil)
		must(s.t, err)
		s.after(time.Hour)
		if got := s.condition("huge"); !strings.Contains(got, "4 Insufficient cpu") || !strings.Contains(got, "1 node(s) were unschedulable") {
			s.violated("an hour after a node was cordoned: %q", got)
		}
		_, _, err = s.c.call(s.ctx, http.MethodPatch, "/api/v1/nodes/n1", mergePatch, map[string]any{"spec": map[string]any{"unschedulable": false}}, nil)
		must(s.t, err)
		_, _, err = s.c.call(s.ctx, http.MethodDelete, "/api/v1/namespaces/default/pods/huge", jsonType, nil, nil)
		must(s.t, err)
	})
}

// complete says whether an app's rollout has ended.
func (s *story) complete(name string) bool {
	s.check.mu.Lock()
	defer s.check.mu.Unlock()
	a := s.check.apps[name]
	return a != nil && a.complete
}

// E9: a node fails in the middle of a rollout, which stays within its bounds
// and ends without the node.
func TestRolloutDuringNodeFailure(t *testing.T) {
	for _, delay := range []time.Duration{0, 2 * time.Second, 6 * time.Second, 11 * time.Second} {
		t.Run(delay.String(), func(t *testing.T) {
			tell(t, size{1, 5}, func(s *story) {
				s.check.mu.Lock()
				s.check.strict = true
				s.check.mu.Unlock()
				s.roll("web", 2)
				s.roll("back", 2)
				s.after(delay)
				h := s.hosts[1]
				h.down()
				h.m.powerCut()
				s.after(2 * time.Minute)
				for name := range s.size {
					if !s.complete(name) {
						s.violated("%s: the rollout did not end without the node", name)
					}
				}
				h.up()
			})
		})
	}
}

// E10: the link is cut and healed. What runs goes on; a cut site's pods stay
// where they are, a single node's are replaced and the originals kept.
func TestPartitions(t *testing.T) {
	for _, d := range []time.Duration{5 * time.Second, time.Minute, time.Hour} {
		t.Run("site for "+d.String(), func(t *testing.T) {
			tell(t, size{1, 5}, func(s *story) {
				before := s.started()
				s.check.storm(true)
				s.net.Cut(s.servers[0].addr, true)
				s.after(d)
				s.same(before, "while cut")
				s.net.Cut(s.servers[0].addr, false)
				s.check.storm(false)
				s.after(time.Minute)
				s.same(before, "healed")
			})
		})
		t.Run("node for "+d.String(), func(t *testing.T) {
			tell(t, size{1, 5}, func(s *story) {
				h := s.hosts[2]
				originals := h.m.running()
				s.check.storm(true)
				s.net.Cut("n3", true)
				s.after(d)
				if !slices.Equal(h.m.running(), originals) {
					s.violated("cut off, %v became %v", originals, h.m.running())
				}
				s.net.Cut("n3", false)
				s.check.storm(false)
				s.rest(2 * time.Minute)
				if !slices.Equal(h.m.running(), originals) {
					s.violated("the originals %v were not kept: %v", originals, h.m.running())
				}
			})
		})
	}
}

// E10: a long time without a link; three weeks by "make sim".
func TestLongCut(t *testing.T) {
	tellOf(t, size{1, 2}, 60, []appPlan{{"web", 1, 1, 3}}, func(s *story) {
		before := s.started()
		var writes []uint64
		var originals [][]string
		for _, h := range s.hosts {
			writes = append(writes, h.disk.Writes())
			originals = append(originals, h.m.running())
		}
		s.check.storm(true)
		s.net.Cut(s.servers[0].addr, true)
		s.after(*cutFor)
		s.same(before, "while cut")
		for i, h := range s.hosts {
			if n := h.disk.Writes() - writes[i]; n > 0 {
				s.violated("%s wrote %d times in %s alone", h.name, n, *cutFor)
			}
		}
		s.net.Cut(s.servers[0].addr, false)
		s.check.storm(false)
		s.after(time.Minute)
		// The node that is back first may have stood in for the other, which
		// ends when that one is back.
		for i, h := range s.hosts {
			if got := h.m.running(); !slices.Equal(got, originals[i]) {
				s.violated("healed: %s ran %v, and runs %v", h.name, originals[i], got)
			}
		}
		now := s.started()
		for id, n := range before {
			if now[id] != n {
				s.violated("healed: %s was started again", id)
			}
		}
	})
}

// E11: power is lost while the link is; the machine boots with its clock at
// 1970, ten times, and runs everything it knows within 30 s.
func TestOfflineRebootIn1970(t *testing.T) {
	tell(t, size{1, 5}, func(s *story) {
		h := s.hosts[3]
		originals := h.m.running()
		s.check.storm(true)
		s.net.Cut("n4", true)
		s.after(time.Hour)
		var back time.Duration
		for range 10 {
			h.down()
			h.m.powerCut()
			to1970 := -h.clock.Now().Sub(time.Unix(0, 0))
			h.clock.jump(to1970)
			back -= to1970
			s.after(5 * time.Second)
			h.up()
			s.after(30 * time.Second)
			if got := h.m.running(); !slices.Equal(got, originals) {
				s.violated("30 s after an offline boot in 1970 %v run, %v are known", got, originals)
			}
		}
		s.net.Cut("n4", false)
		s.check.storm(false)
		s.rest(2 * time.Minute) // with the clock still at 1970
		if got := h.m.running(); !slices.Equal(got, originals) {
			s.violated("back in the cluster the originals %v were not kept: %v", originals, got)
		}
		h.clock.jump(back)
	})
}

// E14: a server's clock is two years off for five minutes: all nodes stay
// Ready, also one that comes back meanwhile, and nothing is restarted. The
// server may have been started with that clock.
func TestServerClockYearsOff(t *testing.T) {
	const twoYears = 2 * 365 * 24 * time.Hour
	for _, tc := range []struct {
		by      time.Duration
		restart bool
	}{{twoYears, false}, {-twoYears, false}, {twoYears, true}} {
		t.Run(fmt.Sprintf("%s restart %v", tc.by, tc.restart), func(t *testing.T) {
			tell(t, size{1, 5}, func(s *story) {
				s.after(30 * time.Second) // the server keeps its time by now
				before := s.started()
				ready := func(when string) {
					for range 60 {
						s.after(5 * time.Second)
						if why := s.unsettled(s.size, false); why != "" {
							s.violated("%s: %s", when, why)
						}
						if _, _, err := s.c.call(s.ctx, http.MethodGet, "/api/v1/nodes", jsonType, nil, nil); err != nil {
							s.violated("%s: %v", when, err)
						}
					}
				}
				if tc.restart {
					s.servers[0].down()
				}
				s.servers[0].clock.jump(tc.by)
				if tc.restart {
					s.servers[0].up()
					s.rest(time.Minute)
				}
				ready("clock moved")
				s.hosts[0].down()
				s.hosts[0].up()
				s.rest(30 * time.Second)
				s.servers[0].clock.jump(-tc.by)
				ready("clock back")
				s.same(before, "clock of the server moved")
			})
		})
	}
}
