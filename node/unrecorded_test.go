package node

import (
	"context"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// groupsOf is control groups, by path, in which something runs.
type groupsOf map[string]bool

func (g groupsOf) Inside(p string) (out []string) {
	for k := range g {
		if rest, ok := strings.CutPrefix(k, p+"/"); ok {
			name, _, _ := strings.Cut(rest, "/")
			if !slices.Contains(out, name) {
				out = append(out, name)
			}
		}
	}
	slices.Sort(out)
	return out
}

func (g groupsOf) Busy(p string) bool {
	for k := range g {
		if k == p || strings.HasPrefix(k, p+"/") {
			return true
		}
	}
	return false
}

func (g groupsOf) End(_ context.Context, p string) error {
	for k := range g {
		if k == p || strings.HasPrefix(k, p+"/") {
			delete(g, k)
		}
	}
	return nil
}

func (groupsOf) Prune(string) error { return nil }

// Processes of pods that left while the agent was away end, though nothing but
// their control group is left; those of the node's pods, and what is no pod's,
// stay; and nothing ends before the assignment is known.
func TestProcessesWithoutRecords(t *testing.T) {
	const gone, here = "3b9cd4a2-7d54-4a5f-8d10-000000000001", "3b9cd4a2-7d54-4a5f-8d10-000000000002"
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		of := func(uid string) string { return path.Join("pods/burstable", uid, "main-0") }
		groups := groupsOf{of(gone): true, of(here): true, "pods/burstable/helper": true, "other/" + gone: true}
		b.c.Cgroups = groups
		pod := wasmPod("a")
		pod.UID = here
		b.link.put("Pod", pod)
		b.link.setCut(true)
		b.start()
		defer b.stop()
		b.after(10 * time.Minute)
		if len(groups) != 4 {
			t.Fatalf("ended before the assignment was known: %v", groups)
		}
		b.link.setCut(false)
		b.after(2 * time.Minute)
		if groups[of(gone)] || len(groups) != 3 {
			t.Errorf("left: %v", groups)
		}
		if !slices.ContainsFunc(b.link.events, func(e eventReport) bool { return e.Reason == "OrphanStopped" && strings.Contains(e.Message, gone) }) {
			t.Error("no event names the pod")
		}
	})
}

// What a pod leaves in its control group ends with it.
func TestProcessesThatAPodLeaves(t *testing.T) {
	const uid = "3b9cd4a2-7d54-4a5f-8d10-000000000001"
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		group := path.Join("pods", qosFolder(corev1.PodQOSBestEffort), uid, "main-7")
		groups := groupsOf{}
		b.c.Cgroups = groups
		pod := wasmPod("a")
		pod.UID = uid
		b.link.put("Pod", pod)
		b.start()
		defer b.stop()
		b.after(time.Minute)
		groups[group] = true
		b.link.unknown[uid] = true
		b.link.drop(uid)
		b.after(5 * time.Minute)
		if len(groups) != 0 {
			t.Errorf("left: %v", groups)
		}
	})
}
