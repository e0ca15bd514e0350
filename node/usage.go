package node

import (
	"context"
	"io"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/wire"
)

// A rate of CPU use needs two samples. The one before is good between these
// ages; else a second one is taken after sampleGap. Nothing is sampled while
// nobody asks.
const (
	sampleGap    = time.Second
	sampleYoung  = 5 * time.Second
	sampleOldest = 2 * time.Minute
)

// usageSample is what was used until then.
type usageSample struct {
	at         time.Time
	node       uint64 // CPU of the machine or of the agent's bound, nanoseconds
	containers map[containerKey]uint64
}

type containerKey struct {
	uid, name string
	attempt   int32
}

// Usage writes what the node and its pods use now (a wire.NodeUsage).
func (a *Agent) Usage(ctx context.Context, w io.Writer) error {
	a.usageMu.Lock()
	defer a.usageMu.Unlock()
	before := a.usage
	if age := time.Since(before.at); before.at.IsZero() || age < sampleYoung || age > sampleOldest {
		if before.at.IsZero() || age > sampleOldest {
			before, _ = a.sample(ctx)
		}
		if left := sampleGap - time.Since(before.at); left > 0 && !sleep(ctx, left, nil) {
			return ctx.Err()
		}
	}
	now, u := a.sample(ctx)
	window := now.at.Sub(before.at)
	u.UnixMilli, u.WindowMillis = a.c.Clock.Now().UnixMilli(), max(window.Milliseconds(), 1)
	u.CPUNanos = rate(before.node, now.node, window)
	for i := range u.Pods {
		p := &u.Pods[i]
		for j := range p.Containers {
			c := &p.Containers[j]
			k := containerKey{p.UID, c.Name, c.Attempt}
			// One that began in between has used all of it in the window.
			c.CPUNanos = rate(before.containers[k], now.containers[k], window)
		}
	}
	if a.usage.at.IsZero() || now.at.Sub(a.usage.at) >= sampleYoung {
		a.usage = now
	}
	return wire.WriteMessage(w, u)
}

// rate is nanoseconds of CPU a second.
func rate(from, to uint64, window time.Duration) uint64 {
	if to <= from || window <= 0 {
		return 0
	}
	return uint64(float64(to-from) * float64(time.Second) / float64(window))
}

func (a *Agent) sample(ctx context.Context) (usageSample, *wire.NodeUsage) {
	s := usageSample{at: time.Now(), containers: map[containerKey]uint64{}}
	u := &wire.NodeUsage{}
	if m, ok := a.c.Machine.(UsageReader); ok {
		s.node, u.MemoryBytes = m.MachineUsage()
	}
	a.mu.RLock()
	infos := make([]podInfo, 0, len(a.known))
	for _, i := range a.known {
		if i.worker != nil && i.assigned != nil && i.status != nil && i.status.Phase == corev1.PodRunning {
			infos = append(infos, i)
		}
	}
	a.mu.RUnlock()
	for _, i := range infos {
		p := wire.PodUsage{Namespace: i.assigned.Namespace, Name: i.assigned.Name, UID: string(i.assigned.UID)}
		for _, c := range a.containerUsage(ctx, i.worker.rt, i.assigned, i.status) {
			attempt := int32(0)
			if st := containerStatusOf(i.status, c.Name); st != nil {
				attempt = st.RestartCount
			}
			s.containers[containerKey{p.UID, c.Name, attempt}] = c.CPUNanos
			p.Containers = append(p.Containers, wire.ContainerUsage{Name: c.Name, Attempt: attempt, MemoryBytes: uint64(max(c.Usage.Memory, 0))})
		}
		if len(p.Containers) > 0 {
			u.Pods = append(u.Pods, p)
		}
	}
	return s, u
}

// UsageReader is the optional ability of a Machine to tell what all of it
// uses: CPU since its start, in nanoseconds, and memory in bytes.
type UsageReader interface {
	MachineUsage() (cpuNanos, memoryBytes uint64)
}
