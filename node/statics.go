package node

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// staticLoop looks at the folder again and again; the folder's reader knows
// by the files' times what changed.
func (a *Agent) staticLoop(ctx context.Context) {
	for sleep(ctx, a.c.Jitter(a.c.StaticScan), nil) {
		if a.scanStatic() {
			signal(a.changed)
		}
	}
}

// scanStatic reads the folder; true when the set of pods changed.
func (a *Agent) scanStatic() bool {
	if a.c.Static == nil {
		return false
	}
	pods, errs := a.c.Static.Pods()
	text := make([]string, len(errs))
	for i, err := range errs {
		text[i] = err.Error()
	}
	if !slices.Equal(text, a.staticErrs) { // once for each new fault
		a.staticErrs = text
		for _, t := range text {
			a.log.Error("static pod file is left out", "err", t)
			a.nodeEvent(true, "InvalidStaticPod", t)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if slices.EqualFunc(pods, a.statics, func(x, y *corev1.Pod) bool { return x.UID == y.UID }) {
		return false
	}
	a.statics = pods
	return true
}
