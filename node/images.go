package node

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/runtime/images"
)

// ImageLister tells what images this node has, and modules with a name.
type ImageLister interface {
	// Mark is cheap, and differs from what it was once List may tell something
	// else. "" is: List may, at any time.
	Mark() string
	List() ([]corev1.ContainerImage, error)
}

// maxNodeImages is how many images the Node names: the kubelet's default.
const maxNodeImages = 50

// listedImages are the images that the Node names. Owned by whoever runs
// updateMachine.
type listedImages struct {
	mark  string
	list  []corev1.ContainerImage
	names map[string]bool // of all images; nil before the first reading
	fresh []string        // of them, those that pods were not told of
	retry time.Time
}

// imagesHere reads the images again when they may have changed. What cannot
// be read stays as it was told.
func (a *Agent) imagesHere(now time.Time) []corev1.ContainerImage {
	l := &a.imagesTold
	if a.c.ImageList == nil || now.Before(l.retry) {
		return l.list
	}
	mark := a.c.ImageList.Mark()
	if mark != "" && mark == l.mark {
		return l.list
	}
	list, err := a.c.ImageList.List()
	if err != nil {
		a.log.Warn("what images are here cannot be told to the cluster", "err", err)
		l.retry = now.Add(collectAgain)
		return l.list
	}
	before := l.names
	l.names = map[string]bool{}
	for _, i := range list {
		for _, n := range i.Names {
			l.names[n] = true
			if before != nil && !before[n] {
				l.fresh = append(l.fresh, n)
			}
		}
	}
	l.mark, l.list = mark, largest(list, maxNodeImages)
	return l.list
}

// tellOfImages lets pods that wait for an image try again, once it was
// imported.
func (a *Agent) tellOfImages() {
	fresh := a.imagesTold.fresh
	if a.imagesTold.fresh = nil; len(fresh) == 0 {
		return
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	for _, i := range a.known {
		if i.worker != nil {
			i.worker.box.tell(func(m *mailbox) { m.images = append(m.images, fresh...) })
		}
	}
}

// isAmong says whether an image of a pod is one of those that came: a module by
// the name that it was given, an image by its full one.
func isAmong(image string, came []string) bool {
	if len(came) == 0 || slices.Contains(came, image) {
		return len(came) > 0
	}
	r, err := images.ParseRef(image)
	return err == nil && slices.Contains(came, r.Name())
}

// largest keeps the n largest images, in an order that does not depend on
// how they were listed.
func largest(list []corev1.ContainerImage, n int) []corev1.ContainerImage {
	for i := range list {
		slices.Sort(list[i].Names)
	}
	slices.SortFunc(list, func(a, b corev1.ContainerImage) int {
		return cmp.Or(cmp.Compare(b.SizeBytes, a.SizeBytes), slices.Compare(a.Names, b.Names))
	})
	return slices.Clone(list[:min(n, len(list))])
}
