package cli

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/internal/version"
	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/wasm"
)

// imageOptions are the flags of images.
type imageOptions struct {
	pulls     int
	rate      string
	high, low int
}

func (o *imageOptions) add(f *pflag.FlagSet) {
	f.IntVar(&o.pulls, "max-pulls", 2, "how many images this node pulls at once")
	f.IntVar(&o.high, "image-gc-high", 85, "percent of the disk that must be used before images that no pod names are removed; 0 never removes any")
	f.IntVar(&o.low, "image-gc-low", 80, "percent of the disk in use down to which they are removed then")
	f.StringVar(&o.rate, "pull-rate", "0", "how many bytes a second all pulls of this node may take together, as in 500k or 2M; 0 does not bound them")
}

func (o *imageOptions) check() error {
	if o.pulls < 1 {
		return usagef("--max-pulls=%d: must be at least 1", o.pulls)
	}
	if o.high < 0 || o.high > 100 || o.low < 0 || o.high > 0 && o.low >= o.high {
		return usagef("--image-gc-high=%d --image-gc-low=%d: must be percentages, the low one below the high one", o.high, o.low)
	}
	if o.rate == "" {
		o.rate = "0" // commands without the node's flags
	}
	q, err := resource.ParseQuantity(o.rate)
	if err != nil || q.Sign() < 0 || q.Sign() > 0 && q.Value() < minPullRate {
		return usagef("--pull-rate=%s: must be 0, or a quantity of at least %d bytes a second (as in 500k)", o.rate, minPullRate)
	}
	return nil
}

const minPullRate = 1024

func (o *imageOptions) bytesPerSecond() int64 {
	q, err := resource.ParseQuantity(o.rate)
	if err != nil {
		return 0 // check refuses it
	}
	return q.Value()
}

// nodeImages are the images of a node, and the way to more of them.
type nodeImages struct {
	store  *images.Store
	client *registry.Client
	puller *images.Puller
	wasm   *wasm.Runtime
}

// Collect implements node.ImageCollector. Modules first: most are second names
// of what the image store has.
func (n *nodeImages) Collect(ctx context.Context, inUse []string, want int64) (int64, []string, error) {
	freed, err := n.wasm.Store().Collect(ctx, inUse)
	if err != nil || freed >= want {
		return freed, nil, err
	}
	got, err := n.store.Collect(ctx, inUse, want-freed)
	return freed + got.Freed, got.Names, err
}

// hereImages implements node.ImageLister.
type hereImages struct{ *nodeImages }

// settled is how long a folder must have been left alone for its time to tell
// the next change: file systems count time in ticks.
const settled = time.Second

// Mark implements node.ImageLister.
func (n hereImages) Mark() string {
	var mark strings.Builder
	now := time.Now()
	for _, dir := range []string{n.store.NamesDir(), n.wasm.Store().NamesDir()} {
		st, err := os.Stat(dir)
		if err != nil {
			return ""
		}
		if age := now.Sub(st.ModTime()); age >= 0 && age < settled {
			return ""
		}
		fmt.Fprintf(&mark, "%d ", st.ModTime().UnixNano())
	}
	return mark.String()
}

// List implements node.ImageLister: what is whole, by digest.
func (n hereImages) List() (out []corev1.ContainerImage, err error) {
	list, err := n.store.List()
	if err != nil {
		return nil, err
	}
	at := map[string]int{}
	add := func(name, digest string, size int64) {
		i, known := at[digest]
		if !known {
			i = len(out)
			at[digest] = i
			out = append(out, corev1.ContainerImage{SizeBytes: size})
		}
		out[i].Names = append(out[i].Names, name)
	}
	for i := range list {
		if list[i].Whole {
			add(list[i].Name, list[i].Digest, list[i].Size)
		}
	}
	err = n.wasm.Store().Named(func(name, digest string, size int64, _ time.Time) { add(name, digest, size) })
	return out, err
}

func openImages(o nodeOptions, log *slog.Logger) (*nodeImages, error) {
	config, err := registry.LoadConfig(filepath.Join(o.config, "registries.yaml"))
	if err != nil {
		return nil, err
	}
	store, err := images.Open(images.Config{Dir: filepath.Join(o.state, "images"), Logger: log.With("part", "images")})
	if err != nil {
		return nil, err
	}
	n := &nodeImages{store: store, client: registry.New(config, "dunlin/"+version.Version)}
	n.puller = images.NewPuller(images.PullerConfig{Store: store, Registry: n.client, Pulls: o.images.pulls, BytesPerSecond: o.images.bytesPerSecond()})
	return n, nil
}
