package node

import (
	"context"
	"fmt"
	"time"
)

// ImageCollector removes images that nobody needs.
type ImageCollector interface {
	// Collect frees want bytes if it can. inUse lists images as specs name
	// them, and digests of what runs: of those nothing is taken.
	Collect(ctx context.Context, inUse []string, want int64) (freed int64, removed []string, err error)
}

// collectAgain is how long a collection that could not free enough waits for
// the next.
const collectAgain = 5 * time.Minute

// toFree is how many bytes must become free: once the disk is used to high
// percent, so many that it is used to low percent. Pure.
func (d *DiskFacts) toFree(high, low int) int64 {
	if d == nil || d.Size <= 0 || high <= 0 {
		return 0
	}
	used := d.Size - d.Free
	if used < d.Size/100*int64(high) {
		return 0
	}
	return max(0, used-d.Size/100*int64(low))
}

// collectImages looks whether the disk needs room. Machine loop only.
func (a *Agent) collectImages(ctx context.Context, now time.Time) {
	if a.c.Images == nil || now.Before(a.collectAt) {
		return
	}
	a.mu.RLock()
	want := a.machine.Disk.toFree(a.c.ImageGCHigh, a.c.ImageGCLow)
	a.mu.RUnlock()
	if want <= 0 {
		return
	}
	inUse, err := a.imagesInUse(ctx)
	if err != nil {
		a.log.Warn("images are not collected, though the disk is full", "err", err)
		a.collectAt = now.Add(collectAgain)
		return
	}
	freed, removed, err := a.c.Images.Collect(ctx, inUse, want)
	if err != nil {
		a.log.Warn("images cannot be collected", "err", err)
	}
	if freed < want {
		a.collectAt = now.Add(collectAgain)
	}
	a.log.Info("images collected", "wanted", bytesText(want), "freed", bytesText(freed), "removed", removed)
}

// imagesInUse lists what pods of this node name, and what runs. Not to know
// one of them is an error: then nothing may be taken.
func (a *Agent) imagesInUse(ctx context.Context) (out []string, err error) {
	if a.c.Link != nil && !a.assignmentKnown() {
		return nil, fmt.Errorf("no assignment is known yet")
	}
	wishes, unreadable := a.wanted()
	if len(unreadable) > 0 {
		return nil, fmt.Errorf("%d assigned pods cannot be read", len(unreadable))
	}
	for _, w := range wishes {
		for i := range w.pod.Spec.InitContainers {
			out = append(out, w.pod.Spec.InitContainers[i].Image)
		}
		for i := range w.pod.Spec.Containers {
			out = append(out, w.pod.Spec.Containers[i].Image)
		}
		for i := range w.pod.Spec.Volumes {
			if v := w.pod.Spec.Volumes[i].Image; v != nil {
				out = append(out, v.Reference)
			}
		}
	}
	for name, rt := range a.c.Runtimes {
		list, err := rt.List(ctx)
		if err != nil {
			return nil, fmt.Errorf("list containers of %s: %w", name, err)
		}
		for _, st := range list {
			if st.Digest != "" {
				out = append(out, st.Digest)
			}
		}
	}
	return out, nil
}
