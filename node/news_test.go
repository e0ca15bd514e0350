package node

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/node/volumes"
)

// TestNewsDuringAWriteAreNotLost: what changes while files are written, for the
// first time or anew, is written after that.
func TestNewsDuringAWriteAreNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		var written atomic.Value
		b.vols.prepare = func(_ *corev1.Pod, src volumes.Source) error {
			s, ok := src.Secret("default", "s")
			time.Sleep(10 * time.Second) // a slow card
			if ok {
				written.Store(string(s.Data["k"]))
			}
			return nil
		}
		put := func(word string) {
			b.link.put("Secret", &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s", UID: "s"}, Data: map[string][]byte{"k": []byte(word)}})
		}
		put("one")
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v"}} }))
		b.start()
		defer b.stop()
		b.after(time.Second)
		put("two") // while the first is written
		b.after(time.Minute)
		if got := written.Load(); got != "two" {
			t.Errorf("%q is written", got)
		}
		put("three")
		b.after(time.Second)
		put("four") // while the third is
		b.after(time.Minute)
		if got := written.Load(); got != "four" {
			t.Errorf("%q is written", got)
		}
		b.want("uid-a", "Running+Ready")
	})
}
