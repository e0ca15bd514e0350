package node

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// shelf is an ImageLister.
type shelf struct {
	mu   sync.Mutex
	mark string
	list []corev1.ContainerImage
	err  error
	read atomic.Int64
}

func (s *shelf) Mark() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mark
}

// change lets a test touch it.
func (s *shelf) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *shelf) List() ([]corev1.ContainerImage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.read.Add(1)
	return slices.Clone(s.list), s.err
}

func shelved(name string, size int64) corev1.ContainerImage {
	return corev1.ContainerImage{Names: []string{name}, SizeBytes: size}
}

// The Node names the largest images; it goes out again only when they change,
// and the store is read only when it may have changed.
func TestNodeNamesItsImages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		s := &shelf{mark: "1", list: []corev1.ContainerImage{shelved("small", 1), shelved("big", 1<<30)}}
		b.c.ImageList = s
		b.start()
		defer b.stop()
		b.after(time.Minute)
		told := func() (names []string) {
			for _, i := range b.link.node.Status.Images {
				names = append(names, i.Names...)
			}
			return names
		}
		if got := told(); !slices.Equal(got, []string{"big", "small"}) || s.read.Load() != 1 {
			t.Fatalf("%v after %d reads", got, s.read.Load())
		}
		reports := len(b.link.reports)
		b.after(time.Hour)
		s.change(func() {
			s.mark = "2" // a name was used, say
			slices.Reverse(s.list)
		})
		b.after(time.Hour)
		if got := len(b.link.reports); got != reports || s.read.Load() != 2 {
			t.Fatalf("%d reports of the same images, %d reads", got-reports, s.read.Load())
		}
		s.change(func() {
			s.mark = "3"
			for i := range 60 {
				s.list = append(s.list, shelved(fmt.Sprint("i", i), int64(i+2)))
			}
		})
		b.after(time.Minute)
		if got := told(); len(got) != maxNodeImages || got[0] != "big" || slices.Contains(got, "small") {
			t.Fatalf("%v", got)
		}
		s.change(func() { s.mark, s.err = "4", errors.New("input/output error") })
		read := s.read.Load()
		b.after(9 * time.Minute)
		if got := told(); len(got) != maxNodeImages || s.read.Load() > read+2 {
			t.Fatalf("%d images told after an error, %d reads", len(got), s.read.Load()-read)
		}
		s.change(func() { s.err, s.list = nil, nil })
		b.after(10 * time.Minute)
		if got := told(); len(got) != 0 {
			t.Fatalf("%v after all were removed", got)
		}
	})
}

// What is imported while a pod waits for it is tried at the next look, and
// not at the end of a back-off; an image that it does not wait for changes
// nothing.
func TestAnImportEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		s := &shelf{mark: "1"}
		b.c.ImageList = s
		var tries atomic.Int64
		b.rt.onPrepare = func(image string) (workload.ImageState, error) {
			tries.Add(1)
			if l, err := s.List(); err == nil && len(l) > 0 && slices.Contains(l[0].Names, "docker.io/library/app:latest") {
				return workload.ImageState{Digest: "sha256:1"}, nil
			}
			return workload.ImageState{}, errors.New("it is not here")
		}
		b.link.put("Pod", wasmPod("a", func(p *corev1.Pod) { p.Spec.Containers[0].Image = "app" }))
		b.start()
		defer b.stop()
		b.after(20 * time.Minute) // a try every five minutes by now
		before := tries.Load()
		s.change(func() { s.mark, s.list = "2", []corev1.ContainerImage{shelved("docker.io/library/other:latest", 1)} })
		b.after(30 * time.Second)
		if now := tries.Load(); now > before+1 {
			t.Errorf("%d tries because of another image", now-before)
		}
		s.change(func() { s.mark, s.list = "3", []corev1.ContainerImage{shelved("docker.io/library/app:latest", 1)} })
		b.after(2 * machineInterval)
		b.want("uid-a", "Running+Ready")
	})
}
