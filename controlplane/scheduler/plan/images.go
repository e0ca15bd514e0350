package plan

import (
	"cmp"
	"slices"
	"strings"
)

// Image is an image, or module, that a node has.
type Image struct {
	Names []string // as the node tells them
	Size  int64    // bytes
}

// Upstream's bounds of the image locality score, a container: below the lower
// one nothing is gained, at the upper one all of it.
const (
	leastImage = 23 << 20
	mostImage  = 1000 << 20
)

// ImageName is the full name of an image as its store knows it: without a
// registry it is Docker Hub's, without tag and digest it is latest. Pods and
// nodes may name one image differently.
func ImageName(name string) string {
	if strings.Contains(name, "://") {
		return name // a file of the node
	}
	if first, _, more := strings.Cut(name, "/"); !more {
		name = "docker.io/library/" + name
	} else if first == "index.docker.io" {
		name = "docker.io/" + strings.TrimPrefix(name, "index.docker.io/")
	} else if !strings.ContainsAny(first, ".:") && first != "localhost" {
		name = "docker.io/" + name
	}
	if repo, digest, pinned := strings.Cut(name, "@"); pinned {
		if at := strings.LastIndexByte(repo, ':'); at > strings.LastIndexByte(repo, '/') {
			repo = repo[:at] // the digest decides
		}
		return repo + "@" + digest
	}
	if strings.LastIndexByte(name, ':') <= strings.LastIndexByte(name, '/') {
		name += ":latest"
	}
	return name
}

// imageOn is one name with the slots that have it, by slot.
type imageOn struct {
	name string
	on   []sized
}

type sized struct {
	slot int32
	size int64
}

func (i *imageOn) find(slot int32) (int, bool) {
	return slices.BinarySearchFunc(i.on, slot, func(s sized, slot int32) int { return cmp.Compare(s.slot, slot) })
}

// setImages takes what images a slot has. They are kept by name rather than
// by node: most pods' images are on few nodes, or of a few names.
func (n *Nodes) setImages(slot int, images []Image) {
	var now []*imageOn
	for i := range images {
		for _, name := range images[i].Names {
			name = ImageName(name)
			on := n.images[name]
			if on == nil {
				on = &imageOn{name: strings.Clone(name)}
				n.images[on.name] = on
			}
			at, there := on.find(int32(slot))
			if !there {
				on.on = slices.Insert(on.on, at, sized{slot: int32(slot)})
			}
			on.on[at].size = images[i].Size
			now = append(now, on)
		}
	}
	for _, was := range n.imagesOf[slot] {
		if slices.Contains(now, was) {
			continue
		}
		if at, there := was.find(int32(slot)); there {
			was.on = slices.Delete(was.on, at, at+1)
		}
		if len(was.on) == 0 {
			delete(n.images, was.name)
		}
	}
	n.imagesOf[slot] = now
}

// Located names those of the images that matter to where a pod that has these
// goes, as ImageName tells them; "" if none does.
func (n *Nodes) Located(images []string) string {
	if len(n.images) == 0 || n.count == 0 {
		return ""
	}
	if scores := n.locality(images); scores == nil {
		return ""
	}
	names := slices.DeleteFunc(slices.Clone(images), func(name string) bool { return n.images[name] == nil })
	slices.Sort(names)
	return strings.Join(names, "\n")
}

// locality scores every slot, from 0 to 100, by the images that it has of a
// pod's (one entry a container), with upstream's arithmetic: the size of
// each, the more nodes have it the more, so that what one node alone has does
// not draw all pods there. nil: all are 0.
func (n *Nodes) locality(images []string) []int8 {
	var sums []int64
	for _, name := range images {
		on := n.images[name]
		if on == nil {
			continue
		}
		if sums == nil {
			sums = make([]int64, len(n.info))
		}
		spread := float64(len(on.on)) / float64(n.count)
		for _, x := range on.on {
			sums[x.slot] += int64(float64(x.size) * spread)
		}
	}
	var scores []int8
	top := int64(mostImage) * int64(len(images))
	for slot, sum := range sums {
		if s := 100 * (min(max(sum, leastImage), top) - leastImage) / (top - leastImage); s > 0 {
			if scores == nil {
				scores = make([]int8, len(n.info))
			}
			scores[slot] = int8(s)
		}
	}
	return scores
}
