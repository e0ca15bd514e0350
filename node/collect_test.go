package node

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/wire"
)

// TestWhenImagesAreCollected: upstream's thresholds, 85 and 80 percent.
func TestWhenImagesAreCollected(t *testing.T) {
	for _, c := range []struct {
		size, free int64
		high, low  int
		want       int64
	}{
		{1000, 500, 85, 80, 0}, {1000, 151, 85, 80, 0}, {1000, 150, 85, 80, 50}, {1000, 0, 85, 80, 200},
		{1000, 0, 0, 80, 0}, {0, 0, 85, 80, 0},
	} {
		if got := (&DiskFacts{Size: c.size, Free: c.free}).toFree(c.high, c.low); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
	if got := (*DiskFacts)(nil).toFree(85, 80); got != 0 {
		t.Error(got)
	}
}

// collector is an ImageCollector that takes nothing.
type collector struct{ asked [][]string }

func (c *collector) Collect(_ context.Context, inUse []string, _ int64) (int64, []string, error) {
	c.asked = append(c.asked, inUse)
	return 0, nil, nil
}

// TestImagesInUse: a full disk takes nothing that a pod of this node names in
// whatever place, or that still runs; while one pod cannot be read, or before
// anything is known, it takes nothing at all.
func TestImagesInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		c := &collector{}
		b.c.Images, b.c.ImageGCHigh, b.c.ImageGCLow = c, 85, 80
		b.c.Machine = &stubMachine{f: MachineFacts{CPUMilli: 2000, Memory: 1 << 30, Disk: &DiskFacts{Path: "/x", Size: 1 << 30, Free: (1 << 30) / 100 * 12}}}
		b.c.Static = &staticPods{pods: []*corev1.Pod{wasmPod("s-n1", func(p *corev1.Pod) {
			p.UID = "static-s"
			p.Annotations = map[string]string{ConfigSourceAnnotation: "file", ConfigHashAnnotation: "s"}
			p.Spec.Containers[0].Image = "static.wasm"
		})}}
		b.link.setCut(true)
		b.start()
		defer b.stop()
		b.after(time.Minute)
		if len(c.asked) != 0 {
			t.Errorf("before anything is known: %v", c.asked)
		}
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "first", Image: "first.wasm"}}
			p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: "r.lan/data:1"}}}}
		}))
		b.link.setCut(false)
		b.after(10 * time.Minute)
		if len(c.asked) == 0 {
			t.Fatal("nothing is collected")
		}
		last := c.asked[len(c.asked)-1]
		for _, want := range []string{"app.wasm", "first.wasm", "r.lan/data:1", "static.wasm", "sha256:static.wasm"} {
			if !slices.Contains(last, want) {
				t.Errorf("%s is not in use: %v", want, last)
			}
		}
		b.link.mu.Lock()
		b.link.asg.Objects = append(slices.Clone(b.link.asg.Objects), wire.Object{Ref: wire.Ref{Kind: "Pod", Namespace: "default", Name: "torn"}, UID: "uid-torn", ResourceVersion: 99, Data: []byte("torn")})
		b.link.asg.Generation++
		b.link.mu.Unlock()
		b.link.hint()
		b.after(time.Minute)
		n := len(c.asked)
		b.after(time.Hour)
		if len(c.asked) != n {
			t.Errorf("with a pod that cannot be read: %v", c.asked[n:])
		}
	})
}
