package node

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node/eviction"
)

func TestDiskIsShort(t *testing.T) {
	const mi, gi = 1 << 20, 1 << 30
	for name, c := range map[string]struct {
		d    DiskFacts
		says string // "" is no pressure
	}{
		"empty":                   {DiskFacts{Size: 8 * gi, Free: 8 * gi, Inodes: 1000, InodesFree: 1000}, ""},
		"a tenth":                 {DiskFacts{Size: 1000 * mi, Free: 100 * mi}, ""},
		"less than a tenth":       {DiskFacts{Size: 1000 * mi, Free: 99 * mi}, "99Mi of 1000Mi is free on the disk of /s, and 100Mi should be"},
		"full":                    {DiskFacts{Size: 64 * mi}, "0 of 64Mi is free on the disk of /s, and 6553Ki should be"},
		"a large one":             {DiskFacts{Size: 1000 * gi, Free: 2 * gi}, ""},
		"a large one, filled":     {DiskFacts{Size: 1000 * gi, Free: 2*gi - 1}, "2047Mi of 1000Gi is free on the disk of /s, and 2048Mi should be"},
		"no inodes":               {DiskFacts{Size: gi, Free: gi, Inodes: 1000, InodesFree: 49}, "49 of 1000 inodes (files) are free on the disk of /s, and 50 should be"},
		"no inodes to run out of": {DiskFacts{Size: gi, Free: gi}, ""},
		"nothing known":           {DiskFacts{}, ""},
	} {
		c.d.Path = "/s"
		got := ""
		f := MachineFacts{Disk: &c.d}
		met, due := eviction.NewTracker(eviction.Config{}).Look(f.readings(), time.Now())
		for i := range met {
			got, _ = shortage(&met[i])
		}
		if got != c.says || len(met) != len(due) {
			t.Errorf("%s: %q, want %q", name, got, c.says)
		}
	}
}

// TestDiskPressure: the condition comes with the next look and figures, stays
// while a tiny disk goes up and down, without a word about each step, lives
// through a restart of the agent, and ends by itself.
func TestDiskPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		const size = 64 << 20
		m := &stubMachine{f: MachineFacts{CPUMilli: 2000, Memory: 1 << 30, Disk: &DiskFacts{Path: "/var/lib/dunlin", Size: size, Free: size / 2}}}
		free := func(n int64) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.f.Disk = &DiskFacts{Path: "/var/lib/dunlin", Size: size, Free: n}
		}
		b.c.Machine = m
		b.start()
		defer func() { b.stop() }()
		b.after(time.Minute)
		want := func(s corev1.ConditionStatus, says string) corev1.NodeCondition {
			t.Helper()
			for _, c := range b.link.node.Status.Conditions {
				if c.Type == corev1.NodeDiskPressure {
					if c.Status != s || !strings.Contains(c.Message, says) {
						t.Fatalf("DiskPressure is %+v, want %s with %q", c, s, says)
					}
					return c
				}
			}
			t.Fatal("no condition DiskPressure")
			return corev1.NodeCondition{}
		}
		want(corev1.ConditionFalse, "no disk pressure")
		free(0)
		b.after(time.Minute)
		since := want(corev1.ConditionTrue, "0 of 64Mi is free on the disk of /var/lib/dunlin, and 6553Ki should be (at 2000-01-01T00:01:").LastTransitionTime
		words := len(b.link.reports)
		for i := range 40 { // pods come, fill the disk, and go
			free([]int64{size / 2, size / 50}[i%2])
			b.after(time.Minute)
			says := "0 of 64Mi is free"
			if i == 0 || i == 2 || i == 4 { // after 10, 20 and 40 s of it
				says = "over since 2000-01-01T00:0"
			}
			if c := want(corev1.ConditionTrue, says); !c.LastTransitionTime.Equal(&since) {
				t.Fatalf("the transition moved to %s", c.LastTransitionTime)
			}
		}
		// Over and back, each time told later, three times: then no more.
		if n := len(b.link.reports) - words; n > 6 {
			t.Fatalf("%d reports of a disk that goes up and down", n)
		}
		free(size / 2)
		b.link.put("Node", b.link.node)
		b.after(time.Minute)
		b.stop()
		b.start() // the next agent does not know when it was full
		b.after(4 * time.Minute)
		if c := want(corev1.ConditionTrue, "over since 2000-01-01T00:43:"); !c.LastTransitionTime.Equal(&since) || !strings.Contains(c.Message, "at the latest (at that moment 32Mi of 64Mi is free on the disk of /var/lib/dunlin); still told until 2000-01-01T00:48:") {
			t.Fatalf("the restart moved the transition to %s: %s", c.LastTransitionTime, c.Message)
		}
		b.after(2 * time.Minute)
		want(corev1.ConditionFalse, "no disk pressure")
	})
}
