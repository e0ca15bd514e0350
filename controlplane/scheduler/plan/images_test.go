package plan

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

func TestImageName(t *testing.T) {
	for in, want := range map[string]string{
		"nginx":                         "docker.io/library/nginx:latest",
		"nginx:1.27":                    "docker.io/library/nginx:1.27",
		"team/app":                      "docker.io/team/app:latest",
		"index.docker.io/library/nginx": "docker.io/library/nginx:latest",
		"localhost/app":                 "localhost/app:latest",
		"r.example:5000/app":            "r.example:5000/app:latest",
		"r.example:5000/app:2":          "r.example:5000/app:2",
		"app:2@sha256:ab":               "docker.io/library/app@sha256:ab",
		"r.example:5000/a/b@sha256:ab":  "r.example:5000/a/b@sha256:ab",
		"hello.wasm":                    "docker.io/library/hello.wasm:latest",
		"file:///modules/hello.wasm":    "file:///modules/hello.wasm",
		"oci://r.example/app":           "oci://r.example/app",
	} {
		if got := ImageName(in); got != want {
			t.Errorf("%s is %s, want %s", in, got, want)
		}
	}
}

// The figures are upstream's arithmetic by hand: MaxScore * (size * share of
// nodes - 23 MiB) / (1000 MiB * containers - 23 MiB).
func TestLocality(t *testing.T) {
	const mib = 1 << 20
	n := NewNodes()
	for i, images := range [][]Image{
		{{Names: []string{"big"}, Size: 2000 * mib}, {Names: []string{"r.example/small:1"}, Size: 22 * mib}},
		{{Names: []string{"docker.io/library/big:latest"}, Size: 1000 * mib}},
		nil, nil,
	} {
		n.Set(Node{Name: fmt.Sprint(i), UID: "u", Images: images})
	}
	for _, c := range []struct {
		images []string
		want   []int8
	}{
		{[]string{"big"}, []int8{100, 48, 0, 0}},                     // 2000 * 2/4 = 1000; 1000 * 2/4 = 500
		{[]string{"big", "big"}, []int8{100, 49, 0, 0}},              // both containers count
		{[]string{"big", "other"}, []int8{49, 24, 0, 0}},             // one of two
		{[]string{"r.example/small:1", "elsewhere"}, nil},            // too little to matter
		{[]string{"big", "r.example/small:1"}, []int8{49, 24, 0, 0}}, // 1005.5 of 2000
		{nil, nil},
	} {
		names := make([]string, len(c.images))
		for i := range names {
			names[i] = ImageName(c.images[i])
		}
		if got := n.locality(names); !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.images, got, c.want)
		}
		if located := n.Located(names); (located != "") != (c.want != nil) {
			t.Errorf("%v: located %q", c.images, located)
		}
	}
	if c := n.Set(Node{Name: "2", UID: "u", Images: []Image{{Names: []string{"big"}, Size: mib}}}); c != (Change{}) {
		t.Errorf("an image that came is a change: %+v", c)
	}
	for i := range 4 {
		n.Remove(fmt.Sprint(i))
	}
	if len(n.images) != 0 {
		t.Errorf("images of nodes that are gone: %v", slices.Collect(maps.Keys(n.images)))
	}
}

// However images come and go, what is known of them is what the nodes have.
func TestImagesAreWhatNodesHave(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, has := NewNodes(), map[string][]Image{}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			name := fmt.Sprint(rapid.IntRange(0, 4).Draw(t, "node"))
			if rapid.IntRange(0, 4).Draw(t, "goes") == 0 {
				n.Remove(name)
				delete(has, name)
				continue
			}
			has[name] = drawImages(t)
			n.Set(Node{Name: name, UID: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "uid"), Images: has[name]})
		}
		fresh := NewNodes()
		for _, name := range slices.Sorted(maps.Keys(has)) {
			fresh.Set(Node{Name: name, UID: "a", Images: has[name]})
		}
		if len(n.images) != len(fresh.images) {
			t.Fatalf("%d names, want %d", len(n.images), len(fresh.images))
		}
		for i := range someImages {
			image := []string{ImageName(someImages[i])}
			got, want := n.locality(image), fresh.locality(image)
			for name := range has {
				a, _ := n.Slot(name)
				b, _ := fresh.Slot(name)
				if (got == nil) != (want == nil) || got != nil && got[a] != want[b] {
					t.Fatalf("%s on %s: %v, want %v", image, name, got, want)
				}
			}
		}
	})
}

// A decision for a pod whose image every tenth of the nodes has, among 50.
func BenchmarkDecisionByImage(b *testing.B) {
	n := benchNodes(5000)
	for slot := range n.info {
		var images []Image
		for i := range 50 {
			images = append(images, Image{Names: []string{fmt.Sprintf("registry.example/team/app-%d:1", (slot%10)*50+i)}, Size: 1 << 30})
		}
		n.setImages(slot, images)
	}
	g := &Group{Shape: &Shape{Handler: "wazero", RuntimeClass: "wasm"}, Count: 1, Images: []string{"registry.example/team/app-7:1"},
		Requests: []state.Quantity{{Name: "cpu", Value: 100}, {Name: "memory", Value: 64 << 20}, {Name: "pods", Value: 1}}}
	b.ReportAllocs()
	start := cpuSeconds(b)
	for b.Loop() {
		if slots := Place(n, g); n.At(slots[0]).Name == "" {
			b.Fatal("nowhere")
		}
	}
	b.ReportMetric(float64(b.N)/(cpuSeconds(b)-start), "decisions/cpu-s")
}
