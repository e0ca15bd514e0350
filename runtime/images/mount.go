package images

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Mount makes an image available as Image does, and mounts what it holds on
// an empty folder: read-only, and no program in it can be started or gets
// rights. It returns the digest.
func (p *Puller) Mount(ctx context.Context, req workload.ImageRequest, target string, progress workload.Progress) (digest string, err error) {
	r, err := p.resolve(ctx, req, false, progress)
	if err != nil {
		return "", err
	}
	if r.config == nil {
		return "", badImage(req.Image, "a volume shows the files of a container image, and this is an artifact that holds a WebAssembly module: it can only be the image of a container with runtimeClassName: wasm")
	}
	img, err := p.image(ctx, req, r, progress)
	if err != nil {
		return "", err
	}
	if len(img.Layers) == 0 {
		return "", badImage(req.Image, "it has no layers")
	}
	// overlayfs without an upper layer wants two lower ones.
	empty := filepath.Join(p.s.path("tmp"), "empty")
	if err := os.Mkdir(empty, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("image volume: %w", err)
	}
	options := fmt.Sprintf("lowerdir=%s:%s", strings.Join(img.Layers, ":"), empty)
	err = InFolder(img.LayerDir, func() error {
		return unix.Mount("overlay", target, "overlay", unix.MS_RDONLY|unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, options)
	})
	if err != nil {
		return "", fmt.Errorf("image volume: mount overlay of %d layers: %w", len(img.Layers), err)
	}
	return img.Digest, nil
}

// InFolder runs f in a thread with a working folder of its own: mount(2) takes one
// page of options, and names of layers are short from inside their folder.
func InFolder(dir string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends
		err := unix.Unshare(unix.CLONE_FS)
		if err == nil {
			err = unix.Chdir(dir)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}
